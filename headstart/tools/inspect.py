"""`headstart inspect`: architecture, sizes and weight types of a checkpoint, and the heads that it really holds.

Heads are looked for twice: what the config declares and which tensors are there. Fine-tuning and quantization tools
often keep the first and drop the second.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.core import Report
from headstart.formats import open_checkpoint
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.head import read_head

DECLARING_KEYS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "nextn_predict_layers")
NESTED_CONFIGS = ("text_config", "llm_config", "language_config")
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length")
SIZE_KEYS = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size",
)  # fmt: skip
_MTP = re.compile(r"(?:^|\.)(mtp(?:_layers|_block)?\.(?:layers\.)?(?:\d+\.)?|nextn\.)")
_LAYER = re.compile(r"^(?:model\.|language_model\.|text_model\.)*(?:layers|blk|h)\.(\d+)\.")
_OTHER = re.compile(r"(?:^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector)\.")


def run(model: str | None = None, *, head: str | None = None) -> Report:
    """Describe a model and its heads; `ok` is false when the config declares heads that are not there."""
    alias = hub.resolve_alias(model)
    checkpoint = open_checkpoint(alias.trunk)
    attached = head or alias.head
    data = describe(checkpoint)
    data["attached_head"] = describe_head(Path(attached)) if attached else None
    return Report(ok=data["heads"]["status"] != "missing", data=data, lines=_lines(data))


def describe(checkpoint: Checkpoint) -> dict[str, Any]:
    """Everything about one checkpoint, from headers alone."""
    text = text_config(checkpoint.config)
    layers = int(text.get("num_hidden_layers") or 0)
    groups: dict[str, list[Tensor]] = defaultdict(list)
    for name, tensor in checkpoint.tensors.items():
        groups[part_of(name, layers)].append(tensor)
    return {
        "path": str(checkpoint.path),
        "format": checkpoint.format,
        "architecture": text.get("model_type"),
        "sizes": {key: text[key] for key in SIZE_KEYS if text.get(key) is not None},
        "context_length": next((text[key] for key in LENGTH_KEYS if text.get(key)), None),
        "tied_embeddings": "lm_head" not in groups,
        "parts": {part: _part(tensors) for part, tensors in sorted(groups.items(), key=_part_order)},
        "total": _part(checkpoint.tensors.values()),
        "heads": find_heads(text, groups["mtp"], layers),
    }


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's own settings; a multimodal config nests them. Outer values stand where none are inside."""
    nested: dict[str, Any] = next((config[key] for key in NESTED_CONFIGS if isinstance(config.get(key), dict)), {})
    return {**config, **nested}


def part_of(name: str, num_layers: int) -> str:
    """Which part of a model a tensor belongs to."""
    if _MTP.search(name):
        return "mtp"
    if _OTHER.search(name):
        return "other modalities"
    if match := _LAYER.match(name):
        return "mtp" if num_layers and int(match.group(1)) >= num_layers else "layers"
    if "lm_head" in name or name.startswith("output."):
        return "lm_head"
    if "embed" in name or "wte" in name:
        return "embedding"
    return "norms and rest"


def find_heads(text: Mapping[str, Any], tensors: Iterable[Tensor], num_layers: int) -> dict[str, Any]:
    """What the config declares against what the tensors hold."""
    key = next((key for key in DECLARING_KEYS if text.get(key)), None)
    declared = int(text[key]) if key else 0
    places = Counter(place_of(tensor.name) for tensor in tensors)
    if declared and not places:
        status = "missing"
    elif places:
        status = "present"
    else:
        status = "none"
    return {"status": status, "declared": declared, "declared_by": key, "found": dict(sorted(places.items()))}


def place_of(name: str) -> str:
    """The prefix under which a head's tensors stand, such as `mtp.` or `model.layers.61.`."""
    if match := _MTP.search(name):
        return name[: match.end()] + "*"
    if match := _LAYER.match(name):
        return name[: match.end()] + "*"
    return name


def describe_head(path: Path) -> dict[str, Any]:
    """A head that is a checkpoint of its own."""
    head, tensors, draft_token_ids = read_head(path)
    return {
        "path": str(path),
        "kind": head.kind,
        "modules": head.num_modules,
        "hidden_size": head.hidden_size,
        "vocab_size": head.vocab_size,
        "draft_vocab_size": head.vocab_size if draft_token_ids is None else len(draft_token_ids),
        "trunk": head.trunk,
        **_part(tensors.values()),
    }


def _part(tensors: Iterable[Tensor]) -> dict[str, Any]:
    bytes_of: Counter[str] = Counter()
    parameters = 0
    for tensor in tensors:
        bytes_of[tensor.dtype] += tensor.nbytes
        parameters += math.prod(tensor.shape)
    return {"parameters": parameters, "bytes": sum(bytes_of.values()), "types": dict(bytes_of.most_common())}


def _part_order(item: tuple[str, Any]) -> tuple[int, str]:
    order = ("embedding", "layers", "norms and rest", "lm_head", "mtp")
    return (order.index(item[0]) if item[0] in order else len(order), item[0])


def _lines(data: dict[str, Any]) -> list[str]:
    rows = [*data["parts"].items(), ("total", data["total"])]
    return [
        f"{data['architecture']} ({data['format']}), {data['path']}",
        f"context length {data['context_length']}; " + ", ".join(f"{k} {v}" for k, v in data["sizes"].items()),
        "",
        f"{'part':18}{'parameters':>14}{'MB':>10}  types",
        *(_part_line(name, part) for name, part in rows if part["parameters"]),
        "" if not data["tied_embeddings"] else "no lm_head of its own: the embedding is used",
        _heads_line(data["heads"]),
        *([_attached_line(data["attached_head"])] if data["attached_head"] else []),
    ]


def _part_line(name: str, part: dict[str, Any]) -> str:
    types = ", ".join(f"{kind} {size / max(part['bytes'], 1):.0%}" for kind, size in part["types"].items())
    return f"{name:18}{part['parameters']:>14,}{part['bytes'] / 1e6:>10.1f}  {types}"


def _heads_line(heads: dict[str, Any]) -> str:
    where = ", ".join(f"{place} ({count} tensors)" for place, count in heads["found"].items())
    declared = f"{heads['declared_by']} = {heads['declared']}" if heads["declared_by"] else "the config declares none"
    return {
        "none": f"heads: none inside this checkpoint ({declared})",
        "missing": f"heads: MISSING: {declared}, but no such tensors are there",
        "present": f"heads: {where}; {declared}",
    }[str(heads["status"])]


def _attached_line(head: dict[str, Any]) -> str:
    return (
        f"attached head: {head['kind']}, {head['modules']} module, {head['parameters']:,} parameters, "
        f"{head['bytes'] / 1e6:.1f} MB, {head['draft_vocab_size']:,} draft tokens, {head['path']}"
    )
