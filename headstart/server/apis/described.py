"""A model as Ollama's lists describe it, from the headers of its checkpoint, in memory or not."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from datetime import UTC, datetime
from typing import Any

from headstart.formats.base import Checkpoint
from headstart.server.entries import Entry, context_of, headers_of, sizes_of
from headstart.server.shelf import LATEST

Json = dict[str, Any]


def listed(entry: Entry) -> list[Json]:
    """Entries of /api/tags, one for each name. Reads files."""
    known = _described(headers_of(entry))
    full = [name if ":" in name else name + LATEST for name in entry.offer.names]
    return [{"name": name, "model": name, **known} for name in full]


def shown(entry: Entry, name: str) -> Json:
    """Of /api/show, under a name. Reads files."""
    checkpoint, config = headers_of(entry), sizes_of(entry)
    known = _described(checkpoint)
    family = known["details"]["family"]
    info: Json = {"general.architecture": family}
    if checkpoint is not None and config is not None:
        info |= {
            "general.parameter_count": _parameters(checkpoint),
            f"{family}.context_length": context_of(entry),
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.block_count": config.num_layers,
            f"{family}.vocab_size": config.vocab_size,
        }
    template = entry.served.llm.chat_template if entry.served else checkpoint and checkpoint.chat_template()
    can = {"tools": True, "thinking": entry.served is not None and entry.served.formats.reasoning is not None}
    return {
        "modelfile": f"FROM {name.removesuffix(LATEST)}",
        "parameters": "",
        "template": next(iter(template.sources.values()), "") if template else "",
        "details": known["details"],
        "model_info": info,
        "capabilities": ["completion", *(name for name, yes in can.items() if yes)],
        "modified_at": known["modified_at"],
    }


def _described(checkpoint: Checkpoint | None) -> Json:
    """`digest` is of names, types and shapes of all tensors, not of a file. Of a model that is not on this machine
    nothing is known."""
    tensors = list(checkpoint.tensors.values()) if checkpoint else []
    family = str(checkpoint.config.get("model_type", "")) if checkpoint else ""
    table = "\n".join(sorted(f"{each.name} {each.dtype} {each.shape}" for each in tensors))
    types = Counter[str]()
    for each in tensors:
        types[each.dtype] += each.nbytes
    times = [path.stat().st_mtime for path in checkpoint.files if path.exists()] if checkpoint else []
    return {
        "modified_at": datetime.fromtimestamp(max(times, default=0), UTC).isoformat(),
        "size": sum(each.nbytes for each in tensors),
        "digest": hashlib.sha256(table.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": checkpoint.format if checkpoint else "",
            "family": family,
            "families": [family],
            "parameter_size": _short(_parameters(checkpoint) if checkpoint else 0),
            "quantization_level": max(types, key=lambda kind: types[kind], default=""),
        },
    }


def _parameters(checkpoint: Checkpoint) -> int:
    return sum(math.prod(each.shape) for each in checkpoint.tensors.values())


def _short(count: int) -> str:
    """135M, 1.7B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
