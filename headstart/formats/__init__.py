"""Checkpoint formats, one file each: `FORMAT = Format(detect, open_checkpoint)`. Helper files start with `_`."""

from headstart.formats._open import open_checkpoint

__all__ = ["open_checkpoint"]
