"""Heads that `headstart adapt` has made, where `serve`, `generate` and `chat` look for them: one per model and kind."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

from headstart import hub, registry
from headstart.config import EngineConfig
from headstart.errors import CapacityError, ModelError, UsageError
from headstart.files import written_aside
from headstart.heads.files import read_head
from headstart.tools.tune.setting import identity_of

log = logging.getLogger("headstart.tools")

FACTS = "adapted.json"
HEAD_FILES = ("config.json", "model.safetensors")
WORK = ".work"
"""Behind the name of a head's folder: where one is being made."""


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """`base`: digest of the shipped head at its root; empty where that is another. Acceptance lengths on held-out
    records: `before`, `after`."""

    kind: str
    date: str
    base: str
    before: float
    after: float

    def __str__(self) -> str:
        return f"acceptance length {self.before:.2f} -> {self.after:.2f} on your records, {self.date}"

    @classmethod
    def of(cls, folder: Path) -> Self:
        """Raises OSError, ValueError, KeyError or TypeError where `keep` has not written."""
        document: Mapping[str, Any] = json.loads((folder / FACTS).read_text("utf-8"))
        before, after = float(document["before"]), float(document["after"])
        kind, date, base = (str(document[name]) for name in ("kind", "date", "base"))
        return cls(kind=kind, date=date, base=base, before=before, after=after)


def folder_of(model: str | None) -> Path:
    """Heads of this model, by kind. Raises UsageError for a model that is not there."""
    known = json.dumps(identity_of(model), default=str)
    return hub.cache_dir() / "adapted" / hashlib.sha256(known.encode()).hexdigest()[:24]


def kept_head(model: str | None, config: EngineConfig) -> tuple[Path, Adapted] | None:
    """The one that takes the place of the model's own head; none where the user has named a head, or no head drafts.
    One that is damaged is left out, with a line of the log: no start shall fail for it."""
    kinds = registry.available("heads")
    if config.head is not None or config.depth == 0 or config.drafter not in ("auto", "mixed", *kinds):
        return None
    with contextlib.suppress(UsageError):
        shipped = hub.shipped_heads(model or hub.DEFAULT_MODEL)
        wanted = [config.drafter] if config.drafter in kinds else list(shipped)[:1] or kinds
        for kind in wanted:
            folder = folder_of(model) / kind
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError), _told():
                adapted = Adapted.of(folder)
                if not adapted.base or (kind in shipped and digest_of(shipped[kind]) == adapted.base):
                    read_head(folder)
                    return folder, adapted
    return None


@contextlib.contextmanager
def _told() -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        log.warning("the adapted head is not used: %s; headstart adapt --forget removes it", error.message)


def digest_of(head: Path) -> str:
    """Of a head's config.json, which says what it was trained on. Raises OSError."""
    return hashlib.sha256((head / "config.json").read_bytes()).hexdigest()[:24]


def keep(folder: Path, head: Path, adapted: Adapted) -> None:
    """In one step. Raises CapacityError where it cannot be written."""
    with written_aside(folder) as aside:
        for name in HEAD_FILES:
            shutil.copyfile(head / name, aside / name)
        (aside / FACTS).write_text(json.dumps(asdict(adapted), indent=1) + "\n", "utf-8")
        aside.chmod(0o700)


class Forgotten(NamedTuple):
    """Kinds of heads that were there, and of interrupted runs."""

    kinds: list[str]
    unfinished: list[str]


def forget(model: str | None, kind: str | None) -> Forgotten:
    """Remove the model's heads of this kind, or all, and what an interrupted run has left. Raises UsageError or
    CapacityError."""
    root = folder_of(model)
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    wanted = [name for name in names if kind is None or name.removesuffix(WORK).split(".")[0] == kind]
    for name in wanted:
        try:
            shutil.rmtree(root / name)
        except OSError as error:
            raise CapacityError(f"cannot remove {root / name}: {error.strerror}", "is it yours?") from None
    unfinished = [name.removesuffix(WORK) for name in wanted if name.endswith(WORK)]
    return Forgotten([name for name in wanted if "." not in name], unfinished)
