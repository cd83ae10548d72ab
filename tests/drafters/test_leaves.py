"""Leaves beside draft tokens: the text is that of plain decoding, and an accepted leaf saves a pass."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cache
from itertools import cycle, product
from typing import Any

import pytest
import support
from support import VOCAB, OracleDrafter, assert_same, make, run, tiny_model, varied_requests

from headstart.config import EngineConfig
from headstart.core import Draft, Leaf, VerifyResult
from headstart.drafters.base import DraftRequest
from headstart.engine.engine import Engine
from headstart.engine.load import Model
from headstart.engine.verify import verify_leaves
from headstart.errors import UsageError
from headstart.kernels.backend import select_backend

DRAFT = Draft([5, 6, 7], leaves=[Leaf(0, 1, 8, 0.1), Leaf(1, 1, 9, 0.2), Leaf(1, 2, 4, 0.1)])
"""5 6 7, or 8, or 5 9, or 5 4."""


@pytest.mark.parametrize(("targets", "result"), [
    ([1, 2, 3, 4, 11, 12, 13], VerifyResult((1,), 6, 0)),
    ([8, 2, 3, 4, 11, 12, 13], VerifyResult((8, 11), 6, 1, leaf=0)),
    ([5, 9, 3, 4, 11, 12, 13], VerifyResult((5, 9, 12), 6, 2, leaf=1)),
    ([5, 4, 3, 4, 11, 12, 13], VerifyResult((5, 4, 13), 6, 2, leaf=2)),
    ([5, 8, 3, 4, 11, 12, 13], VerifyResult((5, 8), 6, 1)),
    ([5, 6, 7, 4, 11, 12, 13], VerifyResult((5, 6, 7, 4), 6, 3)),
    ([5, 6, 7, 8, 11, 12, 13], VerifyResult((5, 6, 7, 8), 6, 3)),
    ([8, 2, 3, 4, -1, 12, 13], VerifyResult((8, -1), 6, 1, leaf=0)),
])  # fmt: skip
def test_leaf_is_accepted_at_its_position(targets: list[int], result: VerifyResult) -> None:
    assert verify_leaves(DRAFT, targets) == result


def test_prefixes_and_parents_of_a_draft_with_leaves() -> None:
    assert DRAFT.prefixes == [[], [5], [5, 6], [5, 6, 7], [8], [5, 9], [5, 4]]
    assert DRAFT.parents == [-1, 0, 1, -1, 0, 0] and DRAFT.num_rows == 6
    assert DRAFT.to_leaf(DRAFT.leaves[1]).tokens == [5, 9] and DRAFT.cut(2) == Draft([5, 6])


class BranchingOracle(OracleDrafter):
    """Moves some true tokens to leaves; the other leaves are wrong."""

    def propose(self, requests: Seq[DraftRequest]) -> None:
        super().propose(requests)
        for request in requests:
            if request.width > 1:
                self._branch(request.sequence.draft)

    def _branch(self, draft: Draft) -> None:
        for place, token in enumerate(draft.tokens):
            leaves = self._rng.integers(0, VOCAB, 2).tolist()
            if self._rng.random() < 0.4:
                leaves[self._rng.integers(2)], draft.tokens[place] = token, leaves[0]
            draft.leaves += [Leaf(place, rank, leaf, 0.5) for rank, leaf in enumerate(leaves, 1) if leaf != token]
            if token in leaves:
                draft.leaves.append(Leaf(place, 2, token, 0.5))


def count_leaves(engine: Engine) -> list[int]:
    """A list that receives the index of each accepted leaf."""
    found, original = list[int](), engine.runner.keep_leaves

    def recording_keep_leaves(spans: Any, results: Seq[VerifyResult]) -> None:
        found.extend(result.leaf for result in results if result.leaf is not None)
        original(spans, results)

    engine.runner.keep_leaves = recording_keep_leaves  # type: ignore[method-assign]
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "one": {"max_num_seqs": 1}, "batch": {}, "chunks": {"max_num_batched_tokens": 24}, "crowded": {"kv_blocks": 16},
}  # fmt: skip
FAMILIES = ("mimo", "deepseek_v3", "deepseek_v4", "gemma3", "glm_moe_dsa", "gpt_oss", "longcat_flash", "step3p5")
"""Layers that keep different things of a token: keys, latents, compressed entries, an indexer's keys, windows."""


@pytest.mark.parametrize(
    "family", [each if each == "mimo" else pytest.param(each, marks=pytest.mark.slow) for each in FAMILIES]
)
def test_accepted_leaves_keep_the_text(family: str) -> None:
    model = replace(tiny_model(family, num_hidden_layers=2), head=None)
    truths = {temperature: plain_texts(model, temperature) for temperature in (0.0, 1.0)}
    pairs = product if family == "mimo" else lambda *each: zip(cycle(each[0]), each[1], strict=False)
    for number, (temperature, settings) in enumerate(pairs(truths, SETTINGS.values())):
        truth = truths[temperature]
        engine = make(model, drafter="ngram", depth=4, **settings)
        engine.drafting.can_branch, engine.drafting._config = True, replace(engine.config, draft_width=3)
        engine.drafting.drafter, accepted = BranchingOracle(truth, number, 0.1), count_leaves(engine)
        assert_same(run(engine, varied_requests(temperature)), truth)
        assert len(accepted) > 3
        assert engine.stats.accepted == sum(engine.stats.per_position)


def plain_texts(model: Model, temperature: float, **settings: Any) -> support.Outputs:
    return run(make(model, drafter="none", **settings), varied_requests(temperature))


@cache
def plain_native_texts(temperature: float) -> support.Outputs:
    return plain_texts(trunk(), temperature, **NATIVE)


NATIVE = {"backend": "native", "dtype": "float32", "block_size": 16}
HEADS = {
    "mtp": lambda model: support.make_head(model, agreeing=True),
    "eagle3": support.make_eagle3,
    "block": lambda model: support.make_block(model, tuple(range(1, VOCAB, 2)), markov_rank=8, confidence=True),
    "block without a Markov head": support.make_block,
}


@cache
def trunk() -> Model:
    pytest.importorskip("headstart.kernels.native._native")
    config, arrays = support.family_of("llama").tiny()
    return support.model_at(support.write_model(support.new_folder(), config, support.soften(arrays, 0.1)), "native")


@pytest.mark.parametrize("depth", [4, "auto"])
@pytest.mark.parametrize("head", HEADS)
def test_leaves_drawn_by_heads_keep_the_text(head: str, depth: Any) -> None:
    model = replace(trunk(), head=HEADS[head](trunk()))
    drafted = num_accepted = 0
    for temperature in (0.0, 0.8, 1.2):
        truth = plain_native_texts(temperature)
        for more in SETTINGS.values():
            engine = make(model, **NATIVE, drafter=head.split()[0], depth=depth, draft_width=3, **more)
            accepted = count_leaves(engine)
            assert_same(run(engine, varied_requests(temperature)), truth)
            drafted += engine.stats.drafted - sum(engine.stats.drafted_at)
            num_accepted += len(accepted)
    assert depth == "auto" or (drafted > 100 and num_accepted > 0)


def first_draft(width: int, temperature: float, banned: Seq[int] = ()) -> tuple[int, Draft]:
    """The first token after a prompt, and the draft after that token."""
    model = replace(trunk(), head=HEADS["eagle3"](trunk()))
    engine = make(model, **NATIVE, drafter="eagle3", depth=2, draft_width=width)
    bias = dict.fromkeys(banned, -100.0)
    settings = {"max_tokens": 30, "stops": (), "temperature": temperature, "seed": 3, "logit_bias": bias}
    (sequence,) = engine.submit(support.request(support.prompt_of(12, 3), **settings))
    engine.step(lambda deltas: None)
    return sequence.tokens[-1], sequence.draft


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_leaf_equals_the_draw_with_higher_ranks_banned(temperature: float) -> None:
    (token, chain), (_, tree) = first_draft(1, temperature), first_draft(3, temperature)
    assert chain.tokens == tree.tokens and not chain.leaves
    assert [(leaf.place, leaf.rank) for leaf in tree.leaves] == [(0, 1), (0, 2), (1, 1), (1, 2)]
    candidates = [tree.tokens[0], *(leaf.token for leaf in tree.leaves if leaf.place == 0)]
    for count in (1, 2):
        other, draft = first_draft(1, temperature, candidates[:count])
        assert other == token and draft.tokens[0] == candidates[count]


def test_draft_width_is_refused_without_backend_support() -> None:
    with pytest.raises(UsageError, match="--draft-width 2 needs the native backend"):
        select_backend(EngineConfig(backend="reference", draft_width=2))
    with pytest.raises(UsageError, match="--draft-width is 9"):
        EngineConfig(draft_width=9)
