"""State slots against a model that remembers what was written into each of them.

A state is named by the tokens that went into it; kept rows by token and position. Sequences over two tokens share
prefixes often."""

from typing import Any

import numpy as np
from hypothesis import settings, strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule
from test_cache import new_sequence

from headstart.cache.kv_cache import KVCacheManager
from headstart.cache.recurrent import StateCacheManager
from headstart.core import Draft, Sequence, Span

SIZE, EVERY, RUNNING, SNAPSHOTS, KEPT = 4, 8, 3, 4, 5
COMMON = np.random.default_rng(0).integers(0, 2, 30).tolist()
"""What sequences begin with, more or less of it."""
Prefix = tuple[int, ...]


class SimulatedStates:
    """Contents of the slots, changed by plans as a backend changes them: spans one by one or at once."""

    def __init__(self, snapshots: int = SNAPSHOTS, *, prefix_caching: bool = True) -> None:
        self.states = StateCacheManager(RUNNING, snapshots, KEPT, block_size=SIZE, every=EVERY)
        self.memory = KVCacheManager(200, SIZE, prefix_caching=prefix_caching, states=self.states)
        self.slots: dict[int, Prefix] = {}
        self.kept: dict[int, dict[int, int]] = {}  # slot -> index of kept row -> token

    def run(self, spans: list[Span]) -> None:
        """Runs one pass and checks that every row starts from the state of the tokens before it."""
        plan = self.states.plan(spans)
        before, kept = dict(self.slots), {slot: dict(rows) for slot, rows in self.kept.items()}
        for s, span in enumerate(spans):
            sequence = span.sequence
            tokens = (sequence.tokens + sequence.draft.tokens)[: span.start + span.num_rows]
            state = before[int(plan.reads[s])] if plan.reads[s] >= 0 else ()
            own, start = int(plan.own[s]), int(plan.starts[s])
            assert len(state) == start
            state += tuple(kept[own][i] for i in range(span.start - start))
            assert state == tuple(tokens[: span.start]), "the state is not that of the tokens before the rows"
            stores = range(plan.store_starts[s], plan.store_starts[s + 1])
            positions = plan.store_positions[stores.start : stores.stop].tolist()
            assert positions == sorted(positions)
            assert positions[-1] == plan.keeps[s] <= len(sequence.tokens), "the state of unverified tokens is stored"
            others = {int(slot) for other, slot in enumerate(plan.reads) if other != s}
            assert not others & set(plan.store_slots[stores.start : stores.stop].tolist()), (
                "others read what is written"
            )
            for i in stores:
                self.slots[int(plan.store_slots[i])] = tuple(tokens[: plan.store_positions[i]])
            self.kept[own] = dict(enumerate(tokens[plan.keeps[s] :]))


class StateMachine(RuleBasedStateMachine):
    """Sequences that arrive, are computed in chunks and drafts, are preempted and finish."""

    sequences = Bundle("sequences")
    tokens = st.tuples(st.integers(0, 30), st.lists(st.integers(0, 1), min_size=1, max_size=4)).map(
        lambda pair: COMMON[: pair[0]] + pair[1]
    )

    def __init__(self) -> None:
        super().__init__()
        self.simulation = SimulatedStates()
        self.live: list[Sequence] = []

    def admit(self, sequence: Sequence) -> Any:
        memory = self.simulation.memory
        assert memory.attach_prefix(sequence) == sequence.num_computed < len(sequence.tokens)
        if not memory.reserve(sequence, len(sequence.tokens)):
            assert len(self.live) == RUNNING
            memory.release(sequence)
            return multiple()
        self.live.append(sequence)
        return sequence

    @rule(target=sequences, tokens=tokens)
    def arrive(self, tokens: list[int]) -> Any:
        return self.admit(new_sequence(tokens))

    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        """A pass over some sequences: a chunk, or all pending tokens with a draft of which any prefix is accepted."""
        spans, news = [], []
        for sequence in self.live:
            pending = len(sequence.tokens) - sequence.num_computed
            rows = data.draw(st.integers(0, pending + 3))
            if not rows:
                continue
            draft = data.draw(st.lists(st.integers(0, 1), max_size=KEPT)) if rows >= pending else []
            sequence.draft = Draft(draft)
            rows = min(rows, pending) + len(draft)
            spans.append(Span(sequence, sequence.num_computed, rows, 1 + len(draft) if rows >= pending else 0))
            taken = data.draw(st.integers(0, len(draft)))
            news.append([*draft[:taken], data.draw(st.integers(0, 1))] if rows >= pending else [])
            assert self.simulation.memory.reserve(sequence, sequence.num_computed + rows)
        if not spans:
            return
        self.simulation.run(spans)
        for span, new in zip(spans, news, strict=True):
            sequence = span.sequence
            sequence.tokens += new
            sequence.num_computed = min(span.start + span.num_rows, len(sequence.tokens) - 1)
            sequence.draft = Draft()
            self.simulation.memory.commit(sequence)

    @rule(sequence=consumes(sequences))
    def finish(self, sequence: Sequence) -> None:
        self.simulation.memory.release(sequence)
        self.live.remove(sequence)

    @rule(target=sequences, sequence=consumes(sequences))
    def preempt(self, sequence: Sequence) -> Any:
        self.simulation.memory.release(sequence)
        self.live.remove(sequence)
        assert sequence.num_computed == 0
        return self.admit(sequence)

    @invariant()
    def slots_are_consistent(self) -> None:
        self.simulation.states.check()

    @invariant()
    def snapshots_hold_whole_blocks(self) -> None:
        for slot in self.simulation.states._snapshots.values():
            assert len(self.simulation.slots[slot]) % SIZE == 0


TestStates = StateMachine.TestCase
TestStates.settings = settings(max_examples=60, stateful_step_count=30)


def computed_sequence(simulation: SimulatedStates, tokens: list[int], chunk: int = 100, **params: Any) -> Sequence:
    """A sequence with all `tokens` computed and one more known."""
    sequence = new_sequence(tokens, **params)
    simulation.memory.attach_prefix(sequence)
    while sequence.num_computed < len(tokens):
        rows = min(chunk, len(tokens) - sequence.num_computed)
        assert simulation.memory.reserve(sequence, sequence.num_computed + rows)
        simulation.run([Span(sequence, sequence.num_computed, rows, 0)])
        sequence.num_computed += rows
        simulation.memory.commit(sequence)
    sequence.tokens.append(0)
    return sequence


def test_snapshots_are_taken_periodically_and_at_the_end_of_the_prompt() -> None:
    for chunk in (1, 3, 100):
        simulation = SimulatedStates()
        simulation.memory.release(computed_sequence(simulation, list(range(22)), chunk))
        assert sorted(len(simulation.slots[slot]) for slot in simulation.states._snapshots.values()) == [8, 16, 20], (
            chunk
        )


def test_prefix_is_found_up_to_its_last_snapshot() -> None:
    simulation = SimulatedStates()
    simulation.memory.release(computed_sequence(simulation, list(range(22))))
    for same, expected in ((22, 20), (20, 20), (19, 16), (13, 8), (7, 0)):
        sequence = new_sequence([*range(same), 50, 51])
        assert simulation.memory.attach_prefix(sequence) == expected, same
        assert len(sequence.block_table) * SIZE == expected
        simulation.memory.release(sequence)


def test_oldest_snapshot_is_evicted_unless_it_is_read() -> None:
    simulation = SimulatedStates(snapshots=1)
    simulation.memory.release(computed_sequence(simulation, list(range(9))))
    reader = new_sequence([*range(8), 70, 71])
    assert simulation.memory.attach_prefix(reader) == 8
    other = new_sequence(list(range(30, 45)))
    for sequence in (reader, other):
        assert simulation.memory.reserve(sequence, len(sequence.tokens))
    # in one pass: the snapshots of `other` must not overwrite the one that `reader` starts from
    simulation.run([Span(other, 0, 15, 1), Span(reader, 8, 2, 1)])


def test_snapshots_are_not_used_without_prefix_cache_or_with_prompt_logprobs() -> None:
    simulation = SimulatedStates(snapshots=0, prefix_caching=False)
    first = computed_sequence(simulation, list(range(22)))
    assert simulation.memory.attach_prefix(new_sequence(list(range(22)))) == 0
    simulation.memory.release(first)
    simulation = SimulatedStates()
    simulation.memory.release(computed_sequence(simulation, list(range(22))))
    assert simulation.memory.attach_prefix(new_sequence(list(range(22)), prompt_logprobs=0)) == 0


def test_sequences_wait_for_free_state_slots() -> None:
    simulation = SimulatedStates()
    sequences = [computed_sequence(simulation, [1, 2, 3]) for _ in range(RUNNING)]
    late = new_sequence([1, 2, 3])
    simulation.memory.attach_prefix(late)
    assert not simulation.memory.reserve(late, 3)
    simulation.memory.release(sequences[0])
    assert simulation.memory.reserve(late, 3)


def test_plan_of_a_prompt_with_a_draft() -> None:
    """A prompt of 3 tokens and a draft of 2, of which one is accepted."""
    simulation, sequence = SimulatedStates(), new_sequence([5, 6, 7])
    simulation.memory.reserve(sequence, 10)
    sequence.draft = Draft([8, 9])
    plan = simulation.states.plan([Span(sequence, 0, 5, 3)])
    assert (plan.reads.tolist(), plan.starts.tolist(), plan.keeps.tolist()) == ([-1], [0], [3])
    sequence.tokens += [8, 4]
    plan = simulation.states.plan([Span(sequence, 4, 1, 1)])
    assert (plan.reads.tolist(), plan.starts.tolist(), plan.keeps.tolist()) == (plan.own.tolist(), [3], [5])
    assert (plan.store_positions.tolist(), plan.store_slots.tolist()) == ([5], plan.own.tolist())
    assert all(array.dtype == np.int32 for array in vars(plan).values())
