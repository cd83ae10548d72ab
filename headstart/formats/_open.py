"""Opening a checkpoint by detection, over all formats the registry finds."""

from __future__ import annotations

from pathlib import Path

from headstart import registry
from headstart.errors import ModelError
from headstart.formats.base import Checkpoint, Format

_HINT = "give a directory with config.json and *.safetensors, a .gguf file, a Hugging Face repo id or an alias"
_NOT_MODELS = {"head"}  # a head's own checkpoint, which is opened by name and never detected


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint by detection. ModelError if nothing is there or no format knows it."""
    path = Path(path).expanduser()
    if not path.exists():
        raise ModelError(f"{path} does not exist", _HINT)
    for name in registry.available("formats"):
        if name in _NOT_MODELS:
            continue
        found: Format = registry.find("formats", name).FORMAT
        if found.detect(path):
            return found.open_checkpoint(path)
    raise ModelError(_why_unknown(path), _HINT)


def _why_unknown(path: Path) -> str:
    if not path.is_dir():
        return f"{path} is not a checkpoint: it is neither a GGUF file nor a directory"
    if not any(path.iterdir()):
        return f"{path} is an empty directory"
    if files := sorted(path.glob("*.gguf")):
        return f"{path} is a directory with GGUF files; name one of them, such as {files[0].name}"
    if not (path / "config.json").exists():
        return f"{path} is not a checkpoint: it has no config.json"
    return f"{path} has a config.json, but no *.safetensors file"
