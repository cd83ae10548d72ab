"""`Ops` in plain torch, for one pass.

Matrix products are torch's own, so the result of a row may round differently with other rows in the batch.

Shapes: R rows, S spans of a group, Q rows of the longest span, L cached positions, K kv heads, G query heads per kv
head, D features of a key, V features of a value.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import IMAGE_ROW, Paths, StepPlan
from headstart.kernels import specs
from headstart.kernels.ops import NEVER, REFINED, Activation, AttentionSpec, Experts, KVSpec, StepInputs
from headstart.kernels.reference.moe import ACTIVATIONS, ByToken, gated, mixture
from headstart.kernels.reference.recurrent import conv_step, delta_step, scan_step, walk
from headstart.kernels.torch_backend import TorchKVPool, TorchStatePool


@dataclass(frozen=True, eq=False)
class SpanGroup:
    """Spans of similar size, padded to one shape."""

    rows: Tensor  # int64 [S, Q]: row of the pass
    valid: Tensor  # bool [S, Q]: False in padding
    slots: Tensor  # int64 [S, L]: slot of each position
    mask: Tensor  # [S, Q, L]: 0 where the row sees the position, -inf elsewhere

    def with_visible(self, visible: Tensor) -> "SpanGroup":
        """The same spans, whose rows see the positions in `visible`: bool [S, Q, L], or [S, G, Q, L] by head group."""
        return replace(self, mask=self.mask.new_zeros(visible.shape).masked_fill_(~visible, float("-inf")))


@dataclass(frozen=True, eq=False)
class Spans:
    """Spans of rows that read the same slots: the rows of one sequence, or a single row if rows have paths."""

    plan: StepPlan
    row_starts: NDArray[np.int64]  # [S + 1]
    tables: NDArray[np.int32]  # [S, B]
    visible_end: NDArray[np.int32]  # [R]
    ends: NDArray[np.int32]  # [S] last position that any row of the span sees, + 1

    @classmethod
    def of(cls, plan: StepPlan) -> "Spans":
        visible_end = plan.positions if plan.visible_end is None else plan.visible_end
        if plan.paths is None:
            ends = np.maximum.reduceat(visible_end, plan.row_starts[:-1]) + 1
            return cls(plan, plan.row_starts.astype(np.int64), plan.block_tables, visible_end, ends)
        tables = np.repeat(plan.block_tables, np.diff(plan.row_starts), axis=0)
        return cls(plan, np.arange(plan.num_rows + 1), tables, visible_end, visible_end + 1)

    def pad(self, spans: NDArray[np.int64], spec: KVSpec, device: torch.device, dtype: torch.dtype) -> SpanGroup:
        plan, starts = self.plan, self.row_starts[spans]
        lengths = self.row_starts[spans + 1] - starts
        columns = np.arange(lengths.max())
        valid = columns[None, :] < lengths[:, None]
        rows = np.where(valid, starts[:, None] + columns, starts[:, None])
        positions = np.arange(plan.first_position, self.ends[spans].max())
        # padding reads the span's own last position: other slots may hold NaN, which a weight of 0 does not remove
        reads = np.minimum(positions, self.ends[spans][:, None] - 1)
        blocks = np.take_along_axis(self.tables[spans], reads // plan.block_size, axis=1)
        slots = blocks * plan.block_size + reads % plan.block_size
        if plan.paths:
            self._apply_paths(plan.paths, spans, slots)
        last = plan.positions - spec.excludes_self if spec.causal or spec.excludes_self else self.visible_end
        visible = positions[None, None, :] <= last[rows][:, :, None]
        if spec.window:
            newest = plan.block_starts if spec.block_window else plan.positions
            oldest = newest - spec.window + 1
            oldest = oldest if plan.visible_start is None else np.minimum(oldest, plan.visible_start)
            visible &= positions[None, None, :] >= oldest[rows][:, :, None]
        if spec.chunk:
            visible &= positions[None, None, :] >= (plan.positions[rows] // spec.chunk * spec.chunk)[:, :, None]
        mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~torch.from_numpy(visible), float("-inf"))
        rows_t, valid_t, slots_t = (torch.from_numpy(np.ascontiguousarray(a)).to(device) for a in (rows, valid, slots))
        return SpanGroup(rows_t, valid_t, slots_t, mask.to(device))

    def _apply_paths(self, paths: Paths, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write the paths of rows into their slots [S, L]; padding repeats the row's own slot."""
        for span, row in enumerate(rows):
            path = paths.slots[paths.starts[row] : paths.starts[row + 1]]
            if len(path):
                end = self.plan.positions[row] + 1 - self.plan.first_position
                slots[span, end - len(path) : end] = path
                slots[span, end:] = path[-1]


SHORT_SPAN, SHORT_CONTEXT = 8, 128
"""Spans are padded in groups of similar size: up to 8 rows or more (prefill), and contexts up to 128, 256, 512, ..."""


class TorchOps(ABC):
    """Ops that are the same in torch on any device."""

    @abstractmethod
    def linear(self, x: Tensor, weight: Any, bias: Tensor | None = None) -> Tensor:
        """See Ops.linear."""

    def token_values(self, ids: Tensor, numbers: Tensor | None = None) -> Tensor:
        values = (ids if numbers is None else numbers[ids]) + 1
        values = values.where(ids != IMAGE_ROW, IMAGE_ROW)
        return values.to(torch.get_default_dtype())[..., None]  # a narrow dtype would round them

    def signed_sqrt(self, x: Tensor, least: float) -> Tensor:
        return x.abs().clamp(min=least).sqrt() * x.sign()

    def refine(self, approximate: Tensor, x: Tensor, weight: Any, count: int) -> Tensor:
        return torch.where(largest_blocks(approximate, count), self.linear(x, weight), approximate)

    def keep_groups(self, logits: Tensor, scores: Tensor, groups: Tensor, count: int) -> Tensor:
        return torch.where(top_mask(scores, count)[..., groups], logits, NEVER)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    def concat(self, a: Tensor, b: Tensor, num_heads: int = 1) -> Tensor:
        heads = [x.unflatten(-1, (num_heads, -1)) for x in (a, b)]
        return torch.cat(heads, dim=-1).flatten(-2)

    def zero_where(self, x: Tensor, positions: Tensor, position: int) -> Tensor:
        return x.masked_fill((positions == position)[..., None], 0)

    def put_where(self, x: Tensor, token_ids: Tensor, token: int, row: Tensor) -> Tensor:
        return torch.where((token_ids == token)[..., None], row, x)


class ReferenceOps(TorchOps):
    """`Ops` over torch tensors for one pass."""

    def __init__(self, plan: StepPlan, device: torch.device, dtype: torch.dtype) -> None:
        self._plan, self._device, self._dtype = plan, device, dtype
        self._rope_tables: dict[tuple[int, specs.RopeSpec], tuple[Tensor, Tensor]] = {}
        self._slots = self._ints(plan.slots)
        self._grouped: dict[tuple[int, bool, int, bool, bool], list[SpanGroup]] = {}
        self._chosen: dict[TorchKVPool, list[Tensor]] = {}  # by pool, per group: selected positions, bool [S, Q, L]
        self._candidates: list[Tensor] = []  # per group: those of the last source, bool [S, Q, L]

    def _ints(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)

    def _groups(self, spec: KVSpec) -> list[SpanGroup]:
        """The pass's spans with the mask of `spec`, cached."""
        key = spec.window, spec.block_window, spec.chunk, spec.causal, spec.excludes_self
        if key not in self._grouped:
            spans = Spans.of(self._plan)
            is_long = np.diff(spans.row_starts) > SHORT_SPAN
            doublings = np.ceil(np.log2(np.maximum(spans.ends / SHORT_CONTEXT, 1))).astype(int)
            kinds = 2 * doublings + is_long
            picks = (np.flatnonzero(kinds == kind) for kind in np.unique(kinds))
            self._grouped[key] = [spans.pad(pick, spec, self._device, self._dtype) for pick in picks]
        return self._grouped[key]

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, table)

    def embed_ngrams(self, table: Tensor, last: Tensor, spec: specs.NGramSpec) -> Tensor:
        return torch.cat([self.embed(table, rows) for rows in spec.rows(last.long())], dim=-1)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def adapted_linear(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, table: Sequence[tuple[Tensor, Tensor] | None]
    ) -> Tensor:
        y = self.linear(x, weight, bias)
        if (slots := self._plan.adapter_slots) is None:
            return y
        if len(x) != len(slots):  # rows with logits
            slots = slots[self._plan.logit_rows]
        for slot, factors in enumerate(table):
            if factors is not None and (slots == slot).any():
                rows = self._ints(np.flatnonzero(slots == slot).astype(np.int32))
                y[rows] += x[rows] @ factors[0].T @ factors[1].T
        return y

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, num_parts: int = 1) -> Tensor:
        if num_parts > 1:
            weight = weight.unflatten(-1, (num_parts, -1))
        grouped = x.unflatten(-1, (-1, weight.shape[-1]))
        wide = grouped.float() if grouped.dtype == torch.bfloat16 else grouped
        normed: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        scaled: Tensor = normed.to(x.dtype) * weight
        return scaled.flatten(-2)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def activate(self, x: Tensor, kind: Activation) -> Tensor:
        return ACTIVATIONS[kind](x)

    def activate_mul(self, gate: Tensor, up: Tensor, kind: Activation = "silu") -> Tensor:
        return gated(gate, up, kind)

    def center(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    def scale_by_position(self, x: Tensor, positions: Tensor, spec: specs.AttentionTemperature) -> Tensor:
        steps = torch.div(positions + spec.ahead, spec.every, rounding_mode="floor").to(widened(x.dtype))
        return x * (1 + spec.strength * torch.log1p(steps)).to(x.dtype)[..., None]

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return (x / cap).tanh() * cap

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        grouped: Tensor = x.unflatten(-1, (gate.shape[-1], -1))
        return (grouped * gate.sigmoid()[..., None]).flatten(-2)

    def columns(self, x: Tensor, start: int, count: int) -> Tensor:
        return x[..., start : start + count]

    def grouped_conv(self, x: Tensor, delta: Tensor, weight: Tensor, taps: int) -> Tensor:
        return grouped_conv(x, delta, weight, taps, self._ints(self._plan.sequences))

    def head_linear(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        heads: tuple[Tensor, ...] = x.unflatten(-1, (len(weights), -1)).unbind(-2)
        return torch.cat([head @ weight.T for head, weight in zip(heads, weights, strict=True)], dim=-1)

    def moe(
        self, x: Tensor, logits: Tensor, bias: Tensor | None, experts: Experts, spec: specs.RouterSpec,
        token_experts: ByToken | None = None, image_bias: ByToken | None = None,
    ) -> Tensor:  # fmt: skip
        return mixture(x, logits, bias, experts, spec, token_experts, image_bias)

    def stream_weights(self, mixes: Tensor, base: Tensor, scale: Tensor, spec: specs.StreamSpec) -> Tensor:
        count, wide = spec.count, widened(mixes.dtype)
        parts, bases = mixes.to(wide).split(count, -1), base.to(wide).split(count)
        scaled: Tensor = parts[0] * scale[0] + bases[0]
        if mixes.shape[-1] == count and spec.softmax:
            return scaled.softmax(-1) + spec.eps
        input_weights = scaled.sigmoid() + spec.eps
        if mixes.shape[-1] == count:
            return input_weights
        output_weights = spec.magnitude * (parts[1] * scale[1] + bases[1]).sigmoid()
        if not spec.mixed:
            return torch.cat((input_weights, output_weights + spec.eps), dim=-1)
        square = torch.stack(parts[2:], -2) * scale[2] + torch.stack(bases[2:])
        square = square.softmax(-1) + spec.eps
        square = square / (square.sum(-2, keepdim=True) + spec.eps)
        for _ in range(spec.iterations - 1):
            square = square / (square.sum(-1, keepdim=True) + spec.eps)
            square = square / (square.sum(-2, keepdim=True) + spec.eps)
        return torch.cat((input_weights, output_weights, square.flatten(-2)), dim=-1)

    def sum_streams(self, streams: Tensor, weights: Tensor | None, spec: specs.StreamSpec) -> Tensor:
        by_stream: Tensor = streams.unflatten(-1, (spec.count, -1))
        weighted = by_stream / spec.count if weights is None else weights[..., : spec.count, None] * by_stream
        return weighted.sum(-2).to(streams.dtype)

    def mix_streams(self, streams: Tensor, x: Tensor, weights: Tensor, spec: specs.StreamSpec) -> Tensor:
        count = spec.count
        output_weights = weights[..., count : 2 * count]
        mixed: Tensor = streams.unflatten(-1, (count, -1))
        if spec.mixed:
            square = weights[..., 2 * count :].unflatten(-1, (count, count))
            mixed = square.transpose(-1, -2).to(streams.dtype) @ mixed
        return torch.flatten(output_weights[..., None].to(x.dtype) * x[..., None, :] + mixed, -2)

    def rope(self, x: Tensor, positions: Tensor, spec: specs.RopeSpec, head_dim: int) -> Tensor:
        cos, sin = self._rope_table(positions, spec)
        heads = x.unflatten(-1, (-1, head_dim))
        if spec.trailing:
            rest, rotating = heads[..., : -spec.rotary_dim], heads[..., -spec.rotary_dim :]
            a, b = rotating[..., 0::2], rotating[..., 1::2]
            rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
            return torch.cat((rest, rotated), dim=-1).flatten(-2)
        half = spec.rotary_dim // 2
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).flatten(-2)

    def _rope_table(self, positions: Tensor, spec: specs.RopeSpec) -> tuple[Tensor, Tensor]:
        """cos, sin [R, 1, rotary_dim / 2], cached for all layers of the pass."""
        key = (id(positions), spec)
        if key not in self._rope_tables:
            frequencies = torch.tensor(spec.inv_freq, dtype=torch.float64, device=positions.device)
            steps = (positions - spec.shift).clamp(min=0)[..., None, None] * (-1 if spec.inverse else 1)
            if spec.axes and self._plan.rope_positions is not None:
                steps = torch.from_numpy(self._plan.rope_positions[:, None, list(spec.axes)]).to(positions.device)
            angles = steps.double() * frequencies
            tables = (angles.cos() * spec.scale, angles.sin() * spec.scale)
            self._rope_tables[key] = (tables[0].to(self._dtype), tables[1].to(self._dtype))
        return self._rope_tables[key]

    def store_kv(self, k: Tensor, v: Tensor, pool: TorchKVPool, spec: AttentionSpec) -> None:
        pool.keys[self._slots] = k.unflatten(-1, (spec.num_kv_heads, -1))
        if not spec.latent:
            pool.values[self._slots] = v.unflatten(-1, (spec.num_kv_heads, -1))

    def store_index(self, k: Tensor, pool: TorchKVPool, spec: specs.IndexSpec) -> None:
        pool.keys[self._slots] = k.unflatten(-1, (1, -1))

    def select_positions(self, q: Tensor, weights: Tensor, pool: TorchKVPool, spec: specs.IndexSpec) -> None:
        groups = self._groups(spec)
        scores = [
            index_scores(q[each.rows], weights[each.rows], pool.keys[each.slots][:, :, 0], spec) for each in groups
        ]
        visible = [each.mask == 0 for each in groups]
        self._chosen[pool] = [
            selected_positions(own, seen, self._window_ends(group, spec.every), spec)
            for group, own, seen in zip(groups, scores, self._among(scores, visible, spec), strict=True)
        ]

    def _among(self, scores: list[Tensor], visible: list[Tensor], spec: specs.IndexSpec) -> list[Tensor]:
        """The candidates among `visible`; keeps those of a source for later selections."""
        if spec.candidates is None:
            return visible
        if spec.candidates.source:
            self._candidates = [candidate_positions(*each, spec) for each in zip(scores, visible, strict=True)]
            return visible
        return [seen & kept for seen, kept in zip(visible, self._candidates, strict=True)]

    def select_blocks(self, q: Tensor, pool: TorchKVPool, spec: specs.IndexSpec) -> None:
        self._chosen[pool] = [
            selected_blocks(block_scores(q[group.rows], pool.keys[group.slots][:, :, 0], spec), group.mask == 0, spec)
            for group in self._groups(spec)
        ]

    def _window_ends(self, group: SpanGroup, every: int) -> Tensor:
        """bool [L]: which of a group's positions end a window of `every`."""
        return (torch.arange(group.slots.shape[1], device=self._device) + 1) % every == 0

    def compress(
        self, values: Tensor, gates: Tensor, bias: Tensor, pool: TorchKVPool, spec: specs.CompressSpec
    ) -> Tensor:
        first = self._plan.first_position
        positions = self._ints(self._plan.positions) - first
        biased = gates + bias.view(spec.every, -1)[positions % spec.every]
        pool.keys[self._slots] = torch.cat((values, biased), dim=-1)[:, None]
        out = values.new_zeros(len(values), spec.dim)
        for group in self._groups(spec):
            span, column = torch.nonzero(((positions[group.rows] + 1) % spec.every == 0) & group.valid, as_tuple=True)
            rows = group.rows[span, column]
            places = positions[rows, None] - torch.arange(spec.span - 1, -1, -1, device=self._device)
            kept = pool.keys[group.slots[span].gather(1, places.clamp(min=0)), 0]
            out[rows] = entries_of(kept, places >= 0, spec)
        return out

    def attend_compressed(
        self, q: Tensor, pool: TorchKVPool, entries: TorchKVPool, spec: AttentionSpec, every: int,
        sinks: Tensor | None = None, chosen: TorchKVPool | None = None,
    ) -> Tensor:  # fmt: skip
        out = q.new_empty(len(q), spec.num_heads * spec.value_width)
        windows, wholes = self._groups(spec), self._groups(replace(spec, window=0, causal=True))
        for i, (near, far) in enumerate(zip(windows, wholes, strict=True)):
            visible = (far.mask == 0) & self._window_ends(far, every)
            visible = visible if chosen is None else visible & self._chosen[chosen][i]
            keys = torch.cat((pool.keys[near.slots], entries.keys[far.slots]), dim=1)
            values = torch.cat((pool.values[near.slots], entries.values[far.slots]), dim=1)
            mask = torch.cat((near.mask, far.with_visible(visible).mask), dim=-1)
            attended = self._attend(q[near.rows], keys, values, spec, mask, sinks)
            out[near.rows[near.valid]] = attended[near.valid]
        return out

    def attend(
        self, q: Tensor, pool: TorchKVPool, spec: AttentionSpec, sinks: Tensor | None = None,
        chosen: TorchKVPool | None = None, bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        out = q.new_empty(len(q), spec.num_heads * spec.value_width)
        groups = self._groups(spec)
        if chosen is not None:
            groups = [
                group.with_visible(selected) for group, selected in zip(groups, self._chosen[chosen], strict=True)
            ]
        for group in groups:
            keys, values = pool.keys[group.slots], pool.values[group.slots]
            near = None if bias is None else self._near(bias, group, spec)
            attended = self._attend(q[group.rows], keys, values, spec, group.mask, sinks, near)
            out[group.rows[group.valid]] = attended[group.valid]
        return out

    def _near(self, bias: Tensor, group: SpanGroup, spec: AttentionSpec) -> Tensor:
        """The biases [R, H * E] of a group's scores [S, Q, H, L]."""
        keys = self._plan.first_position + torch.arange(group.slots.shape[-1], device=bias.device)
        rows = self._ints(self._plan.positions)[group.rows]
        return biases_of(bias[group.rows].unflatten(-1, (spec.num_heads, -1)), (keys - rows[..., None])[:, :, None])

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, mask: Tensor, sinks: Tensor | None,
        near: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q [S, Q, H * D] over keys [S, L, K, D] and values [S, L, K, V], with mask [S, Q, L] or [S, G, Q, L] ->
        [S, Q, H * V]."""
        num_spans, num_rows, _ = q.shape
        kv_heads, dim = spec.num_kv_heads, spec.head_dim
        repeat = spec.num_heads // kv_heads
        # head h = kv head * G + g; the G query heads of a kv head share its keys, so they become rows
        q_skgqd = q.view(num_spans, num_rows, kv_heads, repeat, dim).permute(0, 2, 3, 1, 4)
        keys, values = keys.permute(0, 2, 3, 1), values.permute(0, 2, 1, 3)  # [S, K, D, L], [S, K, L, V]
        scores = q_skgqd.reshape(num_spans, kv_heads, repeat * num_rows, dim) @ keys
        scores = scores.view(num_spans, kv_heads, repeat, num_rows, -1) * spec.scale
        if near is not None:
            scores = scores + near.unflatten(2, (kv_heads, repeat)).permute(0, 2, 3, 1, 4)
        weights = attention_weights(scores, grouped_mask(mask, kv_heads), spec, sinks)
        out = weights.reshape(num_spans, kv_heads, repeat * num_rows, -1) @ values
        out = out.view(num_spans, kv_heads, repeat, num_rows, -1)
        return out.permute(0, 3, 1, 2, 4).reshape(num_spans, num_rows, -1)

    def causal_conv(
        self, x: Tensor, weight: Tensor, pool: TorchStatePool, spec: specs.ConvSpec, bias: Tensor | None = None
    ) -> Tensor:
        result = walk(conv_step(weight, spec), x, spec.channels, pool, self._plan)
        return result if bias is None else result + bias

    def softplus(self, x: Tensor, rate: Tensor | None, bias: Tensor) -> Tensor:
        wide = widened(x.dtype)  # decays of a whole text are summed in the exponent
        result = torch.nn.functional.softplus(x.to(wide) + bias.to(wide), threshold=30)
        return result if rate is None else rate.to(wide) * result

    def bounded_decay(self, x: Tensor, rate: Tensor, bias: Tensor, bound: float) -> Tensor:
        wide = widened(x.dtype)
        return bound * (rate.to(wide) * (x.to(wide) + bias.to(wide))).sigmoid()

    def gated_delta(
        self, qkv: Tensor, log_decay: Tensor, strength: Tensor, pool: TorchStatePool, spec: specs.DeltaSpec
    ) -> Tensor:
        rows = torch.cat((qkv, log_decay, strength), dim=-1)
        return walk(delta_step(spec), rows, spec.num_heads * spec.value_dim, pool, self._plan).to(qkv.dtype)

    def selective_scan(
        self, xbc: Tensor, step: Tensor, rate: Tensor, skip: Tensor, pool: TorchStatePool, spec: specs.ScanSpec
    ) -> Tensor:
        rows, wide = torch.cat((xbc, step), dim=-1), widened(xbc.dtype)
        scanned = walk(scan_step(spec, rate.to(wide), skip.to(wide)), rows, spec.inner, pool, self._plan)
        return scanned.to(xbc.dtype)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows]

    def store(self, x: Tensor, pool: Tensor, column: int = 0) -> None:
        pool[self._slots, column : column + x.shape[-1]] = x

    def inputs(self, hidden: Tensor | None) -> StepInputs:
        plan = self._plan
        return StepInputs(self._ints(plan.token_ids), self._ints(plan.positions), self._ints(plan.logit_rows), hidden)


def biases_of(bias: Tensor, ahead: Tensor) -> Tensor:
    """Biases [..., E] of distances -> those of keys that lie `ahead` [..., L] (at most 0) of their rows, else 0."""
    at, extent = ahead + bias.shape[-1] - 1, bias.shape[-1]
    found = bias.gather(-1, at.clamp(0, extent - 1).expand(*bias.shape[:-1], -1))
    return found.masked_fill((at < 0) | (at >= extent), 0)


def grouped_conv(x: Tensor, delta: Tensor, weight: Tensor, taps: int, sequences: Tensor) -> Tensor:
    """`Ops.grouped_conv`; sequences [R]: of each row."""
    by_tap = delta.unflatten(-1, (taps, -1)).repeat_interleave(taps * x.shape[-1] // delta.shape[-1], -1)
    out = torch.zeros_like(x)
    for tap in range(min(taps, len(x))):
        same = (sequences[tap:] == sequences[: len(x) - tap])[:, None]
        products = (weight.view(taps, -1)[tap] + by_tap[tap:, tap]) * x[: len(x) - tap]
        out[tap:] += products.where(same, products.new_zeros(()))
    return out


def attention_weights(scores: Tensor, mask: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Softmax of scores [..., K, G, Q, L] over L, with mask [Q, L] (0 or -inf) and the extra logits `sinks` [K * G]."""
    if spec.softcap:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    scores = scores + mask
    if sinks is None:
        return scores.softmax(-1)
    heads = sinks.view(scores.shape[-4:-2])[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, heads), dim=-1).softmax(-1)[..., :-1]


def grouped_mask(mask: Tensor, kv_heads: int) -> Tensor:
    """[S, Q, L], or [S, G, Q, L] for G groups of KV heads, as [S, K or 1, 1, Q, L]."""
    return mask[:, None, None] if mask.ndim == 3 else mask.repeat_interleave(kv_heads // mask.shape[1], 1)[:, :, None]


def widened(dtype: torch.dtype) -> torch.dtype:
    """This dtype, but at least float32: for sums over a whole text."""
    return torch.promote_types(dtype, torch.float32)


def index_scores(q: Tensor, weights: Tensor, keys: Tensor, spec: specs.IndexSpec) -> Tensor:
    """Scores of Ops.select_positions: q [..., R, heads * D], weights [..., R, heads], keys [..., L, D] -> [..., R, L],
    or [..., groups, R, L] for several groups, in at least float32."""
    wide, num_heads = widened(q.dtype), spec.num_heads // spec.groups
    if spec.groups > 1:
        q, weights = (x.unflatten(-1, (spec.groups, -1)).transpose(-3, -2) for x in (q, weights))
        keys = keys[..., None, :, :]
    heads = q.to(wide).unflatten(-1, (num_heads, spec.head_dim)).flatten(-3, -2)
    products = (heads @ keys.to(wide).transpose(-1, -2)).relu()
    by_head = products.unflatten(-2, (-1, num_heads))  # [..., R, heads, L]
    scores: Tensor = (weights.to(wide)[..., None, :] @ by_head).squeeze(-2)
    return scores


def selected_positions(scores: Tensor, visible: Tensor, ends: Tensor, spec: specs.IndexSpec) -> Tensor:
    """Ops.select_positions: bool like scores, [S, R, L] or [S, groups, R, L]; visible [S, R, L]; ends [L]: positions
    that end a window."""
    visible = visible[:, None].expand(scores.shape) if spec.groups > 1 else visible
    before = torch.nn.functional.pad(visible[..., 1:], (0, 1)) if spec.local else visible
    best = best_positions(scores, before & ends, spec.top_k)
    if not spec.whole:
        return best
    count = len(ends)
    end = torch.arange(count, device=ends.device) // spec.every * spec.every + spec.every - 1  # of each one's window
    is_whole, end = (end < count) & before[..., end.clamp(max=count - 1)], end.clamp(max=count - 1)
    return visible & (~is_whole | best[..., end])


def candidate_positions(scores: Tensor, visible: Tensor, spec: specs.IndexSpec) -> Tensor:
    """bool [S, R, L]: positions whose keys are in the blocks that a source keeps; scores, visible [S, R, L]."""
    assert spec.candidates
    keys, count = slice(spec.every - 1, None, spec.every), scores.shape[-1]
    blocks = replace(spec, every=spec.candidates.size, top_k=spec.candidates.count)
    kept = selected_blocks(scores[:, None, :, keys], visible[..., keys], blocks)[:, 0]
    kept = kept.repeat_interleave(spec.every, -1)
    return torch.nn.functional.pad(kept, (0, count - kept.shape[-1]))


def block_scores(q: Tensor, keys: Tensor, spec: specs.IndexSpec) -> Tensor:
    """q . k in at least float32: q [S, R, heads * D], keys [S, L, D] -> [S, heads, R, L]."""
    wide = widened(q.dtype)
    heads = q.to(wide).unflatten(-1, (spec.num_heads, spec.head_dim)).transpose(1, 2)
    scores: Tensor = heads @ keys.to(wide).transpose(1, 2)[:, None]
    return scores


def selected_blocks(scores: Tensor, visible: Tensor, spec: specs.IndexSpec) -> Tensor:
    """Ops.select_blocks: bool [S, heads, R, L]; scores [S, heads, R, L], visible [S, R, L]."""
    every, length = spec.every, scores.shape[-1]
    scores = scores.masked_fill(scores.isnan() | ~visible[:, None], float("-inf"))
    blocks = torch.nn.functional.pad(scores, (0, -length % every), value=float("-inf")).unflatten(-1, (-1, every))
    count = visible.sum(-1)[:, None, :, None]  # positions that a row sees
    own = (count - 1).clamp(min=0) // every  # block of the last one
    number = torch.arange(blocks.shape[-2], device=scores.device)
    best = best_positions(
        blocks.amax(-1).masked_fill(number == own, float("inf")),
        (number * every < count).expand(blocks.shape[:-1]), spec.top_k,
    )  # fmt: skip
    return best.repeat_interleave(every, -1)[..., :length] & visible[:, None]


def best_positions(scores: Tensor, visible: Tensor, top_k: int) -> Tensor:
    """The top_k visible positions by score, bool [..., L]; scores, visible [..., L]. Ties: the first; NaN: last."""
    least = torch.finfo(scores.dtype).min
    kept = torch.where(scores.isnan(), least, scores).clamp(min=least).masked_fill(~visible, float("-inf"))
    order = kept.sort(dim=-1, descending=True, stable=True).indices[..., :top_k]
    return torch.zeros_like(visible).scatter_(-1, order, True) & visible


def largest_blocks(approximate: Tensor, count: int) -> Tensor:
    """bool [R, width]: True in the `count` blocks of REFINED columns with the largest maximum (ties: the lower)."""
    width = approximate.shape[-1]
    blocks = torch.nn.functional.pad(approximate, (0, -width % REFINED), value=float("-inf")).unflatten(
        -1, (-1, REFINED)
    )
    return top_mask(blocks.amax(-1), count).repeat_interleave(REFINED, -1)[..., :width]


def top_mask(values: Tensor, count: int) -> Tensor:
    """bool [R, n]: True at the `count` largest values (ties: the lower index)."""
    first = values.sort(dim=-1, descending=True, stable=True).indices[..., :count]
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, first, True)


def entries_of(kept: Tensor, exists: Tensor, spec: specs.CompressSpec) -> Tensor:
    """Entries [N, dim] (Ops.compress) from stored rows [N, span, 2 width] of N windows; exists [N, span] bool."""
    values, gates = kept.split(spec.width, dim=-1)
    if spec.overlap:
        old, new = slice(None, spec.every), slice(spec.every, None)
        values, gates = (
            torch.cat((part[:, old, : spec.dim], part[:, new, spec.dim :]), dim=1) for part in (values, gates)
        )
    wide = widened(gates.dtype)
    weights: Tensor = gates.to(wide).masked_fill(~exists[..., None], float("-inf")).softmax(1)
    return torch.sum(values * weights.to(values.dtype), 1)
