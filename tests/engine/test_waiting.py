"""The waiting queue: shares of owners, priorities and preempted sequences decide the order, never the text."""

from dataclasses import replace
from typing import Any

from support import Outputs, assert_clean, assert_same, collect, headed_model, make, prompt_of, request, run

from headstart.core import Sequence
from headstart.engine.scheduler import WaitingQueue

FAMILY = "mimo"


def sequence(owner: str, order: int, prompt: int = 10, **more: Any) -> Sequence:
    submitted = replace(request(prompt_of(prompt, order), name=f"{order}"), owner=owner, **more)
    return Sequence(submitted, 0, list(submitted.prompt_ids), order)


def serve(waiting: WaitingQueue, count: int, output: int = 0) -> str:
    """Owners in the order in which they are served; each writes `output` tokens and ends."""
    order = ""
    for _ in range(count):
        first = waiting.first()
        waiting.remove(first)
        waiting.charge(first, first.num_prompt + output)
        order += first.request.owner
    return order


def queue_of(*sequences: Sequence) -> WaitingQueue:
    waiting = WaitingQueue([])
    for each in sequences:
        waiting.add(each)
    return waiting


def queue_of_owners(owners: str) -> WaitingQueue:
    return queue_of(*(sequence(owner, order) for order, owner in enumerate(owners)))


def drain(waiting: WaitingQueue) -> list[Sequence]:
    taken = []
    while waiting:
        taken.append(waiting.first())
        waiting.remove(taken[-1])
    return taken


def test_requests_without_owner_are_first_come_first_served() -> None:
    many = [sequence("", order) for order in range(5)]
    waiting = queue_of(*many)
    waiting.remove(many.pop(2))
    assert [each.order for each in waiting] == [0, 1, 3, 4] and drain(waiting) == many


def test_owners_take_turns_regardless_of_request_counts() -> None:
    assert serve(queue_of_owners("aaaaaaab"), 8) == "abaaaaaa" and serve(queue_of_owners("aaaabbbb"), 8) == "abababab"


def test_turns_are_weighted_by_tokens_and_shares() -> None:
    waiting = queue_of(*(sequence(*each) for i in range(8) for each in (("a", i, 30), ("b", 10 + i, 10))))
    assert serve(waiting, 8) == "abbbabbb"
    half = [sequence("b", 10 + order) for order in range(9)]
    assert serve(queue_of(*(sequence("a", order, share=2.0) for order in range(9)), *half), 9).count("a") == 6


def test_idle_owners_do_not_accumulate_turns() -> None:
    waiting = queue_of_owners("aaaaaaaaaa")
    assert serve(waiting, 5) == "aaaaa"
    for order in range(20, 25):
        waiting.add(sequence("b", order))
    assert serve(waiting, 6).count("b") == 3


def test_tokens_of_running_sequences_count_immediately() -> None:
    running = [sequence("a", 0)]
    waiting = WaitingQueue(running)
    for order, owner in enumerate("ab", 1):
        waiting.add(sequence(owner, order))
    assert waiting.first().request.owner == "a"
    running[0].tokens += [1] * 5
    assert waiting.first().request.owner == "b"


def test_idle_engine_resets_the_accounts() -> None:
    waiting = queue_of_owners("aaa")
    serve(waiting, 3, output=1000)
    waiting.add(sequence("b", 4))
    serve(waiting, 1)
    for order, owner in enumerate("ab", 5):
        waiting.add(sequence(owner, order))
    assert serve(waiting, 2) == "ab"


def test_priority_orders_first_then_preempted_sequences() -> None:
    plain, urgent, back = sequence("a", 0), sequence("b", 1, priority=-1), sequence("a", 2)
    waiting = queue_of(plain, urgent)
    waiting.put_back(back)
    assert len(waiting) == 3 and back in waiting and drain(waiting) == [urgent, back, plain]


def test_priority_selects_the_preempted_sequence_and_keeps_texts() -> None:
    """With few blocks the sequences of lowest priority are preempted, though they came first."""
    model = headed_model(FAMILY)
    submitted = [
        request(prompt_of(14, i), name=f"{i}", seed=i, temperature=0.9, max_tokens=40, stops=()) for i in range(3)
    ]
    expected = run(make(model, drafter="none", max_num_seqs=1), submitted)
    engine = make(model, drafter="mtp", depth=3, kv_blocks=16, max_num_batched_tokens=16)
    outputs: Outputs = {}
    for each in submitted[:2]:
        engine.submit(each)
    for _ in range(6):
        engine.step(lambda deltas: collect(outputs, deltas))
    engine.submit(replace(submitted[2], priority=-1))
    preempted: set[str] = set()
    while engine.has_work:
        engine.step(lambda deltas: collect(outputs, deltas))
        running = [each.request.priority for each in engine.scheduler.running]
        assert running == sorted(running)
        preempted.update(each.request.request_id for each in engine.scheduler.waiting if each.admitted)
    assert_clean(engine)
    assert_same(outputs, expected)
    assert preempted and "2" not in preempted
