"""What a checkpoint holds, from its headers alone: names, types and shapes of tensors, and the configs.

The same for a directory, a GGUF file and a repo on the Hub, of which only the headers are fetched.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart import hub
from headstart.core import Progress, no_progress
from headstart.errors import ModelError
from headstart.formats._header import PREFIX, Entry, header_size, parse_header
from headstart.formats._index import INDEX, SINGLE, join, missing_shard, pick, weight_map_of
from headstart.formats._json import read_object

if TYPE_CHECKING:
    from headstart.formats._gguf_file import GgufFile

HINT = "give a directory with config.json and *.safetensors, a .gguf file or a Hugging Face repo id"
CONFIG, GENERATION = "config.json", "generation_config.json"


@dataclass(frozen=True, eq=False)
class Listing:
    """A checkpoint's headers. `stray` are tensors of files that the index does not name: no engine loads them."""

    name: str
    format: str  # safetensors or gguf
    config: dict[str, Any]
    tensors: dict[str, Entry]
    generation_config: dict[str, Any] = field(default_factory=dict)
    stray: dict[str, Entry] = field(default_factory=dict)
    files: tuple[str, ...] = ()
    folder: Path | None = None  # where the files are, when they are on this machine

    def read(self, entry: Entry, begin: int, size: int) -> bytes:
        """At most `size` bytes of a tensor from its byte `begin` on; nothing for a remote one."""
        if self.folder is None:
            return b""
        with (self.folder / entry.file).open("rb") as file:
            file.seek(entry.begin + begin)
            return file.read(max(0, min(size, entry.nbytes - begin)))


def list_checkpoint(name: str | Path, progress: Progress = no_progress) -> Listing:
    """The headers of a path or a repo on the Hub. Raises ModelError for damaged or missing files, UsageError for an
    unknown name or when the Hub cannot be reached."""
    asked = None if isinstance(name, Path) else hub.repo_of(name)
    if asked is not None:
        from headstart.formats._remote import list_repo

        return list_repo(asked, progress)
    path = hub.resolve(str(name)) if hub.is_builtin(str(name)) else Path(name).expanduser()
    if path.is_dir():
        return list_directory(path)
    from headstart.formats import gguf  # tokenizers and templates: more than safetensors' headers need
    from headstart.formats._gguf_file import read

    if not gguf.detect(path):
        raise ModelError(f"{path} is neither a directory nor a GGUF file", HINT)
    return list_gguf(path, [read(part) for part in gguf.parts_of(path)])


def list_directory(path: Path) -> Listing:
    """A directory of config.json and *.safetensors files."""
    config = read_object(path / CONFIG) if (path / CONFIG).exists() else None
    here = sorted(file.name for file in path.glob("*.safetensors"))
    if config is None or not (here or (path / INDEX).exists()):
        raise ModelError(_why_not(path, config is not None), HINT)
    index = read_object(path / INDEX) if (path / INDEX).exists() else None
    files = shards_of(here, index, str(path / INDEX), str(path))
    shards = {file: read_shard(path / file) for file in files}
    found = (
        pick(weight_map_of(index, str(path / INDEX)), shards, str(path / INDEX)) if index else join(shards, str(path))
    )
    return Listing(
        name=str(path),
        format="safetensors",
        config=config,
        tensors=found,
        generation_config=read_object(path / GENERATION) if (path / GENERATION).exists() else {},
        stray=_stray(found, shards, path, here),
        files=tuple(files),
        folder=path,
    )


def _why_not(path: Path, has_config: bool) -> str:
    if files := sorted(path.glob("*.gguf")):
        return f"{path} is a directory with GGUF files; name one of them, such as {files[0].name}"
    if not has_config:
        return f"{path} is not a checkpoint: it has no config.json"
    if files := [*path.glob("*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]:
        return f"{path} holds {files[0].name}, a pickle, which is never opened; convert it to safetensors"
    return f"{path} has a config.json, but no *.safetensors file"


def shards_of(here: Iterable[str], index: Mapping[str, object] | None, index_name: str, where: str) -> list[str]:
    """The files that make the checkpoint, of those that are there. ModelError for one that is missing."""
    here = list(here)
    if index is None:
        return [SINGLE] if SINGLE in here else here
    wanted = sorted(set(weight_map_of(index, index_name).values()))
    for file in wanted:
        if file not in here:
            raise missing_shard(index_name, file)
    return wanted


def read_shard(path: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file."""
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            length = header_size(file.read(PREFIX), size, str(path))
            return parse_header(file.read(length), size, str(path), path.name)[0]
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", "is it a file, and may you read it?") from error


def _stray(
    found: Mapping[str, Entry], shards: Mapping[str, Mapping[str, Entry]], path: Path, here: Iterable[str]
) -> dict[str, Entry]:
    stray = {name: entry for tensors in shards.values() for name, entry in tensors.items() if name not in found}
    for file in here:
        if file not in shards:
            with suppress(ModelError):  # a file that is no part of the model may be anything
                stray |= {name: entry for name, entry in read_shard(path / file).items() if name not in found}
    return stray


def list_gguf(path: Path, parts: list[GgufFile], name: str = "") -> Listing:
    """A GGUF file, or the parts of one, of which the headers were read; `name` is that of a remote one."""
    from headstart.formats import gguf
    from headstart.formats._gguf_names import canonical_names

    checkpoint = gguf.join_files(path, parts)
    canonical = canonical_names(name for part in parts for name in part.spans)
    tensors = {}
    for part in parts:
        for gguf_name, (begin, size) in part.spans.items():
            tensor = checkpoint.tensors[canonical[gguf_name]]
            tensors[tensor.name] = Entry(tensor.dtype, tensor.shape, begin, begin + size, part.path.name)
    return Listing(
        name=name or str(path),
        format="gguf",
        config=checkpoint.config,
        tensors=tensors,
        generation_config=checkpoint.generation_config,
        files=tuple(part.path.name for part in parts),
        folder=None if name else path.parent,
    )
