"""A model as Ollama's lists describe it, from the headers of its checkpoint."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headstart.api import LLM
from headstart.server.prepare import Formats

Json = dict[str, Any]
LATEST = ":latest"


@dataclass(frozen=True)
class Described:
    """`listed`: an entry of /api/tags; `info`: Ollama's `model_info`."""

    listed: Json
    info: Json
    template: str

    def shown(self, formats: Formats) -> Json:
        """Of /api/show."""
        can = {"tools": True, "thinking": formats.reasoning is not None}
        return {
            "modelfile": f"FROM {self.listed['name'].removesuffix(LATEST)}",
            "parameters": "",
            "template": self.template,
            "details": self.listed["details"],
            "model_info": self.info,
            "capabilities": ["completion", *(name for name, yes in can.items() if yes)],
            "modified_at": self.listed["modified_at"],
        }


def described(llm: LLM, name: str) -> Described:
    """Under a name, with a tag behind it. `digest` is of names, types and shapes of all tensors, not of a file."""
    checkpoint, config = llm.model.checkpoint, llm.model.config
    tensors = checkpoint.tensors.values()
    count = sum(math.prod(each.shape) for each in tensors)
    family = str(checkpoint.config.get("model_type", ""))
    table = "\n".join(sorted(f"{each.name} {each.dtype} {each.shape}" for each in tensors))
    types = Counter[str]()
    for each in tensors:
        types[each.dtype] += each.nbytes
    times = [path.stat().st_mtime for path in checkpoint.files if path.exists()]
    full = name if ":" in name else name + LATEST
    listed: Json = {
        "name": full,
        "model": full,
        "modified_at": datetime.fromtimestamp(max(times, default=0), UTC).isoformat(),
        "size": sum(each.nbytes for each in tensors),
        "digest": hashlib.sha256(table.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": checkpoint.format,
            "family": family,
            "families": [family],
            "parameter_size": _short(count),
            "quantization_level": max(types, key=lambda kind: types[kind], default=""),
        },
    }
    info = {
        "general.architecture": family,
        "general.parameter_count": count,
        f"{family}.context_length": llm.engine.max_length,
        f"{family}.embedding_length": config.hidden_size,
        f"{family}.block_count": len(llm.model.decoder.layers),
        f"{family}.vocab_size": config.vocab_size,
    }
    template = llm.chat_template.sources if llm.chat_template else {}
    return Described(listed, info, next(iter(template.values()), ""))


def _short(count: int) -> str:
    """135M, 1.7B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
