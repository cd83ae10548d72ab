"""`DecoderConfig`: sizes and layers of a decoder; builds the decoder from named tensors and counts its costs."""

from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from headstart.kernels.ops import RawTensor
from headstart.kernels.specs import StreamSpec
from headstart.layers.altup import AltUpConfig
from headstart.layers.costs import DecoderCost, LayerCost, num_elements, num_table_elements
from headstart.layers.decoder import Decoder, LayerConfig
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm, Unnormed
from headstart.layers.parts import MixerConfig
from headstart.layers.residual_bank import ResidualBankConfig
from headstart.layers.shapes import shapes_of
from headstart.layers.streams import StreamExpansion, build_last_sum
from headstart.layers.weights import Shapes, Weights

MixerT = TypeVar("MixerT", bound=MixerConfig)


@dataclass(frozen=True)
class OwnDrafter:
    """Sizes of a block drafter (heads/block.py) that a checkpoint holds in place of MTP modules. Its layers are
    DecoderConfig.head_layer, one in each `mtp.{i}`."""

    tap: tuple[int, ...]  # see layers.decoder.Tap
    block_size: int
    mask_token_id: int
    markov_rank: int
    confidence: bool


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and layers of a decoder, independent of the family's config keys."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerConfig, ...]
    eps: float  # of the final norm, and of norms outside layers
    max_length: int  # context, in positions
    tied: bool  # the LM head is the embedding
    embedding_scale: float = 1.0  # multiplies embeddings
    embedding_norm: bool | Literal["weighted"] = False  # they are normed, without a weight or with one
    logit_scale: float = 1.0  # multiplies logits
    logit_softcap: float = 0.0  # 0: none
    centered: bool = False  # the final norm subtracts the mean (LayerNorm)
    biased: bool = False  # the final norm adds a bias
    final_norm: bool = True  # False: the LM head reads the stream as it is
    streams: StreamSpec | AltUpConfig | ResidualBankConfig | None = None  # residual streams of all layers; None: one
    num_mtp: int = 0  # native MTP modules that config.json declares
    mtp_layer: LayerConfig | None = None  # the block of an MTP module; None: like the last layer
    mtp_layers: tuple[LayerConfig, ...] = ()  # the blocks of all MTP modules, where they differ
    mtp_output_norm: bool = True  # see HeadSpec.output_norm
    mtp_lm_heads: bool = False  # each MTP module has its own LM head
    mtp_recycle: Literal["post_norm", "pre_norm"] | None = None  # see HeadSpec.recycle; None: the family's
    drafter: OwnDrafter | None = None  # the modules are the layers of this block drafter
    no_drafter: str = ""  # why the block drafter that config.json declares cannot run

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def num_streams(self) -> int:
        """Number of residual streams."""
        return self.streams.count if self.streams else 1

    @property
    def head_layer(self) -> LayerConfig:
        """The block of an MTP module or of a head that is trained on this trunk."""
        return self.mtp_layer or self.layers[-1]

    def mixers(self, kind: type[MixerT]) -> dict[str, MixerT]:
        """The mixers of this class, by the canonical prefix of their layer."""
        return {f"layers.{i}": each.mixer for i, each in enumerate(self.layers) if isinstance(each.mixer, kind)}

    def shapes(self) -> Shapes:
        """Canonical names and shapes of the trunk, in the order in which random weights are drawn."""
        return shapes_of(lambda weights: build_decoder(weights, self))

    def cost(self) -> DecoderCost:
        """Weights, cache and work of the trunk."""
        costs: dict[LayerConfig, LayerCost] = {}  # most layers are equal
        outer = replace(self, layers=()).shapes()
        for layer in dict.fromkeys(self.layers):
            source, shapes = layer.mixer.source_layer, layer.shapes("layer", self.hidden_size)
            costs[layer] = layer.cost(self.hidden_size, None if source is None else self.layers[source].mixer)
            outer |= {name: shape for name, shape in shapes.items() if not name.startswith("layer.")}
        lm_head, tables = self.vocab_size * self.hidden_size, num_table_elements(outer)
        return DecoderCost(
            layers=tuple(costs[layer] for layer in self.layers),
            embedding=tables - lm_head if self.tied else tables,
            lm_head=lm_head,
            outer=num_elements(outer) - tables - (0 if self.tied else lm_head),
        )


def build_decoder(weights: Weights, config: DecoderConfig) -> Decoder:
    """Builds the trunk from tensors under canonical names."""
    return Decoder(
        embedding=weights.get("embed_tokens.weight", config.vocab_size, config.hidden_size),
        layers=[each.build(weights, f"layers.{i}", config.hidden_size) for i, each in enumerate(config.layers)],
        embedding_norm=_embedding_norm(weights, config),
        streams=_build_streams(weights, config),
        norm=weights.norm("norm", config.hidden_size, config.eps, centered=config.centered, biased=config.biased)
        if config.final_norm
        else Unnormed(weights.unweighted_norm(config.hidden_size, config.eps).weight, config.eps),
        lm_head=Linear(weights.get(lm_head_tensor(weights, config), config.vocab_size, config.hidden_size)),
        embedding_scale=config.embedding_scale,
        logit_scale=config.logit_scale,
        logit_softcap=config.logit_softcap,
    )


def _embedding_norm(weights: Weights, config: DecoderConfig) -> RMSNorm | None:
    if config.embedding_norm == "weighted":
        return weights.norm("embed_norm", config.hidden_size, config.eps)
    return weights.unweighted_norm(config.hidden_size, config.eps) if config.embedding_norm else None


def _build_streams(weights: Weights, config: DecoderConfig) -> StreamExpansion | None:
    if isinstance(config.streams, AltUpConfig):
        return config.streams.build(weights, config.hidden_size)
    if isinstance(config.streams, ResidualBankConfig):
        return config.streams.build(weights, config.hidden_size, config.eps)
    if config.streams is None:
        return None
    return build_last_sum(weights, config.hidden_size, config.streams, config.eps)


def lm_head_tensor(weights: Weights, config: DecoderConfig) -> str:
    """Name of the LM head's tensor, which is the embedding when the two are tied."""
    return "embed_tokens.weight" if config.tied or not weights.has("lm_head.weight", usual=True) else "lm_head.weight"


def raw_lm_head(weights: Weights, config: DecoderConfig) -> RawTensor:
    """The LM head's tensor [vocabulary, hidden size] in the file's encoding."""
    return weights.raw(lm_head_tensor(weights, config), (config.vocab_size, config.hidden_size))
