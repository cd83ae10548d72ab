"""The common decoder: what its config says, and how it is made of named tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headstart.kernels.specs import StreamSpec
from headstart.layers.altup import AltUpConfig
from headstart.layers.decoder import Decoder, LayerConfig, norm_parts
from headstart.layers.linear import Linear
from headstart.layers.streams import Spread, read_streams, stream_shapes
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
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # 0: none
    centered: bool = False  # the final norm is of x - mean(x)
    biased: bool = False  # plus a bias
    streams: StreamSpec | AltUpConfig | None = None  # of all layers
    num_mtp: int = 0  # native MTP modules promised by the config
    mtp_layer: LayerConfig | None = None  # the block of such a module; None: as the last layer
    mtp_lm_heads: bool = False  # each has an LM head of its own
    mtp_recycle: Literal["post_norm", "pre_norm"] | None = None  # None: what the family declares

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_streams(self) -> int:
        """Residual streams side by side."""
        return self.streams.count if self.streams else 1

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
        if isinstance(self.streams, AltUpConfig):
            shapes |= self.streams.shapes(self.hidden_size)
        elif self.streams:
            shapes |= stream_shapes("streams", self.hidden_size, self.streams, last=True)
        norm: Shapes = {f"norm.{end}": (self.hidden_size,) for end in norm_parts(self.biased)}
        return shapes | norm | ({} if self.tied else {"lm_head.weight": embedding})


def decoder(weights: Weights, config: DecoderConfig) -> Decoder:
    """The whole trunk under canonical names."""
    embedding = weights.get("embed_tokens.weight", config.vocab_size, config.hidden_size)
    head = lm_head_name(weights, config)
    return Decoder(
        embedding=embedding,
        layers=[each.build(weights, f"layers.{i}", config.hidden_size) for i, each in enumerate(config.layers)],
        norm=weights.norm("norm", config.hidden_size, config.eps, centered=config.centered, biased=config.biased),
        lm_head=Linear(weights.get(head, config.vocab_size, config.hidden_size)),
        embedding_scale=config.embedding_scale,
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap,
        streams=_spread(weights, config),
    )


def _spread(weights: Weights, config: DecoderConfig) -> Spread | None:
    if isinstance(config.streams, AltUpConfig):
        return config.streams.build(weights, config.hidden_size)
    if config.streams is None:
        return None
    return read_streams(weights, "streams", config.hidden_size, config.streams, config.eps, last=True)


def lm_head_name(weights: Weights, config: DecoderConfig) -> str:
    """Which tensor is the LM head: its own one, or the embedding when the two are tied."""
    return "embed_tokens.weight" if config.tied or not weights.has("lm_head.weight") else "lm_head.weight"
