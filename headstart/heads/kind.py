"""What a kind of head declares, and a head as a checkpoint. One file per kind here; its name is the kind's. Shipped
heads lie beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart import registry
from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import AttentionSpec, RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.rope import rope_base, rope_spec
from headstart.layers.sketch import LMHead
from headstart.layers.weights import Shapes, Weights

Values = NDArray[np.float32]
EMBEDDING_SHARE = 0.1
"""How strongly the token's embedding enters a new head, against the hidden state."""


@dataclass(frozen=True, kw_only=True)
class HeadCheckpoint:
    """A head as a directory of its own. `draft_token_ids`: ascending target ids, None for the full vocabulary;
    `tensors`: under canonical names; `trunk_layers`: of the model it was trained on, 0 where that is not told;
    `vocab_size` 0: its file
    does not tell; `training`: free-form provenance."""

    spec: HeadSpec
    hidden_size: int
    vocab_size: int
    draft_token_ids: NDArray[np.int64] | None = None
    tensors: Mapping[str, RawTensor] = field(default_factory=dict)
    trunk: str = ""
    trunk_layers: int = 0
    trunk_fingerprint: str = ""
    training: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Start:
    """What a new head begins from: `norm` [W] of the trunk's end, `scale`, the rms of the stream that its last layer
    reads, and `layer()`, the tensors of that layer under canonical names. It raises UsageError for a layer that a
    head's block cannot be."""

    norm: Values
    scale: float
    layer: Callable[[], Mapping[str, Values]]


@dataclass(frozen=True, kw_only=True)
class Training:
    """How a kind is trained. `spec`: for a trunk of so many layers and so many draft steps. `initial`: the first
    weights, under canonical names. `depth`: draft steps, where nobody says how many. `own_lm_head`: its file holds the
    LM head's rows too. `stacks`: it may have a module for each draft step instead of one that is used again.
    `random`: of its matrices only the shapes stay. `layer`: its block, for a trunk whose block is this one."""

    spec: Callable[[int, int], HeadSpec]
    initial: Callable[[Start, HeadSpec], dict[str, Values]]
    depth: int = 3
    own_lm_head: bool = False
    stacks: bool = False
    random: bool = False
    layer: Callable[[LayerConfig], LayerConfig] = lambda layer: layer


Document = Mapping[str, Any]
Arrays = Mapping[str, Any]
"""Arrays, or (bits, dtype name), as formats.safetensors.save takes them."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How other programs write heads of a kind: is this config.json one? `read` raises ModelError for what is missing;
    `write`, where there is one, makes config.json and tensors, in place of headstart's own layout. `markers`: tensors
    of which one must be there, where a config.json alone may be that of a whole model."""

    matches: Callable[[Document], bool]
    read: Callable[[Document, Mapping[str, Tensor], Path], HeadCheckpoint]
    write: Callable[[HeadCheckpoint, Arrays], tuple[dict[str, Any], dict[str, Any]]] | None = None
    markers: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HeadKind:
    """`title`: what people call it. `modules`: as its drafter runs them (heads.base.Module for drafter `head`), from
    canonical tensors, a spec and the hidden size; `shapes`: their
    names and shapes. `lm_heads`: one of each module, for so many draft tokens, where they have their own. `drafter`:
    the file of drafters/ that runs it. `fit`: the spec completed for a trunk; raises
    ModelError where it cannot be. `block`: its modules have a layer, which the spec describes. `training` None: it
    cannot be trained here."""

    title: str
    modules: Callable[[Weights, HeadSpec, int], Seq[Any]]
    shapes: Callable[[HeadSpec, int], Shapes]
    lm_heads: Callable[[Weights, HeadSpec, int, int], Seq[LMHead]] = lambda weights, spec, hidden, rows: ()
    drafter: str = "head"
    fit: Callable[[HeadSpec, DecoderConfig], HeadSpec] = lambda spec, trunk: spec
    block: bool = True
    layout: Layout | None = None
    training: Training | None = None


def head_kind(name: str) -> HeadKind:
    """A kind by its name. Raises UsageError for an unknown one."""
    kind: HeadKind = registry.find("heads", name).HEAD
    return kind


def trained_kinds() -> list[str]:
    """Kinds that `headstart train` can make."""
    return [name for name in registry.available("heads") if head_kind(name).training]


def plain_parts(layer: LayerConfig | None) -> tuple[AttentionConfig, MLPConfig]:
    """Attention and feed-forward part of a block as head files hold it. Raises ModelError for any other block."""
    mixer, mlp = (layer.mixer, layer.mlp) if layer else (None, None)
    if layer and isinstance(mixer, AttentionConfig) and isinstance(mlp, MLPConfig) and mixer.rope:
        plain = MLPConfig(inner=mlp.inner, bias=mlp.bias)
        spec = mixer.spec
        causal = not (spec.window or spec.chunk or spec.softcap or mixer.sinks or mixer.shares is not None)
        if mlp == plain and causal and layer == LayerConfig(mixer=mixer, mlp=mlp, eps=layer.eps):
            return mixer, mlp
    what = "a head's directory holds a block of plain attention and a SwiGLU MLP, and no other"
    raise ModelError(what, "train --kind medusa makes a head without one")


def published_layer(layer: LayerConfig, *, qk_norm: bool, biases: bool) -> LayerConfig:
    """The block of a head in the trunk's sizes, of a form that published layouts have: Llama's, with `qk_norm` Qwen3's;
    a plain rope of the trunk's base, no gate, and `biases` of attention as the trunk has them. Raises ModelError for a
    trunk of other parts."""
    mixer, mlp = plain_parts(layer)
    assert mixer.rope
    dim, base = mixer.spec.head_dim, {"rope_theta": round(rope_base(mixer.rope), 6)}
    attention = AttentionConfig(
        spec=AttentionSpec(mixer.spec.num_heads, mixer.spec.num_kv_heads, dim, dim**-0.5),
        rope=rope_spec(base, dim),
        qkv_bias=biases and mixer.qkv_bias,
        o_bias=biases and mixer.o_bias,
        qk_norm=qk_norm,
    )
    return LayerConfig(mixer=attention, mlp=MLPConfig(inner=mlp.inner), eps=layer.eps)
