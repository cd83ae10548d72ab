"""Recording: a family's straight-line code runs once over `Recorder`, and becomes a native program for any row count.

Matrices are held back until something reads them: those over the same input then stand side by side and share a phase,
and silu(gate(x)) * up(x) becomes one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from headstart.kernels.indexing import CompressSpec, IndexSpec
from headstart.kernels.native._native import (
    HiddenPool,
    KVPool,
    Matrix,
    Program,
    RopeTable,
    RowPool,
    StatePool,
)
from headstart.kernels.ops import Activation, AttentionSpec, Experts, StepInputs
from headstart.kernels.specs import RopeSpec, RouterSpec, StreamSpec, TemperSpec
from headstart.kernels.states import ConvSpec, DeltaSpec, ScanSpec

Vector = NDArray[np.float32]
ACTIVATIONS: Mapping[Activation, int] = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "relu": 3,
    "relu2": 4,
    "identity": 5,
    "clamped": 6,
    "silu_7": 7,
    "silu_16": 8,
    "silu_of_10": 9,
}
"""Activation in csrc/kernels.h."""
SCORINGS = {"softmax": 0, "sigmoid": 1, "softplus": 2}
"""Scoring in csrc/kernels.h."""
Input = Literal["token_ids", "positions", "logit_rows", "hidden"]


@dataclass(eq=False)
class Buffer:
    """Rows of a program: `index` in it, or a product still to be recorded."""

    width: int
    index: int = -1
    x: Buffer | None = None
    matrix: Matrix | None = None
    bias: Vector | None = None


class Recorder:
    """`Ops` that writes down what it is asked for."""

    def __init__(self, path: str, hidden_width: int) -> None:
        self.program = Program(path)
        self._held: list[Buffer] = []
        self._ropes: dict[tuple[tuple[float, ...], float], RopeTable] = {}
        self._chosen: dict[KVPool, int] = {}  # the last choice over each pool
        self._hidden_width = hidden_width
        self._logit_buffers: set[int] = set()

    def inputs(self) -> StepInputs:
        """Symbols of the step's inputs; the hidden state [R, width] only where a program has one."""
        width = self._hidden_width
        hidden = Buffer(width, self.program.hidden_input(width)) if width else None
        return StepInputs("token_ids", "positions", "logit_rows", hidden)

    def finish(self, results: dict[str, Buffer]) -> Program:
        outputs = [(name, self._index(buffer)) for name, buffer in results.items()]
        self.program.finish(outputs)
        return self.program

    def embed(self, table: Matrix, ids: Input) -> Buffer:
        assert ids == "token_ids", ids
        return Buffer(table.cols, self.program.embed(table, table.cols))

    def linear(self, x: Buffer, weight: Matrix, bias: Vector | None = None) -> Buffer:
        made = Buffer(weight.rows, x=x, matrix=weight, bias=bias)
        self._held.append(made)
        return made

    def refine(self, approximate: Buffer, x: Buffer, weight: Matrix, count: int) -> Buffer:
        index = self.program.refine(self._index(approximate), self._index(x), weight, count, "head")
        return Buffer(weight.rows, index)

    def keep_groups(self, logits: Buffer, scores: Buffer, groups: NDArray[np.int64], count: int) -> Buffer:
        return Buffer(logits.width, self.program.keep_groups(self._index(logits), self._index(scores), groups, count))

    def activate(self, x: Buffer, kind: Activation) -> Buffer:
        return Buffer(x.width, self.program.activate(self._index(x), ACTIVATIONS[kind]))

    def activate_mul(self, gate: Buffer, up: Buffer, kind: Activation = "silu") -> Buffer:
        number = ACTIVATIONS[kind]
        both_held = gate in self._held and up in self._held
        if both_held and gate.x is not None and gate.x is up.x and _kind(gate) == _kind(up):  # one form of the rows
            self._held = [each for each in self._held if each is not gate and each is not up]
            x = self._index(gate.x)
            made = self.program.gated(x, gate.matrix, up.matrix, gate.bias, up.bias, number, "matrices")
            return Buffer(gate.width, made)
        return Buffer(gate.width, self.program.activate_mul(self._index(gate), self._index(up), number))

    def scale(self, x: Buffer, factor: float) -> Buffer:
        return Buffer(x.width, self.program.scale(self._index(x), factor))

    def shift(self, x: Buffer, bias: Vector) -> Buffer:
        return Buffer(x.width, self.program.shift(self._index(x), bias))

    def center(self, x: Buffer) -> Buffer:
        return Buffer(x.width, self.program.center(self._index(x)))

    def temper(self, x: Buffer, positions: Input, spec: TemperSpec) -> Buffer:
        assert positions == "positions", positions
        return Buffer(x.width, self.program.temper(self._index(x), spec.every, spec.strength, spec.ahead))

    def softcap(self, x: Buffer, cap: float) -> Buffer:
        return Buffer(x.width, self.program.softcap(self._index(x), cap))

    def rms_norm(self, x: Buffer, weight: Vector, eps: float, num_parts: int = 1) -> Buffer:
        return Buffer(x.width, self.program.norm(self._index(x), -1, weight, eps, num_parts)[0])

    def add_rms_norm(self, x: Buffer, residual: Buffer, weight: Vector, eps: float) -> tuple[Buffer, Buffer]:
        normed, total = self.program.norm(self._index(x), self._index(residual), weight, eps)
        return Buffer(x.width, normed), Buffer(x.width, total)

    def add(self, a: Buffer, b: Buffer) -> Buffer:
        return Buffer(a.width, self.program.add(self._index(a), self._index(b)))

    def sigmoid_mul(self, gate: Buffer, x: Buffer) -> Buffer:
        return Buffer(x.width, self.program.sigmoid_mul(self._index(gate), self._index(x)))

    def concat(self, a: Buffer, b: Buffer, num_heads: int = 1) -> Buffer:
        return Buffer(a.width + b.width, self.program.concat(self._index(a), self._index(b), num_heads))

    def head_linear(self, x: Buffer, weights: Sequence[Matrix]) -> Buffer:
        width = sum(weight.rows for weight in weights)
        return Buffer(width, self.program.head_linear(self._index(x), list(weights)))

    def moe(
        self,
        x: Buffer,
        logits: Buffer,
        bias: Vector | None,
        experts: Experts,
        spec: RouterSpec,
        told: tuple[NDArray[np.int64], Input] | None = None,
    ) -> Buffer:
        assert told is None or told[1] == "token_ids", told
        rows = self._index(x)
        for each in (*experts.gate, *experts.up):
            self.program.want(rows, each)  # before the router, whose phase it would part from that of the rows
        if logits in self._held:  # alone: what else is held (shared experts) runs beside the dealing out of rows
            self._held.remove(logits)
            self._record(logits)
        chosen = self.program.route(
            self._index(logits), bias, spec.top_k, spec.num_groups, spec.top_groups, SCORINGS[spec.scoring],
            spec.normalize, spec.scale, spec.num_identity, spec.scales_inputs, told and told[0],
        )  # fmt: skip
        self._flush()
        gate, up, down = (list(each) for each in (experts.gate, experts.up, experts.down))
        biases = (list(each) for each in (experts.gate_bias, experts.up_bias, experts.down_bias))
        return Buffer(
            experts.down[0].rows,
            self.program.experts(rows, chosen, gate, up, down, ACTIVATIONS[experts.activation], *biases),
        )

    def rope(self, x: Buffer, positions: Input, spec: RopeSpec, head_dim: int) -> Buffer:
        assert positions == "positions", positions
        table = self._ropes.setdefault((spec.inv_freq, spec.scale), RopeTable(list(spec.inv_freq), spec.scale))
        turned = self.program.rope(self._index(x), table, head_dim, spec.trailing, spec.inverse, spec.behind)
        return Buffer(x.width, turned)

    def store_kv(self, k: Buffer, v: Buffer, pool: KVPool, spec: AttentionSpec) -> None:
        self.program.store_kv(self._index(k), self._index(v), pool)

    def store_index(self, k: Buffer, pool: KVPool, spec: IndexSpec) -> None:
        self.program.store_kv(self._index(k), -1, pool)

    def choose(self, q: Buffer, weights: Buffer, pool: KVPool, spec: IndexSpec) -> None:
        rows = self._index(q), self._index(weights)
        self._chosen[pool] = self.program.choose(*rows, pool, spec.num_heads, spec.top_k, spec.every)

    def attend(
        self, q: Buffer, pool: KVPool, spec: AttentionSpec, sinks: Vector | None = None, chosen: KVPool | None = None
    ) -> Buffer:
        width = spec.num_heads * spec.value_width
        index = self._index(q)
        if chosen is not None:
            assert not (spec.window or spec.chunk or spec.causal or spec.before), (
                "positions that were chosen, and others hidden"
            )
            among = self._chosen[chosen]
            return Buffer(
                width, self.program.attend_chosen(index, pool, spec.num_heads, spec.scale, spec.softcap, sinks, among)
            )
        how = (spec.num_heads, spec.scale, spec.window, spec.softcap, sinks, spec.causal, spec.before, spec.chunk)
        return Buffer(width, self.program.attend(index, pool, *how))

    def causal_conv(
        self, x: Buffer, weight: Vector, pool: StatePool, spec: ConvSpec, bias: Vector | None = None
    ) -> Buffer:
        return Buffer(x.width, self.program.causal_conv(self._index(x), weight, pool, spec.width, bias))

    def softplus(self, x: Buffer, rate: Vector | None, bias: Vector) -> Buffer:
        return Buffer(x.width, self.program.softplus(self._index(x), rate, bias))

    def gated_delta(self, qkv: Buffer, log_decay: Buffer, strength: Buffer, pool: StatePool, spec: DeltaSpec) -> Buffer:
        rows = (self._index(qkv), self._index(log_decay), self._index(strength))
        sizes = (spec.num_key_heads, spec.num_heads, spec.key_dim, spec.value_dim)
        return Buffer(spec.num_heads * spec.value_dim, self.program.gated_delta(*rows, pool, *sizes, spec.tiled))

    def selective_scan(
        self, xbc: Buffer, step: Buffer, rate: Vector, skip: Vector, pool: StatePool, spec: ScanSpec
    ) -> Buffer:
        sizes = (spec.num_groups, spec.num_heads, spec.state_dim, spec.head_dim)
        rows = (self._index(xbc), self._index(step))
        return Buffer(spec.inner, self.program.selective_scan(*rows, rate, skip, pool, *sizes))

    def compress(self, values: Buffer, gates: Buffer, bias: Vector, pool: RowPool, spec: CompressSpec) -> Buffer:
        rows = self._index(values), self._index(gates)
        return Buffer(spec.dim, self.program.compress(*rows, bias, pool, spec.every, spec.dim, spec.overlap))

    def stream_weights(self, mixes: Buffer, base: Vector, scale: Vector, spec: StreamSpec) -> Buffer:
        how = (base, scale, spec.count, spec.iterations, spec.eps)
        return Buffer(mixes.width, self.program.stream_weights(self._index(mixes), *how))

    def sum_streams(self, streams: Buffer, weights: Buffer | None, spec: StreamSpec) -> Buffer:
        by = -1 if weights is None else self._index(weights)
        summed = self.program.sum_streams(self._index(streams), by, spec.count)
        return Buffer(streams.width // spec.count, summed)

    def mix_streams(self, streams: Buffer, x: Buffer, weights: Buffer, spec: StreamSpec) -> Buffer:
        rows = self._index(streams), self._index(x), self._index(weights)
        return Buffer(streams.width, self.program.mix_streams(*rows, spec.count))

    def attend_beside(
        self,
        q: Buffer,
        pool: KVPool,
        entries: KVPool,
        spec: AttentionSpec,
        every: int,
        sinks: Vector | None = None,
        chosen: KVPool | None = None,
    ) -> Buffer:
        among = -1 if chosen is None else self._chosen[chosen]
        how = (spec.num_heads, spec.scale, spec.softcap, spec.window, every, sinks, among)
        width = spec.num_heads * spec.value_width
        return Buffer(width, self.program.attend_beside(self._index(q), pool, entries, *how))

    def take_rows(self, x: Buffer, rows: Input) -> Buffer:
        assert rows == "logit_rows", rows
        taken = Buffer(x.width, self.program.take_logit_rows(self._index(x)))
        self._logit_buffers.add(taken.index)
        return taken

    def zero_where(self, x: Buffer, positions: Input, position: int) -> Buffer:
        assert positions == "positions", positions
        return Buffer(x.width, self.program.zero_where(self._index(x), position))

    def put_where(self, x: Buffer, token_ids: Input, token: int, row: Vector) -> Buffer:
        assert token_ids == "token_ids", token_ids
        return Buffer(x.width, self.program.put_where(self._index(x), token, row))

    def store(self, x: Buffer, pool: HiddenPool, column: int = 0) -> None:
        self.program.store_hidden(self._index(x), pool, column)

    def _index(self, buffer: Buffer) -> int:
        if buffer.index < 0:
            self._flush()
        if buffer.index < 0:  # a factor of a gated product that is read by itself as well
            self._record(buffer)
        return buffer.index

    def _flush(self) -> None:
        held, self._held = self._held, []
        for each in held:
            self._record(each)

    def _record(self, product: Buffer) -> None:
        assert product.x is not None
        x = self._index(product.x)
        label = "head" if x in self._logit_buffers else "matrices"
        product.index = self.program.linear(x, product.matrix, product.bias, label)
        if label == "head":  # of several steps
            self._logit_buffers.add(product.index)


def _kind(product: Buffer) -> int | None:
    return product.matrix.kind if product.matrix else None


def record(code: Any, path: str, hidden_width: int) -> Program:
    """Run a family's program once. `hidden_width` > 0: it reads hidden states of that width."""
    recorder = Recorder(path, hidden_width)
    return recorder.finish(dict(code(recorder, recorder.inputs())))
