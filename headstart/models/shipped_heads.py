"""Heads in this package: folders of headstart/heads, found by the trunk that they were trained on."""

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

from headstart import hub
from headstart.errors import ModelError
from headstart.formats import open_checkpoint
from headstart.formats.base import Checkpoint
from headstart.layers.weights import trunk_fingerprint
from headstart.models.tensors import canonical_tensors, find_family, read_config

KINDS = ("eagle3", "mtp")  # of a trunk's heads the first of these is its default


@dataclass(frozen=True)
class ShippedHead:
    """A head in this package: its folder, and facts of its config.json."""

    folder: Path
    kind: str
    hidden_size: int  # of its trunk, as vocab_size
    vocab_size: int
    trunk: str  # alias or Hub repo
    trunk_fingerprint: str  # layers.weights.trunk_fingerprint


@cache
def heads_in_package() -> tuple[ShippedHead, ...]:
    """All heads in this package, in the order of KINDS."""
    found = []
    for config in sorted(hub.HEADS.glob("*/config.json")):
        facts = json.loads(config.read_text("utf-8"))
        named = {each.name: facts[each.name] for each in fields(ShippedHead) if each.name != "folder"}
        found.append(ShippedHead(folder=config.parent, **named))
    return tuple(sorted(found, key=lambda each: KINDS.index(each.kind)))


def shipped_heads(checkpoint: Checkpoint) -> dict[str, Path]:
    """Kind -> folder of the heads in this package that were trained on the checkpoint's trunk, in any quantization.
    Empty for a family that is not run, and where only headers of remote files were read."""
    try:
        family = find_family(checkpoint)
        config = read_config(checkpoint, family)
    except ModelError:
        return {}
    sizes = config.hidden_size, config.vocab_size
    sized = [each for each in heads_in_package() if (each.hidden_size, each.vocab_size) == sizes]
    if not sized or not checkpoint.here:
        return {}
    fingerprint = trunk_fingerprint(canonical_tensors(checkpoint, family, config))
    return {each.kind: each.folder for each in sized if each.trunk_fingerprint == fingerprint}


def shipped_heads_at(path: Path) -> dict[str, Path]:
    """The `shipped_heads` of the checkpoint at a path; empty for a format that is not read."""
    with suppress(ModelError):
        return shipped_heads(open_checkpoint(path))
    return {}


def choose_head(heads: Mapping[str, Path], kind: str | None = None) -> Path | None:
    """The head of this kind, else the default; None without heads. heads: kind -> folder."""
    return heads.get(kind or "") or next(iter(heads.values()), None)
