"""Where a Shape comes from: a built-in card, a checkpoint's headers, a lone config.json."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.errors import UsageError
from headstart.formats import open_checkpoint
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.drafters import MODEL, MTP, DrafterKind, classify, classify_path
from headstart.formats.json_object import read_object, read_packaged
from headstart.heads.files import MARK, read_head
from headstart.tools.inspect.parts import part_of
from headstart.tools.plan.acceptance import of_lengths
from headstart.tools.plan.config_shape import shape_of
from headstart.tools.plan.drafters import draft_model, from_checkpoint as from_head, from_config
from headstart.tools.plan.formats import declared_format, kv_bytes, weight_format
from headstart.tools.plan.roofline import SizedModel
from headstart.tools.plan.shape import Part, Shape

GGUF_TYPES = {"Q8_0": "q8_0", "Q4_1": "q4_1", "Q4_K": "q4_k_m", "Q6_K": "q8_0", "Q4_0": "q4_1"}
"""The most frequent block type -> the format whose products run alike; bytes are measured."""
LIKELY_BYTES = (0.2, 4.6)
"""A weight takes so many bytes; anything else says that the formula has counted other matrices than the file has."""


@cache
def cards() -> Mapping[str, Any]:
    """The built-in cards by name."""
    return dict(read_packaged("headstart.tools.plan", "cards.json"))


def card_names() -> list[str]:
    return [name for name, card in cards().items() if "config" in card]


def is_card(name: str | None) -> bool:
    """Does a name mean a card, which has no weights?"""
    return name in known_names()


def known_names() -> list[str]:
    """Cards and their aliases."""
    return [name for card in card_names() for name in (card, *cards()[card]["aliases"])]


def find_shape(name: str | None, weights: str | None = None) -> Shape:
    """A model by card, alias, path or Hub id; `weights` replaces the format it comes in. Raises UsageError or
    ModelError."""
    if weights is not None:
        weight_format(weights)
    card = next((key for key in card_names() if name == key or name in cards()[key]["aliases"]), None)
    shape = from_card(card) if card else from_model(name)
    return shape if weights is None else replace(shape, weights=weights, bytes_per_weight={})


def from_card(name: str) -> Shape:
    card = cards()[name]
    shape = shape_of(name, card["config"], weights=card["weights"])
    return accepting(shape, name).noted(f"shape of {name}: {card['source']}")


def accepting(shape: Shape, name: str) -> Shape:
    """With the acceptance lengths that a card knows."""
    if not (known := cards().get(name, {}).get("acceptance")):
        return shape
    return replace(shape, acceptance=of_lengths(known["lengths"]), acceptance_source=known["source"])


def from_model(name: str | None) -> Shape:
    """A checkpoint by its headers; of a Hub repo the config alone is fetched."""
    if name and not hub.is_builtin(name) and not Path(name).expanduser().exists():
        if not hub.is_repo(name):
            raise _unknown(name)
        return _from_config(name, read_object(hub.config_file(name)))
    path = Path(name).expanduser() if name and not hub.is_builtin(name) else None
    if path and path.is_dir() and not any(path.glob("*.safetensors")) and (path / "config.json").exists():
        return _from_config(str(path), read_object(path / "config.json"))
    alias = hub.resolve_alias(name)
    shape = from_checkpoint(open_checkpoint(alias.trunk), name or alias.name)
    if (head := alias.head()) is not None and shape.head.assumed:
        shape = from_head(shape, read_head(head), head.name)
    return accepting(shape, alias.name)


def _unknown(name: str) -> UsageError:
    known = f"cards: {', '.join(card_names())}; else a directory, a .gguf file or a repo id"
    close = difflib.get_close_matches(name.lower(), known_names(), n=1)
    return UsageError(f"unknown model {name!r}", f"did you mean {close[0]}? {known}" if close else known)


def _refuse(name: str, drafter: DrafterKind) -> None:
    """Raises UsageError for a drafter: it runs beside a model, whose sizes its config does not tell."""
    if drafter.separate:
        what = f"{name} is a drafter ({drafter.title}), and no model by itself"
        raise UsageError(what, f"headstart plan MODEL --head {name}")


def _from_config(name: str, config: Mapping[str, Any]) -> Shape:
    _refuse(name, classify(config))
    shape = shape_of(name, config, weights=declared_format(config))
    return shape.noted(f"shape of {name}: its config.json; no weights were looked at, format {shape.weights}")


def from_checkpoint(checkpoint: Checkpoint, name: str) -> Shape:
    """Sizes by config, bytes by the tensors' headers. Raises UsageError for a drafter."""
    _refuse(name, classify(checkpoint.config, checkpoint.tensors))
    types = Counter[str]()
    for tensor in checkpoint.tensors.values():
        types[tensor.dtype] += tensor.nbytes
    declared = declared_format(checkpoint.config)
    main = max(types, key=lambda kind: types[kind])
    config = {"tie_word_embeddings": "lm_head.weight" not in checkpoint.tensors, **checkpoint.config}
    shape = shape_of(name, config, weights=GGUF_TYPES.get(main, declared))
    measured, unlikely = measured_bytes(shape, checkpoint.tensors)
    notes = [f"shape of {name}: config and tensor headers of {checkpoint.path.name}; {main} for the most part"]
    notes += [f"the tensors of {part} do not match the config's sizes; format {shape.weights}" for part in unlikely]
    notes += undescribed(shape, checkpoint.tensors)
    return replace(shape, bytes_per_weight=measured).noted(*notes)


def sized_model(
    name: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None, *, kv: str = "bf16"
) -> SizedModel:
    """A model by its config.json: weights in the format that it declares, or of the bytes that the tensors' headers
    tell. Raises ModelError for a config that names no sizes, UsageError for a cache type that is not known."""
    shape = shape_of(name, config, weights=declared_format(config))
    if tensors:
        shape = replace(shape, bytes_per_weight=measured_bytes(shape, tensors)[0])
    return SizedModel(shape=shape, format=weight_format(shape.weights), kv=kv_bytes(kv))


def undescribed(shape: Shape, tensors: Mapping[str, Tensor]) -> list[str]:
    """Kinds of layers that the tensors' names show, but the metadata (of GGUF files, mostly) do not."""
    recurrent = any(group.attention.state for group in shape.layers)
    latent = any(group.attention.width and group.attention.splits == 1 for group in shape.layers)
    hidden = ["recurrent"] if not recurrent and any("ssm" in name or "linear_attn" in name for name in tensors) else []
    hidden += ["latent"] if not latent and any("kv_a" in name for name in tensors) else []
    return [
        f"the file has {kind} attention that its metadata do not describe: its cache is overestimated; use a card or a "
        "config.json"
        for kind in hidden
    ]


def measured_bytes(shape: Shape, tensors: Mapping[str, Tensor]) -> tuple[dict[Part, float], list[Part]]:
    """Bytes of a weight by part, and the parts whose tensors do not match the shape."""
    totals: Counter[Part] = Counter()
    for name, tensor in tensors.items():
        if (part := _part(name, shape)) is not None:
            totals[part] += tensor.nbytes
    if "lm_head" not in totals:
        totals["lm_head"] = totals["embedding"]
    sizes = {part: totals[part] / count for part, count in shape.parameters().items() if count and totals[part]}
    unlikely = [part for part, size in sizes.items() if not LIKELY_BYTES[0] < size < LIKELY_BYTES[1]]
    return {part: size for part, size in sizes.items() if part not in unlikely}, unlikely


def _part(name: str, shape: Shape) -> Part | None:
    where = part_of(name, shape.num_layers)
    if where == "layers":
        return "attention" if "attn" in name else "mlp"
    names: dict[str, Part] = {"experts": "experts", "mtp": "head", "lm_head": "lm_head", "embedding": "embedding"}
    return names.get(where)


def with_head(shape: Shape, name: str, kind: str | None = None) -> Shape:
    """With a drafter by name: a card or a whole model for `draft_model`, else a directory or a repo id, told by its
    files. Raises UsageError or ModelError."""
    path = Path(name).expanduser()
    if kind == "draft_model" or name in known_names():
        return draft_model(shape, find_shape(name))
    if (path / "config.json").is_file() and MARK in read_object(path / "config.json"):
        return from_head(shape, read_head(path), path.name)
    drafter = classify_path(name)
    if drafter.kind == MODEL or (drafter.kind == MTP and drafter.layout is None):
        return draft_model(shape, find_shape(name))
    if drafter.hidden_size not in (None, shape.hidden):
        what = f"--head {name} is made for a hidden size of {drafter.hidden_size}, {shape.name} has {shape.hidden}"
        raise UsageError(what, "give a drafter of this model")
    config = read_object(path / "config.json" if path.is_dir() else hub.config_file(name))
    return from_config(shape, drafter, name, config)
