"""The engine: one forward a step, token budget, state between steps, preemption, prefix cache, errors, sampling
rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import support
import torch
from support import Outputs, agreeing_model, assert_same, headed_model, make, prompt_of, request, run, varied_requests

from headstart.core import Delta, Draft, Request, Sequence, Span, StepPlan
from headstart.drafters.base import DraftRequest
from headstart.engine.engine import Engine
from headstart.errors import CapacityError, HeadstartError, UsageError
from headstart.layers.network import FORWARD

FAMILY = "mimo"


class RecordingBackend:
    """A backend that records the plan of every pass, of trunk and head apart, and the number of operations."""

    def __init__(self, engine: Engine) -> None:
        self._backend, self._trunk = engine.runner.backend, engine.runner.trunk.programs[FORWARD]
        self.trunk: list[StepPlan] = []
        self.head: list[StepPlan] = []
        self.num_ops: list[int] = []
        self.num_draws = 0
        engine.runner.backend = self

    def run(self, program: Any, plan: StepPlan, **options: Any) -> Mapping[str, Any]:
        counted = CountingOps()
        (self.trunk if program is self._trunk else self.head).append(plan)
        output = self._backend.run(lambda ops, step: program(counted.over(ops), step), plan, **options)
        if program is self._trunk:
            self.num_ops.append(counted.count)
        return output

    def sample(self, *arguments: Any, **options: Any) -> Any:
        self.num_draws += 1
        return self._backend.sample(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class CountingOps:
    """`Ops` that counts the calls of its operations."""

    def __init__(self) -> None:
        self.count = 0

    def over(self, ops: Any) -> CountingOps:
        self._ops = ops
        return self

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self._ops, name)

        def counted(*arguments: Any, **options: Any) -> Any:
            self.count += 1
            return operation(*arguments, **options)

        return counted


def step(engine: Engine, outputs: Outputs | None = None) -> list[Delta]:
    found: list[Delta] = []
    engine.step(found.extend)
    if outputs is not None:
        support.collect(outputs, found)
    return found


# Passes.


def test_one_forward_per_step_serves_all_rows() -> None:
    engine = make(agreeing_model(FAMILY), drafter="mtp", depth=5, max_num_batched_tokens=64)
    spy, mixes = RecordingBackend(engine), set()
    for each in varied_requests(0.0):
        engine.submit(each)
    while engine.has_work:
        drafts = {id(s): len(s.draft.tokens) for s in engine.scheduler.running}
        passes, rows, head, draws = len(spy.trunk), engine.runner.num_rows, len(spy.head), spy.num_draws
        step(engine)
        assert len(spy.trunk) == passes + 1 and spy.trunk[-1].num_rows == engine.runner.num_rows - rows
        assert len(spy.head) - head <= 5, "a head pass serves all sequences of a draft step"
        assert spy.num_draws - draws <= 6
        lengths = np.diff(spy.trunk[-1].row_starts).tolist()
        kinds = {"prefill" if n > 6 else "decode" if n == 1 else "draft" for n in lengths}
        mixes.add(frozenset(kinds) | {f"{len(set(drafts.values()))} lengths"})
    assert engine.runner.num_passes == len(spy.trunk)
    assert min(int(plan.positions.min()) for plan in spy.head) == 1, "the first pair lives at position 1"
    assert len(set(spy.num_ops)) == 1, "the forward loops over sequences or rows"
    assert any({"prefill", "draft"} <= mix for mix in mixes) and any({"draft", "decode"} <= mix for mix in mixes)
    assert any({"3 lengths", "4 lengths"} & mix for mix in mixes), "no drafts of different lengths in a batch"


@pytest.mark.slow
@pytest.mark.parametrize(("budget", "batch"), [(17, 8), (23, 3), (64, 64)])
def test_passes_stay_within_token_budget_and_batch_size(budget: int, batch: int) -> None:
    engine = make(agreeing_model(FAMILY), drafter="mtp", depth=4, max_num_batched_tokens=budget, max_num_seqs=batch)
    spy = RecordingBackend(engine)
    run(engine, varied_requests(0.7))
    most = max(len(plan.row_starts) - 1 for plan in spy.trunk)
    assert budget // 2 < max(plan.num_rows for plan in spy.trunk) <= budget
    assert most == 3 if batch == 3 else most <= batch


def test_drafts_do_not_starve_other_sequences() -> None:
    """Eight sequences ask for six rows each of a budget of 17: each still gets its token in every step."""
    engine = make(agreeing_model(FAMILY), drafter="none", depth=5, max_num_batched_tokens=17, kv_blocks=200)
    truth = run(engine, requests := [request(prompt_of(2, i), name=f"{i}", max_tokens=40, stops=()) for i in range(8)])
    engine.drafting.drafter = support.OracleDrafter(truth, 0, 0.2)
    for each in requests:
        engine.submit(each)
    step(engine)
    step(engine)
    assert len(engine.scheduler.running) == 8
    num_drafted = 0
    while not engine.scheduler.waiting and len(engine.scheduler.running) == 8:
        before = {s: s.num_output for s in engine.scheduler.running}
        step(engine)
        assert all(s.num_output > count for s, count in before.items())
        num_drafted += engine.runner.num_rows
    assert num_drafted


def test_tokens_are_delivered_before_the_next_draft() -> None:
    engine, events = make(headed_model(FAMILY), drafter="none", depth=2), []
    engine.step(lambda deltas: pytest.fail("delivered"))  # an idle step does nothing
    assert engine.runner.num_passes == 0

    class RecordingDrafter(support.OracleDrafter):
        def propose(self, requests: Seq[DraftRequest]) -> None:
            events.append("propose")

    engine.drafting.drafter = RecordingDrafter({}, 0, 0)
    engine.submit(request([5, 6], max_tokens=3, stops=()))
    while engine.has_work:
        engine.step(lambda deltas: events.append("deliver"))
    assert events == ["deliver", "propose", "deliver", "deliver"]  # no draft if one token is left


# State between steps.


def check_state(engine: Engine) -> None:
    """Checks the invariants of core.Sequence between steps."""
    for sequence in engine.scheduler.waiting:
        assert (sequence.num_computed, sequence.filled[0], len(sequence.block_table)) == (0, 0, 0)
        assert not sequence.draft.tokens
    for sequence in engine.scheduler.running:
        length, params = len(sequence.tokens), sequence.request.params
        slots = len(sequence.block_table) * engine.memory.block_size
        assert 0 <= sequence.num_computed <= length - 1 and sequence.filled[0] <= length
        assert sequence.num_output < params.max_tokens and sequence.finish_reason is None
        assert slots >= max(sequence.num_computed, sequence.filled[0], length if sequence.draft.tokens else 0)
        if sequence.draft.tokens:
            assert sequence.num_computed == length - 1
            assert len(sequence.draft.tokens) <= min(engine.config.depth, params.max_tokens - sequence.num_output - 1)
            assert slots >= length + len(sequence.draft.tokens)
    held = [index for sequence in engine.scheduler.running for index in set(sequence.block_table)]
    assert all(block.references == held.count(block.index) for block in engine.memory.pool.blocks)
    engine.memory.pool.check()


def states(engine: Engine, sequence: Sequence) -> dict[str, torch.Tensor]:
    """Trunk keys, values and hidden states below num_computed; head keys and values of pairs below filled."""
    size = engine.memory.block_size
    slots = torch.tensor([b * size + i for b in sequence.block_table for i in range(size)])
    known, pairs = slots[: sequence.num_computed], slots[1 : max(sequence.filled[0], 1)]
    found = {"hidden": engine.runner.trunk.pools.hidden[known]}
    for i, pool in enumerate(engine.runner.trunk.pools.kv):
        found |= {f"keys {i}": pool.keys[known], f"values {i}": pool.values[known]}
    for i, pool in enumerate(engine.runner.networks[0].pools.kv):
        found |= {f"head keys {i}": pool.keys[pairs], f"head values {i}": pool.values[pairs]}
    return found


def fresh_prefill(engine: Engine, tokens: list[int], num_computed: int, num_drafter: int) -> tuple[Engine, Sequence]:
    """The same tokens computed in one pass by an engine that never drafted."""
    other = make(headed_model(FAMILY), drafter="mtp", depth=1, enable_prefix_caching=False)
    sequence = support.new_sequence(other, tokens, computed=num_computed)
    if num_drafter > 1:
        sequence.tokens = tokens[:num_drafter]
        other.drafting.drafter.propose([DraftRequest(sequence, 1)])
    return other, sequence


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"kv_blocks": 16, "max_num_batched_tokens": 23}])
def test_state_equals_a_fresh_prefill(settings: dict[str, Any]) -> None:
    """Keys, values, hidden states and head rows hold no trace of rejected drafts, chunks, preemption or cache hits."""
    engine = make(headed_model(FAMILY), drafter="mtp", depth=4, **settings)
    requests, rng, checked = varied_requests(0.7), np.random.default_rng(0), 0

    def after(engine: Engine) -> None:
        nonlocal checked
        check_state(engine)
        if rng.random() < 0.6 and engine.scheduler.running:
            sequence = engine.scheduler.running[rng.integers(len(engine.scheduler.running))]
            other, again = fresh_prefill(engine, sequence.tokens, sequence.num_computed, sequence.filled[0])
            expected = states(other, again)
            for name, value in states(engine, sequence).items():
                torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9, msg=name)
            checked += 1

    run(engine, requests, after)
    run(engine, [replace(each, request_id=f"again {each.request_id}") for each in requests], after)
    assert checked > 5 and engine.scheduler.prefix_hits > 0
    assert bool(engine.scheduler.num_preemptions) == bool(settings)


@pytest.mark.parametrize("drafter", ["ngram", "none"])
def test_state_invariants_hold_with_other_drafters(drafter: str) -> None:
    engine = make(headed_model(FAMILY), drafter=drafter, depth=4, kv_blocks=20, max_num_batched_tokens=31)
    run(engine, varied_requests(0.0), check_state)


# Preemption.


@pytest.mark.slow
def test_preempted_sequences_resume_with_the_same_text() -> None:
    model = headed_model(FAMILY)
    settings: dict[str, Any] = {"temperature": 0.9, "max_tokens": 60, "stops": ()}
    requests = [request(prompt_of(30, i), name=f"{i}", seed=i, **settings) for i in range(4)]
    alone = run(make(model, drafter="none", max_num_seqs=1), requests)
    engine = make(model, drafter="mtp", depth=3, kv_blocks=20)
    order: list[str] = []

    def after(engine: Engine) -> None:
        waiting = [s for s in engine.scheduler.waiting if s.num_output]
        order.extend(s.request.request_id for s in waiting)
        assert [s.order for s in engine.scheduler.waiting] == sorted(s.order for s in engine.scheduler.waiting)

    assert_same(run(engine, requests, after), alone)
    assert engine.scheduler.num_preemptions >= 2
    assert order, "no sequence with output was preempted"
    assert "0" not in order, "the oldest sequence was preempted"


@pytest.mark.slow
def test_reported_counts_survive_preemption() -> None:
    """Prompt logprobs are delivered once; cached tokens and lookups are those of the first admission."""
    model = headed_model(FAMILY)
    extra = {"prompt_logprobs": 1, "max_tokens": 50, "stops": ()}
    requests = [request(prompt_of(40, i), name=f"{i}", **extra) for i in range(3)]
    engine = make(model, drafter="none", kv_blocks=18)
    outputs = run(engine, requests)
    assert engine.scheduler.num_preemptions and all(len(output.prompt_logprobs) == 39 for output in outputs.values())
    for each in requests:
        assert [t.token for t in outputs[each.request_id, 0].prompt_logprobs] == list(each.prompt_ids[1:])

    engine = make(model, drafter="none", kv_blocks=18, max_num_batched_tokens=20)
    submitted = [engine.submit(request(prompt_of(60, i), name=f"{i}", max_tokens=50, stops=()))[0] for i in range(3)]
    run(engine, [])
    assert engine.scheduler.num_preemptions and [sequence.num_cached for sequence in submitted] == [0, 0, 0]
    assert (engine.scheduler.prefix_queries, engine.scheduler.prefix_hits) == (180, 0)


# Resuming a text of another engine.


@pytest.mark.slow
@pytest.mark.parametrize("family", [FAMILY, "qwen3_5"])
def test_engine_resumes_a_text_of_another_engine(family: str) -> None:
    """Penalties, min_tokens, logprobs, ends and counts equal those of one engine, for any cut."""
    model = headed_model(family)
    submitted_request = request(
        prompt_of(20, 1), n=2, temperature=0.9, repetition_penalty=1.4, presence_penalty=0.5, min_tokens=20, logprobs=1,
        prompt_logprobs=1, max_tokens=30,
    )  # fmt: skip
    one, whole, deltas = make(model, drafter="mtp", depth=2), {}, list[Delta]()
    one.submit(submitted_request)
    while one.has_work:
        deltas += step(one, whole)
    for cut in (1, 2, len(deltas) // 2, len(deltas) - 1, len(deltas)):
        other, found = make(model, drafter="none", max_num_batched_tokens=16), {}
        support.collect(found, deltas[:cut])
        sequences = other.submit(submitted_request, deltas[:cut])
        while other.has_work:
            step(other, found)
        assert_same(found, whole)
        assert [each.prompt_logprobs for each in found.values()] == [each.prompt_logprobs for each in whole.values()]
        assert [each.stats.emitted for each in sequences] == [len(whole["r", i].tokens) for i in range(2)]
        support.assert_clean(other)


# Prefix cache.


@pytest.mark.slow
def test_prefix_hits_are_counted_and_keep_the_text() -> None:
    model, prompt = headed_model(FAMILY), prompt_of(43, 1)
    engine = make(model, drafter="mtp", depth=3)
    settings = {"temperature": 0.8, "seed": 3, "max_tokens": 20, "stops": ()}
    first = run(engine, [request(prompt, **settings)])
    assert (engine.scheduler.prefix_queries, engine.scheduler.prefix_hits) == (43, 0)
    rows = engine.runner.num_rows
    sequence, again = engine.submit(request(prompt, **settings))[0], run(engine, [])
    assert_same(again, first)
    assert sequence.num_cached == 40  # five blocks of eight
    assert (engine.scheduler.prefix_queries, engine.scheduler.prefix_hits) == (86, 40)
    assert engine.runner.num_rows - rows == rows - 40
    assert again["r", 0].stats == first["r", 0].stats, "a prefix hit changes the drafts"

    engine = make(model, drafter="mtp", depth=3, enable_prefix_caching=False)
    assert_same(run(engine, [request(prompt, **settings)]), first)
    assert_same(run(engine, [request(prompt, **settings)]), first)
    assert engine.scheduler.prefix_hits == 0


def test_output_of_a_turn_is_cached_for_the_next_turn() -> None:
    model, prompt = headed_model(FAMILY), prompt_of(20, 1)
    engine = make(model, drafter="mtp", depth=3)
    answer = run(engine, [request(prompt, max_tokens=30, stops=())])["r", 0].tokens
    longer = [*prompt, *answer, 7, 8, 9]
    sequence = engine.submit(request(longer, max_tokens=5, stops=()))[0]
    found = run(engine, [])
    assert sequence.num_cached == 48  # 49 positions are computed
    assert_same(found, run(make(model, drafter="none"), [request(longer, max_tokens=5, stops=())]))


def test_prefix_cached_without_drafting_serves_drafts() -> None:
    """Missing head rows of cached blocks are computed when a later request drafts."""
    model, prompt = agreeing_model(FAMILY), prompt_of(43, 1)
    settings = {"max_tokens": 20, "stops": ()}
    engine = make(model, drafter="mtp", depth=3)
    run(engine, [request(prompt, depth=0, **settings)])
    mixed = run(engine, [request(prompt, name=f"{i}", depth=i, **settings) for i in range(4)])
    cold = run(make(model, drafter="mtp", depth=3), [request(prompt, **settings)])
    assert all(output.tokens == cold["r", 0].tokens for output in mixed.values())
    assert mixed["3", 0].stats == cold["r", 0].stats and mixed["0", 0].stats.drafts == 0
    assert 0 < mixed["1", 0].stats.accepted < mixed["3", 0].stats.accepted


# Ends, depth.


def test_max_tokens_and_context_length_end_the_text() -> None:
    engine = make(agreeing_model(FAMILY), drafter="mtp", depth=5, max_model_len=64)
    sizes = {"context": (50, 100, 14), "max": (5, 7, 7), "one left": (63, 9, 1), "one": (5, 1, 1)}
    found = run(engine, [request(prompt_of(length, 0), name=name, max_tokens=most, stops=())
                         for name, (length, most, _) in sizes.items()])  # fmt: skip
    assert {output.finish_reason for output in found.values()} == {"length"}
    assert [len(output.tokens) for output in found.values()] == [size for _, _, size in sizes.values()]


def test_stop_id_inside_an_accepted_draft_ends_the_text() -> None:
    engine = make(agreeing_model(FAMILY), drafter="none", depth=8)
    truth = run(engine, [request([5, 9], max_tokens=30, stops=())])
    tokens = truth["r", 0].tokens
    stop = next(token for token in tokens[4:] if token not in tokens[:4])
    engine.drafting.drafter = support.OracleDrafter(truth, 1, 0.0)
    found = run(engine, [request([5, 9], max_tokens=30, stops=(stop,))])["r", 0]
    assert (found.tokens, found.finish_reason) == (tokens[: tokens.index(stop) + 1], "stop")
    assert found.stats.accepted > 0


def test_depth_of_a_request_overrides_the_engine() -> None:
    engine = make(agreeing_model(FAMILY), drafter="mtp", depth=2)
    settings = {"max_tokens": 20, "stops": ()}
    found = run(engine, [request([5, 6, 7], name=str(depth), depth=depth, **settings) for depth in (None, 0, 1, 4)])
    lengths = {name: len(output.stats.drafted_at) for (name, _), output in found.items()}
    assert lengths == {"None": 2, "0": 0, "1": 1, "4": 4}
    assert len({tuple(output.tokens) for output in found.values()}) == 1


# Abort, errors.


def test_abort_frees_blocks_of_waiting_and_running_sequences() -> None:
    engine = make(headed_model(FAMILY), drafter="mtp", depth=3, max_num_seqs=2)
    for i in range(4):
        engine.submit(request(prompt_of(20, i), name=f"{i}", n=2 if i == 0 else 1, max_tokens=30, stops=()))
    for _ in range(3):
        step(engine)
    assert {s.request.request_id for s in engine.scheduler.running} == {"0"}
    engine.abort("0", choice=1)
    engine.abort("3")  # waiting
    engine.abort("nobody")
    engine.abort("0", choice=1)
    assert [s.choice for s in engine.scheduler.running] == [0]
    outputs: Outputs = {}
    for _ in range(3):
        step(engine, outputs)
    assert set(outputs) == {("0", 0), ("1", 0)}
    for name in "012":
        engine.abort(name)
    support.assert_clean(engine)
    assert run(engine, [request([5], name="0", max_tokens=2, stops=())])["0", 0].finish_reason == "length"


def test_abort_is_allowed_inside_deliver() -> None:
    engine = make(headed_model(FAMILY), drafter="mtp", depth=3)
    seen: list[str] = []

    def deliver(deltas: list[Delta]) -> None:
        for delta in deltas:
            seen.append(delta.request_id)
            engine.abort(delta.request_id)

    for i in range(3):
        engine.submit(request(prompt_of(5, i), name=f"{i}", max_tokens=30, stops=()))
    while engine.has_work:
        engine.step(deliver)
    assert sorted(seen) == ["0", "1", "2"]
    support.assert_clean(engine)


BAD: dict[str, tuple[Request, type[HeadstartError], str]] = {
    "empty": (request([]), UsageError, "the prompt is empty"),
    "too long": (request([5] * 128), CapacityError, "128 tokens, but the context holds 128"),
    "id too large": (request([5, support.VOCAB]), UsageError, f"outside 0..{support.VOCAB - 1}"),
    "id below 0": (request([-1]), UsageError, "outside 0.."),
    "deep": (request([5], depth=17), UsageError, "depth is 17, but the drafter's limit is 16"),
    "depth below 0": (request([5], depth=-1), UsageError, "depth is -1, but must be at least 0"),
    "begun elsewhere, too long": (request([5] * 100), CapacityError, "130 tokens so far, but the context holds 128"),
    "id taken": (request([5], name="running"), UsageError, "'running' is running"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", BAD)
def test_refused_request_leaves_no_state_behind(case: str) -> None:
    bad, error, message = BAD[case]
    engine = make(headed_model(FAMILY), drafter="mtp", depth=3)
    engine.submit(good := request([7, 8, 9], name="running", max_tokens=12, stops=()))
    outputs: Outputs = {}
    step(engine, outputs)
    with pytest.raises(error, match=message):
        engine.submit(bad, [Delta(request_id="r", choice=0, tokens=(5,) * 30)] if "begun" in case else ())
    assert list(engine._live) == ["running"] and not engine.scheduler.waiting
    while engine.has_work:
        step(engine, outputs)
    support.assert_clean(engine)
    assert_same(outputs, run(make(headed_model(FAMILY), drafter="none"), [good]))


# Rule `rejection`: same distribution as plain sampling, same text when greedy.

SMALL_VOCAB = 5
TEMPERATURE, TOP_K = 0.8, 4


def processed(logits: np.ndarray) -> np.ndarray:
    """Probabilities after temperature and top-k, computed independently."""
    scaled = np.exp((logits - logits.max()) / TEMPERATURE)
    scaled[np.argsort(-logits, kind="stable")[TOP_K:]] = 0
    return scaled / scaled.sum()


@cache
def joint_of_three(prompt: tuple[int, ...]) -> np.ndarray:
    """P(t1, t2, t3) [V, V, V] from the trunk's own logits."""
    engine = make(support.tiny_model(FAMILY, vocab_size=SMALL_VOCAB, num_hidden_layers=2), drafter="none")

    @cache
    def next_probs(*tokens: int) -> np.ndarray:
        sequence = support.new_sequence(engine, [*prompt, *tokens])
        logits = engine.runner.forward([Span(sequence, 0, len(sequence.tokens), 1)]).logits
        engine.memory.release(sequence)
        return processed(logits[0].numpy())

    joint = np.zeros((SMALL_VOCAB,) * 3)
    for a, b in product(range(SMALL_VOCAB), repeat=2):
        joint[a, b] = next_probs()[a] * next_probs(a)[b] * next_probs(a, b)
    return joint


class JunkDrafter(support.OracleDrafter):
    """Drafts fixed tokens as one-hot distributions."""

    def propose(self, requests: Seq[DraftRequest]) -> None:
        for sequence, depth in [(each.sequence, each.depth) for each in requests]:
            # fixed tokens: a uniform choice would average out a wrong residual
            sequence.draft = Draft([2, 3][:depth], method="junk")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("drafter", "rule"), [("mtp", "rejection"), ("mtp, reduced", "rejection"), ("junk", "rejection"), ("mtp", "exact")]
)
def test_first_three_tokens_follow_the_plain_sampling_distribution(drafter: str, rule: str) -> None:
    """Chi-square of the joint distribution; the second and third tokens are drafted."""
    prompt, runs = [3, 1, 4, 1], 6
    model = support.tiny_model(FAMILY, vocab_size=SMALL_VOCAB, num_hidden_layers=2)
    if drafter == "mtp, reduced":
        model = replace(model, head=support.make_head(model, draft_ids=(0, 2, 3)))
    engine = make(model, drafter="none" if drafter == "junk" else "mtp", depth=2, rule=rule, kv_blocks=400)
    if drafter == "junk":
        engine.drafting.drafter = JunkDrafter({}, 0, 0)
    settings = {"n": 128, "temperature": TEMPERATURE, "top_k": TOP_K, "max_tokens": 3, "stops": ()}
    found = run(engine, [request(prompt, name=f"{i}", seed=7000 + i, **settings) for i in range(runs)])
    counts = np.zeros((SMALL_VOCAB,) * 3)
    for output in found.values():
        counts[tuple(output.tokens[:3])] += 1
    expected = joint_of_three(tuple(prompt)) * 128 * runs
    assert counts.sum() == 128 * runs
    assert (counts[expected == 0] == 0).all(), "a token outside top-k was sampled"
    often = expected >= 5
    cells = [*zip(counts[often], expected[often], strict=True), (counts[~often].sum(), expected[~often].sum())]
    chi_square = sum((have - want) ** 2 / want for have, want in cells if want > 0)
    freedom = len(cells) - 1
    assert freedom > 20
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5, (chi_square, freedom)
    assert 0.1 < engine.stats.accepted / engine.stats.drafted < 0.95


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
def test_rejection_is_exact_when_greedy(drafter: str) -> None:
    requests = varied_requests(0.0)
    expected = run(make(agreeing_model(FAMILY), drafter="none"), requests)
    engine = make(agreeing_model(FAMILY), drafter=drafter, rule="rejection", kv_blocks=20, max_num_batched_tokens=33)
    assert_same(run(engine, requests), expected)


def test_rejection_reports_logprobs_of_emitted_tokens() -> None:
    engine = make(agreeing_model(FAMILY), drafter="mtp", rule="rejection", depth=3)
    prompt = prompt_of(9, 2)
    found = run(engine, [request(prompt, temperature=1.0, logprobs=2, max_tokens=40, stops=(), n=3, seed=5)])
    plain = make(agreeing_model(FAMILY), drafter="none")
    for output in found.values():
        assert [each.token for each in output.logprobs] == output.tokens
        again = request([*prompt, *output.tokens], prompt_logprobs=2, max_tokens=1, stops=())
        expected = run(plain, [again])["r", 0].prompt_logprobs[len(prompt) - 1 :]
        for ours, theirs in zip(output.logprobs, expected, strict=True):
            assert dict(ours.top) == pytest.approx(dict(theirs.top))
            assert ours.logprob == pytest.approx(theirs.logprob, rel=1e-6)


@pytest.mark.slow
def test_rejection_is_independent_of_the_batch() -> None:
    """The text may depend on the drafts, and these depend on the sequence alone."""
    requests = varied_requests(0.9)
    engines = [make(agreeing_model(FAMILY), drafter="mtp", rule="rejection", max_num_seqs=n) for n in (1, 8)]
    assert_same(*(run(engine, requests) for engine in engines))
