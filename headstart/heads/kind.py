"""`HeadKind`: the declaration of a kind of head (one file per kind); `HeadCheckpoint`: a head as read from files."""

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart import registry
from headstart.core import Float32
from headstart.errors import ModelError, UsageError
from headstart.heads.base import MAX_LAYERS, HeadSpec
from headstart.heads.published import Document, DrafterFormat
from headstart.kernels.ops import AttentionSpec, RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import DecoderLayer, LayerConfig, NormPlacement
from headstart.layers.linear import LMHead
from headstart.layers.mlp import MLPConfig
from headstart.layers.rope import rope_base, rope_spec, unscaled_base
from headstart.layers.shapes import shapes_of
from headstart.layers.weights import Shapes, Weights

NO_VECTORS: Mapping[str, Float32] = {}
DEFAULT_HEAD_DIM, DEFAULT_KV_HEADS, DEFAULT_INNER = 128, 8, 3
"""Sizes of a new head's block if the trunk has no attention or MLP to copy them from: features of an attention head, KV
heads (both reduced to divisors), MLP size as a multiple of the hidden size."""


@dataclass(frozen=True, kw_only=True)
class HeadCheckpoint:
    """A head as read from, or to be written to, its own directory."""

    spec: HeadSpec
    hidden_size: int
    vocab_size: int  # 0: not in the file
    draft_token_ids: NDArray[np.int64] | None = None  # [V'] ascending target ids; None: the full vocabulary
    tensors: Mapping[str, RawTensor] = field(default_factory=dict)  # under canonical names
    trunk: str = ""  # name of the model that the head was trained on
    trunk_layers: int = 0  # number of that model's layers; 0: not in the file
    trunk_fingerprint: str = ""  # of that model's weights; empty: not in the file
    training: Mapping[str, Any] = field(default_factory=dict)  # free-form provenance

    @property
    def draft_vocab_size(self) -> int:
        """Number of tokens that the head may draft; 0: not in the file."""
        return self.vocab_size if self.draft_token_ids is None else len(self.draft_token_ids)


@dataclass(frozen=True)
class Start:
    """Parts of the trunk from which a new head is initialized."""

    norm: Float32  # [H] the trunk's final norm; a constant that gives small logits if `layer` is empty
    scale: float  # rms of the stream that the trunk's last layer reads; 1 if `layer` is empty
    # norms and biases of that layer, by their names in a block; empty if the new head's block has another form
    layer: Mapping[str, Float32]


def random_weights(
    rng: np.random.Generator, shapes: Shapes, layer: Mapping[str, Float32] = NO_VECTORS, divisor: float = 1.0
) -> dict[str, Float32]:
    """Initial weights by name. Matrices: normal with standard deviation 1 / sqrt(columns), drawn in the order of
    `shapes`; those that add to the residual stream are divided by `divisor`. Vectors: copies from `layer`, else ones
    (norms) or zeros (biases)."""
    first: dict[str, Float32] = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            vector = layer.get(name.partition("block.")[2])
            plain = np.full(shape, 0.0 if name.endswith(".bias") else 1.0, np.float32)
            first[name] = vector if vector is not None and vector.shape == shape else plain
        else:
            scale = shape[1] ** -0.5 / (divisor if "o_proj" in name or "down_proj" in name else 1)
            first[name] = rng.standard_normal(shape, np.float32) * np.float32(scale)
    return first


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a kind of head is trained."""

    spec: Callable[[int, int], HeadSpec]  # (layers of the trunk, draft steps) -> spec
    initial: Callable[[Start, HeadSpec], dict[str, Float32]]  # first weights, under canonical names
    depth: int = 3  # default number of draft steps
    stacks: bool = False  # a head may have one module for each draft step
    norms_residual: bool = False  # HeadSpec.norm_before_residual for trunks whose layers are not plain
    # (`plain_layer`, hidden size) -> the head's block
    layer: Callable[[LayerConfig, int], LayerConfig] = lambda layer, hidden: layer


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """A kind of head: its modules, tensors, drafter, published formats and training."""

    title: str
    modules: Callable[[Weights, HeadSpec, int], Seq[Any]]  # (weights, spec, hidden size) -> Head.modules
    # (weights, spec, hidden size, rows) -> each module's LM head; empty: modules use the head's or the trunk's
    lm_heads: Callable[[Weights, HeadSpec, int, int], Seq[LMHead]] = lambda weights, spec, hidden, rows: ()
    drafter: str = "head"  # name of the file in drafters/ that runs such heads
    # (spec, trunk) -> spec with the fields that depend on the trunk; raises ModelError if the head does not fit
    fit: Callable[[HeadSpec, DecoderConfig], HeadSpec] = lambda spec, trunk: spec
    block: bool = True  # modules have a decoder layer, declared by HeadSpec.layer
    formats: tuple[DrafterFormat, ...] = ()  # published formats of such heads and of related ones
    training: Training | None = None  # None: headstart cannot train such heads

    def shapes(self, spec: HeadSpec, hidden: int) -> Shapes:
        """Names and shapes of the modules' canonical tensors, in the order in which random weights are drawn."""
        return shapes_of(lambda weights: self.modules(weights, spec, hidden))


def head_kind(name: str) -> HeadKind:
    """The kind with this name. Raises UsageError if there is none."""
    kind: HeadKind = registry.find("heads", name).HEAD
    return kind


def trained_kinds() -> list[str]:
    """Kinds that `headstart train` can make."""
    return [name for name in registry.available("heads") if head_kind(name).training]


def checked_draft_ids(values: NDArray[Any], vocab_size: float, what: str) -> NDArray[np.int64]:
    """The ids of a draft vocabulary from a file. Raises ModelError, naming `what`, unless they ascend within the
    vocabulary."""
    ids: NDArray[np.int64] = values.astype(np.int64)
    if ids.ndim != 1 or not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= vocab_size:
        below = f" below {vocab_size}" if vocab_size < math.inf else ""
        raise ModelError(f"{what} does not give ascending ids{below}", "is the file damaged?")
    return ids


def ascend_below(layers: Seq[int], count: int) -> bool:
    """True if these layers ascend within a trunk of `count` layers."""
    return all(0 <= layer < count for layer in layers) and list(layers) == sorted(set(layers))


@contextmanager
def reading_config(path: Path, hint: str) -> Iterator[None]:
    """Context for reading config.json in directory `path`: missing or ill-typed values raise ModelError."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ModelError(f"{path / 'config.json'}: {error} is missing or wrong", hint) from error


def new_head_spec(name: str, trunk: DecoderConfig, depth: int = 3, modules: int = 1) -> HeadSpec:
    """The spec of a new head of a kind for a trunk. depth: draft steps in training. Raises UsageError for a kind that
    cannot be trained and for a trunk with too few layers."""
    kind = head_kind(name)
    if kind.training is None:
        raise UsageError(f"heads of kind {name} are not trained here", f"choose {' or '.join(trained_kinds())}")
    spec = kind.training.spec(trunk.num_layers, depth)
    if kind.block:
        spec = replace(spec, layer=kind.training.layer(plain_layer(trunk), trunk.hidden_size))
    if not is_plain(trunk.head_layer):
        # the stream before the final norm may be a thousand times larger than the output of a block (Gemma); training
        # recovers the input of an RMSNorm from its output, but not that of a LayerNorm
        spec = replace(spec, tap="post_norm" if spec.tap == "pre_norm" else spec.tap)
        spec = replace(spec, norm_before_residual=kind.training.norms_residual)
    return replace(spec, num_modules=modules, beyond="last") if modules > 1 else spec


def plain_layer(trunk: DecoderConfig) -> LayerConfig:
    """The block of a new head: the trunk's if head files can hold it (`is_plain`), else plain attention and a SwiGLU
    MLP in the sizes of the trunk's layers."""
    if is_plain(trunk.head_layer):
        return trunk.head_layer
    layers, hidden = (trunk.head_layer, *reversed(trunk.layers)), trunk.hidden_size
    mixers = [each.mixer for each in layers if isinstance(each.mixer, AttentionConfig)]
    like = next((each for each in mixers if each.rope), None)
    dim = math.gcd(hidden, DEFAULT_HEAD_DIM)
    spec, base = AttentionSpec(hidden // dim, math.gcd(hidden // dim, DEFAULT_KV_HEADS), dim, dim**-0.5), 1e4
    if like and like.rope:
        dim, base = like.spec.head_dim, max(rope_base(like.rope), 2.0)
        spec = AttentionSpec(like.spec.num_heads, like.spec.num_kv_heads, dim, dim**-0.5)
    inner = next((each.mlp.inner for each in layers if isinstance(each.mlp, MLPConfig)), DEFAULT_INNER * hidden)
    rope = rope_spec({"rope_theta": round(base, 6)}, dim)
    return LayerConfig(mixer=AttentionConfig(spec=spec, rope=rope), mlp=MLPConfig(inner=inner), eps=trunk.eps)


def is_plain(layer: LayerConfig | None) -> bool:
    """True for a block that head files can hold: plain attention with a rope, and a SwiGLU MLP."""
    if not (layer and isinstance(layer.mixer, AttentionConfig) and isinstance(layer.mlp, MLPConfig)):
        return False
    mixer, mlp, spec = layer.mixer, layer.mlp, layer.mixer.spec
    attention = AttentionConfig(
        spec=AttentionSpec(spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.scale), rope=mixer.rope,
        qkv_bias=mixer.qkv_bias, o_bias=mixer.o_bias, qk_norm=mixer.qk_norm, gated=mixer.gated,
    )  # fmt: skip
    plain = LayerConfig(mixer=attention, mlp=MLPConfig(inner=mlp.inner, bias=mlp.bias), eps=layer.eps)
    return mixer.rope is not None and layer == plain


def plain_parts(layer: LayerConfig | None) -> tuple[AttentionConfig, MLPConfig]:
    """Attention and feed-forward part of a block as head files hold it. Raises ModelError for any other block."""
    if layer is None or not is_plain(layer):
        what = "a head's directory holds a block of plain attention and a SwiGLU MLP, and no other"
        raise ModelError(what, "headstart train makes such a head for any model")
    assert isinstance(layer.mixer, AttentionConfig) and isinstance(layer.mlp, MLPConfig)
    return layer.mixer, layer.mlp


def transformer_keys(head: HeadCheckpoint, num_layers: int, hint: str) -> dict[str, Any]:
    """Keys of a Llama or Qwen3 config.json with the sizes of a head's layers. Raises ModelError, with this hint, for a
    RoPE that is scaled or partial."""
    layer, (attention, mlp) = head.spec.layer, plain_parts(head.spec.layer)
    assert layer and attention.rope
    base = unscaled_base(attention.rope, attention.spec.head_dim)
    if base is None:
        raise ModelError("the head's RoPE is scaled or partial, which cannot be written yet", hint)
    return {
        "hidden_size": head.hidden_size, "intermediate_size": mlp.inner, "num_hidden_layers": num_layers,
        "num_attention_heads": attention.spec.num_heads, "num_key_value_heads": attention.spec.num_kv_heads,
        "head_dim": attention.spec.head_dim, "hidden_act": "silu", "rms_norm_eps": layer.eps,
        "rope_theta": round(base, 6), "attention_bias": attention.qkv_bias, "vocab_size": head.vocab_size,
        "tie_word_embeddings": False,
    }  # fmt: skip


def published_layer(
    layer: LayerConfig, hidden: int, *, qk_norm: bool, biases: bool, inner_factor: float = math.inf
) -> LayerConfig:
    """A block in the sizes of `layer`, in the form that published heads have: Llama's, or Qwen3's with qk_norm. Its
    RoPE has the base of the layer's but no scaling. biases: keep biases of attention. inner_factor: largest MLP size as
    a multiple of the hidden size. Raises ModelError unless `is_plain(layer)`."""
    mixer, mlp = plain_parts(layer)
    assert mixer.rope
    dim, base = mixer.spec.head_dim, {"rope_theta": round(rope_base(mixer.rope), 6)}
    attention = AttentionConfig(
        spec=AttentionSpec(mixer.spec.num_heads, mixer.spec.num_kv_heads, dim, dim**-0.5), rope=rope_spec(base, dim),
        qkv_bias=biases and mixer.qkv_bias, o_bias=biases and mixer.o_bias, qk_norm=qk_norm,
    )  # fmt: skip
    return LayerConfig(mixer=attention, mlp=MLPConfig(inner=int(min(mlp.inner, inner_factor * hidden))), eps=layer.eps)


def plain_block(
    document: Document, named: Container[str], path: Path, norms: NormPlacement, what: str
) -> tuple[LayerConfig, int, int, int]:
    """(layer, number of layers, hidden size, target's vocabulary size) of a published config.json. named: canonical
    names of the tensors, which tell whether there are biases and norms of q and k. what: the kind of head, for errors.
    Raises ModelError for missing or wrong values."""
    where = path / "config.json"
    try:
        hidden, heads = int(document["hidden_size"]), int(document["num_attention_heads"])
        vocab_size = int(document.get("target_vocab_size") or document["vocab_size"])
        head_dim = int(document.get("head_dim") or hidden // heads)
        spec = AttentionSpec(heads, int(document.get("num_key_value_heads") or heads), head_dim, head_dim**-0.5)
        activation = str(document.get("hidden_act") or "silu")
        if min(hidden, heads, vocab_size, head_dim, spec.num_kv_heads) < 1 or heads % spec.num_kv_heads:
            raise ValueError("a size")
        layer = LayerConfig(
            mixer=AttentionConfig(
                spec=spec,
                rope=rope_spec(document, head_dim),
                qkv_bias="block.self_attn.q_proj.bias" in named,
                o_bias="block.self_attn.o_proj.bias" in named,
                qk_norm="block.self_attn.q_norm.weight" in named,
            ),
            mlp=MLPConfig(inner=int(document["intermediate_size"])),
            eps=float(document.get("rms_norm_eps", 1e-6)),
            norms=norms,
        )
        layers = int(document.get("num_hidden_layers") or 1)
        if not 1 <= layers <= MAX_LAYERS:
            raise ValueError(f"num_hidden_layers {layers}")
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{where}: {error} is missing or wrong", f"is this {what}?") from error
    except ModelError as error:
        raise ModelError(f"{path}: {error.message}", error.hint) from error
    if activation != "silu":
        raise ModelError(f"{where}: hidden_act is {activation!r}, which is not known of {what}", "known: silu")
    return layer, layers, hidden, vocab_size


# Layers of an EAGLE head after its first one.


def further_layers(spec: HeadSpec) -> dict[str, LayerConfig]:
    """Tensor prefix -> config of each layer after the first. These layers have both norms and read the stream."""
    assert spec.layer is not None
    return {f"layers.{i}": replace(spec.layer, norms="pre") for i in range(1, spec.num_layers)}


def build_further(weights: Weights, spec: HeadSpec, hidden: int) -> tuple[DecoderLayer, ...]:
    return tuple(layer.build(weights, prefix, hidden) for prefix, layer in further_layers(spec).items())
