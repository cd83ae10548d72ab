"""Heads with a limited attention window draft the same from the latest positions as from all positions."""

from dataclasses import replace

import pytest
import support

from headstart.core import Rows, Sequence
from headstart.drafters.base import DraftRequest
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.heads.base import WINDOW_LIMIT, limit_window
from headstart.layers.attention import Attention

WINDOW, LENGTH = 12, 90
KINDS = {"mtp": "mimo", "eagle3": "llama", "block": "llama"}


@pytest.fixture(params=KINDS)
def model(request: pytest.FixtureRequest) -> Model:
    found = support.headed_model(KINDS[request.param], request.param)
    return replace(found, head=replace(found.head, modules=limit_window(found.head.modules, WINDOW)))


def prefilled(engine: Engine, tokens: list[int]) -> Sequence:
    """A sequence with all but the last token computed, starting from the cached prefix."""
    sequence = Sequence(support.request(tokens), 0, tokens, 0)
    cached = engine.memory.attach_prefix(sequence)
    assert engine.memory.reserve(sequence, len(tokens) + 8)
    if rows := tokens[cached:-1]:
        engine.runner.run(engine.runner.trunk, "forward", [Rows(sequence, cached, rows, 1)])
    sequence.num_computed = len(tokens) - 1
    engine.memory.commit(sequence)
    return sequence


def draft(engine: Engine, sequence: Sequence) -> tuple[int, list[int]]:
    """Number of positions that the drafter had to compute first, and its draft."""
    drafter = engine.drafting.drafter
    num_uncached = drafter.num_uncached(sequence)
    drafter.propose([DraftRequest(sequence, 3)])
    return num_uncached, sequence.draft.tokens


@pytest.mark.slow
def test_drafts_equal_those_of_a_fully_filled_head(model: Model) -> None:
    engine, text = support.make(model, depth=3), support.prompt_of(LENGTH, 3)
    reach = engine.runner.networks[0].receptive_field
    assert WINDOW <= reach < LENGTH // 2
    incremental = prefilled(engine, text[:20])
    expected = draft(engine, incremental)[1]
    for length in range(21, LENGTH + 1):  # a token at a time, so the head fills every position
        incremental.tokens.append(text[length - 1])
        engine.memory.reserve(incremental, length + 8)
        engine.runner.run(
            engine.runner.trunk, "forward", [Rows(incremental, length - 2, text[length - 2 : length - 1], 1)]
        )
        num_uncached, expected = draft(engine, incremental)
        assert num_uncached <= 1
    engine.memory.release(incremental)
    num_uncached, found = draft(engine, prefilled(engine, text))
    assert found == expected and reach - 2 <= num_uncached <= reach + engine.memory.block_size


def test_shorter_text_does_not_read_unfilled_positions(model: Model) -> None:
    engine, other, text = support.make(model, depth=3), support.make(model, depth=3), support.prompt_of(LENGTH, 4)
    whole = prefilled(engine, text)
    draft(engine, whole)
    engine.memory.release(whole)
    part = prefilled(engine, text[:41])
    assert part.filled[engine.runner.networks[0].index] == 0
    assert draft(engine, part)[1] == draft(other, prefilled(other, text[:41]))[1]


def test_modules_with_a_window_or_without_keys_are_unchanged() -> None:
    (module,) = limit_window(support.headed_model("mimo").head.modules)
    assert module.block.mixer.config.spec.window == WINDOW_LIMIT
    assert isinstance(module.block.mixer, Attention) and limit_window([module]) == [module]
    without = support.headed_model("mimo", "medusa").head
    assert limit_window(without.modules) == list(without.modules)
