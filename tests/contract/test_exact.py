"""Exactness: every family with every drafter gives the text of plain decoding.

Tiny float64 models. For any depth, batch, chunk size, prefix cache and KV pool, token ids, ends and logprobs equal
plain decoding; there are no ties to excuse."""

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
    """Only one family runs by default; the others repeat its tests for other layers."""
    return [] if family == STRUCTURES[0] else [pytest.mark.slow]


@cache
def plain(kind: str, family: str, temperature: float) -> support.Outputs:
    """Outputs of plain decoding, one request at a time; for OTHERS all at once, since effects of the batch are covered
    by test_logits_of_a_mixed_batch_match_transformers."""
    model = {"random": headed_model, "agreeing": agreeing_model}[kind](family)
    room = {"max_num_seqs": 8, "kv_blocks": 200} if family in OTHERS else {"max_num_seqs": 1, "kv_blocks": 16}
    return run(make(model, drafter="none", enable_prefix_caching=False, **room), varied_requests(temperature))


def head_kind(drafter: str) -> str:
    """The kind of head that a drafter needs."""
    return drafter if drafter in ("eagle3", "peagle", "medusa", "draft_model", "block") else "mtp"


def assert_same_as_plain(kind: str, family: str, drafter: str, cell: dict[str, Any]) -> tuple[int, int]:
    """Runs one cell and compares with plain decoding; returns accepted tokens and preemptions."""
    settings = {name: value for name, value in cell.items() if name != "temperature"}
    model = agreeing_model(family) if kind == "agreeing" else headed_model(family, head_kind(drafter))
    engine = make(model, drafter=drafter, **settings)
    requests = varied_requests(cell["temperature"])
    if cell["max_num_seqs"] == 1:  # one at a time is slow: only every other request
        requests = requests[cell["depth"] == 1 :: 2]
    outputs, expected = run(engine, requests), plain(kind, family, cell["temperature"])
    names = {each.request_id for each in requests}
    assert_same(outputs, {key: output for key, output in expected.items() if key[0] in names})
    return engine.stats.accepted, engine.scheduler.num_preemptions


@pytest.mark.slow
@pytest.mark.parametrize(("family", "drafter"), [pytest.param(*pair, marks=slow(pair[0])) for pair in PAIRS])
def test_drafters_keep_the_text(family: str, drafter: str) -> None:
    is_crossed = (family, drafter) in CROSSED
    totals = [assert_same_as_plain("random", family, drafter, cell) for cell in (CROWDED if is_crossed else SAMPLED)]
    assert not is_crossed or sum(preemptions for _, preemptions in totals) > 0, "no cell ran out of blocks"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "drafter"), CROSSED)
def test_pairs_of_settings_keep_the_text(family: str, drafter: str) -> None:
    for cell in CELLS:
        if cell["pair"] == (family, drafter):
            assert_same_as_plain("random", family, drafter, {name: cell[name] for name in FACTORS})


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(family, marks=slow(family)) for family in (*STRUCTURES, *MIXERS)])
def test_accepted_drafts_keep_the_text(family: str) -> None:
    totals = [
        assert_same_as_plain("agreeing", family, "mtp", cell) for cell in (CROWDED if family in STRUCTURES else SAMPLED)
    ]
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
def test_heads_of_every_form_keep_the_text(spec: HeadSpec, agreeing: bool) -> None:
    kind = "agreeing" if agreeing else "random"
    model = (agreeing_model if agreeing else headed_model)(PLAIN_FAMILY)
    vocabulary = range(0, support.VOCAB, 2) if agreeing else None
    model = replace(model, head=support.make_head(model, spec, agreeing=agreeing, draft_ids=vocabulary))
    for temperature in (0.0, 1.0):
        engine = make(model, drafter="mtp", depth=4, kv_blocks=24, max_num_batched_tokens=40)
        assert_same(run(engine, varied_requests(temperature)), plain(kind, PLAIN_FAMILY, temperature))
        assert engine.stats.drafted > 100


def test_depth_beyond_the_modules_is_refused() -> None:
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
def test_random_drafts_keep_the_text(
    seed: int, error: float, depth: int, temperature: float, batch: int, chunk: int, blocks: int, caching: bool
) -> None:
    """Ragged lengths, wrong tokens and the true tokens all leave correct acceptance counts."""
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
    assert_stats_consistent(outputs, oracle, error)


def assert_stats_consistent(outputs: support.Outputs, oracle: OracleDrafter, error: float) -> None:
    """Checks that counts add up, and that true drafts are accepted."""
    for output in outputs.values():
        stats = output.stats
        assert stats.emitted == len(output.tokens) and stats.accepted == sum(stats.per_position)
        assert stats.drafted == sum(stats.drafted_at) <= oracle.proposed
        assert stats.per_position == sorted(stats.per_position, reverse=True) and stats.passes >= stats.drafts
        if error == 0:  # a draft may run past the end of the text, and be wrong only there
            assert stats.drafted - stats.accepted <= 8 and stats.emitted <= stats.passes + stats.accepted
