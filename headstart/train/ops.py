"""`Ops` over whole sequences with gradients: what is trained is `MTPModule.forward` itself.

Shapes: B sequences padded on the right to T rows, one document each; W width; H query heads, K kv heads, D head dim.
Rows are *origins* p: the trunk row whose hidden state starts a draft. Draft step i (1-based) reads token t_{p+i} at
position p + i and predicts t_{p+i+1}. Its attention sees what it sees at run time: the step-1 keys of origins <= p
(true hidden states; the rows below p were recomputed from true ones after acceptance) and p's own keys of steps 2..i.
Step-1 keys of later origins, and so all padding, lie behind the causal mask.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from headstart.kernels.ops import AttentionSpec, ConvSpec, DeltaSpec, Pool, RopeSpec
from headstart.kernels.reference import ReferenceOps
from headstart.train import delta


@dataclass(eq=False)
class DraftMemory:
    """The KV pool of one unrolled head: `keys[i]`, `values[i]` [B, K, T, D] of draft step i + 1."""

    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)


class TrainOps(ReferenceOps):
    """Differentiable `Ops` over [B, T, W]; everything but attention works on any leading shape already."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        # not super().__init__: there is no StepPlan; rows are addressed by their place in [B, T]
        self._device, self._dtype = device, dtype
        self._rope_tables: dict[tuple[int, RopeSpec], tuple[Tensor, Tensor]] = {}

    def attention(self, q: Tensor, k: Tensor, v: Tensor, pool: Pool, spec: AttentionSpec) -> Tensor:
        """q [B, T, H * D], k [B, T, K * D], v [B, T, K * V] -> [B, T, H * V]. Each call on one DraftMemory is the
        next draft step; pool None is a trunk layer, plain causal attention."""
        heads = q.unflatten(-1, (spec.num_heads, spec.head_dim)).transpose(1, 2)
        keys, values = (x.unflatten(-1, (spec.num_kv_heads, -1)).transpose(1, 2) for x in (k, v))
        memory: DraftMemory = pool if pool is not None else DraftMemory()
        memory.keys.append(keys)
        memory.values.append(values)
        if len(memory.keys) == 1:
            out = scaled_dot_product_attention(
                heads, keys, values, is_causal=True, scale=spec.scale, enable_gqa=spec.num_heads != spec.num_kv_heads
            )
        else:
            out = _drafted_attention(heads, memory, spec)
        return out.transpose(1, 2).flatten(-2)

    def causal_conv(self, x: Tensor, weight: Tensor, pool: Pool, spec: ConvSpec) -> Tensor:
        return delta.causal_conv(x, weight, spec)

    def gated_delta(self, qkv: Tensor, log_decay: Tensor, strength: Tensor, pool: Pool, spec: DeltaSpec) -> Tensor:
        return delta.gated_delta(qkv, log_decay, strength, spec)


def _drafted_attention(q: Tensor, pool: DraftMemory, spec: AttentionSpec) -> Tensor:
    """q [B, H, T, D] of step i >= 2 over the step-1 keys of origins <= p and the own keys of steps 2..i."""
    num_rows = q.shape[2]
    grouped = q.unflatten(1, (spec.num_kv_heads, -1))  # [B, K, G, T, D]
    shared = grouped @ pool.keys[0].unsqueeze(2).transpose(-1, -2)  # [B, K, G, T, T]
    later = torch.ones(num_rows, num_rows, dtype=torch.bool, device=q.device).triu(1)
    shared = (shared * spec.scale).masked_fill(later, float("-inf"))
    own = [(grouped * keys.unsqueeze(2)).sum(-1, keepdim=True) * spec.scale for keys in pool.keys[1:]]
    weights = torch.cat((shared, *own), dim=-1).softmax(-1)
    out = weights[..., :num_rows] @ pool.values[0].unsqueeze(2)
    for i, values in enumerate(pool.values[1:]):
        out = out + weights[..., num_rows + i, None] * values.unsqueeze(2)
    return out.flatten(1, 2)
