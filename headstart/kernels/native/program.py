"""Records model code once over `ProgramRecorder` into a native program for any number of rows.

Matrix products are recorded when their result is first read, so that products of the same input are adjacent and run in
one phase, and activate(gate(x)) * up(x) becomes one step.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headstart.core import Float32
from headstart.kernels import specs
from headstart.kernels.native._native import (
    HiddenPool,
    KVPool,
    LoraTable,
    Matrix,
    Program,
    RopeTable,
    RowPool,
    StatePool,
)
from headstart.kernels.ops import Activation, AttentionSpec, Experts, StepInputs

ACTIVATIONS: Mapping[Activation, int] = {name: number for number, name in enumerate(get_args(Activation))}
"""Numbers of Activation in csrc/kernels.h."""
SCORINGS = {"softmax": 0, "sigmoid": 1, "softplus": 2}  # numbers of Scoring in csrc/kernels.h
Input = Literal["token_ids", "positions", "logit_rows", "hidden"]


@dataclass(eq=False)
class Symbol:
    """A buffer of a program, or a matrix product that is not recorded yet."""

    width: int
    index: int = -1  # of the buffer; -1: not recorded
    x: "Symbol | None" = None  # input of the product
    matrix: Matrix | None = None
    bias: Float32 | None = None
    table: LoraTable | None = None  # adapters of the matrix


class ProgramRecorder:
    """`Ops` that records each op into a native program."""

    def __init__(self, path: str, hidden_width: int) -> None:
        self.program = Program(path)
        self._pending: list[Symbol] = []
        self._ropes: dict[tuple[tuple[float, ...], float, tuple[int, ...]], RopeTable] = {}
        self._selected: dict[KVPool, int] = {}  # the last selection over each pool
        self._candidates = -1  # selection of the last source of candidates
        self._hidden_width = hidden_width
        self._logit_buffers: set[int] = set()

    def inputs(self) -> StepInputs:
        """Symbols of the step's inputs, with hidden states [R, width] if the program reads them."""
        width = self._hidden_width
        hidden = Symbol(width, self.program.hidden_input(width)) if width else None
        return StepInputs("token_ids", "positions", "logit_rows", hidden)

    def finish(self, results: dict[str, Symbol]) -> Program:
        outputs = [(name, self._index(buffer)) for name, buffer in results.items()]
        self.program.finish(outputs)
        return self.program

    def embed(self, table: Matrix, ids: Input) -> Symbol:
        assert ids == "token_ids", ids
        return Symbol(table.cols, self.program.embed(table, table.cols))

    def token_values(self, ids: Input, numbers: NDArray[np.int64] | None = None) -> Symbol:
        assert ids == "token_ids", ids
        return Symbol(1, self.program.token_values(numbers))

    def embed_ngrams(self, table: Matrix, last: Symbol, spec: specs.NGramSpec) -> Symbol:
        hashes = list(spec.factors), list(spec.sizes), spec.end, spec.cuts
        index = self.program.embed_ngrams(self._index(last), table, *hashes)
        return Symbol(table.cols * len(spec.sizes), index)

    def signed_sqrt(self, x: Symbol, least: float) -> Symbol:
        return Symbol(x.width, self.program.signed_sqrt(self._index(x), least))

    def linear(self, x: Symbol, weight: Matrix, bias: Float32 | None = None) -> Symbol:
        product = Symbol(weight.rows, x=x, matrix=weight, bias=bias)
        self._pending.append(product)
        return product

    def adapted_linear(self, x: Symbol, weight: Matrix, bias: Float32 | None, table: LoraTable) -> Symbol:
        product = Symbol(weight.rows, x=x, matrix=weight, bias=bias, table=table)
        self._pending.append(product)
        return product

    def refine(self, approximate: Symbol, x: Symbol, weight: Matrix, count: int) -> Symbol:
        index = self.program.refine(self._index(approximate), self._index(x), weight, count, "head")
        return Symbol(weight.rows, index)

    def keep_groups(self, logits: Symbol, scores: Symbol, groups: NDArray[np.int64], count: int) -> Symbol:
        return Symbol(logits.width, self.program.keep_groups(self._index(logits), self._index(scores), groups, count))

    def activate(self, x: Symbol, kind: Activation) -> Symbol:
        return Symbol(x.width, self.program.activate(self._index(x), ACTIVATIONS[kind]))

    def activate_mul(self, gate: Symbol, up: Symbol, kind: Activation = "silu") -> Symbol:
        number = ACTIVATIONS[kind]
        both_pending = gate in self._pending and up in self._pending and not (gate.table or up.table)
        # only matrices of one kind read the same packed form of the input rows
        if both_pending and gate.x is not None and gate.x is up.x and _kind(gate) == _kind(up):
            self._pending = [each for each in self._pending if each is not gate and each is not up]
            x = self._index(gate.x)
            index = self.program.gated(x, gate.matrix, up.matrix, gate.bias, up.bias, number, "matrices")
            return Symbol(gate.width, index)
        return Symbol(gate.width, self.program.activate_mul(self._index(gate), self._index(up), number))

    def scale(self, x: Symbol, factor: float) -> Symbol:
        return Symbol(x.width, self.program.scale(self._index(x), factor))

    def add_bias(self, x: Symbol, bias: Float32) -> Symbol:
        return Symbol(x.width, self.program.shift(self._index(x), bias))

    def center(self, x: Symbol) -> Symbol:
        return Symbol(x.width, self.program.center(self._index(x)))

    def scale_by_position(self, x: Symbol, positions: Input, spec: specs.AttentionTemperature) -> Symbol:
        assert positions == "positions", positions
        return Symbol(x.width, self.program.temper(self._index(x), spec.every, spec.strength, spec.ahead))

    def softcap(self, x: Symbol, cap: float) -> Symbol:
        return Symbol(x.width, self.program.softcap(self._index(x), cap))

    def rms_norm(self, x: Symbol, weight: Float32, eps: float, num_parts: int = 1) -> Symbol:
        return Symbol(x.width, self.program.norm(self._index(x), -1, weight, eps, num_parts)[0])

    def add_rms_norm(self, x: Symbol, residual: Symbol, weight: Float32, eps: float) -> tuple[Symbol, Symbol]:
        normed, total = self.program.norm(self._index(x), self._index(residual), weight, eps)
        return Symbol(x.width, normed), Symbol(x.width, total)

    def add(self, a: Symbol, b: Symbol) -> Symbol:
        return Symbol(a.width, self.program.add(self._index(a), self._index(b)))

    def sigmoid_mul(self, gate: Symbol, x: Symbol) -> Symbol:
        return Symbol(x.width, self.program.sigmoid_mul(self._index(gate), self._index(x)))

    def columns(self, x: Symbol, start: int, count: int) -> Symbol:
        return Symbol(count, self.program.columns(self._index(x), start, count))

    def grouped_conv(self, x: Symbol, delta: Symbol, weight: Float32, taps: int) -> Symbol:
        return Symbol(x.width, self.program.grouped_conv(self._index(x), self._index(delta), weight, taps))

    def concat(self, a: Symbol, b: Symbol, num_heads: int = 1) -> Symbol:
        return Symbol(a.width + b.width, self.program.concat(self._index(a), self._index(b), num_heads))

    def head_linear(self, x: Symbol, weights: Sequence[Matrix]) -> Symbol:
        width = sum(weight.rows for weight in weights)
        return Symbol(width, self.program.head_linear(self._index(x), list(weights)))

    def moe(
        self, x: Symbol, logits: Symbol, bias: Float32 | None, experts: Experts, spec: specs.RouterSpec,
        token_experts: tuple[NDArray[np.int64], Input] | None = None, image_bias: tuple[Float32, Input] | None = None,
    ) -> Symbol:  # fmt: skip
        assert all(each is None or each[1] == "token_ids" for each in (token_experts, image_bias))
        rows = self._index(x)
        for each in (*experts.gate, *experts.up):
            self.program.want(rows, each)  # before the router, so that its phase is not split
        if logits in self._pending:  # alone: other products (shared experts) run while rows are sorted by expert
            self._pending.remove(logits)
            self._record([logits])
        chosen = self.program.route(
            self._index(logits), bias, spec.top_k, spec.num_groups, spec.top_groups, SCORINGS[spec.scoring],
            spec.normalize, spec.scale, spec.num_identity, spec.scales_inputs, token_experts and token_experts[0],
            image_bias and image_bias[0],
        )  # fmt: skip
        self._flush()
        gate, up, down = (list(each) for each in (experts.gate, experts.up, experts.down))
        biases = (list(each) for each in (experts.gate_bias, experts.up_bias, experts.down_bias))
        kind = ACTIVATIONS[experts.activation]
        return Symbol(experts.down[0].rows, self.program.experts(rows, chosen, gate, up, down, kind, *biases))

    def rope(self, x: Symbol, positions: Input, spec: specs.RopeSpec, head_dim: int) -> Symbol:
        assert positions == "positions", positions
        key = (spec.inv_freq, spec.scale, spec.axes)
        table = self._ropes.setdefault(key, RopeTable(list(spec.inv_freq), spec.scale, list(spec.axes)))
        index = self.program.rope(self._index(x), table, head_dim, spec.trailing, spec.inverse, spec.shift)
        return Symbol(x.width, index)

    def store_kv(self, k: Symbol, v: Symbol, pool: KVPool, spec: AttentionSpec) -> None:
        self.program.store_kv(self._index(k), self._index(v), pool)

    def store_index(self, k: Symbol, pool: KVPool, spec: specs.IndexSpec) -> None:
        self.program.store_kv(self._index(k), -1, pool)

    def select_positions(self, q: Symbol, weights: Symbol, pool: KVPool, spec: specs.IndexSpec) -> None:
        rows, blocks = (self._index(q), self._index(weights)), spec.candidates
        limit = () if blocks is None else (blocks.count, blocks.size, -1 if blocks.source else self._candidates)
        self._selected[pool] = self.program.select_positions(
            *rows, pool, spec.num_heads, spec.groups, spec.top_k, spec.every, spec.whole, spec.local,
            spec.causal, *limit,
        )  # fmt: skip
        self._candidates = self._selected[pool] if blocks and blocks.source else self._candidates

    def select_blocks(self, q: Symbol, pool: KVPool, spec: specs.IndexSpec) -> None:
        self._selected[pool] = self.program.select_blocks(self._index(q), pool, spec.num_heads, spec.top_k, spec.every)

    def attend(
        self, q: Symbol, pool: KVPool, spec: AttentionSpec, sinks: Float32 | None = None, chosen: KVPool | None = None,
        bias: Symbol | None = None,
    ) -> Symbol:  # fmt: skip
        width = spec.num_heads * spec.value_width
        index = self._index(q)
        if chosen is not None:
            has_mask = spec.window or spec.chunk or spec.causal or spec.excludes_self
            assert not has_mask, "an attention over selected positions cannot have a mask"
            options = (spec.num_heads, spec.scale, spec.softcap, sinks, self._selected[chosen])
            return Symbol(width, self.program.attend_selected(index, pool, *options))
        how = (spec.num_heads, spec.scale, spec.window, spec.softcap, sinks)
        mask = (spec.causal, spec.excludes_self, spec.chunk)
        near = -1 if bias is None else self._index(bias)
        return Symbol(width, self.program.attend(index, pool, *how, *mask, near, spec.block_window))

    def causal_conv(
        self, x: Symbol, weight: Float32, pool: StatePool, spec: specs.ConvSpec, bias: Float32 | None = None
    ) -> Symbol:
        return Symbol(x.width, self.program.causal_conv(self._index(x), weight, pool, spec.width, bias))

    def softplus(self, x: Symbol, rate: Float32 | None, bias: Float32) -> Symbol:
        return Symbol(x.width, self.program.softplus(self._index(x), rate, bias))

    def bounded_decay(self, x: Symbol, rate: Float32, bias: Float32, bound: float) -> Symbol:
        return Symbol(x.width, self.program.bounded_decay(self._index(x), rate, bias, bound))

    def gated_delta(
        self, qkv: Symbol, log_decay: Symbol, strength: Symbol, pool: StatePool, spec: specs.DeltaSpec
    ) -> Symbol:
        rows = (self._index(qkv), self._index(log_decay), self._index(strength))
        sizes = (spec.num_key_heads, spec.num_heads, spec.key_dim, spec.value_dim)
        how = (spec.tiled, spec.by_channel)
        return Symbol(spec.num_heads * spec.value_dim, self.program.gated_delta(*rows, pool, *sizes, *how))

    def selective_scan(
        self, xbc: Symbol, step: Symbol, rate: Float32, skip: Float32, pool: StatePool, spec: specs.ScanSpec
    ) -> Symbol:
        sizes = (spec.num_groups, spec.num_heads, spec.state_dim, spec.head_dim)
        rows = (self._index(xbc), self._index(step))
        return Symbol(spec.inner, self.program.selective_scan(*rows, rate, skip, pool, *sizes))

    def compress(self, values: Symbol, gates: Symbol, bias: Float32, pool: RowPool, spec: specs.CompressSpec) -> Symbol:
        rows = self._index(values), self._index(gates)
        return Symbol(spec.dim, self.program.compress(*rows, bias, pool, spec.every, spec.dim, spec.overlap))

    def stream_weights(self, mixes: Symbol, base: Float32, scale: Float32, spec: specs.StreamSpec) -> Symbol:
        iterations = -1 if spec.softmax else spec.iterations
        how = (base, scale, spec.count, iterations, spec.eps, spec.magnitude)
        return Symbol(mixes.width, self.program.stream_weights(self._index(mixes), *how))

    def sum_streams(self, streams: Symbol, weights: Symbol | None, spec: specs.StreamSpec) -> Symbol:
        by = -1 if weights is None else self._index(weights)
        summed = self.program.sum_streams(self._index(streams), by, spec.count)
        return Symbol(streams.width // spec.count, summed)

    def mix_streams(self, streams: Symbol, x: Symbol, weights: Symbol, spec: specs.StreamSpec) -> Symbol:
        rows = self._index(streams), self._index(x), self._index(weights)
        return Symbol(streams.width, self.program.mix_streams(*rows, spec.count))

    def attend_compressed(
        self, q: Symbol, pool: KVPool, entries: KVPool, spec: AttentionSpec, every: int, sinks: Float32 | None = None,
        chosen: KVPool | None = None,
    ) -> Symbol:  # fmt: skip
        assert not spec.block_window, "a window beside compressed entries counts from each row"
        selected = -1 if chosen is None else self._selected[chosen]
        how = (spec.num_heads, spec.scale, spec.softcap, spec.window, every, sinks, selected)
        width = spec.num_heads * spec.value_width
        return Symbol(width, self.program.attend_compressed(self._index(q), pool, entries, *how))

    def take_rows(self, x: Symbol, rows: Input) -> Symbol:
        assert rows == "logit_rows", rows
        taken = Symbol(x.width, self.program.take_logit_rows(self._index(x)))
        self._logit_buffers.add(taken.index)
        return taken

    def zero_where(self, x: Symbol, positions: Input, position: int) -> Symbol:
        assert positions == "positions", positions
        return Symbol(x.width, self.program.zero_where(self._index(x), position))

    def put_where(self, x: Symbol, token_ids: Input, token: int, row: Float32) -> Symbol:
        assert token_ids == "token_ids", token_ids
        return Symbol(x.width, self.program.put_where(self._index(x), token, row))

    def store(self, x: Symbol, pool: HiddenPool, column: int = 0) -> None:
        self.program.store_hidden(self._index(x), pool, column)

    def _index(self, buffer: Symbol) -> int:
        if buffer.index < 0:
            self._flush()
        if buffer.index < 0:  # a factor of a gated product that is also read by itself
            self._record([buffer])
        return buffer.index

    def _flush(self) -> None:
        held, self._pending = self._pending, []
        self._record(held)

    def _record(self, products: Sequence[Symbol]) -> None:
        """Records products, then what adapters add to them: two phases for all products of one input."""
        additions = list[tuple[int, int, LoraTable]]()
        for product in products:
            assert product.x is not None
            x = self._index(product.x)
            label = "head" if x in self._logit_buffers else "matrices"
            product.index = self.program.linear(x, product.matrix, product.bias, label)
            if label == "head":  # a head of several products
                self._logit_buffers.add(product.index)
            if product.table is not None:
                additions.append((product.index, self.program.lora_shrink(x, product.table), product.table))
        for addition in additions:
            self.program.lora_expand(*addition)


def _kind(product: Symbol) -> int | None:
    return product.matrix.kind if product.matrix else None


def record(code: Any, path: str, hidden_width: int) -> Program:
    """Record model code. hidden_width > 0: it reads hidden states of that width. Raises ValueError for sizes beyond the
    kernels' limits."""
    recorder = ProgramRecorder(path, hidden_width)
    return recorder.finish(dict(code(recorder, recorder.inputs())))
