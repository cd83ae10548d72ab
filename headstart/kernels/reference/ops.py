"""`Ops` in plain torch, for one pass.

Shapes: R rows, S sequences of a group, Q rows of the longest span, L cached positions, K kv heads, G query heads per
kv head, D head dim of keys, V of values. Matrices run in torch's own kernels, so rows agree with each other up to
rounding only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from headstart.core import StepPlan
from headstart.kernels.indexing import CompressSpec, IndexSpec
from headstart.kernels.ops import NEVER, Activation, AttentionSpec, Experts, KVSpec, StepInputs
from headstart.kernels.reference.choice import best_positions, index_scores
from headstart.kernels.reference.moe import ACTIVATIONS, gated, mixture
from headstart.kernels.reference.recurrent import conv_step, delta_step, scan_step, walk
from headstart.kernels.reference.refine import best, largest
from headstart.kernels.reference.spans import Group, Spans
from headstart.kernels.reference.streams import entries_of, mix_streams, stream_weights, sum_streams
from headstart.kernels.specs import RopeSpec, RouterSpec, StreamSpec, TemperSpec
from headstart.kernels.states import ConvSpec, DeltaSpec, ScanSpec
from headstart.kernels.torch_backend import KVPool, StatePool

SHORT_SPAN, SHORT_CONTEXT = 8, 128
"""Spans are padded in groups of like size: up to 8 rows or more (prefill), contexts up to 128, 256, 512, ..."""


class ReferenceOps:
    """`Ops` over torch tensors for one pass."""

    def __init__(self, plan: StepPlan, device: torch.device, dtype: torch.dtype) -> None:
        self._plan, self._device, self._dtype = plan, device, dtype
        self._rope_tables: dict[tuple[int, RopeSpec], tuple[Tensor, Tensor]] = {}
        self._slots = self._ints(plan.slots)
        self._grouped: dict[tuple[int, int, bool, bool], list[Group]] = {}
        self._chosen: dict[KVPool, list[Tensor]] = {}  # by groups: which of their positions rows see

    def _ints(self, array: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)

    def _groups(self, spec: KVSpec) -> list[Group]:
        key = spec.window, spec.chunk, spec.causal, spec.before
        if key not in self._grouped:
            spans = Spans.of(self._plan)
            is_long = np.diff(spans.row_starts) > SHORT_SPAN
            doublings = np.ceil(np.log2(np.maximum(spans.ends / SHORT_CONTEXT, 1))).astype(int)
            kinds = 2 * doublings + is_long
            picks = (np.flatnonzero(kinds == kind) for kind in np.unique(kinds))
            made = [spans.group(pick, spec, self._device, self._dtype) for pick in picks]
            self._grouped[key] = made
        return self._grouped[key]

    def embed(self, table: Tensor, ids: Tensor) -> Tensor:
        return torch.nn.functional.embedding(ids, table)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    def refine(self, approximate: Tensor, x: Tensor, weight: Tensor, count: int) -> Tensor:
        return torch.where(largest(approximate, count), self.linear(x, weight), approximate)

    def keep_groups(self, logits: Tensor, scores: Tensor, groups: Tensor, count: int) -> Tensor:
        return torch.where(best(scores, count)[..., groups], logits, NEVER)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float, num_parts: int = 1) -> Tensor:
        if num_parts > 1:
            weight = weight.unflatten(-1, (num_parts, -1))
        grouped = x.unflatten(-1, (-1, weight.shape[-1]))
        wide = grouped.float() if grouped.dtype == torch.bfloat16 else grouped
        normed: Tensor = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        scaled: Tensor = normed.to(x.dtype) * weight
        return scaled.flatten(-2)

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def activate(self, x: Tensor, kind: Activation) -> Tensor:
        return ACTIVATIONS[kind](x)

    def activate_mul(self, gate: Tensor, up: Tensor, kind: Activation = "silu") -> Tensor:
        return gated(gate, up, kind)

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x * factor

    def shift(self, x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    def center(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    def temper(self, x: Tensor, positions: Tensor, spec: TemperSpec) -> Tensor:
        steps = torch.div(positions + spec.ahead, spec.every, rounding_mode="floor").to(widened(x.dtype))
        return x * (1 + spec.strength * torch.log1p(steps)).to(x.dtype)[..., None]

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        return (x / cap).tanh() * cap

    def sigmoid_mul(self, gate: Tensor, x: Tensor) -> Tensor:
        grouped: Tensor = x.unflatten(-1, (gate.shape[-1], -1))
        return (grouped * gate.sigmoid()[..., None]).flatten(-2)

    def concat(self, a: Tensor, b: Tensor, num_heads: int = 1) -> Tensor:
        heads = [x.unflatten(-1, (num_heads, -1)) for x in (a, b)]
        return torch.cat(heads, dim=-1).flatten(-2)

    def head_linear(self, x: Tensor, weights: Sequence[Tensor]) -> Tensor:
        heads: tuple[Tensor, ...] = x.unflatten(-1, (len(weights), -1)).unbind(-2)
        return torch.cat([head @ weight.T for head, weight in zip(heads, weights, strict=True)], dim=-1)

    def moe(
        self,
        x: Tensor,
        logits: Tensor,
        bias: Tensor | None,
        experts: Experts,
        spec: RouterSpec,
        told: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        return mixture(x, logits, bias, experts, spec, told)

    def stream_weights(self, mixes: Tensor, base: Tensor, scale: Tensor, spec: StreamSpec) -> Tensor:
        return stream_weights(mixes, base, scale, spec)

    def sum_streams(self, streams: Tensor, weights: Tensor | None, spec: StreamSpec) -> Tensor:
        return sum_streams(streams, weights, spec)

    def mix_streams(self, streams: Tensor, x: Tensor, weights: Tensor, spec: StreamSpec) -> Tensor:
        return mix_streams(streams, x, weights, spec)

    def rope(self, x: Tensor, positions: Tensor, spec: RopeSpec, head_dim: int) -> Tensor:
        cos, sin = self._rope_table(positions, spec)
        heads = x.unflatten(-1, (-1, head_dim))
        if spec.trailing:
            rest, turning = heads[..., : -spec.rotary_dim], heads[..., -spec.rotary_dim :]
            a, b = turning[..., 0::2], turning[..., 1::2]
            turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
            return torch.cat((rest, turned), dim=-1).flatten(-2)
        half = spec.rotary_dim // 2
        a, b, rest = heads[..., :half], heads[..., half : 2 * half], heads[..., 2 * half :]
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1).flatten(-2)

    def _rope_table(self, positions: Tensor, spec: RopeSpec) -> tuple[Tensor, Tensor]:
        """cos, sin [R, 1, rotary_dim / 2], shared by all layers of the pass."""
        key = (id(positions), spec)
        if key not in self._rope_tables:
            frequencies = torch.tensor(spec.inv_freq, dtype=torch.float64, device=positions.device)
            turns = (positions - spec.behind).clamp(min=0) * (-1 if spec.inverse else 1)
            angles = turns[..., None, None].double() * frequencies
            self._rope_tables[key] = (
                (angles.cos() * spec.scale).to(self._dtype),
                (angles.sin() * spec.scale).to(self._dtype),
            )
        return self._rope_tables[key]

    def store_kv(self, k: Tensor, v: Tensor, pool: KVPool, spec: AttentionSpec) -> None:
        pool.keys[self._slots] = k.unflatten(-1, (spec.num_kv_heads, -1))
        if not spec.latent:
            pool.values[self._slots] = v.unflatten(-1, (spec.num_kv_heads, -1))

    def store_index(self, k: Tensor, pool: KVPool, spec: IndexSpec) -> None:
        pool.keys[self._slots] = k.unflatten(-1, (1, -1))

    def choose(self, q: Tensor, weights: Tensor, pool: KVPool, spec: IndexSpec) -> None:
        self._chosen[pool] = [
            best_positions(
                index_scores(q[group.rows], weights[group.rows], pool.keys[group.slots][:, :, 0], spec),
                (group.mask == 0) & self._ends(group, spec.every), spec.top_k,
            )
            for group in self._groups(spec)
        ]  # fmt: skip

    def _ends(self, group: Group, every: int) -> Tensor:
        """[L]: which of a group's positions end a window of `every`."""
        positions = torch.arange(group.slots.shape[1], device=self._device) + self._plan.first_position
        return (positions + 1) % every == 0

    def compress(self, values: Tensor, gates: Tensor, bias: Tensor, pool: KVPool, spec: CompressSpec) -> Tensor:
        positions = self._ints(self._plan.positions)
        told = gates + bias.view(spec.every, -1)[positions % spec.every]
        pool.keys[self._slots] = torch.cat((values, told), dim=-1)[:, None]
        out = values.new_zeros(len(values), spec.dim)
        for group in self._groups(spec):
            span, column = torch.nonzero(((positions[group.rows] + 1) % spec.every == 0) & group.valid, as_tuple=True)
            rows = group.rows[span, column]
            places = positions[rows, None] - torch.arange(spec.span - 1, -1, -1, device=self._device)
            kept = pool.keys[group.slots[span].gather(1, places.clamp(min=0)), 0]
            out[rows] = entries_of(kept, places >= 0, spec)
        return out

    def attend_beside(
        self,
        q: Tensor,
        pool: KVPool,
        entries: KVPool,
        spec: AttentionSpec,
        every: int,
        sinks: Tensor | None = None,
        chosen: KVPool | None = None,
    ) -> Tensor:
        out = q.new_empty(len(q), spec.num_heads * spec.value_width)
        windows, wholes = self._groups(spec), self._groups(replace(spec, window=0))
        for i, (near, far) in enumerate(zip(windows, wholes, strict=True)):
            seen = (far.mask == 0) & self._ends(far, every)
            seen = seen if chosen is None else seen & self._chosen[chosen][i]
            keys = torch.cat((pool.keys[near.slots], entries.keys[far.slots]), dim=1)
            values = torch.cat((pool.values[near.slots], entries.values[far.slots]), dim=1)
            mask = torch.cat((near.mask, far.only(seen).mask), dim=-1)
            attended = self._attend(q[near.rows], keys, values, spec, mask, sinks)
            out[near.rows[near.valid]] = attended[near.valid]
        return out

    def attend(
        self, q: Tensor, pool: KVPool, spec: AttentionSpec, sinks: Tensor | None = None, chosen: KVPool | None = None
    ) -> Tensor:
        out = q.new_empty(len(q), spec.num_heads * spec.value_width)
        groups = self._groups(spec)
        if chosen is not None:
            groups = [group.only(seen) for group, seen in zip(groups, self._chosen[chosen], strict=True)]
        for group in groups:
            keys, values = pool.keys[group.slots], pool.values[group.slots]
            attended = self._attend(q[group.rows], keys, values, spec, group.mask, sinks)
            out[group.rows[group.valid]] = attended[group.valid]
        return out

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, spec: AttentionSpec, mask: Tensor, sinks: Tensor | None
    ) -> Tensor:
        """[S, Q, H * D] over keys [S, L, K, D] and values [S, L, K, V] -> [S, Q, H * V]."""
        num_spans, num_rows, _ = q.shape
        kv_heads, dim = spec.num_kv_heads, spec.head_dim
        repeat = spec.num_heads // kv_heads
        # head h = kv head * G + g; the G query heads of a kv head share its keys, so they become rows
        q_skgqd = q.view(num_spans, num_rows, kv_heads, repeat, dim).permute(0, 2, 3, 1, 4)
        keys, values = keys.permute(0, 2, 3, 1), values.permute(0, 2, 1, 3)  # [S, K, D, L], [S, K, L, V]
        scores = q_skgqd.reshape(num_spans, kv_heads, repeat * num_rows, dim) @ keys
        scores = scores.view(num_spans, kv_heads, repeat, num_rows, -1) * spec.scale
        weights = attention_weights(scores, mask[:, None, None], spec, sinks)
        out = weights.reshape(num_spans, kv_heads, repeat * num_rows, -1) @ values
        out = out.view(num_spans, kv_heads, repeat, num_rows, -1)
        return out.permute(0, 3, 1, 2, 4).reshape(num_spans, num_rows, -1)

    def causal_conv(
        self, x: Tensor, weight: Tensor, pool: StatePool, spec: ConvSpec, bias: Tensor | None = None
    ) -> Tensor:
        made = walk(conv_step(weight, spec), x, spec.channels, pool, self._plan)
        return made if bias is None else made + bias

    def softplus(self, x: Tensor, rate: Tensor | None, bias: Tensor) -> Tensor:
        wide = widened(x.dtype)  # e to the sum of a whole text of these
        made = torch.nn.functional.softplus(x.to(wide) + bias.to(wide), threshold=30)
        return made if rate is None else rate.to(wide) * made

    def gated_delta(self, qkv: Tensor, log_decay: Tensor, strength: Tensor, pool: StatePool, spec: DeltaSpec) -> Tensor:
        rows = torch.cat((qkv, log_decay, strength), dim=-1)
        return walk(delta_step(spec), rows, spec.num_heads * spec.value_dim, pool, self._plan).to(qkv.dtype)

    def selective_scan(
        self, xbc: Tensor, step: Tensor, rate: Tensor, skip: Tensor, pool: StatePool, spec: ScanSpec
    ) -> Tensor:
        rows, wide = torch.cat((xbc, step), dim=-1), widened(xbc.dtype)
        scanned = walk(scan_step(spec, rate.to(wide), skip.to(wide)), rows, spec.inner, pool, self._plan)
        return scanned.to(xbc.dtype)

    def take_rows(self, x: Tensor, rows: Tensor) -> Tensor:
        return x[rows]

    def zero_where(self, x: Tensor, positions: Tensor, position: int) -> Tensor:
        return x.masked_fill((positions == position)[..., None], 0)

    def put_where(self, x: Tensor, token_ids: Tensor, token: int, row: Tensor) -> Tensor:
        return torch.where((token_ids == token)[..., None], row, x)

    def store(self, x: Tensor, pool: Tensor, column: int = 0) -> None:
        pool[self._slots, column : column + x.shape[-1]] = x

    def inputs(self, hidden: Tensor | None) -> StepInputs:
        plan = self._plan
        return StepInputs(self._ints(plan.token_ids), self._ints(plan.positions), self._ints(plan.logit_rows), hidden)


def attention_weights(scores: Tensor, mask: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """scores [..., K, G, Q, L] of G query heads per kv head, mask [Q, L] (0, or -inf) -> softmax over L, less what
    `sinks` [K * G] take of it."""
    if spec.softcap:
        scores = (scores / spec.softcap).tanh() * spec.softcap
    scores = scores + mask
    if sinks is None:
        return scores.softmax(-1)
    heads = sinks.view(scores.shape[-4:-2])[..., None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, heads), dim=-1).softmax(-1)[..., :-1]


def widened(dtype: torch.dtype) -> torch.dtype:
    """A sum over a whole text is not for eight bits."""
    return torch.promote_types(dtype, torch.float32)
