"""The common decoder: what its config says, and how it is made of named tensors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from headstart.errors import ModelError
from headstart.layers.decoder import Decoder, LayerConfig, tapped_layers
from headstart.layers.eagle3 import Eagle3Module
from headstart.layers.linear import Linear
from headstart.layers.medusa import MedusaModule
from headstart.layers.mtp import HeadSpec, MTPHead, MTPModule
from headstart.layers.weights import Shapes, Weights


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes of the common decoder, whatever the family calls them, and its layers."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    eps: float  # of the final norm, and of norms outside layers
    max_length: int
    tied: bool  # LM head = embedding
    embedding_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none
    num_mtp: int = 0  # native MTP modules promised by the config
    mtp_layer: LayerConfig | None = None  # the block of such a module; None: as the last layer
    mtp_recycle: Literal["post_norm", "pre_norm"] | None = None  # None: what the family declares

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def head_layer(self) -> LayerConfig:
        """The block of a head."""
        return self.mtp_layer or self.layers[-1]

    def shapes(self) -> Shapes:
        """Canonical names and shapes of the trunk."""
        embedding = (self.vocab_size, self.hidden_size)
        shapes: Shapes = {"embed_tokens.weight": embedding}
        for i, layer in enumerate(self.layers):
            shapes |= layer.shapes(f"layers.{i}", self.hidden_size)
        return shapes | {"norm.weight": (self.hidden_size,)} | ({} if self.tied else {"lm_head.weight": embedding})


def decoder(weights: Weights, config: DecoderConfig) -> Decoder:
    """The whole trunk under canonical names."""
    embedding = weights.get("embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = lm_head_name(weights, config)
    return Decoder(
        embedding=embedding,
        layers=[each.build(weights, f"layers.{i}", config.hidden_size) for i, each in enumerate(config.layers)],
        norm=weights.norm("norm", config.hidden_size, config.eps),
        lm_head=Linear(weights.get(head, config.vocab_size, config.hidden_size)),
        embedding_scale=config.embedding_scale,
        logit_softcap=config.logit_softcap,
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
        block=config.head_layer.build(weights, f"{prefix}.block", hidden),
        norm=weights.norm(f"{prefix}.norm", hidden, eps),
    )


def mtp_shapes(prefix: str, config: DecoderConfig) -> Shapes:
    """Names and shapes of what `mtp_module` takes."""
    hidden = config.hidden_size
    norms: Shapes = {f"{prefix}.{name}.weight": (hidden,) for name in ("norm_embedding", "norm_hidden", "norm")}
    return {
        **norms,
        f"{prefix}.projection.weight": (hidden, 2 * hidden),
        **config.head_layer.shapes(f"{prefix}.block", hidden),
    }


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
        block=config.head_layer.build(weights, "block", hidden, reads=2 * hidden),
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
