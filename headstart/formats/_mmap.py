"""Mapping a file read-only."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headstart.errors import ModelError
from headstart.formats.base import Bytes


def map_file(path: Path) -> Bytes:
    """The file's bytes, uint8 [size], mapped and not read. ModelError for a missing, unreadable or empty file."""
    try:
        if not path.is_file():
            raise ModelError(f"{path} is not a file")
        if path.stat().st_size == 0:
            raise ModelError(f"{path} is empty", "download the file again")
        return np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from error
