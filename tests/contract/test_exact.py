"""Every family with every drafter: drafting changes nothing but the speed.

Tiny float64 models. Whatever the depth, batch, chunk size, prefix cache and KV pool, the token ids, ends and logprobs
are those of plain decoding, and there are no ties to excuse.
"""

from dataclasses import replace
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import support
from hypothesis import given, settings, strategies as st
from support import DRAFTERS, OracleDrafter, agreeing_model, assert_same, headed_model, make, run, varied_requests

from headstart.errors import UsageError
from headstart.heads.base import HeadSpec
from headstart.tools.verify.options import pairwise

TEMPERATURES = (0.0, 0.7, 1.0)
FACTORS: dict[str, tuple[Any, ...]] = {
    "temperature": TEMPERATURES, "depth": (1, 3, 5), "max_num_seqs": (1, 8), "max_num_batched_tokens": (20, 512),
    "enable_prefix_caching": (True, False), "kv_blocks": (16, 200),
}  # fmt: skip
CROWDED = [
    cell for cell in pairwise(FACTORS) if cell["max_num_seqs"] > 1 and cell["kv_blocks"] < 200 and cell["depth"] == 5
]
"""Batches that run out of blocks: where drafts, chunks, preemption and prefix hits meet, and the quickest cells."""
SAMPLED = [cell for cell in CROWDED if cell["temperature"] > 0]
"""Greedy texts of every family are drafted in test_families.py, too."""
assert 0 < len(SAMPLED) < len(CROWDED)
STRUCTURES = ("mimo", "deepseek_v3", "qwen3_next")
"""Keys and values with a native head; a latent and experts; recurrent states. To the loop and its drafters other
families are one of these: they differ in data, so a head that is often right and one drafter more will do for them."""
MIXERS = ("deepseek_v4", "gemma3", "glm_moe_dsa", "gpt_oss", "lfm2", "longcat_flash", "nemotron_h", "step3p5")
"""Other mixers: what they keep of drafts that come true is of other kinds."""
OTHERS = [family for family in support.FAMILIES if family not in STRUCTURES]
PAIRS = [(family, drafter) for family in STRUCTURES for drafter in DRAFTERS] + list(
    zip(OTHERS, cycle(drafter for drafter in DRAFTERS if drafter != "mtp"), strict=False)
)
"""Families with drafters; each drafter meets some of the others."""
CROSSED = [(family, drafter) for family, drafter in PAIRS if family == STRUCTURES[0] or drafter == "mtp"]
"""Those with more settings: every drafter, and every structure."""
CELLS = pairwise({"pair": tuple(CROSSED), **FACTORS})
"""Each pair of settings, and each setting of every drafter and structure."""


def slow(family: str) -> list[pytest.MarkDecorator]:
    """One family is quick; the others make the same claim of what their layers do."""
    return [] if family == STRUCTURES[0] else [pytest.mark.slow]


@cache
def plain(kind: str, family: str, temperature: float) -> support.Outputs:
    """Plain decoding, one request after another; of OTHERS all at once: what company changes is a matter of their
    layers (test_logits_in_company)."""
    model = {"random": headed_model, "agreeing": agreeing_model}[kind](family)
    room = {"max_num_seqs": 8, "kv_blocks": 200} if family in OTHERS else {"max_num_seqs": 1, "kv_blocks": 16}
    return run(make(model, drafter="none", enable_prefix_caching=False, **room), varied_requests(temperature))


def head_kind(drafter: str) -> str:
    """What a drafter must find at the model."""
    return drafter if drafter in ("eagle3", "peagle", "medusa", "draft_model", "block") else "mtp"


def check(kind: str, family: str, drafter: str, cell: dict[str, Any]) -> tuple[int, int]:
    """Run one cell, compare; returns accepted tokens and preemptions."""
    settings = {name: value for name, value in cell.items() if name != "temperature"}
    model = agreeing_model(family) if kind == "agreeing" else headed_model(family, head_kind(drafter))
    engine = make(model, drafter=drafter, **settings)
    requests = varied_requests(cell["temperature"])
    if cell["max_num_seqs"] == 1:  # one after another takes long: every other request, these or those
        requests = requests[cell["depth"] == 1 :: 2]
    outputs, expected = run(engine, requests), plain(kind, family, cell["temperature"])
    names = {each.request_id for each in requests}
    assert_same(outputs, {key: output for key, output in expected.items() if key[0] in names})
    return engine.stats.accepted, engine.scheduler.num_preemptions


@pytest.mark.slow
@pytest.mark.parametrize(("family", "drafter"), [pytest.param(*pair, marks=slow(pair[0])) for pair in PAIRS])
def test_drafting_changes_nothing(family: str, drafter: str) -> None:
    is_crossed = (family, drafter) in CROSSED
    totals = [check("random", family, drafter, cell) for cell in (CROWDED if is_crossed else SAMPLED)]
    assert not is_crossed or sum(preemptions for _, preemptions in totals) > 0, "no cell ran out of blocks"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "drafter"), CROSSED)
def test_no_pair_of_settings_changes_anything(family: str, drafter: str) -> None:
    for cell in CELLS:
        if cell["pair"] == (family, drafter):
            check("random", family, drafter, {name: cell[name] for name in FACTORS})


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(family, marks=slow(family)) for family in (*STRUCTURES, *MIXERS)])
def test_a_head_that_is_often_right_changes_nothing(family: str) -> None:
    totals = [check("agreeing", family, "mtp", cell) for cell in (CROWDED if family in STRUCTURES else SAMPLED)]
    assert sum(accepted for accepted, _ in totals) > 25 * len(totals)
    assert sum(preemptions for _, preemptions in totals) > 0


PLAIN_FAMILY = "llama"
SPECS = {
    "embedding first, pre-norm hidden": HeadSpec(tap="pre_norm"),
    "recycles before the norm": HeadSpec(recycle="pre_norm", mask_first=True),
    "two modules in turn": HeadSpec(num_modules=2, beyond="cycle", hidden_first=True),
    "three modules, then the last": HeadSpec(num_modules=3, beyond="last"),
}


@pytest.mark.slow
@pytest.mark.parametrize("agreeing", [False, True])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_kind_of_head_changes_nothing(spec: HeadSpec, agreeing: bool) -> None:
    kind = "agreeing" if agreeing else "random"
    model = (agreeing_model if agreeing else headed_model)(PLAIN_FAMILY)
    vocabulary = range(0, support.VOCAB, 2) if agreeing else None
    model = replace(model, head=support.make_head(model, spec, agreeing=agreeing, draft_ids=vocabulary))
    for temperature in (0.0, 1.0):
        engine = make(model, drafter="mtp", depth=4, kv_blocks=24, max_num_batched_tokens=40)
        assert_same(run(engine, varied_requests(temperature)), plain(kind, PLAIN_FAMILY, temperature))
        assert engine.stats.drafted > 100


def test_a_head_with_no_module_for_a_depth_refuses_it() -> None:
    model = headed_model(PLAIN_FAMILY)
    model = replace(model, head=support.make_head(model, HeadSpec(num_modules=2)))
    with pytest.raises(UsageError, match="--depth is 3, but drafter mtp goes to 2"):
        make(model, drafter="mtp", depth=3)
    make(model, drafter="mtp", depth=2)


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**31), error=st.sampled_from([0.0, 0.05, 0.3, 1.0]), depth=st.integers(1, 8),
    temperature=st.sampled_from(TEMPERATURES), batch=st.sampled_from([1, 3, 8]), chunk=st.sampled_from([17, 33, 512]),
    blocks=st.sampled_from([16, 24, 80]), caching=st.booleans(),
)  # fmt: skip
@settings(max_examples=20)
def test_no_draft_changes_the_text(
    seed: int, error: float, depth: int, temperature: float, batch: int, chunk: int, blocks: int, caching: bool
) -> None:
    """Ragged lengths, junk, or the truth itself: acceptance bookkeeping is right for all of them."""
    family = STRUCTURES[seed % len(STRUCTURES)]
    truth = plain("random", family, temperature)
    engine = make(
        headed_model(family), drafter="ngram", depth=depth, max_num_seqs=batch, max_num_batched_tokens=chunk,
        kv_blocks=blocks, enable_prefix_caching=caching,
    )  # fmt: skip
    engine.drafting.drafter = oracle = OracleDrafter(truth, seed, error)
    outputs = run(engine, varied_requests(temperature))
    assert_same(outputs, truth)
    assert oracle.released == len(truth)
    check_stats(outputs, oracle, error)


def check_stats(outputs: support.Outputs, oracle: OracleDrafter, error: float) -> None:
    """The counts of drafting add up, and the truth is accepted."""
    for output in outputs.values():
        stats = output.stats
        assert stats.emitted == len(output.tokens) and stats.accepted == sum(stats.per_position)
        assert stats.drafted == sum(stats.drafted_at) <= oracle.proposed
        assert stats.per_position == sorted(stats.per_position, reverse=True) and stats.passes >= stats.drafts
        if error == 0:  # a draft may run on past the end of the text, and only there be wrong
            assert stats.drafted - stats.accepted <= 8 and stats.emitted <= stats.passes + stats.accepted
