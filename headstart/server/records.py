"""Folders of records: token ids of prompts and outputs, for `headstart adapt`.

`manifest.json` names the model; each line of `records-*.jsonl` is a text: {"prompt_ids", "response_ids",
"temperature", "adapter"}. Only the owner has access (folder 0700, files 0600). Damaged lines, as after a crash, are
skipped.
"""

import json
import logging
import math
import os
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from queue import Full, Queue
from typing import Annotated, Any, Self

from pydantic import Field, TypeAdapter

from headstart.core import Request
from headstart.engine.load import Model
from headstart.errors import CapacityError, UsageError
from headstart.files import read_regular, write_atomic
from headstart.layers.weights import weights_fingerprint

log = logging.getLogger("headstart.server")
MANIFEST = "manifest.json"
VERSION = 1
FILES = "records-*.jsonl"
PARTS = 16  # files of a full folder; the oldest is deleted to make space for a new one
MAX_QUEUED = 1024  # texts that may wait to be written
STOP_SECONDS = 5.0  # maximum time for writing waiting texts when the server stops
LOG_DISK_EVERY_S = 600.0  # minimum time between two log lines about failed writes
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1)]


@dataclass(frozen=True)
class RecordedModel:
    """The model whose texts a folder records. `name` is only shown: another name of the same model is accepted."""

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    fingerprint: str

    @classmethod
    def of(cls, model: Model) -> Self:
        """The description of a loaded model."""
        config = model.config
        fingerprint = weights_fingerprint(model.weights.tensors)
        return cls(model.name, config.vocab_size, config.hidden_size, config.num_layers, fingerprint)

    def check(self, folder: Path) -> None:
        """Raise UsageError if a folder has records of another model or no manifest."""
        theirs = read_manifest(folder)
        for name in (each for each in _TYPES if each != "name"):
            ours, other = getattr(self, name), getattr(theirs, name)
            if ours != other:
                raise UsageError(
                    f"{folder} holds records of another model, {theirs.name}: its {name} is {other}, that of "
                    f"{self.name} is {ours}",
                    "give each model a folder of its own",
                )


@dataclass(frozen=True)
class TextRecord:
    """One text with its prompt and temperature."""

    prompt_ids: TokenIds
    response_ids: TokenIds
    temperature: Annotated[float, Field(ge=0, lt=100)] = 0.0
    adapter: str = ""  # digest of the LoRA adapter that wrote it; empty: the model as it is

    def line(self) -> bytes:
        """The record as a line of JSON."""
        document = {name: value for name, value in asdict(self).items() if value or name != "adapter"}
        return json.dumps(document, separators=(",", ":")).encode() + b"\n"

    @classmethod
    def of(cls, line: bytes, vocab_size: int) -> "TextRecord":
        """Parse a line of JSON. Raises ValueError for an invalid record or token ids outside the vocabulary."""
        record = _RECORD.validate_json(line, strict=True)
        if max(*record.prompt_ids, *record.response_ids) >= vocab_size:
            raise ValueError(f"a token id is not below {vocab_size}")
        return record


_RECORD = TypeAdapter(TextRecord)


def read_manifest(folder: Path) -> RecordedModel:
    """The manifest of a folder of records. Raises UsageError if it is missing, damaged or of another version."""
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
        hint += "; if it is damaged, move the folder away and record again"
        raise UsageError(f"{path} is damaged, or not a manifest of records: {error}", hint) from None


_TYPES: dict[str, Any] = {each.name: each.type for each in fields(RecordedModel)}


@dataclass
class LoadedRecords:
    """Records of a folder, oldest first, and the number of damaged lines."""

    records: list[TextRecord] = field(default_factory=list)
    damaged: int = 0


def read_records(folder: Path, vocab_size: int, adapter: str = "") -> LoadedRecords:
    """The records of a folder that one LoRA adapter wrote, by its digest; empty: those of the model as it is. Raises
    UsageError if there are none or they cannot be read."""
    by_adapter = defaultdict[str, list[TextRecord]](list)
    found = LoadedRecords(by_adapter[adapter])
    try:
        for path in sorted(folder.glob(FILES)):
            for line in read_regular(path).split(b"\n"):
                try:
                    if line:
                        by_adapter[(record := TextRecord.of(line, vocab_size)).adapter].append(record)
                except (ValueError, RecursionError):
                    found.damaged += 1
    except OSError as error:
        raise UsageError(f"cannot read {error.filename or folder}: {error.strerror}", "are they yours?") from None
    if not found.records:
        lines = f"{found.damaged} damaged lines" if found.damaged else "no text yet"
        writer = " of this adapter" if adapter else " of the model without an adapter" if len(by_adapter) > 1 else ""
        raise UsageError(f"{folder} holds {lines}{writer}", "let headstart serve --record run for a while")
    return found


def prepare_folder(folder: Path) -> None:
    """Create a folder for records, or reuse one, with access for its owner only. Raises UsageError if it has other
    files, CapacityError if it cannot be written."""
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
    """Prepare a folder and write its manifest. Raises UsageError if it has records of another model."""
    prepare_folder(folder)
    if (folder / MANIFEST).exists():
        model.check(folder)
        return
    with _written(folder):
        write_atomic(folder / MANIFEST, json.dumps({"headstart_records": VERSION, **asdict(model)}, indent=1) + "\n")
        (folder / MANIFEST).chmod(0o600)


@contextmanager
def _written(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CapacityError(f"--record: cannot write {folder}: {error.strerror}", "give another folder") from None


class RecordFiles:
    """Appends whole lines to files of a folder, which hold at most `max_bytes` together: the oldest file is deleted to
    make space for a new one. Several servers of one model may share a folder; each writes its own files."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self._max_bytes, self._part = folder, max_bytes, max(max_bytes // PARTS, 1)
        self._path, self._handle, self._size = folder, -1, 0

    def append(self, line: bytes) -> None:
        """Append a line. Raises OSError if it cannot be written; the file is then unchanged."""
        if self._handle < 0 or self._is_gone() or (self._size and self._size + len(line) > self._part):
            self._next(len(line))
        try:
            written = os.write(self._handle, line)
            while written < len(line):  # os.write wrote less: the next call goes on or raises the reason
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
        """Whether the open file was deleted or moved, so that records written to it would be lost."""
        with suppress(OSError):
            return not os.path.samestat(self._path.stat(), os.fstat(self._handle))
        return True

    def _next(self, size: int) -> None:
        """Open the next file. A missing folder is not created again: it was removed or unmounted."""
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
            if total + size <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            total -= each


class TextRecorder:
    """Writes finished texts to record files, in its own thread. Drops and counts records if queue or disk is full."""

    def __init__(self, files: RecordFiles, size: int = MAX_QUEUED) -> None:
        self.kept = 0  # texts that were written
        self.lost = {"queue": 0, "disk": 0}  # texts dropped because the queue was full or a write failed
        self._files, self.folder = files, files.folder
        self._queue: Queue[TextRecord | None] = Queue(size)
        self._logged_at = -math.inf
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Write waiting records, within STOP_SECONDS."""
        with suppress(Full):
            self._queue.put(None, timeout=STOP_SECONDS)
            self._thread.join(STOP_SECONDS)

    def offer(self, request: Request, tokens: Seq[int]) -> None:
        """Queue a finished text; drops it if the queue is full."""
        if not tokens or request.images:  # token ids say nothing without images
            return
        adapter = request.adapter.digest if request.adapter else ""
        try:
            record = TextRecord(request.prompt_ids, tuple(tokens), request.params.temperature, adapter)
            self._queue.put_nowait(record)
        except Full:
            self.lost["queue"] += 1

    def _run(self) -> None:
        while (record := self._queue.get()) is not None:
            try:
                self._files.append(record.line())
                self.kept += 1
            except OSError as error:
                self.lost["disk"] += 1
                self._log_failure(error)
        self._files.close()

    def _log_failure(self, error: OSError) -> None:
        if time.monotonic() - self._logged_at > LOG_DISK_EVERY_S:
            log.error("cannot record to %s: %s; serving goes on", self.folder, error.strerror or error)
            self._logged_at = time.monotonic()
