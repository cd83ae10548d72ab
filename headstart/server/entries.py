"""One of a server's models: what it is made of, how it stands, and what its headers tell while it is not in memory."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from headstart import hub
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.errors import HeadstartError, UsageError
from headstart.formats import is_checkpoint, open_checkpoint
from headstart.formats.base import Checkpoint
from headstart.heads.files import is_head
from headstart.layers.build import DecoderConfig
from headstart.models.tensors import find_family, read_config
from headstart.server import limits
from headstart.server.bridge import Bridge
from headstart.server.prepare import Formats

log = logging.getLogger("headstart.server")
KEEP_SECONDS = 300.0
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_OF_PARTS = re.compile(r"-00001-of-\d{5}$")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")


@dataclass(frozen=True)
class KeepAlive:
    """How long a model stays without requests; `seconds` None: as long as its server."""

    seconds: float | None = KEEP_SECONDS

    @classmethod
    def of(cls, given: float | str) -> KeepAlive:
        """Seconds, or a text such as 5m or 1h30m, as Ollama writes it; below zero: for ever. Raises UsageError."""
        text = str(given).strip()
        parts = _PART.findall(text.removeprefix("-"))
        if parts and "".join(number + unit for number, unit in parts) == text.removeprefix("-"):
            seconds = sum(float(number) * UNITS[unit] for number, unit in parts)
            return cls(None if text.startswith("-") else seconds)
        with suppress(ValueError):
            if (seconds := float(text)) == seconds:
                return cls(None if seconds < 0 or seconds == float("inf") else seconds)
        shown = limits.shortened(text)
        raise UsageError(f"keep-alive is {shown!r}, which is no time", "for example 10m, 90 (seconds), or -1")


@dataclass(frozen=True)
class Served:
    """A model in memory, as requests meet it. `names`: by which they may call it; the first signs the answers."""

    bridge: Bridge
    names: tuple[str, ...]
    formats: Formats

    @property
    def llm(self) -> LLM:
        return self.bridge.llm


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A model that can be asked for. `path`: as LLM takes it; `prepare`: what is known of it here, asked when it is
    loaded."""

    names: tuple[str, ...]
    path: str | None
    config: EngineConfig
    prepare: Callable[[str | None, EngineConfig], EngineConfig] = lambda path, config: config


@dataclass(eq=False)
class Entry:
    """One model and how it stands. `size`: bytes of weights and caches, known once it has been loaded; `used`: when it
    was last asked for, or had work (time of the event loop); `checkpoint`: headers, once they have been read."""

    offer: Offer
    keep_alive: KeepAlive
    served: Served | None = None
    size: int = 0
    used: float = 0.0
    loads: int = 0
    checkpoint: Checkpoint | None = None
    loading: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.offer.names[0]

    @property
    def root(self) -> str:
        """What it is made of."""
        return self.offer.path or hub.DEFAULT_MODEL

    @property
    def expires(self) -> float | None:
        """Seconds from now until it leaves; None: it stays, or is not here."""
        if self.served is None or self.keep_alive.seconds is None:
            return None
        now = asyncio.get_running_loop().time()
        return max((now if not self.served.bridge.is_idle else self.used) + self.keep_alive.seconds - now, 0.0)


def models_in(folder: Path) -> dict[str, Path]:
    """Model directories and .gguf files of a folder, by name; heads and further parts of files are none."""
    found = {}
    for path in sorted(folder.iterdir()):
        whole = _LATER_PART.search(path.name) is None and not _is_surely_head(path)
        if whole and is_checkpoint(path):
            found[_OF_PARTS.sub("", path.stem) if path.is_file() else path.name] = path
    return found


def _is_surely_head(path: Path) -> bool:
    """What is damaged counts as a model: who asks for it hears why it cannot be read, and the others are served."""
    with suppress(HeadstartError, OSError):
        return path.is_dir() and is_head(path)
    return False


def headers_of(entry: Entry) -> Checkpoint | None:
    """A model's headers, read once; None where they are not on this machine, or cannot be read. Reads files."""
    try:
        if entry.checkpoint is None and (path := _on_this_machine(entry.offer.path)) is not None:
            entry.checkpoint = open_checkpoint(path)
    except (HeadstartError, OSError) as error:
        log.debug("%s: %s", entry.name, error)  # who asks for it hears more
    return entry.checkpoint


def sizes_of(entry: Entry) -> DecoderConfig | None:
    """Of a model in memory, or by its headers; None where they do not tell. Reads files."""
    if entry.served is not None:
        return entry.served.llm.model.config
    if (checkpoint := headers_of(entry)) is None:
        return None
    try:
        return read_config(checkpoint, find_family(checkpoint), entry.offer.config.max_model_len)
    except HeadstartError:
        return None


def context_of(entry: Entry) -> int:
    """The longest prompt plus output; 0 where nothing tells it yet. Reads files."""
    if entry.served is not None:
        return entry.served.llm.engine.max_length
    config = sizes_of(entry)
    return 0 if config is None else entry.offer.config.max_model_len or config.max_length


def _on_this_machine(name: str | None) -> Path | None:
    """Fetches nothing."""
    if name is None or name in hub.BUILTIN:
        return hub.cached_trunk(name or hub.DEFAULT_MODEL)
    return hub.resolve(name) if hub.is_builtin(name) or Path(name).expanduser().exists() else None
