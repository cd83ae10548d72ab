"""Assistants (Gemma 4): query-only layers over the trunk's KV cache.

x = pre [s e(t_n) ; h_{n-1}], with the trunk's embedding e and its scale s. Each layer attends to the keys and values
that the trunk's last layer of its own kind (sliding or full) has stored for the positions before n: y =
norm(layers(x)), logits = lm_head(y). The next draft step reads post(y) in place of h, at the same position, over the
same keys: nothing is stored or recomputed. With centroids only the tokens of the groups with the highest scores
(centroids y) are drafted.

Formulas and config: transformers 5.23, `models/gemma4_assistant`; a window counts from position n, as the trunk's do
and llama.cpp's `gemma4-assistant`. Canonical tensors: `pre.weight` [h, 2 H], `layers.{i}.`, `norm.weight`,
`post.weight` [H, h], `lm_head.weight` [V, h]; `centroids.weight` [groups, h], `token_ordering` [V]: the tokens of group
0, then those of group 1, and so on.
"""

import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.sizes import FULL, SLIDING, Sizes, Unknown
from headstart.heads.base import HeadSpec, ReaderSpec
from headstart.heads.kind import HeadCheckpoint, HeadKind
from headstart.heads.published import DeclaredShapes, Document, DrafterFormat, Present
from headstart.kernels.ops import AttentionSpec, Buffer, Ops, Pool, StepInputs, Weight
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import DecoderLayer, LayerConfig
from headstart.layers.linear import Linear, LMHead
from headstart.layers.mlp import MLPConfig
from headstart.layers.norm import RMSNorm
from headstart.layers.rope import rope_spec
from headstart.layers.weights import Weights

WITHOUT = {
    "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, "enable_moe_block": False,
    "use_double_wide_mlp": False, "attention_bias": False, "hidden_activation": "gelu_pytorch_tanh",
}  # fmt: skip
"""Keys of text_config -> the only supported value; transformers refuses other values, too."""
DEFAULTS = {
    "vocab_size": 262144, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 30, "head_dim": 256,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rms_norm_eps": 1e-6, "sliding_window": 512,
}  # fmt: skip
"""transformers' defaults for keys that text_config lacks. In unified assistants `sliding_window` is twice as large."""


@dataclass(frozen=True)
class GroupedHead:
    """LM head over groups of tokens: each row keeps the logits of the `count` groups that its centroids score best."""

    exact: Linear  # [V, h] logits of all tokens
    centroids: Linear  # [groups, h] scores of the groups
    groups: Weight  # [V] group of each token
    count: int

    def __call__(self, ops: Ops, x: Buffer) -> Buffer:
        return ops.keep_groups(self.exact(ops, x), self.centroids(ops, x), self.groups, self.count)


@dataclass(frozen=True)
class AssistantModule:
    """The whole assistant: one module, which runs every draft step."""

    spec: ReaderSpec
    pre: Linear
    layers: Seq[DecoderLayer]
    norm: RMSNorm
    post: Linear
    kv_specs: tuple[()] = ()

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """See heads.base.Module. y [R, h] has the assistant's width, the recycled vector [R, H] the trunk's."""
        x = self.pre(ops, ops.concat(ops.scale(embedded, self.spec.embedding_scale), step.hidden))
        delta: Buffer | None = None
        for layer, keys in zip(self.layers, pool, strict=True):
            delta, x = layer(ops, delta, x, step.positions, keys)
        y, _ = self.norm.add(ops, delta, x)
        return y, self.post(ops, y)


def modules(weights: Weights, spec: HeadSpec, hidden: int) -> Seq[AssistantModule]:
    reader = _reader(spec)
    width = reader.hidden_size
    return [
        AssistantModule(
            spec=reader,
            pre=weights.linear("pre", width, 2 * hidden),
            post=weights.linear("post", hidden, width),
            norm=weights.norm("norm", width, reader.eps),
            layers=[each.build(weights, f"layers.{i}", width) for i, each in enumerate(reader.layers)],
        )
    ]


def lm_heads(weights: Weights, spec: HeadSpec, hidden: int, rows: int) -> Seq[LMHead]:
    reader = _reader(spec)
    exact, count = weights.linear("lm_head", rows, reader.hidden_size), reader.num_groups
    if not count:
        return [exact]
    declared = weights.raw("token_ordering", (rows,))
    assert isinstance(declared, Tensor)
    ordering = declared.numpy().astype(np.int64)
    if rows % count or not np.array_equal(np.sort(ordering), np.arange(rows)):
        raise ModelError(f"{weights.source}: token_ordering does not put {rows} tokens into {count} groups")
    groups = np.empty(rows, np.int64)
    groups[ordering] = np.arange(rows) // (rows // count)
    centroids = weights.linear("centroids", count, reader.hidden_size)
    return [GroupedHead(exact, centroids, weights.index(lambda: groups), reader.top_groups)]


def _reader(spec: HeadSpec) -> ReaderSpec:
    assert spec.reader
    return spec.reader


def fit(spec: HeadSpec, trunk: DecoderConfig) -> HeadSpec:
    """Assigns to each layer the KV of the trunk's last layer of the same kind (sliding or full attention) that stores
    any. Raises ModelError if the trunk has no such layer, or its keys have another shape."""
    reader, kept = _reader(spec), dict[bool, tuple[int, AttentionSpec]]()
    place = 0
    for layer in trunk.layers:
        mixer = layer.mixer
        if not isinstance(mixer, AttentionConfig):
            raise ModelError("an assistant reads keys of plain attention, but the model has layers of another kind")
        if mixer.source_layer is None:
            kept[mixer.spec.window > 0] = place, mixer.spec
            place += 1
    reads = []
    for i, layer in enumerate(reader.layers):
        asked = _attention(layer).spec
        kind, (place, own) = SLIDING if asked.window else FULL, kept.get(asked.window > 0, (-1, None))
        if own is None:
            raise ModelError(f"layer {i} of the assistant reads keys of a {kind} layer, and the model has none")
        for name in ("num_kv_heads", "head_dim"):
            if (theirs := getattr(own, name)) != (ours := getattr(asked, name)):
                what = f"layer {i} of the assistant reads keys with {name} {ours}"
                raise ModelError(f"{what}, the model's {kind} layers have {theirs}", "use this model's own assistant")
        reads.append(place)
    return replace(spec, reader=replace(reader, reads=tuple(reads), embedding_scale=trunk.embedding_scale))


def _attention(layer: LayerConfig) -> AttentionConfig:
    assert isinstance(layer.mixer, AttentionConfig)
    return layer.mixer


# Published directories.


def read(document: Document, tensors: Mapping[str, Tensor], path: Path) -> HeadCheckpoint:
    where, declared = path / "config.json", document.get("text_config")
    if not isinstance(declared, dict):
        raise ModelError(f"{where}: text_config is {declared!r}, not an object", "is this an assistant?")
    window = {"sliding_window": 1024} if "unified" in str(document.get("model_type")) else {}
    inner = {**DEFAULTS, **window, **{key: value for key, value in declared.items() if value is not None}}
    if inner.get("use_bidirectional_attention") == "all":
        raise ModelError(f"{where}: use_bidirectional_attention is 'all', which is not known of an assistant")
    for key, only in WITHOUT.items():
        if inner.get(key, only) not in (only, None):
            raise ModelError(f"{where}: {key} is {inner[key]!r}, which is not known of an assistant")
    try:
        groups = int(document.get("num_centroids", 2048)) if document.get("use_ordered_embeddings") else 0
        reader = ReaderSpec(
            layers=tuple(_layers(inner)),
            hidden_size=int(inner["hidden_size"]),
            eps=float(inner["rms_norm_eps"]),
            num_groups=groups,
            top_groups=min(int(document.get("centroid_intermediate_top_k", 32)), groups) if groups else 0,
        )
        hidden, vocab_size = int(document["backbone_hidden_size"]), int(inner["vocab_size"])
        if min(reader.hidden_size, hidden, vocab_size, reader.top_groups or 1, groups or 1) < 1:
            raise ValueError("a size below 1")
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ModelError(f"{where}: {error} is missing or wrong", "is this an assistant?") from error
    named = {canonical(name): tensor for name, tensor in tensors.items()}
    tied = named.pop("embed_tokens.weight", None)  # tokens are embedded by the trunk
    if tied is not None:
        named.setdefault("lm_head.weight", tied)
    spec = HeadSpec(kind="assistant", reader=reader)
    return HeadCheckpoint(spec=spec, hidden_size=hidden, vocab_size=vocab_size, tensors=named)


def _layers(inner: Document) -> list[LayerConfig]:
    count, window = int(inner["num_hidden_layers"]), int(inner["sliding_window"])
    kinds = inner.get("layer_types") or [SLIDING if (i + 1) % 6 else FULL for i in range(count - 1)] + [FULL]
    if len(kinds) != count or not {*kinds} <= {FULL, SLIDING} or (SLIDING in kinds and window < 2):
        raise ValueError(f"layer_types {kinds} with a window of {window}")
    mlp = MLPConfig(inner=int(inner["intermediate_size"]), activation="gelu_tanh")
    eps = float(inner["rms_norm_eps"])
    return [
        LayerConfig(
            mixer=_mixer({**inner, **_own(inner, i, kind)}, kind, window if kind == SLIDING else 0),
            mlp=mlp,
            eps=eps,
            norms="sandwich",
            has_layer_scalar=True,
        )
        for i, kind in enumerate(kinds)
    ]


def _own(inner: Document, index: int, kind: str) -> Document:
    """Keys of one layer that override the common ones: per_layer_config in newer files, else those of full layers."""
    declared = inner.get("per_layer_config")
    if declared:
        return dict(declared.get(str(index), {}))
    if kind == SLIDING:
        return {}
    heads = inner.get("num_global_key_value_heads") if inner.get("attention_k_eq_v") else None
    return {"head_dim": inner.get("global_head_dim") or 512} | ({"num_key_value_heads": heads} if heads else {})


def _mixer(inner: Document, kind: str, window: int) -> AttentionConfig:
    heads, kv_heads, dim = (int(inner[name]) for name in ("num_attention_heads", "num_key_value_heads", "head_dim"))
    if min(heads, kv_heads, dim) < 1 or heads % kv_heads:
        raise ValueError(f"num_attention_heads {heads} over {kv_heads}")
    declared = inner.get("rope_parameters") or ROPES
    return AttentionConfig(
        spec=AttentionSpec(heads, kv_heads, dim, 1.0, window=window, excludes_self=True),
        rope=rope_spec({**inner, "rope_parameters": declared[kind], "rope_scaling": None}, dim),
        qk_norm=True,
        source_layer=0,
    )


ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}
"""rope_parameters for a config.json without them."""


def canonical(name: str) -> str:
    """Canonical name of a tensor in a published file."""
    name = name.removeprefix("model.").removeprefix("masked_embedding.")
    return re.sub(r"^(pre|post)_projection\.", r"\1.", name)


def tensors(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    """DrafterFormat.tensors. Full and sliding layers differ in head_dim, so sizes of attention stay unknown."""
    at, hidden, wide = f"layers.{index}.", s["hidden"], s["target_hidden"]
    names = ("input", "post_attention", "pre_feedforward", "post_feedforward")
    queries, inner = Unknown("queries"), Unknown("inner")
    layer: DeclaredShapes = {
        **{f"{at}{name}_layernorm.weight": (hidden,) for name in names},
        f"{at}self_attn.q_proj.weight": (queries, hidden),
        f"{at}self_attn.q_norm.weight": (None,),
        f"{at}self_attn.o_proj.weight": (hidden, queries),
        f"{at}mlp.gate_proj.weight": (inner, hidden),
        f"{at}mlp.up_proj.weight": (inner, hidden),
        f"{at}mlp.down_proj.weight": (hidden, inner),
    }
    if index:
        return layer
    return layer | {
        "embed_tokens.weight": (s["vocabulary"], hidden),
        "norm.weight": (hidden,),
        "pre_projection.weight": (hidden, 2 * wide),
        "post_projection.weight": (wide, hidden),
        "?masked_embedding.centroids.weight": (None, hidden),
        "?masked_embedding.token_ordering": (s["vocabulary"],),
        "?lm_head.weight": (s["vocabulary"], hidden),
    }


PUBLISHED = DrafterFormat(
    key="assistant",
    title="Gemma 4 assistant",
    method="mtp",
    read=read,
    tensors=tensors,
    model_types=("gemma4_assistant", "gemma4_unified_assistant"),
    gguf=("gemma4-assistant",),
    count=("num_hidden_layers",),
    targets="gemma4",
)
HEAD = HeadKind(title="assistant", modules=modules, lm_heads=lm_heads, fit=fit, block=False, formats=(PUBLISHED,))
