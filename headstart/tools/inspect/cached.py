"""Models that are kept on this machine, and what their headers say: our own cache, and that of the Hub's client."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.core import Report
from headstart.errors import HeadstartError, UsageError


@dataclass(frozen=True)
class Cached:
    """One model. `used`: when its files were last read, as far as the system notes it (Unix time); `path`: of a
    checkpoint in it, None where there is none; `remove` takes it out of the cache."""

    name: str
    size: int
    used: float
    path: Path | None
    remove: Callable[[], None]

    def document(self) -> dict[str, Any]:
        format_name, heads = _described(self)
        used = datetime.fromtimestamp(self.used, UTC).isoformat(timespec="seconds")
        return {"name": self.name, "bytes": self.size, "format": format_name, "heads": heads, "last_used": used}


DERIVED = {
    "packed": "packed weights", "sketches": "LM head sketches", "costs": "measured costs", "digests": "checksums",
    "plan": "machine measurements", "tokenizers": "merges of tokenizers",
}  # fmt: skip
"""Folders of the cache whose files are made anew when they are needed -> their content."""


def run() -> Report:
    """Lists the cached models and the bytes of the other folders of the cache, for `headstart models`."""
    models = [each.document() for each in cached()]
    derived = {title: sum(size for _, size in _files(folder)) for folder, title in DERIVED.items()}
    return Report(True, {"models": models, "cache": str(hub.cache_dir()), "derived": derived})


def prune() -> Report:
    """Remove the files of DERIVED. A running process keeps what it has opened."""
    removed = [each for folder in DERIVED for each in _files(folder)]
    for path, _ in removed:
        path.unlink(missing_ok=True)
    size = sum(size for _, size in removed)
    lines = [f"removed {len(removed)} files ({size / 1e6:.0f} MB)" if removed else "there is nothing to remove"]
    return Report(True, {"removed": [str(path) for path, _ in removed], "bytes": size}, lines)


def _files(folder: str) -> Iterator[tuple[Path, int]]:
    for path in sorted((hub.cache_dir() / folder).glob("*")):
        if path.is_file():
            yield path, path.stat().st_size


def remove(names: Sequence[str]) -> Report:
    """Take models out of the caches. Raises UsageError for one that is in none, before any is removed."""
    chosen = found(names)
    for each in chosen:
        each.remove()
    lines = [f"removed {each.name} ({each.size / 1e6:.0f} MB)" for each in chosen]
    return Report(True, {"removed": [each.name for each in chosen], "bytes": sum(each.size for each in chosen)}, lines)


def found(names: Sequence[str]) -> list[Cached]:
    """By name. Raises UsageError for one that is in no cache."""
    known = {each.name: each for each in cached()}
    for name in names:
        if name not in known:
            listed = ", ".join(known) or "none is"
            raise UsageError(f"{name!r} is not in the cache", f"these are: {listed}" if known else "headstart models")
    return [known[name] for name in dict.fromkeys(names)]


def cached() -> Iterator[Cached]:
    """Built-in models, then those of the Hub, by name."""
    for name in hub.BUILTIN:
        if path := hub.cached_trunk(name):
            stat = path.stat()
            yield Cached(name, stat.st_size, stat.st_atime, path, partial(hub.remove, name))
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError, OSError):  # none yet; no folder; one that is not to be read
        return
    for repo in sorted((each for each in cache.repos if each.repo_type == "model"), key=lambda each: each.repo_id):
        revisions = sorted(repo.revisions, key=lambda each: each.last_modified, reverse=True)
        hashes = [each.commit_hash for each in revisions]
        yield Cached(
            repo.repo_id, repo.size_on_disk, repo.last_accessed,
            next((path for each in revisions if (path := _checkpoint(each.snapshot_path))), None),
            lambda hashes=hashes: cache.delete_revisions(*hashes).execute(),  # type: ignore[misc]
        )  # fmt: skip


def _checkpoint(snapshot: Path) -> Path | None:
    if any(snapshot.glob("*.safetensors")):
        return snapshot
    return next(iter(sorted(snapshot.glob("*.gguf"))), None)


def _described(model: Cached) -> tuple[str | None, str | None]:
    """Format, and the heads: those that come with a built-in model, else what inspect says of its own."""
    if model.path is None:
        return None, None
    from headstart.formats import open_checkpoint  # doctor and prune have no need of these
    from headstart.tools.inspect.run import describe

    try:
        checkpoint = open_checkpoint(model.path)
        heads: str = describe(checkpoint)["heads"]["verdict"]
    except HeadstartError:  # half fetched, or of a kind that is not known here
        return None, None
    return checkpoint.format, ", ".join(hub.shipped_heads(model.name)) or heads
