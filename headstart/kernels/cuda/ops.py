"""`Ops` on the device.

torch is used only for copies and for single IEEE operations per element (`+`, `*`, cat, where, index_select), whose
bits do not depend on the number of rows. All sums and functions are Triton kernels, except in `refine` and
`keep_groups`, which serve drafts only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.kernels import specs
from headstart.kernels.cuda.attention import ALL, WINDOW_ENDS, AttentionSplits, PositionList, compress
from headstart.kernels.cuda.grouped_products import GroupedProducts, check_same_layout
from headstart.kernels.cuda.kernels import recurrent as recurrent_kernels, rows as row_kernels
from headstart.kernels.cuda.launch import KernelLauncher, tile_size
from headstart.kernels.cuda.matrix import CudaMatrix
from headstart.kernels.cuda.plan import DevicePlan
from headstart.kernels.cuda.selection import Selector
from headstart.kernels.ops import Activation, AttentionSpec, Experts, StepInputs
from headstart.kernels.reference.moe import ByToken
from headstart.kernels.reference.ops import TorchOps, grouped_conv
from headstart.kernels.torch_backend import TorchKVPool, TorchStatePool

CHUNK = 1024  # positions computed together on the host
MAX_STATE_COLUMNS = 64  # columns of a recurrent state that one program updates, at most


class PositionTables:
    """Factors by position on one device: cosines and sines of rotary embeddings, and attention temperatures.

    Computed on the host in float64, in fixed chunks, so an entry depends on its position alone. `version` counts
    replacements: recordings made with an older version are invalid."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tables: dict[specs.RopeSpec | specs.AttentionTemperature, tuple[Tensor, ...]] = {}
        self._axes: dict[tuple[int, ...], Tensor] = {}
        self._rows = CHUNK
        self.version = 0

    def cover(self, last: int) -> None:
        """Grow the tables (by doubling) up to position `last`."""
        if last >= self._rows:
            while self._rows <= last:
                self._rows *= 2
            self._tables.clear()
            self.version += 1

    def table(self, spec: specs.RopeSpec) -> tuple[Tensor, ...]:
        """Cosines and sines, times the scale: two float32 [positions, rotary_dim / 2]."""
        frequencies = np.array(spec.inv_freq, np.float64)

        def compute(positions: np.ndarray) -> tuple[np.ndarray, ...]:
            angles = positions[:, None] * frequencies
            return np.cos(angles) * spec.scale, np.sin(angles) * spec.scale

        return self._table(spec, compute)

    def axes(self, spec: specs.RopeSpec) -> Tensor:
        """The axis of each frequency, int32 [rotary_dim / 2]."""
        if spec.axes not in self._axes:
            self._axes[spec.axes] = torch.tensor(spec.axes, dtype=torch.int32, device=self._device)
        return self._axes[spec.axes]

    def factors(self, spec: specs.AttentionTemperature) -> Tensor:
        """Factors of queries, float32 [positions]."""

        def compute(positions: np.ndarray) -> tuple[np.ndarray, ...]:
            steps = np.floor_divide(positions + spec.ahead, spec.every)
            return (1 + spec.strength * np.log1p(steps),)

        return self._table(spec, compute)[0]

    def _table(
        self, spec: specs.RopeSpec | specs.AttentionTemperature, compute: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    ) -> tuple[Tensor, ...]:
        if spec not in self._tables:
            parts = [
                compute(np.arange(begin, begin + CHUNK, dtype=np.float64)) for begin in range(0, self._rows, CHUNK)
            ]
            columns = (np.concatenate(part).astype(np.float32) for part in zip(*parts, strict=True))
            self._tables[spec] = tuple(torch.from_numpy(column).to(self._device) for column in columns)
        return self._tables[spec]


class CudaOps(TorchOps):
    """`Ops` over torch tensors, for the rows of one plan."""

    def __init__(
        self, launcher: KernelLauncher, plan: DevicePlan, tables: PositionTables, products: GroupedProducts
    ) -> None:
        self._launch, self._plan, self._tables, self._products = launcher, plan, tables, products
        self._selector = Selector(launcher, plan)
        self._chosen: dict[TorchKVPool, PositionList] = {}  # the last selection over each pool

    def inputs(self, hidden: Tensor | None) -> StepInputs:
        plan = self._plan
        return StepInputs(plan["token_ids"], plan["positions"], plan["logit_rows"], hidden)

    def embed(self, table: CudaMatrix, ids: Tensor) -> Tensor:
        return self._launch.take(table, ids)

    def embed_ngrams(self, table: CudaMatrix, last: Tensor, spec: specs.NGramSpec) -> Tensor:
        ids = torch.stack(spec.rows(last.long()), dim=-1)
        return self._launch.take(table, ids.flatten()).view(len(last), -1)

    def linear(self, x: Tensor, weight: CudaMatrix, bias: Tensor | None = None) -> Tensor:
        return self._launch.product(x, weight, bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, num_parts: int = 1) -> Tensor:
        return self._launch.norm(x, weight, eps, num_parts)[0]

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return self._launch.norm(x, weight, eps, 1, residual)

    def activate(self, x: Tensor, kind: Activation) -> Tensor:
        out = torch.empty_like(x)
        self._launch.each(row_kernels.activate, x.numel(), x, out, x.numel(), KIND=kind)
        return out

    def activate_mul(self, gate: Tensor, up: Tensor, kind: Activation = "silu") -> Tensor:
        out = torch.empty_like(gate)
        self._launch.each(row_kernels.activate_mul, out.numel(), gate, up, out, out.numel(), KIND=kind)
        return out

    def center(self, x: Tensor) -> Tensor:
        out = torch.empty_like(x)
        row_kernels.center[(len(x),)](x, out, x.shape[1], TILE=tile_size(x.shape[1]))
        return out

    def scale_by_position(self, x: Tensor, positions: Tensor, spec: specs.AttentionTemperature) -> Tensor:
        return x * self._tables.factors(spec).index_select(0, positions)[:, None]

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        out = torch.empty_like(x)
        self._launch.each(row_kernels.softcap, x.numel(), x, out, x.numel(), cap)
        return out

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        out, repeat = torch.empty_like(x), x.shape[1] // gate.shape[1]
        self._launch.each(row_kernels.sigmoid_mul, x.numel(), gate, x, out, x.numel(), repeat)
        return out

    def columns(self, x: Tensor, start: int, count: int) -> Tensor:
        return x[:, start : start + count].contiguous()

    def grouped_conv(self, x: Tensor, delta: Tensor, weight: Tensor, taps: int) -> Tensor:
        return grouped_conv(x, delta, weight, taps, self._plan["sequences"])

    def head_linear(self, x: Tensor, weights: Sequence[CudaMatrix]) -> Tensor:
        return self._products.head_linear(x, weights)

    def moe(
        self, x: Tensor, logits: Tensor, bias: Tensor | None, experts: Experts, spec: specs.RouterSpec,
        token_experts: ByToken | None = None, image_bias: ByToken | None = None,
    ) -> Tensor:  # fmt: skip
        """`image_bias` is not used: models with one read no images here (models/tensors.py)."""
        return self._products.moe(x, logits, bias, experts, spec, self._plan, token_experts)

    def rope(self, x: Tensor, positions: Tensor, spec: specs.RopeSpec, head_dim: int) -> Tensor:
        cosines, sines = self._tables.table(spec)
        out, heads, axes = torch.empty_like(x), x.shape[1] // head_dim, None
        if spec.axes and self._plan.shape.num_axes:  # never above the row's position: the tables cover them
            positions, axes = self._plan["rope_positions"], self._tables.axes(spec)
        row_kernels.rope[(len(x),)](
            x, positions, axes, cosines, sines, out, x.shape[1], spec.shift, HEADS=heads, HEAD_TILE=tile_size(heads),
            DIM=head_dim, ROTARY=spec.rotary_dim, TILE=tile_size(head_dim), TRAILING=spec.trailing,
            INVERSE=spec.inverse, NUM_AXES=0 if axes is None else self._plan.shape.num_axes,
        )  # fmt: skip
        return out

    def store_kv(self, k: Tensor, v: Tensor, pool: TorchKVPool, spec: AttentionSpec) -> None:
        self._launch.scatter(k, self._plan["slots"], pool.keys.flatten(1))
        if not pool.latent:
            self._launch.scatter(v, self._plan["slots"], pool.values.flatten(1))

    def attend(
        self, q: Tensor, pool: TorchKVPool, spec: AttentionSpec, sinks: Tensor | None = None,
        chosen: TorchKVPool | None = None, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        selected = None if chosen is None else self._chosen[chosen]
        positions = selected or PositionList(ALL, self._plan.shape.context)
        splits = AttentionSplits(self._launch, q, spec, self._plan, positions.splits)
        window, chunk = (0, 0) if selected else (spec.window, spec.chunk)
        splits.add(pool, positions, 0, bias, window=window, chunk=chunk)
        return splits.join(positions, 0, sinks, dense=selected is None)

    def attend_compressed(
        self, q: Tensor, pool: TorchKVPool, entries: TorchKVPool, spec: AttentionSpec, every: int,
        sinks: Tensor | None = None, chosen: TorchKVPool | None = None,
    ) -> Tensor:  # fmt: skip
        context = self._plan.shape.context
        window_ends = PositionList(WINDOW_ENDS, max(context // every, 1), every)
        positions, among_entries = PositionList(ALL, context), window_ends if chosen is None else self._chosen[chosen]
        splits = AttentionSplits(self._launch, q, spec, self._plan, positions.splits + among_entries.splits)
        splits.add(pool, positions, 0, window=spec.window, chunk=spec.chunk)
        splits.add(entries, among_entries, positions.splits)
        return splits.join(among_entries, positions.splits, sinks, dense=True)

    def store_index(self, k: Tensor, pool: TorchKVPool, spec: specs.IndexSpec) -> None:
        self._launch.scatter(k, self._plan["slots"], pool.keys.flatten(1))

    def select_positions(self, q: Tensor, weights: Tensor, pool: TorchKVPool, spec: specs.IndexSpec) -> None:
        self._chosen[pool] = self._selector.select_positions(q, weights, pool, spec)

    def select_blocks(self, q: Tensor, pool: TorchKVPool, spec: specs.IndexSpec) -> None:
        self._chosen[pool] = self._selector.select_blocks(q, pool, spec)

    def compress(
        self, values: Tensor, gates: Tensor, bias: Tensor, pool: TorchKVPool, spec: specs.CompressSpec
    ) -> Tensor:
        return compress(self._launch, values, gates, bias, pool, spec, self._plan)

    def stream_weights(self, mixes: Tensor, base: Tensor, scale: Tensor, spec: specs.StreamSpec) -> Tensor:
        out, width = torch.empty_like(mixes), mixes.shape[1]
        row_kernels.stream_weights[(len(mixes),)](
            mixes, base, scale, out, width, spec.eps, spec.iterations, spec.magnitude, COUNT=spec.count,
            TILE=tile_size(spec.count), OUTPUT=width > spec.count, MIXED=width > 2 * spec.count,
            SOFTMAX=spec.softmax and width == spec.count,
        )  # fmt: skip
        return out

    def sum_streams(self, streams: Tensor, weights: Tensor | None, spec: specs.StreamSpec) -> Tensor:
        width, stride = streams.shape[1] // spec.count, 0 if weights is None else weights.shape[1]
        out, tile = self._launch.empty(len(streams), width), min(tile_size(width), self._launch.device.elements)
        row_kernels.sum_streams[(len(streams), -(-width // tile))](
            streams, weights, out, width, stride, COUNT=spec.count, WEIGHTED=weights is not None, TILE=tile
        )
        return out

    def mix_streams(self, streams: Tensor, x: Tensor, weights: Tensor, spec: specs.StreamSpec) -> Tensor:
        out, width = torch.empty_like(streams), x.shape[1]
        tile = min(tile_size(width), self._launch.device.elements)
        row_kernels.mix_streams[(len(streams), -(-width // tile), spec.count)](
            streams, x, weights, out, width, weights.shape[1], COUNT=spec.count, MIXED=spec.mixed, TILE=tile
        )
        return out

    def causal_conv(
        self, x: Tensor, weight: Tensor, pool: TorchStatePool, spec: specs.ConvSpec, bias: Tensor | None = None
    ) -> Tensor:
        launch, plan, states, kept = self._launch, self._plan, pool.states, pool.rows
        out, tile = torch.empty_like(x), min(tile_size(spec.channels), launch.device.elements)
        sizes = {"CHANNELS": spec.channels, "WIDTH": spec.width, "TILE": tile}
        tiles, steps = -(-spec.channels // tile), (plan["row_starts"], plan["own"], plan["reads"], plan["starts"])
        recurrent_kernels.conv[(len(x), tiles)](
            x, weight, bias, states, kept, out, plan["positions"], plan["sequences"], *steps, kept.shape[1],
            BIAS=bias is not None, **sizes,
        )  # fmt: skip
        if (stores := plan.shape.stores) and spec.width > 1:
            inputs = launch.empty(stores, spec.width - 1, spec.channels)
            recurrent_kernels.conv_states[(stores, spec.width - 1, tiles)](
                x, states, kept, inputs, plan["positions"], *steps, plan["store_sequences"], plan["store_positions"],
                kept.shape[1], **sizes,
            )  # fmt: skip
            launch.scatter(inputs.flatten(1), plan["store_slots"], states.flatten(1))
        self._keep_rows(pool, x)
        return out

    def gated_delta(
        self, qkv: Tensor, log_decay: Tensor, strength: Tensor, pool: TorchStatePool, spec: specs.DeltaSpec
    ) -> Tensor:
        out = torch.zeros((len(qkv), spec.num_heads * spec.value_dim), device=qkv.device)
        tile = min(tile_size(spec.value_dim), MAX_STATE_COLUMNS)
        recurrent_kernels.gated_delta[(len(out), spec.num_heads, -(-spec.value_dim // tile))](
            qkv, log_decay, strength, pool.states, pool.rows, out, *self._state_arrays(), pool.rows.shape[1],
            KEY_HEADS=spec.num_key_heads, HEADS=spec.num_heads, KEY_DIM=spec.key_dim, VALUE_DIM=spec.value_dim,
            TILED=spec.tiled, BY_CHANNEL=spec.by_channel, KEY_TILE=tile_size(spec.key_dim), VALUE_TILE=tile,
        )  # fmt: skip
        self._keep_rows(pool, qkv, log_decay, strength)
        return out

    def selective_scan(
        self, xbc: Tensor, step: Tensor, rate: Tensor, skip: Tensor, pool: TorchStatePool, spec: specs.ScanSpec
    ) -> Tensor:
        out = torch.zeros((len(xbc), spec.inner), device=xbc.device)
        tile = min(tile_size(spec.head_dim), MAX_STATE_COLUMNS)
        recurrent_kernels.selective_scan[(len(out), spec.num_heads, -(-spec.head_dim // tile))](
            xbc, step, rate, skip, pool.states, pool.rows, out, *self._state_arrays(), pool.rows.shape[1],
            GROUPS=spec.num_groups, HEADS=spec.num_heads, STATE=spec.state_dim, DIM=spec.head_dim,
            STATE_TILE=tile_size(spec.state_dim), TILE=tile,
        )  # fmt: skip
        self._keep_rows(pool, xbc, step)
        return out

    def _state_arrays(self) -> tuple[Tensor, ...]:
        """The arrays of plan.states, in the order of the kernels' parameters."""
        names = ("positions", "row_starts", "own", "reads", "starts", "store_starts")
        # without stores any array serves as their positions and slots: none is read
        stores = ("store_positions", "store_slots") if self._plan.shape.stores else ("starts", "starts")
        return tuple(self._plan[name] for name in (*names, *stores))

    def _keep_rows(self, pool: TorchStatePool, *parts: Tensor) -> None:
        """Store drafted rows for the next pass, after all kernels that read those of the last pass."""
        _, num_kept, width = pool.rows.shape
        offset = 0
        for part in parts if num_kept else ():
            columns = part.shape[1]
            tile = min(tile_size(columns), self._launch.device.elements)
            recurrent_kernels.keep[(len(part), -(-columns // tile))](
                part, self._plan["keep_owns"], self._plan["keep_places"], pool.rows, num_kept, columns, offset, width,
                TILE=tile,
            )  # fmt: skip
            offset += columns

    def softplus(self, x: Tensor, rate: Tensor | None, bias: Tensor) -> Tensor:
        out = torch.empty_like(x)
        self._launch.each(
            row_kernels.softplus, x.numel(), x, rate, bias, out, x.numel(), x.shape[1], RATE=rate is not None
        )
        return out

    def bounded_decay(self, x: Tensor, rate: Tensor, bias: Tensor, bound: float) -> Tensor:
        out = torch.empty_like(x)
        self._launch.each(row_kernels.bounded_decay, x.numel(), x, rate, bias, out, x.numel(), x.shape[1], bound)
        return out

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x.index_select(0, rows)

    def store(self, x: Tensor, pool: Tensor, column: int = 0) -> None:
        self._launch.scatter(x, self._plan["slots"], pool[:, column : column + x.shape[-1]])


class SupportCheck:
    """`Ops` without computation: running a program over it raises ModelError for experts without a kernel."""

    def __getattr__(self, name: str) -> Any:
        return self._accept

    def moe(
        self, x: Any, logits: Any, bias: Any, experts: Experts, spec: specs.RouterSpec, token_experts: Any = None,
        image_bias: Any = None,
    ) -> None:  # fmt: skip
        """Raises ModelError unless the matrices of all experts have one layout."""
        for matrices in (experts.gate, experts.up, experts.down):
            check_same_layout(matrices)

    def add_rms_norm(self, *arguments: Any) -> tuple[str, str]:
        return "buffer", "buffer"

    def _accept(self, *arguments: Any, **options: Any) -> str:
        return "buffer"
