"""Multi-head latent attention (DeepSeek-V2 report, section 2.1) in its absorbed form, for every row.

A position keeps one latent c = norm(W_c x) and one rotated key k_r, shared by all heads. With W_K and W_V the parts of
kv_b_proj that would expand c for a head, q . k = (W_K^T q_nope) . c + q_r . k_r, and the head's output is W_V times the
weighted sum of latents: grouped-query attention with one kv head, whose values are the first part of its keys.

Canonical tensors under `{prefix}`: `q_proj` or `q_a_proj`, `q_a_layernorm`, `q_b_proj`; `kv_a_proj_with_mqa`,
`kv_a_layernorm`; `kv_b_proj`, or its parts `k_b_proj` [heads, latent, nope] and `v_b_proj` [heads, value, latent];
`o_proj`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool, RopeSpec, StateSpec, Weight
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm

if TYPE_CHECKING:
    from headstart.layers.build import Weights


@dataclass(frozen=True, kw_only=True)
class MLAConfig:
    """Sizes; `query_rank` 0: queries come from x at once. `interleaved`: the file has the two halves of a rotary pair
    side by side. `eps` is of the two inner norms."""

    num_heads: int
    query_rank: int
    latent: int
    nope: int
    rotary: int
    value: int
    rope: RopeSpec
    scale: float
    eps: float = 1e-6
    interleaved: bool = True
    bias: bool = False

    @property
    def spec(self) -> AttentionSpec:
        """What is kept of a position, and how it is read."""
        return AttentionSpec(self.num_heads, 1, self.latent + self.rotary, self.scale, self.latent, latent=True)


@dataclass(frozen=True)
class MLA:
    """The parts of a projection that are rotated stand by themselves: `query_rope`, `key_rope`."""

    query_down: Linear | None
    query_norm: RMSNorm | None
    query: Linear
    query_rope: Linear
    latent: Linear
    latent_norm: RMSNorm
    key_rope: Linear
    absorb_key: tuple[Weight, ...]  # of each head, [latent, nope]
    absorb_value: tuple[Weight, ...]  # of each head, [value, latent]
    output: Linear
    config: MLAConfig

    @property
    def spec(self) -> AttentionSpec:
        return self.config.spec

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return ()

    def __call__(self, ops: Ops, x: Buffer, positions: Buffer, pool: Pool) -> Buffer:
        config = self.config
        latent, key_rope = self.latent(ops, x), self.key_rope(ops, x)
        queries = x
        if self.query_down and self.query_norm:
            queries = self.query_norm(ops, self.query_down(ops, x))
        query, query_rope = self.query(ops, queries), self.query_rope(ops, queries)
        query_rope = ops.rope(query_rope, positions, config.rope, config.rotary)
        absorbed = ops.head_linear(query, self.absorb_key)
        latent = self.latent_norm(ops, latent)
        key_rope = ops.rope(key_rope, positions, config.rope, config.rotary)
        q, k = ops.concat(absorbed, query_rope, config.num_heads), ops.concat(latent, key_rope)
        ops.store_kv(k, latent, pool, self.spec)
        attended = ops.attend(q, pool, self.spec)
        return self.output(ops, ops.head_linear(attended, self.absorb_value))


def mla_layer(weights: Weights, prefix: str, hidden: int, config: MLAConfig) -> MLA:
    """The attention whose tensors start with `prefix` (no trailing dot)."""
    heads, rank, per_head = config.num_heads, config.query_rank, config.nope + config.rotary
    queries = np.arange(heads * per_head).reshape(heads, per_head)
    turned = _half_split(config)
    name, reads = (f"{prefix}.q_b_proj", rank) if rank else (f"{prefix}.q_proj", hidden)
    down = f"{prefix}.kv_a_proj_with_mqa"
    width = config.latent + config.rotary
    keys, values = _absorbed(weights, prefix, config)
    return MLA(
        query_down=weights.linear(f"{prefix}.q_a_proj", rank, hidden, bias=config.bias) if rank else None,
        query_norm=weights.norm(f"{prefix}.q_a_layernorm", rank, config.eps) if rank else None,
        query=_rows(weights, name, heads * per_head, reads, queries[:, : config.nope].reshape(-1)),
        query_rope=_rows(weights, name, heads * per_head, reads, queries[:, config.nope + turned].reshape(-1)),
        latent=_rows(weights, down, width, hidden, np.arange(config.latent), bias=config.bias),
        latent_norm=weights.norm(f"{prefix}.kv_a_layernorm", config.latent, config.eps),
        key_rope=_rows(weights, down, width, hidden, config.latent + turned, bias=config.bias),
        absorb_key=keys,
        absorb_value=values,
        output=weights.linear(f"{prefix}.o_proj", hidden, heads * config.value, bias=config.bias),
        config=config,
    )


def _half_split(config: MLAConfig) -> NDArray[np.int64]:
    """Rows of a rotary part in the order of Ops.rope: the first halves of all pairs, then the second ones."""
    order = np.arange(config.rotary)
    return order.reshape(-1, 2).T.reshape(-1) if config.interleaved else order


def _rows(
    weights: Weights, name: str, num_out: int, num_in: int, rows: NDArray[np.int64], *, bias: bool = False
) -> Linear:
    """Some rows of a projection."""
    weight = weights.take(weights.raw(f"{name}.weight", (num_out, num_in)).take_rows(rows))
    return Linear(weight, weights.take(weights.raw(f"{name}.bias", (num_out,)).take_rows(rows)) if bias else None)


def _absorbed(weights: Weights, prefix: str, config: MLAConfig) -> tuple[tuple[Weight, ...], tuple[Weight, ...]]:
    """W_K^T [latent, nope] and W_V [value, latent] of each head. They stay floats: what they read is not quantized."""
    heads, latent, nope, value = config.num_heads, config.latent, config.nope, config.value
    if weights.has(f"{prefix}.k_b_proj.weight"):
        k = weights.raw(f"{prefix}.k_b_proj.weight", (heads, latent, nope))
        v = weights.raw(f"{prefix}.v_b_proj.weight", (heads, value, latent))
        keys = [k.part(h).plain() for h in range(heads)]
        values = [v.part(h).plain() for h in range(heads)]
    else:
        both = weights.raw(f"{prefix}.kv_b_proj.weight", (heads * (nope + value), latent))
        rows = np.arange(heads * (nope + value)).reshape(heads, nope + value)
        keys = [both.take_rows(each[:nope]).transposed() for each in rows]
        values = [both.take_rows(each[nope:]).plain() for each in rows]
    take = [tuple(weights.take(each, precise=True) for each in parts) for parts in (keys, values)]
    return take[0], take[1]


def mla_shapes(prefix: str, hidden: int, config: MLAConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of one attention's tensors."""
    heads, rank, per_head = config.num_heads, config.query_rank, config.nope + config.rotary
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}.kv_a_proj_with_mqa.weight": (config.latent + config.rotary, hidden),
        f"{prefix}.kv_a_layernorm.weight": (config.latent,),
        f"{prefix}.kv_b_proj.weight": (heads * (config.nope + config.value), config.latent),
        f"{prefix}.o_proj.weight": (hidden, heads * config.value),
    }
    if rank:
        shapes |= {
            f"{prefix}.q_a_proj.weight": (rank, hidden),
            f"{prefix}.q_a_layernorm.weight": (rank,),
            f"{prefix}.q_b_proj.weight": (heads * per_head, rank),
        }
    else:
        shapes[f"{prefix}.q_proj.weight"] = (heads * per_head, hidden)
    if config.bias:
        down = {"q_a_proj": rank} if rank else {}
        for name, size in {**down, "kv_a_proj_with_mqa": config.latent + config.rotary, "o_proj": hidden}.items():
            shapes[f"{prefix}.{name}.bias"] = (size,)
    return shapes
