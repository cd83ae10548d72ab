"""The scheduler: any token budget, down to one row a pass, gives the same text and lets every request progress."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import support
from support import OracleDrafter, Outputs, agreeing_model, assert_same, headed_model, make, prompt_of, request, run

from headstart.core import Request, Span
from headstart.engine.engine import Engine

FAMILY = "mimo"


def requests() -> list[Request]:
    settings: dict[str, Any] = {"temperature": 0.8, "max_tokens": 12, "stops": ()}
    lengths = enumerate((1, 9, 30, 2, 17))
    return [request(prompt_of(length, i), name=f"{i}", seed=i, **settings) for i, length in lengths]


@cache
def plain_texts() -> Outputs:
    return run(make(agreeing_model(FAMILY), drafter="none", max_num_seqs=1), requests())


@pytest.mark.slow
@pytest.mark.parametrize("drafter", ["mtp", "ngram"])
@pytest.mark.parametrize("budget", [1, 2, 5, 16])
def test_small_budgets_give_the_same_text(budget: int, drafter: str) -> None:
    engine = make(agreeing_model(FAMILY), drafter=drafter, depth=4, max_num_batched_tokens=budget)
    rows: list[int] = []

    def after(engine: Engine) -> None:
        rows.append(engine.runner.num_rows - sum(rows))
        assert len(engine.scheduler.running) <= budget
        earlier = engine.scheduler.running[:-1]
        assert all(s.num_computed == len(s.tokens) - 1 for s in earlier), "several sequences are in prefill"

    assert_same(run(engine, requests(), after), plain_texts())
    assert max(rows) <= budget
    if budget == 1 or drafter == "mtp":
        assert (engine.stats.drafted > 0) == (budget > 1), "drafts in a budget of one row"


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 3, 6])
def test_every_running_sequence_advances_in_every_pass(budget: int) -> None:
    """Long drafts leave rows for the sequences after them; sequences without a row wait."""
    model, many = agreeing_model(FAMILY), [request(prompt_of(4, i), name=f"{i}", max_tokens=15) for i in range(6)]
    truth = run(make(model, drafter="none"), many)
    engine = make(model, drafter="none", depth=8, max_num_batched_tokens=budget)
    engine.drafting.drafter = OracleDrafter(truth, 0, 0.2)
    for each in many:
        engine.submit(each)
    while engine.has_work:
        before = {s: (s.num_computed, s.num_output) for s in engine.scheduler.running}
        engine.step(lambda deltas: None)
        for sequence, (computed, output) in before.items():
            assert (sequence.num_computed, sequence.num_output) > (computed, output) or sequence.finish_reason
    assert (engine.drafting.drafter.proposed > 0) == (budget > 1)


def test_prompt_is_one_pass_without_chunked_prefill() -> None:
    """Tokens of other requests share the pass; a prompt longer than the budget exceeds it."""
    engine = make(agreeing_model(FAMILY), drafter="none", max_num_batched_tokens=5, enable_chunked_prefill=False)
    assert max({each.request_id: len(each.prompt_ids) for each in requests()}.values()) > 5

    def after(engine: Engine) -> None:
        for sequence in engine.scheduler.running:
            assert sequence.num_computed == len(sequence.tokens) - 1, "no prompt is cut"

    assert_same(run(engine, requests(), after), plain_texts())


def crowding_requests() -> list[Request]:
    """Requests with a common prefix, of which two do not fit into 16 blocks."""
    prompts = [[*prompt_of(16, 9), *prompt_of(14, i)] for i in range(4)]
    settings: dict[str, Any] = {"temperature": 0.9, "max_tokens": 48, "stops": ()}
    return [request(prompt, name=f"{i}", seed=i, **settings) for i, prompt in enumerate(prompts)]


@cache
def plain_crowding_texts() -> Outputs:
    return run(
        make(headed_model(FAMILY), drafter="none", max_num_seqs=1, enable_prefix_caching=False), crowding_requests()
    )


@pytest.mark.slow
@pytest.mark.parametrize("budget", [1, 2, 7])
def test_small_budgets_with_preemption_and_prefix_hits_keep_the_text(budget: int) -> None:
    engine = make(headed_model(FAMILY), drafter="mtp", depth=3, kv_blocks=16, max_num_batched_tokens=budget)
    assert_same(run(engine, crowding_requests()), plain_crowding_texts())
    assert (engine.scheduler.num_preemptions > 0) == (budget > 2), "two of these fit into the blocks"
    assert engine.scheduler.prefix_hits > 0


def test_backend_numpy_returns_the_logits() -> None:
    engine = make(headed_model(FAMILY), drafter="none")
    sequence = support.new_sequence(engine, [5, 6, 7])
    logits = engine.runner.backend.numpy(engine.runner.forward([Span(sequence, 0, 3, 3)]).logits)
    assert (logits.dtype, logits.shape) == (np.float32, (3, engine.runner.vocab_size))
