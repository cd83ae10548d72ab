"""Differentiable `Ops` over whole sequences: training runs the same `forward` of a module as the engine.

Shapes: B sequences padded on the right to T rows, one document each; W width; H query heads, K kv heads, D head dim.
Rows are *origins* p: the trunk row whose hidden state starts a draft. Draft step i (1-based) reads token t_{p+i} at
position p + i and predicts t_{p+i+1}. Its attention sees the same keys as at run time: the step-1 keys of origins <= p
(from true hidden states, which replace drafted ones after acceptance) and p's own keys of steps 2..i. The causal mask
hides step-1 keys of later origins, and so all padding.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headstart.errors import ModelError
from headstart.kernels.ops import AttentionSpec, KVSpec, Pool, StepInputs
from headstart.kernels.reference.ops import (
    ReferenceOps,
    attention_weights,
    biases_of,
    block_scores,
    entries_of,
    grouped_mask,
    index_scores,
    selected_blocks,
    selected_positions,
)
from headstart.kernels.specs import CompressSpec, ConvSpec, DeltaSpec, IndexSpec, RopeSpec, ScanSpec
from headstart.layers.decoder import Decoder, Tap
from headstart.train import recurrent


@dataclass(eq=False)
class TrainingKV:
    """The KV pool of one layer, or of an indexer."""

    keys: list[Tensor] = field(default_factory=list)  # [i] [B, K, T, D] of draft step i + 1; a trunk layer has one step
    values: list[Tensor] = field(default_factory=list)
    chosen: Tensor | None = None  # indexers: additive mask [B, T, T + steps] or [B, groups, T, T + steps] (0 or -inf)


class TrainOps(ReferenceOps):
    """Differentiable `Ops` over [B, T, W]; the inherited ops other than attention work on any leading shape."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        # not super().__init__: there is no StepPlan; rows are addressed by their index in [B, T]
        self._device, self._dtype = device, dtype
        self._rope_tables: dict[tuple[int, RopeSpec], tuple[Tensor, Tensor]] = {}

    def store_kv(self, k: Tensor, v: Tensor, pool: Pool, spec: AttentionSpec) -> None:
        """Append k [B, T, K * D], v [B, T, K * V] as the pool's next draft step."""
        for stored, rows in ((pool.keys, k), (pool.values, v)):
            stored.append(rows.unflatten(-1, (spec.num_kv_heads, -1)).transpose(1, 2))

    def store_index(self, k: Tensor, pool: Pool, spec: IndexSpec) -> None:
        pool.keys.append(k.detach()[:, None])

    @torch.no_grad()
    def select_positions(self, q: Tensor, weights: Tensor, pool: Pool, spec: IndexSpec) -> None:
        """Select keys, without a gradient: indexers are not trained."""
        shared, *own = (keys[:, 0] for keys in pool.keys)
        parts = [index_scores(q, weights, shared, spec)]
        parts += [index_scores(q[:, :, None], weights[:, :, None], keys[:, :, None], spec)[..., 0] for keys in own]
        mask = _mask(q.shape[1], len(own), spec, q)
        ends = (torch.arange(mask.shape[1], device=q.device) + 1) % spec.every == 0
        if own and spec.every > 1:
            raise ModelError("a head whose indexer selects windows cannot be trained for several steps", "--depth 1")
        visible = (mask == 0).expand(len(q), -1, -1)
        scores = torch.cat(parts, dim=-1)
        (visible,) = self._among([scores], [visible], spec)
        seen = selected_positions(scores, visible, ends, spec)
        pool.chosen = q.new_zeros(seen.shape).masked_fill(~seen, float("-inf"))

    @torch.no_grad()
    def select_blocks(self, q: Tensor, pool: Pool, spec: IndexSpec) -> None:
        """Select keys, without a gradient. Own keys of row p, of later steps, are at positions p + 1, p + 2 ..."""
        shared, *own = (keys[:, 0] for keys in pool.keys)
        heads, rows = q.unflatten(-1, (spec.num_heads, -1)).transpose(1, 2), torch.arange(q.shape[1], device=q.device)
        scores = torch.nn.functional.pad(block_scores(q, shared, spec), (0, len(own)))  # by position
        places = [(rows + step)[:, None].expand(*heads.shape[:3], 1) for step in range(1, len(own) + 1)]
        for place, keys in zip(places, own, strict=True):
            scores.scatter_(-1, place, (heads * keys[:, None]).sum(-1, keepdim=True).to(scores.dtype))
        visible = torch.arange(scores.shape[-1], device=q.device) <= (rows + len(own))[:, None]
        seen = selected_blocks(scores, visible.expand(len(q), -1, -1), spec)
        by_step = [seen[..., : len(rows)] & (rows <= rows[:, None]), *(seen.gather(-1, place) for place in places)]
        chosen = torch.cat(by_step, dim=-1)
        pool.chosen = q.new_zeros(chosen.shape).masked_fill(~chosen, float("-inf"))

    def compress(self, values: Tensor, gates: Tensor, bias: Tensor, pool: Pool, spec: CompressSpec) -> Tensor:
        """An entry for every row; `attend_compressed` masks the rows that end no entry."""
        num_rows = values.shape[1]
        rows = torch.arange(num_rows, device=values.device)
        gates = gates + bias.view(spec.every, -1)[rows % spec.every]
        window = rows[:, None] - torch.arange(spec.span - 1, -1, -1, device=values.device)
        inputs = torch.cat((values, gates), dim=-1)[:, window.clamp(min=0)]
        exists = (window >= 0).expand(len(values), -1, -1)
        entries: Tensor = entries_of(inputs.flatten(0, 1), exists.flatten(0, 1), spec).unflatten(0, (-1, num_rows))
        return entries

    def attend_compressed(
        self, q: Tensor, pool: Pool, entries: Pool, spec: AttentionSpec, every: int, sinks: Tensor | None = None,
        chosen: Pool = None,
    ) -> Tensor:  # fmt: skip
        """Attention over a trunk layer's keys (one step) and its compressed entries."""
        (near,), (far,) = pool.keys, entries.keys
        num_rows = q.shape[1]
        ends = (torch.arange(num_rows, device=q.device) + 1) % every == 0
        mask = _mask(num_rows, 0, replace(spec, window=0), q) if chosen is None else chosen.chosen
        masks = (_mask(num_rows, 0, spec, q).expand_as(mask), mask.masked_fill(~ends, float("-inf")))
        both = TrainingKV([torch.cat((near, far), 2)], [torch.cat((pool.values[0], entries.values[0]), 2)])
        seen = torch.cat(masks, dim=-1).expand(len(q), -1, -1)
        heads = q.unflatten(-1, (spec.num_heads, spec.head_dim)).transpose(1, 2)
        return _unrolled_attention(heads, both, spec, sinks, seen).transpose(1, 2).flatten(-2)

    def attend(
        self, q: Tensor, pool: Pool, spec: AttentionSpec, sinks: Tensor | None = None, chosen: Pool = None,
        bias: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """q [B, T, H * D] of the pool's latest draft step -> [B, T, H * V]."""
        heads = q.unflatten(-1, (spec.num_heads, spec.head_dim)).transpose(1, 2)
        is_plain = not (spec.window or spec.chunk or spec.softcap or sinks is not None or chosen is not None)
        mask = None
        if bias is not None:  # of a trunk, which has one step
            rows = torch.arange(q.shape[1], device=q.device)
            near = biases_of(bias.unflatten(-1, (spec.num_heads, -1)).transpose(1, 2), rows - rows[:, None])
            mask = _mask(q.shape[1], 0, spec, q) + near
        elif len(pool.keys) > 1 or not is_plain:
            out = _unrolled_attention(heads, pool, spec, sinks, None if chosen is None else chosen.chosen)
            return out.transpose(1, 2).flatten(-2)
        out = scaled_dot_product_attention(
            heads, pool.keys[0], pool.values[0], mask, is_causal=mask is None, scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(-2)

    def causal_conv(self, x: Tensor, weight: Tensor, pool: Pool, spec: ConvSpec, bias: Tensor | None = None) -> Tensor:
        out = recurrent.causal_conv(x, weight, spec)
        return out if bias is None else out + bias

    def gated_delta(self, qkv: Tensor, log_decay: Tensor, strength: Tensor, pool: Pool, spec: DeltaSpec) -> Tensor:
        return recurrent.gated_delta(qkv, log_decay, strength, spec)

    def selective_scan(
        self, xbc: Tensor, step: Tensor, rate: Tensor, skip: Tensor, pool: Pool, spec: ScanSpec
    ) -> Tensor:
        return recurrent.selective_scan(xbc, step, rate, skip, spec)


def _unrolled_attention(
    q: Tensor, pool: TrainingKV, spec: AttentionSpec, sinks: Tensor | None, chosen: Tensor | None
) -> Tensor:
    """q [B, H, T, D] of step i over the step-1 keys of origins <= p and its own keys of steps 2..i, or `chosen`."""
    num_rows, num_own = q.shape[2], len(pool.keys) - 1
    if 0 < spec.window < num_own:
        what = f"a head with a window of {spec.window} cannot be trained for {num_own + 1} steps"
        raise ModelError(what, f"train with --depth {spec.window}")
    grouped = q.unflatten(1, (spec.num_kv_heads, -1))  # [B, K, G, T, D]
    shared = grouped @ pool.keys[0].unsqueeze(2).transpose(-1, -2)  # [B, K, G, T, T]
    own = [(grouped * keys.unsqueeze(2)).sum(-1, keepdim=True) for keys in pool.keys[1:]]
    mask = _mask(num_rows, num_own, spec, q) if chosen is None else grouped_mask(chosen, spec.num_kv_heads)
    weights = attention_weights(torch.cat((shared, *own), dim=-1) * spec.scale, mask, spec, sinks)
    out = weights[..., : pool.values[0].shape[2]] @ pool.values[0].unsqueeze(2)
    for i, values in enumerate(pool.values[1:]):
        out = out + weights[..., num_rows + i, None] * values.unsqueeze(2)
    return out.flatten(1, 2)


def _mask(num_rows: int, num_own: int, spec: KVSpec, like: Tensor) -> Tensor:
    """Additive mask [T, T + own steps]: 0 where row p sees an origin's step-1 key, and own later keys; else -inf."""
    unseen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=like.device).triu(1)
    if spec.window:
        unseen |= torch.ones_like(unseen).tril(num_own - spec.window)  # step i is at its origin's position + i - 1
    if spec.chunk:  # trunk layers only, where positions are rows
        rows = torch.arange(num_rows, device=like.device)
        unseen |= rows < (rows // spec.chunk * spec.chunk)[:, None]
    mask = torch.zeros(num_rows, num_rows + num_own, dtype=like.dtype, device=like.device)
    mask[:, :num_rows].masked_fill_(unseen, float("-inf"))
    return mask


def trunk_outputs(
    trunk: Decoder, tokens: Tensor, dtype: torch.dtype, tap: Tap, *, logits: bool = False
) -> Mapping[str, Tensor]:
    """The trunk's results for tokens [B, T], computed in `dtype`: the states of `tap`, and with `logits` those of all
    rows."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    kv, states = [TrainingKV() for _ in trunk.kv_specs], [None] * len(trunk.state_specs)
    program = trunk.program(kv, tap=tap, state_pools=states)
    rows = slice(None) if logits else slice(0)
    return program(TrainOps(tokens.device, dtype), StepInputs(tokens, positions, rows))
