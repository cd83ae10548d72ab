"""From named tensors to layers: the getter that checks shapes, and the builder of the common decoder."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headstart.errors import ModelError
from headstart.kernels.ops import AttentionSpec, Backend, RawTensor, RopeSpec, Weight
from headstart.layers.attention import Attention
from headstart.layers.decoder import Decoder, DecoderLayer, Mixer, tapped_layers
from headstart.layers.delta import DeltaConfig, delta_layer
from headstart.layers.eagle3 import Eagle3Module
from headstart.layers.linear import Linear
from headstart.layers.medusa import MedusaModule
from headstart.layers.mla import MLAConfig, mla_layer
from headstart.layers.mlp import GatedMLP
from headstart.layers.moe import MoEConfig, moe_layer
from headstart.layers.mtp import HeadSpec, MTPHead, MTPModule
from headstart.layers.norm import RMSNorm


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of the common decoder, whatever the family calls them."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: AttentionSpec
    rope: RopeSpec
    eps: float
    max_length: int
    tied: bool  # LM head = embedding
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gated_attention: bool = False
    delta: DeltaConfig | None = None
    num_mtp: int = 0  # native MTP modules promised by the config
    mtp_recycle: Literal["post_norm", "pre_norm"] | None = None  # None: what the family declares
    moe: MoEConfig | None = None
    mla: MLAConfig | None = None  # instead of `attention`, which is then what a block beside this trunk may have


class Weights:
    """Canonical names -> backend weights, with shape checks. A tensor asked for twice is taken once (tied weights).
    `drafts`: what is taken only makes drafts (see Backend.weight). `on_take` is told of each tensor taken."""

    def __init__(
        self,
        tensors: Mapping[str, RawTensor],
        backend: Backend,
        source: str,
        *,
        drafts: bool = False,
        on_take: Callable[[RawTensor], None] = lambda tensor: None,
    ) -> None:
        self.tensors, self.backend, self.source, self.drafts = tensors, backend, source, drafts
        self.on_take = on_take
        self.used: set[str] = set()
        self._taken: dict[str, Weight] = {}

    def raw(self, name: str, *shapes: tuple[int, ...]) -> RawTensor:
        """The file's tensor. Raises ModelError when it is absent or has none of these shapes."""
        tensor = self.tensors.get(name)
        if tensor is None:
            raise ModelError(f"{self.source} has no tensor {name}", "is the checkpoint complete, and of this family?")
        if tuple(tensor.shape) not in shapes:
            has = f"{self.source}: {name} has shape {tuple(tensor.shape)}"
            raise ModelError(f"{has}, but the config implies {shapes[0]}")
        self.used.add(name)
        return tensor

    def get(self, name: str, *shape: int, precise: bool = False) -> Weight:
        if name not in self._taken:
            self._taken[name] = self.take(self.raw(name, shape), precise=precise)
        return self._taken[name]

    def take(self, tensor: RawTensor, *, precise: bool = False) -> Weight:
        """A tensor, or what was made of one, in the backend's form."""
        self.on_take(tensor)
        return self.backend.weight(tensor, drafts=self.drafts, precise=precise)

    def has(self, name: str) -> bool:
        return name in self.tensors

    def linear(self, prefix: str, num_out: int, num_in: int, *, bias: bool = False) -> Linear:
        weight = self.get(f"{prefix}.weight", num_out, num_in)
        return Linear(weight, self.get(f"{prefix}.bias", num_out) if bias else None)

    def norm(self, name: str, size: int, eps: float) -> RMSNorm:
        return RMSNorm(self.get(f"{name}.weight", size), eps)


def decoder_layer(
    weights: Weights,
    prefix: str,
    config: DecoderConfig,
    *,
    index: int | None = None,
    attention_input: int | None = None,
) -> DecoderLayer:
    """The block whose tensors start with `prefix` (no trailing dot). `index`: its place in the trunk; a block beside
    the trunk always has the experts, if there are any. `attention_input`: columns that q, k and v read, where they are
    not the hidden size."""
    hidden, eps = config.hidden_size, config.eps
    mlp = f"{prefix}.mlp"
    sparse = config.moe if config.moe and index not in config.moe.dense else None
    return DecoderLayer(
        input_norm=weights.norm(f"{prefix}.input_layernorm", hidden, eps),
        attention=_mixer(weights, prefix, config, index, attention_input or hidden),
        post_norm=weights.norm(f"{prefix}.post_attention_layernorm", hidden, eps),
        mlp=moe_layer(weights, mlp, hidden, sparse)
        if sparse
        else GatedMLP.of(weights, mlp, hidden, config.intermediate_size, bias=config.mlp_bias),
    )


def _mixer(weights: Weights, prefix: str, config: DecoderConfig, index: int | None, reads: int) -> Mixer:
    """What layer `index` of the trunk, or a block beside it, mixes positions with."""
    if config.delta and index in config.delta.layers:
        return delta_layer(weights, f"{prefix}.linear_attn", config.hidden_size, config.eps, config.delta)
    if config.mla:
        return mla_layer(weights, f"{prefix}.self_attn", config.hidden_size, config.mla)
    return _attention(weights, f"{prefix}.self_attn", config, reads)


def _attention(weights: Weights, attn: str, config: DecoderConfig, reads: int) -> Attention:
    """The attention whose tensors start with `attn`; q, k and v read as many columns as `reads`."""
    hidden, spec, eps = config.hidden_size, config.attention, config.eps
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    gate = weights.linear(f"{attn}.gate_proj", q_size, reads, bias=config.qkv_bias) if config.gated_attention else None
    return Attention(
        q_proj=weights.linear(f"{attn}.q_proj", q_size, reads, bias=config.qkv_bias),
        k_proj=weights.linear(f"{attn}.k_proj", kv_size, reads, bias=config.qkv_bias),
        v_proj=weights.linear(f"{attn}.v_proj", kv_size, reads, bias=config.qkv_bias),
        o_proj=weights.linear(f"{attn}.o_proj", hidden, q_size, bias=config.o_bias),
        spec=spec,
        rope=config.rope,
        q_norm=weights.norm(f"{attn}.q_norm", spec.head_dim, eps) if config.qk_norm else None,
        k_norm=weights.norm(f"{attn}.k_norm", spec.head_dim, eps) if config.qk_norm else None,
        gate_proj=gate,
    )


def decoder(weights: Weights, config: DecoderConfig) -> Decoder:
    """The whole trunk under canonical names."""
    embedding = weights.get("embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = lm_head_name(weights, config)
    return Decoder(
        embedding=embedding,
        layers=[decoder_layer(weights, f"layers.{i}", config, index=i) for i in range(config.num_layers)],
        norm=weights.norm("norm", config.hidden_size, config.eps),
        lm_head=Linear(weights.get(head, config.vocab_size, config.hidden_size)),
    )


def lm_head_name(weights: Weights, config: DecoderConfig) -> str:
    """Which tensor is the LM head: its own one, or the embedding when the two are tied."""
    return "embed_tokens.weight" if config.tied or not weights.has("lm_head.weight") else "lm_head.weight"


def draft_lm_head(weights: Weights, config: DecoderConfig, token_ids: np.ndarray | None) -> Linear:
    """The trunk's LM head, or only its rows of the draft vocabulary (ascending target ids)."""
    name = lm_head_name(weights, config)
    if token_ids is None:
        return Linear(weights.get(name, config.vocab_size, config.hidden_size))
    rows = weights.raw(name, (config.vocab_size, config.hidden_size)).take_rows(token_ids)
    return Linear(weights.backend.weight(rows, drafts=True))


def mtp_module(weights: Weights, prefix: str, config: DecoderConfig) -> MTPModule:
    """Canonical MTP tensors under `prefix`: norm_embedding, norm_hidden, projection, block, norm."""
    hidden, eps = config.hidden_size, config.eps
    return MTPModule(
        embedding_norm=weights.norm(f"{prefix}.norm_embedding", hidden, eps),
        hidden_norm=weights.norm(f"{prefix}.norm_hidden", hidden, eps),
        projection=weights.linear(f"{prefix}.projection", hidden, 2 * hidden),
        block=decoder_layer(weights, f"{prefix}.block", config),
        norm=weights.norm(f"{prefix}.norm", hidden, eps),
    )


def medusa_modules(weights: Weights, config: DecoderConfig, count: int) -> list[MedusaModule]:
    """Canonical Medusa tensors: medusa.{k}.weight and .bias."""
    hidden = config.hidden_size
    return [MedusaModule(weights.linear(f"medusa.{k}", hidden, hidden, bias=True)) for k in range(count)]


def eagle3_module(
    weights: Weights, config: DecoderConfig, num_taps: int, norm_before_residual: bool = False
) -> Eagle3Module:
    """Canonical EAGLE-3 tensors: fuse, block (with hidden_norm), norm."""
    hidden, eps = config.hidden_size, config.eps
    return Eagle3Module(
        fuse=weights.linear("fuse", hidden, num_taps * hidden),
        hidden_norm=weights.norm("block.hidden_norm", hidden, eps),
        block=decoder_layer(weights, "block", config, attention_input=2 * hidden),
        norm=weights.norm("norm", hidden, eps),
        norm_before_residual=norm_before_residual,
    )


def eagle3_head(
    weights: Weights, config: DecoderConfig, spec: HeadSpec, norm_before_residual: bool, token_ids: np.ndarray | None
) -> MTPHead:
    """An EAGLE-3 head; taps that it does not name are those of its paper's code (low, middle, high)."""
    layers = config.num_layers
    tap = tapped_layers(spec.tap) or (2, layers // 2, layers - 3)
    if not all(0 <= layer < layers for layer in tap) or list(tap) != sorted(set(tap)):
        raise ModelError(f"{weights.source} taps the layers {tap}, but they must ascend below {layers}")
    module = eagle3_module(weights, config, len(tap), norm_before_residual)
    size = config.vocab_size if token_ids is None else len(token_ids)
    return MTPHead(
        replace(spec, tap=tap),
        [module],
        "eagle3",
        Linear(weights.get("lm_head.weight", size, config.hidden_size)) if weights.has("lm_head.weight") else None,
        weights.get("embed_tokens.weight", config.vocab_size, config.hidden_size)
        if weights.has("embed_tokens.weight")
        else None,
    )
