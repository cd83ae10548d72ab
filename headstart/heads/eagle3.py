"""EAGLE-3 and 3.1 (arXiv 2503.01840): a block over three fused streams of the trunk.

g = fc [a_1 ; a_2 ; a_3]; one block reads [norm_e(e(t_{p+1})) ; norm_h(g)] in its attention, g as its residual stream;
logits = lm_head(norm(x')). The next draft step reads x' (before the norm) in place of g. vLLM 0.32,
`model_executor/models/llama_eagle3.py`. EAGLE-3.1 normalizes the input of fc, all streams together or each by itself;
its next step reads the input of the LM head. Canonical tensors: fuse, block (with hidden_norm), norm, lm_head, in 3.1
`input_norm.weight` or `tap_norms.weight` [taps x H]. Layers after the first are ordinary blocks `layers.{i}.`.

`train` writes headstart's own layout, without an LM head where it is the trunk's; `export` writes the published one
(`published`). Published directories have the layout that vLLM, SGLang, llama.cpp and OpenVINO load (SafeAILab's;
speculators' names too): `fc`, `midlayer.*` (or `layers.0.*`), `norm`, `lm_head` over the draft vocabulary, `d2t`
(target id = draft id + d2t[draft id]), `t2d` (mask over the target's ids). Norms of fc's input: `input_norm` (config
key `norm_before_fc`), or `fc_norm.0` and so on (key `fc_norm`). config.json is that of a Llama or Qwen3 model. Any
other tensor is refused.
"""

import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from headstart.config import MAX_DEPTH
from headstart.core import Float32
from headstart.errors import ModelError, UsageError
from headstart.formats.base import Tensor, make_tensor
from headstart.formats.sizes import Sizes, first_value
from headstart.heads.base import BlockSpec, HeadSpec
from headstart.heads.kind import (
    DEFAULT_INNER,
    HeadCheckpoint,
    HeadKind,
    Start,
    Training,
    ascend_below,
    build_further,
    plain_block,
    plain_parts,
    published_layer,
    random_weights,
    transformer_keys,
)
from headstart.heads.layouts.names import MAPS, NOT_DRAFTING, draft_ids, vocabulary_maps
from headstart.heads.published import (
    Arrays,
    DeclaredShapes,
    Document,
    DrafterFormat,
    Present,
    block_shapes,
    draft_vocabulary,
    latent_shapes,
)
from headstart.kernels.ops import Buffer, KVSpec, Ops, Pool, StepInputs, Weight
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import DecoderLayer, tapped_layers
from headstart.layers.linear import Linear
from headstart.layers.norm import RMSNorm
from headstart.layers.parts import split_pools
from headstart.layers.weights import Weights

ARCHITECTURE = "LlamaForCausalLMEagle3"
OURS = "headstart"  # key of config.json under which trunk and training are written; other engines ignore it
FEWEST_LAYERS = 3
WHOLE, EACH = "input_norm.weight", "tap_norms.weight"  # EAGLE-3.1: norm of all streams together, norms of each stream
NORM_KEYS = {WHOLE: "norm_before_fc", EACH: "fc_norm"}
"""Tensor of EAGLE-3.1 -> key of config.json that declares it."""
STREAM = re.compile(r"fc_norm\.\d+\.weight")  # published name of the norm of one stream
COPIES = ("lm_head.weight", "embed_tokens.weight")  # optional tensors that are also in the trunk
TAPS = "eagle_aux_hidden_state_layer_ids"  # key of config.json: the layers whose inputs are read
MASK = "mask_hidden"  # P-EAGLE (heads/peagle.py): what rows of the mask token read in place of the streams
MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")  # config.json keys of the mask token: speculators', vLLM's
NUM_DEPTHS = 8  # drafts per pass where config.json has no number, as in speculators' training


@dataclass(frozen=True)
class Eagle3Module:
    """All layers of an EAGLE-3 head; each draft step runs them."""

    fuse: Linear
    hidden_norm: RMSNorm
    block: DecoderLayer  # input_norm normalizes the embedding; q, k and v read 2 H columns
    further: Seq[DecoderLayer]  # layers after `block`
    norm: RMSNorm
    whole: Weight | None  # [num_taps * H] norm of all streams together, before `fuse`
    each: Weight | None  # [num_taps * H] norms of the single streams, before `fuse`
    num_taps: int  # number of streams
    mask: Weight | None  # [num_taps * H] P-EAGLE: input of rows of the mask token in place of stored states

    @property
    def kv_specs(self) -> list[KVSpec]:
        return [spec for layer in (self.block, *self.further) for spec in layer.mixer.kv_specs]

    def forward(
        self, ops: Ops, spec: HeadSpec, embedded: Buffer, step: StepInputs, pool: Pool, *, recycled: bool = False
    ) -> tuple[Buffer, Buffer]:
        """See heads.base.Module. Stored states [R, taps x H] are fused; recycled vectors [R, H] are not."""
        g = step.hidden
        if not recycled:
            g = self.fuse(ops, self._normed(ops, self._masked(ops, spec, step)))
        h = self.hidden_norm(ops, g)
        x = ops.concat(self.block.input_norm(ops, embedded), h)
        first, *others = split_pools(pool)
        attended = self.block.mixer(ops, x, step.positions, first)
        x, residual = self.block.post_norm.add(ops, attended, h if spec.norm_before_residual else g)
        delta: Buffer | None = self.block.mlp(ops, x)
        for layer, own in zip(self.further, others, strict=True):
            delta, residual = layer(ops, delta, residual, step.positions, own)
        y, stream = self.norm.add(ops, delta, residual)
        return y, y if spec.recycle == "post_norm" else stream

    def _masked(self, ops: Ops, spec: HeadSpec, step: StepInputs) -> Buffer:
        if self.mask is None or spec.block is None:
            return step.hidden
        return ops.put_where(step.hidden, step.token_ids, spec.block.mask_token_id, self.mask)

    def _normed(self, ops: Ops, streams: Buffer) -> Buffer:
        if self.whole is not None:
            streams = ops.rms_norm(streams, self.whole, self.norm.eps)
        return streams if self.each is None else ops.rms_norm(streams, self.each, self.norm.eps, self.num_taps)


def modules(weights: Weights, spec: HeadSpec, hidden: int) -> Seq[Eagle3Module]:
    assert spec.layer is not None
    eps, num_taps = spec.layer.eps, len(tapped_layers(spec.tap))
    width = num_taps * hidden
    whole, each = (weights.get(name, width) if weights.has(name) else None for name in (WHOLE, EACH))
    return [
        Eagle3Module(
            fuse=weights.linear("fuse", hidden, width),
            mask=weights.get(MASK, width) if spec.block else None,
            hidden_norm=weights.norm("block.hidden_norm", hidden, eps),
            block=spec.layer.build(weights, "block", hidden, in_features=2 * hidden),
            further=build_further(weights, spec, hidden),
            norm=weights.norm("norm", hidden, eps),
            whole=whole,
            each=each,
            num_taps=num_taps,
        )
    ]


def paper_taps(layers: int) -> tuple[int, int, int]:
    """Low, middle and high layer of a trunk with `layers` layers, as in the paper's code."""
    return 2, layers // 2, layers - 3


def fit(spec: HeadSpec, trunk: DecoderConfig) -> HeadSpec:
    """The spec with taps; a head that names none has the paper's. Raises ModelError for taps outside the trunk."""
    layers = trunk.num_layers
    tap = tapped_layers(spec.tap) or paper_taps(layers)
    if not ascend_below(tap, layers):
        raise ModelError(f"the head taps the layers {tap}, but they must ascend below {layers}")
    return replace(spec, tap=tap)


# Published directories.


def read(document: Document, tensors: Mapping[str, Tensor], path: Path) -> HeadCheckpoint:
    inner = {**document, **(document.get("transformer_layer_config") or {})}
    ours = document.get(OURS) or {}
    named = _normed({new: tensors[name] for name in tensors if (new := canonical(name))}, document, path)
    layer, num_layers, hidden, vocab_size = plain_block(inner, named, path, "pre", "an EAGLE-3 head")
    if "fuse.weight" not in named:
        raise ModelError(f"{path} holds no fc.weight", "is this an EAGLE-3 head?")
    block = None
    if MASK in named:
        named[MASK] = named[MASK].shaped(int(np.prod(named[MASK].shape)))
        block = _block(document, num_layers, vocab_size, path)
    spec = HeadSpec(
        kind="peagle" if block else "eagle3",
        block=block,
        layer=layer,
        tap=tuple(_taps(document)),
        recycle="post_norm" if document.get("norm_output") else "pre_norm",
        norm_before_residual=bool(document.get("norm_before_residual", False)),
        num_layers=num_layers,
    )
    if unknown := sorted(named.keys() - HEAD.shapes(spec, hidden).keys() - {WHOLE, EACH, *COPIES}):
        what = f"{path}: {theirs(unknown[0])} is not known of an EAGLE-3 head"
        raise ModelError(what, "it changes the head's formula: headstart does not run this variant")
    return HeadCheckpoint(
        spec=spec, hidden_size=hidden, vocab_size=vocab_size,
        draft_token_ids=draft_ids(tensors.get("d2t") or tensors.get("model.d2t"), vocab_size, path), tensors=named,
        trunk=str(ours.get("trunk", "")), trunk_fingerprint=str(ours.get("trunk_fingerprint", "")),
        training=dict(ours.get("training") or {}),
    )  # fmt: skip


def _block(document: Document, num_layers: int, vocab_size: int, path: Path) -> BlockSpec:
    """BlockSpec of a P-EAGLE head: the last pair's row drafts the first token, mask rows the others."""
    mask = first_value(document, MASK_KEYS)
    if type(mask) is not int:
        raise ModelError(f"{path / 'config.json'}: mask_token_id is {mask!r}, but must be a token", "is it P-EAGLE?")
    methods = (document.get("speculators_config") or {}).get("proposal_methods") or [{}]
    depth = int(methods[0].get("speculative_tokens") or NUM_DEPTHS)
    return BlockSpec(
        block_size=min(depth, MAX_DEPTH), num_layers=num_layers, mask_token_id=mask, causal=True, anchor_predicts=True,
        vocab_size=vocab_size,
    )  # fmt: skip


def _taps(document: Document) -> list[int]:
    """Layers whose inputs the head reads. DeepSpec's key names layers whose outputs it reads. So do the ids in
    `eagle_config` that begin with 1 (SpecForge, SGLang); others there name inputs (NVIDIA)."""
    if ids := document.get("target_layer_ids"):
        return [int(each) + 1 for each in ids]
    if ids := document.get(TAPS):
        return [int(each) for each in ids]
    ids = (document.get("eagle_config") or {}).get(TAPS) or []
    outputs = ids[:1] == [1]
    return [int(each) + outputs for each in ids]


def _normed(named: Mapping[str, Tensor], document: Document, path: Path) -> dict[str, Tensor]:
    """The tensors with EAGLE-3.1's norms under canonical names. As in vLLM 0.32, the norm of all streams is used only
    if config.json names it. Raises ModelError if config.json names norms that are missing."""
    eagle = document.get("eagle_config") or {}
    parts = [named[name] for name in sorted((n for n in named if STREAM.fullmatch(n)), key=_number)]
    found = {name: tensor for name, tensor in named.items() if not STREAM.fullmatch(name)}
    if parts:
        values = np.concatenate([part.float32() for part in parts])
        found[EACH] = make_tensor(EACH, values.shape, "F32", values.view(np.uint8))
    declared = {name: document.get(key) for name, key in NORM_KEYS.items()}
    declared[WHOLE] = eagle.get(NORM_KEYS[WHOLE], declared[WHOLE])
    for name, key in NORM_KEYS.items():
        if declared[name] and name not in found:
            raise ModelError(f"{path}: config.json says {key}, but its tensors are missing", "download the head again")
    if not declared[WHOLE]:
        found.pop(WHOLE, None)
    return found


def _number(name: str) -> int:
    return int(name.split(".")[1])


def canonical(name: str) -> str | None:
    """Canonical name of a tensor in a published file; None for vocabulary maps and tensors used only in training."""
    name = name.removeprefix("model.")
    if name in MAPS or NOT_DRAFTING.match(name) or name.endswith("rotary_emb.inv_freq"):
        return None
    return re.sub(r"^fc\.", "fuse.", re.sub(r"^(?:midlayer|layers\.0)\.", "block.", name))


def theirs(name: str) -> str:
    """Published name of a canonical tensor."""
    return re.sub(r"^fuse\.", "fc.", re.sub(r"^block\.", "midlayer.", name))


def published(head: HeadCheckpoint, arrays: Arrays, max_length: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and arrays by published names. arrays: by canonical names, an LM head among them. max_length: the
    trunk's context in positions."""
    named = {theirs(name): array for name, array in arrays.items()}
    if EACH in named:
        named |= _parts(named.pop(EACH), head.hidden_size)
    if block := head.spec.block:
        named[MASK] = named[MASK].reshape(1, 1, -1)
    named |= vocabulary_maps(head.draft_token_ids, head.vocab_size)
    norms = {key: True for name, key in NORM_KEYS.items() if name in arrays}
    masked = {"ptd_token_id": block.mask_token_id} if block else {}
    document = _document(head, head.draft_vocab_size)
    return {**document, "max_position_embeddings": max_length, **norms, **masked}, named


def _parts(norms: Any, hidden: int) -> dict[str, Any]:
    """Published tensors `fc_norm.{i}` of the norms of all streams: values [taps * H], or (bits, dtype name)."""
    values, *dtype = norms if isinstance(norms, tuple) else (norms,)
    parts = enumerate(np.split(values, len(values) // hidden))
    return {f"fc_norm.{i}.weight": (part, *dtype) if dtype else part for i, part in parts}


def _document(head: HeadCheckpoint, num_draft: int) -> dict[str, Any]:
    attention, _ = plain_parts(head.spec.layer)
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "qwen3" if attention.qk_norm else "llama",
        **transformer_keys(head, head.spec.num_layers, "train a head of a trunk without RoPE scaling"),
        "draft_vocab_size": num_draft,
        "target_hidden_size": head.hidden_size,
        "mlp_bias": False,
        "norm_before_residual": head.spec.norm_before_residual,
        **({"norm_output": True} if head.spec.recycle == "post_norm" else {}),
        TAPS: list(tapped_layers(head.spec.tap)),
        "torch_dtype": "bfloat16",
        OURS: {"trunk": head.trunk, "trunk_fingerprint": head.trunk_fingerprint, "training": dict(head.training)},
    }


def tensors(s: Sizes, index: int, present: Present) -> DeclaredShapes:
    """DrafterFormat.tensors. Layers are Llama's, or Qwen3's if there is a norm of q."""
    qk_norm = "layers.0.self_attn.q_norm.weight" in present
    if index:
        return block_shapes(f"layers.{index}.", s, present, qk_norm=qk_norm)
    hidden, wide, at = s["hidden"], s["target_hidden"], "layers.0."
    block = block_shapes(at, s, present, qk_norm=qk_norm, reads=2)
    if f"{at}self_attn.q_a_proj.weight" in present and f"{at}self_attn.q_proj.weight" not in present:
        block = {name: shape for name, shape in block.items() if ".self_attn." not in name}
        block |= latent_shapes(f"{at}self_attn.", s, reads=2)
    return {
        "fc.weight": (hidden, s["taps"] * wide),
        "norm.weight": (hidden,),
        "lm_head.weight": (s["draft_vocabulary"], hidden),
        f"{at}hidden_norm.weight": (hidden,),
        **block,
        **draft_vocabulary(s),
        "?embed_tokens.weight": (s["vocabulary"], hidden),
        "?fc.bias": (hidden,),
        "?input_norm.weight": (s["taps"] * wide,),
        f"?{MASK}": (1, 1, s["taps"] * wide),
        **{f"?{name}": (wide,) for name in (f"fc_norm.{i}.weight" for i in range(5)) if name in present},
    }


EAGLE3 = DrafterFormat(
    key="eagle3",
    title="EAGLE-3",
    method="eagle3",
    read=read,
    tensors=tensors,
    speculators=("eagle3",),
    gguf=("eagle3",),
    architectures=("eagle3",),
    keys=("draft_vocab_size", "eagle_config", TAPS),
    markers=("midlayer.self_attn.q_proj.weight", "model.midlayer.self_attn.q_proj.weight", "d2t", "model.d2t"),
    renamed=(("midlayer.", "layers.0."),),
    count=("num_hidden_layers",),
    aux="input",
    reduced=True,
)


# Training.


def trained_spec(layers: int, depth: int) -> HeadSpec:
    """Spec of a new head: the paper's taps, else the last three layers. llama.cpp requires exactly three taps."""
    if layers < FEWEST_LAYERS:
        raise UsageError(f"an EAGLE-3 head reads three layers, but the model has {layers}", "train --kind mtp")
    low, middle, high = paper_taps(layers)
    tap = (low, middle, high) if low < middle < high else (layers - 3, layers - 2, layers - 1)
    return HeadSpec(kind="eagle3", tap=tap, recycle="pre_norm")


def initial(start: Start, spec: HeadSpec) -> dict[str, Float32]:
    """Initial weights: random matrices; norms and biases of the trunk's last block."""
    width = len(start.norm)
    first = random_weights(np.random.default_rng(0), HEAD.shapes(spec, width), start.layer)
    first["block.hidden_norm.weight"] = first["block.input_layernorm.weight"]
    first["block.input_layernorm.weight"] = np.ones(width, np.float32)
    first["norm.weight"] = np.float32(0.5) * start.norm
    return first


HEAD = HeadKind(
    title="EAGLE-3",
    modules=modules,
    fit=fit,
    formats=(EAGLE3,),
    training=Training(
        spec=trained_spec,
        initial=initial,
        norms_residual=True,
        # each draft step reads the whole layer: the MLP of a trunk with a wide one would slow it
        layer=partial(published_layer, qk_norm=False, biases=True, inner_factor=DEFAULT_INNER),
    ),
)
