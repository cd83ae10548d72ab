"""Does the engine here run a model? What its config alone says."""

from __future__ import annotations

from typing import Any

from headstart.errors import ModelError
from headstart.formats.base import Checkpoint
from headstart.models.tensors import find_family, read_config


def runs_here(checkpoint: Checkpoint) -> dict[str, Any]:
    """`runs`; `why` not, in one line, and `fix`: what to do."""
    try:
        read_config(checkpoint, find_family(checkpoint))
    except ModelError as error:
        return {"runs": False, "why": error.message, "fix": error.hint}
    return {"runs": True, "why": "", "fix": ""}
