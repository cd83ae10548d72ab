"""`Ops` over whole sequences with gradients: what is trained is `MTPModule.forward` itself.

Shapes: B sequences padded on the right to T rows, one document each; W width; H query heads, K kv heads, D head dim.
Rows are *origins* p: the trunk row whose hidden state starts a draft. Draft step i (1-based) reads token t_{p+i} at
position p + i and predicts t_{p+i+1}. Its attention sees what it sees at run time: the step-1 keys of origins <= p
(true hidden states; the rows below p were recomputed from true ones after acceptance) and p's own keys of steps 2..i.
Step-1 keys of later origins, and so all padding, lie behind the causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headstart.errors import ModelError
from headstart.kernels.indexing import CompressSpec, IndexSpec
from headstart.kernels.ops import AttentionSpec, KVSpec, Pool
from headstart.kernels.reference.choice import best_positions, index_scores
from headstart.kernels.reference.ops import ReferenceOps, attention_weights
from headstart.kernels.reference.streams import entries_of
from headstart.kernels.specs import RopeSpec
from headstart.kernels.states import ConvSpec, DeltaSpec, ScanSpec
from headstart.train import delta, scan


@dataclass(eq=False)
class DraftMemory:
    """The KV pool of one layer: `keys[i]`, `values[i]` [B, K, T, D] of draft step i + 1; of a trunk layer one step. Of
    an indexer: keys, and what was `chosen` last: a mask [B, T, T + steps] (0, or -inf) of the keys of attention."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)
    chosen: Tensor | None = None


class TrainOps(ReferenceOps):
    """Differentiable `Ops` over [B, T, W]; everything but attention works on any leading shape already."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        # not super().__init__: there is no StepPlan; rows are addressed by their place in [B, T]
        self._device, self._dtype = device, dtype
        self._rope_tables: dict[tuple[int, RopeSpec], tuple[Tensor, Tensor]] = {}

    def store_kv(self, k: Tensor, v: Tensor, pool: Pool, spec: AttentionSpec) -> None:
        """k [B, T, K * D], v [B, T, K * V]: those of the memory's next draft step; a trunk layer has one step."""
        for kept, rows in ((pool.keys, k), (pool.values, v)):
            kept.append(rows.unflatten(-1, (spec.num_kv_heads, -1)).transpose(1, 2))

    def store_index(self, k: Tensor, pool: Pool, spec: IndexSpec) -> None:
        pool.keys.append(k.detach()[:, None])

    @torch.no_grad()
    def choose(self, q: Tensor, weights: Tensor, pool: Pool, spec: IndexSpec) -> None:
        """An indexer learns nothing here: what it chooses has no gradient."""
        shared, *own = (keys[:, 0] for keys in pool.keys)
        scores = [index_scores(q, weights, shared, spec)]
        scores += [index_scores(q[:, :, None], weights[:, :, None], keys[:, :, None], spec)[..., 0] for keys in own]
        mask = _mask(q.shape[1], len(own), spec, q)
        ends = (torch.arange(mask.shape[1], device=q.device) + 1) % spec.every == 0
        mask = mask.masked_fill(~ends, float("-inf")) if spec.every > 1 else mask
        seen = best_positions(torch.cat(scores, dim=-1), (mask == 0).expand(len(q), -1, -1), spec.top_k)
        pool.chosen = mask.expand(len(q), -1, -1).masked_fill(~seen, float("-inf"))

    def compress(self, values: Tensor, gates: Tensor, bias: Tensor, pool: Pool, spec: CompressSpec) -> Tensor:
        """Of every row, whatever it ends."""
        num_rows = values.shape[1]
        rows = torch.arange(num_rows, device=values.device)
        told = gates + bias.view(spec.every, -1)[rows % spec.every]
        places = rows[:, None] - torch.arange(spec.span - 1, -1, -1, device=values.device)
        kept = torch.cat((values, told), dim=-1)[:, places.clamp(min=0)]
        there = (places >= 0).expand(len(values), -1, -1)
        made: Tensor = entries_of(kept.flatten(0, 1), there.flatten(0, 1), spec).unflatten(0, (-1, num_rows))
        return made

    def attend_beside(
        self,
        q: Tensor,
        pool: Pool,
        entries: Pool,
        spec: AttentionSpec,
        every: int,
        sinks: Tensor | None = None,
        chosen: Pool = None,
    ) -> Tensor:
        """Of a trunk: one step."""
        (near,), (far,) = pool.keys, entries.keys
        num_rows = q.shape[1]
        ends = (torch.arange(num_rows, device=q.device) + 1) % every == 0
        mask = _mask(num_rows, 0, replace(spec, window=0), q) if chosen is None else chosen.chosen
        masks = (_mask(num_rows, 0, spec, q).expand_as(mask), mask.masked_fill(~ends, float("-inf")))
        both = DraftMemory([torch.cat((near, far), 2)], [torch.cat((pool.values[0], entries.values[0]), 2)])
        seen = torch.cat(masks, dim=-1).expand(len(q), -1, -1)
        heads = q.unflatten(-1, (spec.num_heads, spec.head_dim)).transpose(1, 2)
        return _drafted_attention(heads, both, spec, sinks, seen).transpose(1, 2).flatten(-2)

    def attend(
        self, q: Tensor, pool: Pool, spec: AttentionSpec, sinks: Tensor | None = None, chosen: Pool = None
    ) -> Tensor:
        """q [B, T, H * D] of the memory's latest draft step -> [B, T, H * V]."""
        heads = q.unflatten(-1, (spec.num_heads, spec.head_dim)).transpose(1, 2)
        if len(pool.keys) > 1 or spec.window or spec.chunk or spec.softcap or sinks is not None or chosen is not None:
            out = _drafted_attention(heads, pool, spec, sinks, None if chosen is None else chosen.chosen)
        else:
            out = scaled_dot_product_attention(
                heads, pool.keys[0], pool.values[0], is_causal=True, scale=spec.scale,
                enable_gqa=spec.num_heads != spec.num_kv_heads,
            )  # fmt: skip
        return out.transpose(1, 2).flatten(-2)

    def causal_conv(self, x: Tensor, weight: Tensor, pool: Pool, spec: ConvSpec, bias: Tensor | None = None) -> Tensor:
        made = delta.causal_conv(x, weight, spec)
        return made if bias is None else made + bias

    def gated_delta(self, qkv: Tensor, log_decay: Tensor, strength: Tensor, pool: Pool, spec: DeltaSpec) -> Tensor:
        return delta.gated_delta(qkv, log_decay, strength, spec)

    def selective_scan(
        self, xbc: Tensor, step: Tensor, rate: Tensor, skip: Tensor, pool: Pool, spec: ScanSpec
    ) -> Tensor:
        return scan.selective_scan(xbc, step, rate, skip, spec)


def _drafted_attention(
    q: Tensor, pool: DraftMemory, spec: AttentionSpec, sinks: Tensor | None, chosen: Tensor | None
) -> Tensor:
    """q [B, H, T, D] of step i over the step-1 keys of origins <= p and the own keys of steps 2..i, or those chosen."""
    num_rows, num_own = q.shape[2], len(pool.keys) - 1
    if 0 < spec.window < num_own:
        what = f"a head with a window of {spec.window} cannot be trained for {num_own + 1} steps"
        raise ModelError(what, f"train with --depth {spec.window}")
    grouped = q.unflatten(1, (spec.num_kv_heads, -1))  # [B, K, G, T, D]
    shared = grouped @ pool.keys[0].unsqueeze(2).transpose(-1, -2)  # [B, K, G, T, T]
    own = [(grouped * keys.unsqueeze(2)).sum(-1, keepdim=True) for keys in pool.keys[1:]]
    mask = _mask(num_rows, num_own, spec, q) if chosen is None else chosen[:, None, None]
    weights = attention_weights(torch.cat((shared, *own), dim=-1) * spec.scale, mask, spec, sinks)
    out = weights[..., : pool.values[0].shape[2]] @ pool.values[0].unsqueeze(2)
    for i, values in enumerate(pool.values[1:]):
        out = out + weights[..., num_rows + i, None] * values.unsqueeze(2)
    return out.flatten(1, 2)


def _mask(num_rows: int, num_own: int, spec: KVSpec, like: Tensor) -> Tensor:
    """[T, T + steps]: 0 where row p sees the step-1 key of an origin, and for all its own later ones; else -inf."""
    unseen = torch.ones(num_rows, num_rows, dtype=torch.bool, device=like.device).triu(1)
    if spec.window:
        unseen |= torch.ones_like(unseen).tril(num_own - spec.window)  # the row of step i lies i - 1 behind its origin
    if spec.chunk:  # of a trunk, whose positions are its rows
        places = torch.arange(num_rows, device=like.device)
        unseen |= places < (places // spec.chunk * spec.chunk)[:, None]
    mask = torch.zeros(num_rows, num_rows + num_own, dtype=like.dtype, device=like.device)
    mask[:, :num_rows].masked_fill_(unseen, float("-inf"))
    return mask
