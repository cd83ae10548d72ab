"""Folders of records: what requests asked and what the model wrote, as token ids, for `headstart adapt`.

`manifest.json` says of which model; each line of `records-*.jsonl` is a text: {"prompt_ids", "response_ids",
"temperature"}. The folder is its owner's alone (0700, files 0600). A line that a crash has cut short is no record.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from headstart.engine.load import Model
from headstart.errors import CapacityError, UsageError
from headstart.files import read_regular, write_whole
from headstart.layers.fingerprint import weights_fingerprint

MANIFEST = "manifest.json"
VERSION = 1
FILES = "records-*.jsonl"
PARTS = 16
"""Files of a full folder: the oldest goes when there is no room for another."""


@dataclass(frozen=True)
class RecordedModel:
    """Which model has written. `name` is what it was called, and may change."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    fingerprint: str

    @classmethod
    def of(cls, model: Model) -> Self:
        config = model.config
        fingerprint = weights_fingerprint(model.weights.tensors)
        return cls(model.name, config.vocab_size, config.hidden_size, config.num_layers, fingerprint)

    def check(self, folder: Path) -> None:
        """Raises UsageError for records of another model, saying what differs, and for what is no folder of records."""
        theirs = read_manifest(folder)
        for name in ("vocab_size", "hidden_size", "num_layers", "fingerprint"):
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours != other:
                raise UsageError(
                    f"{folder} holds records of another model, {theirs.name}: its {name} is {other}, that of "
                    f"{self.name} is {ours}",
                    "give each model a folder of its own",
                )


@dataclass(frozen=True)
class Record:
    """One text, and how it was drawn."""

    prompt_ids: tuple[int, ...]
    response_ids: tuple[int, ...]
    temperature: float = 0.0

    def line(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes, vocab_size: int) -> Self:
        """Raises ValueError for a line that is no record of this vocabulary."""
        document = json.loads(line)
        if not isinstance(document, dict):
            raise ValueError("not an object")
        prompt, response = (_ids(document.get(name), vocab_size) for name in ("prompt_ids", "response_ids"))
        temperature = document.get("temperature", 0.0)
        if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < 100:
            raise ValueError("temperature is no number from 0 to 100")
        return cls(prompt, response, float(temperature))


def _ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    if not isinstance(value, list) or not value:
        raise ValueError("no token ids")
    if not all(type(token) is int and 0 <= token < vocab_size for token in value):
        raise ValueError(f"a token id is not within 0..{vocab_size - 1}")
    return tuple(value)


def read_manifest(folder: Path) -> RecordedModel:
    """Raises UsageError for what is no folder of records."""
    path, hint = folder / MANIFEST, "give the folder of headstart serve --record"
    if not folder.is_dir():
        raise UsageError(f"{folder} is {'a file' if folder.exists() else 'not there'}", hint)
    try:
        document = json.loads(read_regular(path))
        if document["headstart_records"] != VERSION:
            raise UsageError(f"{path} is of version {document['headstart_records']!r}, this program reads {VERSION}")
        return RecordedModel(**{name: kind(document[name]) for name, kind in _TYPES.items()})
    except FileNotFoundError:
        raise UsageError(f"{folder} holds no records: it has no {MANIFEST}", hint) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", "is it yours?") from None
    except (ValueError, KeyError, TypeError) as error:
        hint += "; one that is damaged: move it away and record anew"
        raise UsageError(f"{path} is damaged, or no manifest of records: {error}", hint) from None


_TYPES: dict[str, Any] = {"name": str, "vocab_size": int, "hidden_size": int, "num_layers": int, "fingerprint": str}


@dataclass
class Found:
    """What a folder holds: usable records, oldest first, and lines that are none."""

    records: list[Record] = field(default_factory=list)
    damaged: int = 0


def read_records(folder: Path, vocab_size: int) -> Found:
    """Raises UsageError for a folder without any, or that cannot be read."""
    found = Found()
    try:
        for path in sorted(folder.glob(FILES)):
            for line in read_regular(path).split(b"\n"):
                try:
                    if line:
                        found.records.append(Record.of(line, vocab_size))
                except (ValueError, RecursionError):
                    found.damaged += 1
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or folder}: {error.strerror}", "are they yours?") from None
    if not found.records:
        lines = f"{found.damaged} damaged lines" if found.damaged else "no text yet"
        raise UsageError(f"{folder} holds {lines}", "let headstart serve --record run for a while")
    return found


def prepare_folder(folder: Path) -> None:
    """Make it, or take it: the owner's alone from now on. Raises UsageError for one that holds something else,
    CapacityError where it cannot be written."""
    with _written(folder):
        if folder.exists() and not folder.is_dir():
            raise UsageError(f"--record: {folder} is a file", "give a folder of its own")
        if folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).exists():
            raise UsageError(f"--record: {folder} holds other files", "give a folder of its own, or a new name")
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        probe = folder / f".probe.{os.getpid()}"
        probe.touch(0o600)
        probe.unlink()


def claim_folder(folder: Path, model: RecordedModel) -> None:
    """The folder is this model's: raises what `RecordedModel.check` and `prepare_folder` raise."""
    prepare_folder(folder)
    if (folder / MANIFEST).exists():
        model.check(folder)
        return
    with _written(folder):
        write_whole(folder / MANIFEST, json.dumps({"headstart_records": VERSION, **asdict(model)}, indent=1) + "\n")
        (folder / MANIFEST).chmod(0o600)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CapacityError(f"--record: cannot write {folder}: {error.strerror}", "give another folder") from None


class RecordFiles:
    """Appends lines, whole or not at all, within `most_bytes`: the oldest file goes when there is no room for another.
    Several servers of one model may write to one folder, each to files of its own."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        self.folder, self._most, self._part = folder, most_bytes, max(most_bytes // PARTS, 1)
        self._path, self._handle, self._size = folder, -1, 0

    def append(self, line: bytes) -> None:
        """Raises OSError where it cannot be written; the file then ends as it did before."""
        if self._handle < 0 or self._is_gone() or (self._size and self._size + len(line) > self._part):
            self._next(len(line))
        try:
            written = os.write(self._handle, line)
            while written < len(line):  # the next write says why
                written += os.write(self._handle, line[written:])
        except OSError:
            os.ftruncate(self._handle, self._size)
            raise
        self._size += len(line)

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def _is_gone(self) -> bool:
        """Has somebody deleted or moved the file? What is written to it would be seen by nobody."""
        with suppress(OSError):
            return not os.path.samestat(self._path.stat(), os.fstat(self._handle))
        return True

    def _next(self, size: int) -> None:
        """Another file. A folder that is not there any more is not made again: it was taken away, or unmounted."""
        self.close()
        self._make_room(max(size, self._part))
        self._path = self.folder / f"records-{time.time_ns():020}-{os.getpid()}.jsonl"
        self._handle = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
        self._size = 0

    def _make_room(self, size: int) -> None:
        files = sorted(self.folder.glob(FILES))
        sizes: Seq[int] = [path.stat().st_size for path in files]
        total = sum(sizes)
        for path, each in zip(files, sizes, strict=True):
            if total + size <= self._most:
                return
            path.unlink(missing_ok=True)
            total -= each
