"""A head as its own checkpoint: `config.json` (what it is, what trunk it fits) and `model.safetensors`."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats import _eagle3
from headstart.formats.base import Tensor
from headstart.formats.json_object import read_object
from headstart.formats.safetensors import Array, save
from headstart.formats.safetensors_file import read_file
from headstart.kernels.ops import AttentionSpec, RopeSpec

MARK = "headstart_head"
VERSION = 1
KINDS = ("mtp", "eagle3", "medusa")
DRAFT_IDS = "draft_token_ids"
WRITTEN = (
    "kind", "hidden_size", "vocab_size", "num_modules", "hidden_first", "mask_first", "tap", "recycle", "beyond",
)  # fmt: skip
"""Fields of HeadConfig that config.json holds as they are, at its top level."""
SWITCHES = ("qkv_bias", "o_bias", "mlp_bias", "qk_norm", "gated_attention")
"""Fields of BlockConfig that may be off."""
Recycle = Literal["post_norm", "pre_norm"]
Tap = Recycle | tuple[int, ...]
Beyond = Literal["last", "cycle"]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Sizes and switches of a head's decoder block."""

    intermediate_size: int
    attention: AttentionSpec
    rope: RopeSpec
    eps: float
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    gated_attention: bool = False


@dataclass(frozen=True, kw_only=True)
class HeadConfig:
    """What a head says about itself; see layers.mtp.HeadSpec for the switches. `training` is free-form provenance."""

    hidden_size: int
    vocab_size: int
    block: BlockConfig
    trunk: str
    trunk_fingerprint: str
    kind: str = "mtp"
    num_modules: int = 1
    hidden_first: bool = False
    mask_first: bool = False
    tap: Tap = "post_norm"
    recycle: Recycle = "post_norm"
    beyond: Beyond | None = None
    norm_before_residual: bool = False  # eagle3
    training: Mapping[str, Any] = field(default_factory=dict)


def is_head(path: Path) -> bool:
    """Does a directory say that it is a head, of our layout or EAGLE-3's?"""
    config = path / "config.json"
    if not config.is_file():
        return False
    document = read_object(config)
    return MARK in document or _eagle3.matches(document)


def read_head(path: Path) -> tuple[HeadConfig, dict[str, Tensor], NDArray[np.int64] | None]:
    """Config, tensors under canonical names, and the draft vocabulary (ascending target ids; None: the full one).
    Raises ModelError for a directory that is no head, or a damaged one."""
    if not path.is_dir():
        raise ModelError(f"the head {path} is not a directory", "give the directory that headstart train wrote")
    document, tensors = read_object(path / "config.json"), read_file(path / "model.safetensors")
    if _eagle3.matches(document):
        return _eagle3.parse(document, tensors, path)
    config = _parse(document, path)
    ids = tensors.pop(DRAFT_IDS, None)
    return config, tensors, None if ids is None else _draft_ids(ids, config, path)


def write_head(
    path: Path, config: HeadConfig, tensors: Mapping[str, Array], draft_token_ids: NDArray[np.int64] | None
) -> None:
    """Write the directory in one step; a directory of that name is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        document, arrays = _layout(config, tensors, draft_token_ids)
        save(temporary / "model.safetensors", arrays)
        (temporary / "config.json").write_text(json.dumps(document, indent=2) + "\n", "utf-8")
        old = temporary.with_name(f"{temporary.name}.old")
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        shutil.rmtree(old, ignore_errors=True)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    os.sync()


def _layout(
    config: HeadConfig, tensors: Mapping[str, Array], draft_token_ids: NDArray[np.int64] | None
) -> tuple[dict[str, Any], dict[str, Array]]:
    """config.json and tensors as the files hold them."""
    if config.kind != "eagle3":
        extra = {} if draft_token_ids is None else {DRAFT_IDS: draft_token_ids.astype(np.int32)}
        return _document(config), {**tensors, **extra}
    named: dict[str, Array] = {_eagle3.theirs(name): tensor for name, tensor in tensors.items()}
    if draft_token_ids is None:
        return _eagle3.document(config, config.vocab_size), named
    mask = np.zeros(config.vocab_size, np.bool_)
    mask[draft_token_ids] = True
    maps = {"d2t": draft_token_ids - np.arange(len(draft_token_ids)), "t2d": mask}
    return _eagle3.document(config, len(draft_token_ids)), {**named, **maps}


def _document(config: HeadConfig) -> dict[str, Any]:
    block, attention, rope = config.block, config.block.attention, config.block.rope
    return {
        MARK: VERSION,
        **{name: getattr(config, name) for name in WRITTEN},
        "block": {
            "intermediate_size": block.intermediate_size,
            "num_heads": attention.num_heads,
            "num_kv_heads": attention.num_kv_heads,
            "head_dim": attention.head_dim,
            "scale": attention.scale,
            "eps": block.eps,
            "rope": {"inv_freq": list(rope.inv_freq), "rotary_dim": rope.rotary_dim, "scale": rope.scale},
            **{name: getattr(block, name) for name in SWITCHES},
        },
        "trunk": config.trunk,
        "trunk_fingerprint": config.trunk_fingerprint,
        "training": dict(config.training),
    }


def _parse(data: Mapping[str, Any], path: Path) -> HeadConfig:
    if data.get(MARK) != VERSION:
        hint = "give the directory that headstart train wrote"
        raise ModelError(f"{path} is no headstart head: {MARK} is {data.get(MARK)!r}, not {VERSION}", hint)
    if data.get("kind") not in KINDS:
        raise ModelError(f"the head {path} is of kind {data.get('kind')!r}", f"known kinds: {', '.join(KINDS)}")
    try:
        block, rope = data["block"], data["block"]["rope"]
        attention = AttentionSpec(
            int(block["num_heads"]), int(block["num_kv_heads"]), int(block["head_dim"]), float(block["scale"])
        )
        switches = {name: bool(block.get(name, False)) for name in SWITCHES}
        return HeadConfig(
            kind=data["kind"],
            hidden_size=int(data["hidden_size"]),
            vocab_size=int(data["vocab_size"]),
            num_modules=int(data["num_modules"]),
            hidden_first=bool(data["hidden_first"]),
            mask_first=bool(data["mask_first"]),
            tap=_one_of(data, "tap", get_args(Recycle)),
            recycle=_one_of(data, "recycle", get_args(Recycle)),
            beyond=_one_of(data, "beyond", (None, *get_args(Beyond))),
            block=BlockConfig(
                intermediate_size=int(block["intermediate_size"]),
                attention=attention,
                rope=RopeSpec(tuple(map(float, rope["inv_freq"])), int(rope["rotary_dim"]), float(rope["scale"])),
                eps=float(block["eps"]),
                **switches,
            ),
            trunk=str(data["trunk"]),
            trunk_fingerprint=str(data["trunk_fingerprint"]),
            training=dict(data.get("training") or {}),
        )
    except (KeyError, TypeError, ValueError) as error:
        where = path / "config.json"
        raise ModelError(f"{where}: {error} is missing or wrong", "was the head written whole?") from error


def _one_of(data: Mapping[str, Any], name: str, allowed: tuple[Any, ...]) -> Any:
    if data[name] not in allowed:
        raise ValueError(f"{name} {data[name]!r}")
    return data[name]


def _draft_ids(tensor: Tensor, config: HeadConfig, path: Path) -> NDArray[np.int64]:
    ids: NDArray[np.int64] = tensor.numpy().astype(np.int64)
    if ids.ndim != 1 or not len(ids) or (np.diff(ids) <= 0).any() or ids[0] < 0 or ids[-1] >= config.vocab_size:
        raise ModelError(f"the head {path}: {DRAFT_IDS} must be ascending token ids below {config.vocab_size}")
    return ids
