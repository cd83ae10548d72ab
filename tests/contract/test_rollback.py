"""Recurrent states after any history equal those of a fresh prefill, bit for bit on the native backend.

A history has prompts in chunks and batches, drafts with any accepted prefix, prefix-cache hits and preemption. Inputs
of an op come from tables, so that a token's inputs have the same bits in every pass."""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import as_tensors
from hypothesis import given, settings, strategies as st
from numpy.typing import NDArray

from headstart.cache.kv_cache import KVCacheManager
from headstart.cache.recurrent import StateCacheManager
from headstart.core import Draft, Request, Rows, SamplingParams, Sequence, Span, StateSteps
from headstart.engine.runner import build_plan, span_rows
from headstart.kernels.reference.backend import ReferenceBackend
from headstart.kernels.specs import ConvSpec, DeltaSpec, ScanSpec

try:
    import headstart.kernels.native._native  # noqa: F401
except ImportError:  # installed without a compiler
    PATHS = []
else:
    from native_ops import PATHS, backend as native_backend

Array = NDArray[Any]
BLOCK, EVERY, KEPT, RUNNING, VOCAB, LONGEST = 16, 32, 4, 3, 50, 75
SPECS = {
    "three value heads to a key head": (DeltaSpec(2, 6, 12, 8), 4),
    "tiled heads, whole strips": (DeltaSpec(2, 4, 16, 64, tiled=True), 4),
    "more than a strip": (DeltaSpec(1, 2, 40, 72), 3),
    "the smallest": (DeltaSpec(1, 1, 1, 1), 2),
    "decays by channel": (DeltaSpec(3, 3, 20, 20, by_channel=True), 4),
    "decays by channel, more than a strip": (DeltaSpec(1, 2, 40, 72, by_channel=True), 3),
    "scan, three heads to a group": (ScanSpec(2, 6, 12, 24), 4),
    "scan, more than a strip": (ScanSpec(1, 2, 40, 72), 3),
    "scan, the smallest": (ScanSpec(1, 1, 1, 1), 2),
}
BACKENDS = ["reference", *PATHS]


@dataclass(frozen=True)
class RecurrentLayer:
    """One recurrent layer over tokens on one backend; `run` runs a plan, `states` reads a slot."""

    code: Callable[..., Any]
    pools: tuple[Any, Any]
    backend: Any

    def run(self, parts: Seq[Rows], states: StateSteps) -> Array:
        plan = build_plan(parts, BLOCK)
        plan.states = states
        out = self.backend.run(self.backend.prepare(self.code), plan)["out"]
        return out.numpy().copy() if isinstance(out, torch.Tensor) else np.array(out)

    def states(self, slot: int) -> list[Array]:
        if self.backend.name == "reference":
            return [pool.states[slot].numpy().reshape(-1).copy() for pool in self.pools]
        return [pool.state(slot) for pool in self.pools]


@cache
def tables(name: str) -> dict[str, Array]:
    spec, width = SPECS[name]
    rng = np.random.default_rng(len(name))
    decays = spec.num_decays if isinstance(spec, DeltaSpec) else spec.num_heads
    shapes = {"qkv": (VOCAB, spec.channels), "a": (VOCAB, decays), "b": (VOCAB, spec.num_heads)}
    made = {key: rng.standard_normal(shape) for key, shape in shapes.items()}
    made["taps"] = rng.standard_normal(width * spec.channels)
    made["skip"], made["conv_bias"] = rng.standard_normal(spec.num_heads), rng.standard_normal(spec.channels)
    made["rate"], made["bias"] = -rng.uniform(0.02, 0.5, decays), rng.standard_normal(decays)
    return {key: value.astype(np.float32) for key, value in made.items()}


def build_layer(
    kind: str, name: str, num_slots: int, num_owned: int = 0, num_kept: int = 0, threads: int = 1
) -> RecurrentLayer:
    spec, width = SPECS[name]
    conv = ConvSpec(spec.channels, width)
    on = ReferenceBackend(dtype="float64") if kind == "reference" else native_backend(kind, threads)
    pools = tuple(on.state_pool(num_slots, num_owned, num_kept, each) for each in (conv, spec))
    w = {key: on.weight(tensor) for key, tensor in as_tensors(tables(name)).items()}

    def code(ops: Any, step: Any) -> dict[str, Any]:
        qkv, bias = ops.embed(w["qkv"], step.token_ids), w["conv_bias"] if isinstance(spec, ScanSpec) else None
        qkv = ops.activate(ops.causal_conv(qkv, w["taps"], pools[0], conv, bias), "silu")
        if isinstance(spec, ScanSpec):
            steps = ops.softplus(ops.embed(w["a"], step.token_ids), None, w["bias"])
            return {"out": ops.selective_scan(qkv, steps, w["rate"], w["skip"], pools[1], spec)}
        a = ops.embed(w["a"], step.token_ids)
        log_decay = ops.bounded_decay(a, w["rate"], w["bias"], -0.5) if "strip" in name and spec.by_channel else None
        log_decay = ops.softplus(a, w["rate"], w["bias"]) if log_decay is None else log_decay
        return {"out": ops.gated_delta(qkv, log_decay, ops.embed(w["b"], step.token_ids), pools[1], spec)}

    return RecurrentLayer(code, pools, on)


def new_sequence(tokens: Seq[int]) -> Sequence:
    request = Request(request_id="r", prompt_ids=tuple(tokens), params=SamplingParams(), seed=0, stop_ids=frozenset())
    return Sequence(request, 0, list(tokens), 0)


Prefill = tuple[Array, list[list[Array]]]


@cache
def fresh_prefill(kind: str, name: str, tokens: tuple[int, ...]) -> Prefill:
    """Outputs of one pass over all tokens, and the states after 0, 1, ... tokens."""
    count = len(tokens)
    on, sequence = build_layer(kind, name, count + 1), new_sequence(tokens)
    sequence.block_table.extend(range(-(-count // BLOCK)))
    arrays = ([0], [-1], [0], [count], [0, count + 1], range(count + 1), range(count + 1))
    out = on.run([Rows(sequence, 0, tokens, 0)], StateSteps(*(np.array(each, np.int32) for each in arrays)))
    return out, [on.states(slot) for slot in range(count + 1)]


def random_tokens(seed: int, count: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, VOCAB, count).tolist())


TEXTS = [random_tokens(9, 40) + random_tokens(i, 35) for i in range(4)]
"""What sequences say; they begin alike."""


class History:
    """Sequences on one layer, changed by random actions and checked after each pass."""

    def __init__(self, kind: str, name: str, draw: Callable[[Any], Any]) -> None:
        self.kind, self.name, self.draw = kind, name, draw
        self.states = StateCacheManager(RUNNING, 3, KEPT, block_size=BLOCK, every=EVERY)
        self.memory = KVCacheManager(100, BLOCK, states=self.states)
        self.layer = build_layer(kind, name, self.states.num_slots, RUNNING, KEPT, threads=draw(st.integers(1, 3)))
        self.live: list[tuple[Sequence, tuple[int, ...]]] = []
        self.hits = self.replayed = 0

    def arrive(self) -> None:
        text = TEXTS[self.draw(st.integers(0, len(TEXTS) - 1))]
        self.admit(new_sequence(text[: self.draw(st.integers(1, LONGEST - 20))]), text)

    def admit(self, sequence: Sequence, text: tuple[int, ...]) -> None:
        self.hits += self.memory.attach_prefix(sequence) > 0
        if self.memory.reserve(sequence, LONGEST + KEPT):
            self.live.append((sequence, text))
        else:
            self.memory.release(sequence)

    def leave(self, *, again: bool) -> None:
        """The oldest sequence leaves, and starts again if `again`."""
        if self.live:
            sequence, text = self.live.pop(0)
            self.memory.release(sequence)
            if again:
                self.admit(sequence, text)

    def step(self) -> None:
        spans, accepted = [], []
        for sequence, text in self.live:
            length, pending = len(sequence.tokens), len(sequence.tokens) - sequence.num_computed
            rows = self.draw(st.sampled_from((0, 1, 20, LONGEST, LONGEST)))
            if rows == 0 or length >= LONGEST:
                continue
            drafted = self.draw(st.integers(0, KEPT)) if rows >= pending else 0
            right = min(self.draw(st.integers(0, drafted)), LONGEST - 1 - length)
            wrong = [(text[min(length + i, LONGEST - 1)] + 1) % VOCAB for i in range(right, drafted)]
            sequence.draft = Draft([*text[length : length + right], *wrong])
            spans.append(Span(sequence, sequence.num_computed, min(rows, pending) + drafted, int(rows >= pending)))
            accepted.append(right + 1 if rows >= pending else 0)
        if spans:
            self.run(spans, accepted)

    def run(self, spans: list[Span], accepted: list[int]) -> None:
        texts, steps = dict(self.live), self.states.plan(spans)
        self.replayed += sum(span.start for span in spans) - int(steps.starts.sum())
        out, row = self.layer.run([span_rows(span) for span in spans], steps), 0
        for s, (span, taken) in enumerate(zip(spans, accepted, strict=True)):
            sequence, text = span.sequence, texts[span.sequence]
            expected, states = fresh_prefill(self.kind, self.name, text)
            sequence.tokens += text[len(sequence.tokens) : len(sequence.tokens) + taken]
            sequence.num_computed = min(span.start + span.num_rows, len(sequence.tokens) - 1)
            num_committed = sequence.num_computed - span.start
            self.assert_same(out[row : row + num_committed], expected[span.start : sequence.num_computed])
            self.assert_same(self.layer.states(steps.own[s]), states[steps.keeps[s]])
            self.memory.commit(sequence)
            row += span.num_rows

    def assert_same(self, found: Any, expected: Any) -> None:
        for ours, theirs in zip(found, expected, strict=True):
            if self.kind == "reference":  # torch's exp depends on the position in a vector
                np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13)
            else:
                assert ours.tobytes() == theirs.tobytes()


@pytest.mark.slow
@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("kind", BACKENDS)
def test_states_equal_a_fresh_prefill(kind: str, name: str) -> None:
    seen = []

    @given(data=st.data())
    @settings(max_examples=10)
    def histories(data: st.DataObject) -> None:
        history = History(kind, name, data.draw)
        for _ in range(20):
            action = data.draw(st.sampled_from(("arrive", "step", "step", "step", "step", "step", "leave", "again")))
            if action in ("leave", "again"):
                history.leave(again=action == "again")
            else:
                getattr(history, action)()
        seen.append((history.hits, history.replayed))

    histories()
    assert sum(hits for hits, _ in seen) > 0, "no prefix hit"
    assert sum(replayed for _, replayed in seen) > 10, "no draft was accepted"


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("path", PATHS)
def test_native_outputs_match_reference(path: str, name: str) -> None:
    expected, states = fresh_prefill("reference", name, TEXTS[0])
    found, found_states = fresh_prefill(path, name, TEXTS[0])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)
    for ours, theirs in zip(found_states[-1], states[-1], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["the smallest", "scan, the smallest"])
@pytest.mark.parametrize("kind", BACKENDS)
def test_extreme_gates_leave_finite_states(kind: str, name: str) -> None:
    """Decays of 0 and 1, strengths of 0 and 1, and zero inputs."""
    spec, _ = SPECS[name]
    assert spec.num_heads == 1
    extreme = {**tables(name), "a": np.repeat(np.float32([-200, 200, 0, 90, -90]), 10)[:, None]}
    extreme["b"] = np.tile(np.float32([-300, 300, 0, 88, -88]), 10)[:, None]
    extreme["qkv"] = np.where(np.arange(VOCAB)[:, None] % 7 == 0, 0, extreme["qkv"]).astype(np.float32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(globals(), "tables", lambda _: extreme)
        on, sequence = build_layer(kind, name, 1), new_sequence(range(VOCAB))
        sequence.block_table.extend(range(4))
        arrays = ([0], [-1], [0], [VOCAB], [0, 1], [VOCAB], [0])
        out = on.run([Rows(sequence, 0, range(VOCAB), 0)], StateSteps(*(np.array(a, np.int32) for a in arrays)))
    assert np.isfinite(out).all() and np.abs(out).max() > 1e-3
