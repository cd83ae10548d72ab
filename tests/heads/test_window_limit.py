"""A head that looks back only so far: it drafts the same from the latest positions as from all of them."""

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


def begun(engine: Engine, tokens: list[int]) -> Sequence:
    """All but the last token computed, but for what the cache has."""
    sequence = Sequence(support.request(tokens), 0, tokens, 0)
    cached = engine.memory.attach_prefix(sequence)
    assert engine.memory.reserve(sequence, len(tokens) + 8)
    if rows := tokens[cached:-1]:
        engine.runner.run(engine.runner.trunk, "forward", [Rows(sequence, cached, rows, 1)])
    sequence.num_computed = len(tokens) - 1
    engine.memory.commit(sequence)
    return sequence


def drafted(engine: Engine, sequence: Sequence) -> tuple[int, list[int]]:
    """Positions that the drafter had to make up for, and its draft."""
    drafter = engine.drafting.drafter
    num_uncached = drafter.num_uncached(sequence)
    drafter.propose([DraftRequest(sequence, 3)])
    return num_uncached, sequence.draft.tokens


@pytest.mark.slow
def test_drafts_are_those_of_a_head_that_made_up_for_all(model: Model) -> None:
    engine, text = support.make(model, depth=3), support.prompt_of(LENGTH, 3)
    reach = engine.runner.networks[0].receptive_field
    assert WINDOW <= reach < LENGTH // 2
    grown = begun(engine, text[:20])
    expected = drafted(engine, grown)[1]
    for length in range(21, LENGTH + 1):  # a token at a time: nothing is left out
        grown.tokens.append(text[length - 1])
        engine.memory.reserve(grown, length + 8)
        engine.runner.run(engine.runner.trunk, "forward", [Rows(grown, length - 2, text[length - 2 : length - 1], 1)])
        num_uncached, expected = drafted(engine, grown)
        assert num_uncached <= 1
    engine.memory.release(grown)
    num_uncached, found = drafted(engine, begun(engine, text))
    assert found == expected and reach - 2 <= num_uncached <= reach + engine.memory.block_size


def test_a_shorter_text_does_not_read_what_a_longer_one_left_out(model: Model) -> None:
    engine, other, text = support.make(model, depth=3), support.make(model, depth=3), support.prompt_of(LENGTH, 4)
    whole = begun(engine, text)
    drafted(engine, whole)
    engine.memory.release(whole)
    part = begun(engine, text[:41])
    assert part.filled[engine.runner.networks[0].index] == 0
    assert drafted(engine, part)[1] == drafted(other, begun(other, text[:41]))[1]


def test_what_has_a_window_or_no_keys_stays() -> None:
    (module,) = limit_window(support.headed_model("mimo").head.modules)
    assert module.block.mixer.config.spec.window == WINDOW_LIMIT
    assert isinstance(module.block.mixer, Attention) and limit_window([module]) == [module]
    without = support.headed_model("mimo", "medusa").head
    assert limit_window(without.modules) == list(without.modules)
