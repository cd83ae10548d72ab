"""Head directories: `config.json` (the head's kind and sizes, its trunk) and `model.safetensors`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from headstart import registry
from headstart.errors import ModelError
from headstart.files import atomic_folder
from headstart.formats import gguf
from headstart.formats.base import Tensor
from headstart.formats.gguf_file import read as read_gguf
from headstart.formats.json_object import read_object
from headstart.formats.pickled import pickles_in, read_pickles
from headstart.formats.quantization import readable
from headstart.formats.rows import in_memory
from headstart.formats.safetensors import save, whole_directory
from headstart.formats.safetensors_file import read_file
from headstart.heads.base import MAX_MODULES, BlockSpec, HeadSpec
from headstart.heads.kind import HeadCheckpoint, checked_draft_ids, plain_parts, reading_config
from headstart.heads.layouts import gguf as drafter_file
from headstart.heads.published import MARK, Arrays, Document, DrafterFormat, identify_bare
from headstart.kernels.ops import AttentionSpec, RawTensor, RopeSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.system import sync_disks

VERSION = 1
DRAFT_IDS = "draft_token_ids"
SWITCHES = ("hidden_first", "mask_first")
STATES = ("post_norm", "pre_norm")
CHOICES: Mapping[str, tuple[str | None, ...]] = {"tap": STATES, "recycle": STATES, "beyond": (None, "last", "cycle")}
"""Fields of HeadSpec that config.json holds as they are; `tap` may be a list of layers too."""
BLOCK = "block_drafter"
BLOCK_FACTS = {
    each.name: each.type
    for each in fields(BlockSpec)
    if not each.name.endswith("vocab_size") and each.name != "in_checkpoint"
}
"""Key of config.json for a BlockSpec, and the fields under it: name -> type as written."""
LATER = ("markov_kind", "top_k", "conv_taps", "conv_group", "embedding_scale", "logit_softcap")
"""Fields of BLOCK_FACTS that older files lack; they then have their defaults."""


def is_head(path: Path) -> bool:
    """True if the config.json of a directory declares a head, in headstart's own or a published layout."""
    config = path / "config.json"
    if not config.is_file():
        return False
    document = read_object(config)
    return MARK in document or _foreign(document, path) is not None


def read_if_head(path: Path) -> HeadCheckpoint | None:
    """Reads a head directory in any known layout, or a block drafter's GGUF file. None for other files. Raises
    ModelError for a damaged head."""
    if gguf.detect(path):
        file = read_gguf(path)
        if file.metadata.get("general.architecture") != drafter_file.ARCHITECTURE:
            return None
        document, tensors = drafter_file.as_published(file)
        return _read_foreign(identify_bare(document), document, tensors, path)
    if not (path / "config.json").is_file():
        return None
    document = read_object(path / "config.json")
    if MARK in document:
        return _read_own(document, readable(read_file(path / "model.safetensors"), document), path)
    if (foreign := _foreign(document, path)) is None:
        return None
    stored = readable(_tensors_of(path), document)
    return _read_foreign(foreign, document, {name: in_memory(each) for name, each in stored.items()}, path)


def read_head(path: Path) -> HeadCheckpoint:
    """Like `read_if_head`. Raises ModelError if there is no head."""
    if (head := read_if_head(path)) is None:
        what = "is no head" if path.exists() else "does not exist"
        raise ModelError(f"{path} {what}", "give the directory that headstart train wrote")
    return head


def _read_foreign(
    found: DrafterFormat | None, document: Document, tensors: Mapping[str, Tensor], path: Path
) -> HeadCheckpoint:
    assert found and found.read
    head: HeadCheckpoint = found.read(document, tensors, path)
    return head


def write_head(path: Path, head: HeadCheckpoint, arrays: Arrays) -> None:
    """Writes a head directory in headstart's layout, atomically. In an existing directory the head's files are
    replaced and others stay.
    arrays: by canonical names. Raises CapacityError if the directory cannot be written."""
    ids = head.draft_token_ids
    with atomic_folder(path, keep=True) as aside:
        save(aside / "model.safetensors", {**arrays, **({} if ids is None else {DRAFT_IDS: ids.astype(np.int32)})})
        (aside / "config.json").write_text(json.dumps(_document(head), indent=2) + "\n", "utf-8")
    sync_disks()


def _foreign(document: Document, path: Path) -> DrafterFormat | None:
    """The published format of this directory; None if there is none, or none that can be read."""
    found = identify_bare(document)
    if found is None or found.read is None:
        return None
    sure = not found.bare or bool({*found.markers} & _tensors_of(path).keys())
    return found if sure else None


def _tensors_of(path: Path) -> dict[str, Tensor]:
    """All tensors of a directory, from safetensors or else from pickles."""
    if (pickles := pickles_in(path)) and not any(path.glob("*.safetensors")):
        return read_pickles(pickles)
    return whole_directory(path)


def _document(head: HeadCheckpoint) -> dict[str, Any]:
    spec = head.spec
    return {
        MARK: VERSION,
        "kind": spec.kind,
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "num_modules": spec.num_modules,
        **{name: getattr(spec, name) for name in (*SWITCHES, *CHOICES)},
        **({} if spec.output_norm else {"output_norm": False}),
        **({"own_lm_head": spec.own_lm_head} if spec.own_lm_head else {}),
        **({"norm_before_residual": True} if spec.norm_before_residual else {}),
        **({"num_layers": spec.num_layers} if spec.num_layers > 1 else {}),
        **({"block": _block(spec.layer)} if spec.layer else {}),
        **({BLOCK: {name: getattr(spec.block, name) for name in BLOCK_FACTS}} if spec.block else {}),
        "trunk": head.trunk,
        "trunk_fingerprint": head.trunk_fingerprint,
        "training": dict(head.training),
    }


def _block(layer: LayerConfig) -> dict[str, Any]:
    attention, mlp = plain_parts(layer)
    spec, rope = attention.spec, attention.rope
    assert rope
    return {
        "intermediate_size": mlp.inner, "num_heads": spec.num_heads, "num_kv_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim, "scale": spec.scale, "eps": layer.eps,
        "rope": {
            "inv_freq": list(rope.inv_freq), "rotary_dim": rope.rotary_dim, "scale": rope.scale,
            **({"axes": list(rope.axes)} if rope.axes else {}),
        },
        "qkv_bias": attention.qkv_bias, "o_bias": attention.o_bias, "mlp_bias": mlp.bias, "qk_norm": attention.qk_norm,
        "gated_attention": attention.gated,
    }  # fmt: skip


class Shaped(Protocol):
    """A tensor of which only the header may be known."""

    @property
    def shape(self) -> Sequence[int] | None: ...


def spec_of(document: Document, tensors: Mapping[str, Shaped], path: Path) -> HeadSpec:
    """The HeadSpec of a config.json in headstart's layout and the shapes of the tensors. Raises ModelError."""
    if document.get(MARK) != VERSION:
        hint = "give the directory that headstart train wrote"
        raise ModelError(f"{path} is no headstart head: {MARK} is {document.get(MARK)!r}, not {VERSION}", hint)
    if document.get("kind") not in (kinds := registry.available("heads")):
        raise ModelError(f"the head {path} is of kind {document.get('kind')!r}", f"known kinds: {', '.join(kinds)}")
    with reading_config(path, "was the head written whole?"):
        spec, vocab_size = _spec(document), int(document["vocab_size"])
        if spec.block is None:
            return spec
        ids = tensors.get(DRAFT_IDS)
        num_draft = ids.shape[0] if ids and ids.shape else vocab_size
        return replace(spec, block=replace(spec.block, vocab_size=vocab_size, draft_vocab_size=num_draft))


def _read_own(document: Document, tensors: Mapping[str, RawTensor], path: Path) -> HeadCheckpoint:
    spec = spec_of(document, tensors, path)
    with reading_config(path, "was the head written whole?"):
        vocab_size, ids, where = int(document["vocab_size"]), tensors.get(DRAFT_IDS), f"{path}: {DRAFT_IDS}"
        return HeadCheckpoint(
            spec=spec,
            hidden_size=int(document["hidden_size"]),
            vocab_size=vocab_size,
            draft_token_ids=None if ids is None else checked_draft_ids(in_memory(ids).numpy(), vocab_size, where),
            tensors={name: tensor for name, tensor in tensors.items() if name != DRAFT_IDS},
            trunk=str(document["trunk"]),
            trunk_fingerprint=str(document["trunk_fingerprint"]),
            training=dict(document.get("training") or {}),
        )


def _spec(document: Document) -> HeadSpec:
    facts: dict[str, Any] = {name: bool(document[name]) for name in SWITCHES}
    facts |= {name: _one_of(document, name, choices) for name, choices in CHOICES.items()}
    if not 0 < int(document["num_modules"]) <= MAX_MODULES:
        raise ValueError(f"num_modules {document['num_modules']}")
    return HeadSpec(
        kind=document["kind"],
        layer=_layer(document["block"]) if "block" in document else None,
        num_modules=int(document["num_modules"]),
        output_norm=bool(document.get("output_norm", True)),
        own_lm_head=int(document.get("own_lm_head", 0)),
        norm_before_residual=bool(document.get("norm_before_residual", False)),
        num_layers=int(document.get("num_layers", 1)),
        block=_block_spec(document[BLOCK]) if BLOCK in document else None,
        **facts,
    )


def _block_spec(facts: Document) -> BlockSpec:
    """BlockSpec of the config.json object under BLOCK. Raises KeyError, TypeError or ValueError."""
    values: dict[str, Any] = {}
    for name, kind in BLOCK_FACTS.items():
        if name in LATER and name not in facts:
            continue
        value = facts[name]
        if kind == "tuple[int, ...]":
            value = _whole_numbers(name, value)
        elif kind == "float":
            value = float(value)
        elif type(value).__name__ != kind:
            raise TypeError(f"{name} {value!r}")
        values[name] = value
    if unknown := [name for name, value in facts.items() if name not in BLOCK_FACTS and value]:
        raise ValueError(f"{BLOCK}.{min(unknown)}")
    return BlockSpec(**values)


def _whole_numbers(name: str, values: Any) -> tuple[int, ...]:
    if not isinstance(values, list) or not all(type(each) is int for each in values):
        raise TypeError(f"{name} {values!r}")
    return tuple(values)


def _layer(block: Document) -> LayerConfig:
    rope = block["rope"]
    spec = AttentionSpec(
        int(block["num_heads"]), int(block["num_kv_heads"]), int(block["head_dim"]), float(block["scale"])
    )
    return LayerConfig(
        mixer=AttentionConfig(
            spec=spec,
            rope=RopeSpec(
                tuple(map(float, rope["inv_freq"])),
                int(rope["rotary_dim"]),
                float(rope["scale"]),
                axes=tuple(map(int, rope.get("axes", ()))),
            ),
            qkv_bias=bool(block.get("qkv_bias")),
            o_bias=bool(block.get("o_bias")),
            qk_norm=bool(block.get("qk_norm")),
            gated=bool(block.get("gated_attention")),
        ),
        mlp=MLPConfig(inner=int(block["intermediate_size"]), bias=bool(block.get("mlp_bias"))),
        eps=float(block["eps"]),
    )


def _one_of(document: Document, name: str, choices: tuple[str | None, ...]) -> Any:
    if name == "tap" and isinstance(document[name], list):
        return _whole_numbers(name, document[name])
    if document[name] not in choices:
        raise ValueError(f"{name} {document[name]!r}")
    return document[name]
