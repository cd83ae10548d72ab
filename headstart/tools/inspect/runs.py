"""Does the engine here run a model? What its config says, and the types in a GGUF file."""

from __future__ import annotations

from typing import Any

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, widened
from headstart.formats.quantization import readable
from headstart.models.tensors import find_family, read_config


def runs_here(checkpoint: Checkpoint) -> dict[str, Any]:
    """`runs`; `why` not, in one line, and `fix`: what to do. `widened`: types that become float32, and the bytes of
    such weights then."""
    types, size = widened(checkpoint.tensors.values())
    wide = {"types": types, "bytes": size} if types else None
    try:
        read_config(checkpoint, find_family(checkpoint))
        if checkpoint.format == "gguf":
            readable(checkpoint.tensors, checkpoint.config)
    except ModelError as error:
        return {"runs": False, "why": error.message, "fix": error.hint, "widened": wide}
    return {"runs": True, "why": "", "fix": "", "widened": wide}
