"""Checkpoint formats, one file each (`FORMAT = Format(detect, open_checkpoint)`), and opening with the right format."""

from pathlib import Path

from headstart import hub, registry
from headstart.core import Progress, no_progress
from headstart.errors import ModelError
from headstart.files import user_path
from headstart.formats.base import Checkpoint, Format
from headstart.formats.json_object import read_object
from headstart.placeholder import check_placeholder, partial_files
from headstart.wording import option

HINT = "give a directory with config.json and *.safetensors, a .gguf file, a Hugging Face repo id or an alias"


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint in the format that detects it; reads only headers. ModelError for no file or unknown format."""
    path = user_path(path)
    if not path.exists():
        raise ModelError(f"{path} does not exist", HINT)
    if (found := _format_of(path)) is None:
        raise no_checkpoint(path)
    return found.open_checkpoint(path)


def is_checkpoint(path: Path) -> bool:
    """Whether a format detects the path, by its name and first bytes."""
    return _format_of(path) is not None


def _format_of(path: Path) -> Format | None:
    formats = (registry.find("formats", name).FORMAT for name in registry.available("formats"))
    return next((each for each in formats if each.detect(path)), None)


def find_checkpoint(name: str | Path, progress: Progress = no_progress) -> Checkpoint:
    """Open a path, an alias, or a repo on the Hub, from which only headers are fetched. Raises ModelError for damaged
    or missing files, UsageError for an unknown name or if the Hub cannot be reached."""
    if isinstance(name, Path):
        return open_checkpoint(name)
    if (repo := hub.repo_of(name)) is not None:
        from headstart.formats.remote import open_repo  # the Hub's client is slow to import

        return open_repo(repo, progress)
    return open_checkpoint(hub.resolve(name))


def config_alone(config: Path, name: str) -> Checkpoint:
    """A checkpoint of a config.json, without tensors."""
    return Checkpoint(config.parent, "safetensors", read_object(config), {}, canonical_names=False, name=name)


def open_described(name: str | None) -> Checkpoint:
    """Open a model by name as `find_checkpoint`, or a directory without weights, of which config.json alone. None: the
    default model. Raises UsageError or ModelError."""
    if name and hub.repo_of(name):
        return find_checkpoint(name)
    path = hub.resolve(name)
    if (path / "config.json").exists() and not is_checkpoint(path):
        return config_alone(path / "config.json", str(path))
    return open_checkpoint(path)


def no_checkpoint(path: Path) -> ModelError:
    """The error for an existing path that no format detects."""
    if (path / "adapter_config.json").exists():
        return ModelError(
            f"{path} is a LoRA adapter, not a whole model", "give its model, with " + option("lora", f"NAME={path}")
        )
    if path.name.endswith((".safetensors", ".json")) and is_checkpoint(path.parent):
        return ModelError(f"{path} is one file of a checkpoint", f"give its directory: {path.parent}")
    return ModelError(_why_unknown(path), HINT)


def pytorch_files(path: Path) -> list[Path]:
    """The files of a directory whose endings are those of PyTorch's pickles."""
    return [file for ending in ("bin", "pt", "pth") for file in path.glob(f"*.{ending}")]


def _why_unknown(path: Path) -> str:
    if path.is_file():
        check_placeholder(path)
    if not path.is_dir():
        return f"{path} is not a checkpoint: it is neither a GGUF file nor a directory"
    if not any(path.iterdir()):
        return f"{path} is an empty directory"
    if partial := next(partial_files(path), None):
        return f"{path} holds {partial}, an incomplete download"
    if files := sorted(path.glob("*.gguf")):
        return f"{path} is a directory with GGUF files; name one of them, such as {files[0].name}"
    if not (path / "config.json").exists():
        has_weights = any(path.glob("*.safetensors"))
        return f"{path} {'has weights, but' if has_weights else 'is not a checkpoint: it has'} no config.json"
    if files := pytorch_files(path):
        what = f"{path} holds {files[0].name}, a pickle, opened for heads only ("
        return what + option("head") + "); convert it to safetensors"
    return f"{path} has a config.json, but no *.safetensors file"
