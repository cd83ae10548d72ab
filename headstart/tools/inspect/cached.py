"""Models cached on this machine, in headstart's own cache and in the Hub client's, with format and heads."""

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
    """One cached model."""

    name: str
    size: int  # bytes
    used: float  # Unix time of the last access, if the file system records it
    path: Path | None  # of a checkpoint in it; None: the model has no checkpoint
    remove: Callable[[], None]  # deletes the model from the cache

    def document(self) -> dict[str, Any]:
        format_name, heads = _described(self)
        used = datetime.fromtimestamp(self.used, UTC).isoformat(timespec="seconds")
        return {"name": self.name, "bytes": self.size, "format": format_name, "heads": heads, "last_used": used}


DERIVED = {
    "packed": "packed weights", "sketches": "LM head sketches", "costs": "measured costs", "digests": "checksums",
    "plan": "machine measurements", "tokenizers": "merges of tokenizers", "inspect": "unfinished measurements",
}  # fmt: skip
"""Folder of the cache whose files are created again when needed -> description of its content."""


def run() -> Report:
    """Lists the cached models and the bytes of the other folders of the cache, for `headstart models`."""
    models = [each.document() for each in cached()]
    derived = {title: sum(size for _, size in _files(folder)) for folder, title in DERIVED.items()}
    return Report(True, {"models": models, "cache": str(hub.cache_dir()), "derived": derived})


def prune() -> Report:
    """Removes the files in the folders of DERIVED. Processes that have opened a file can go on using it."""
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


def remove(chosen: Sequence[Cached]) -> Report:
    """Removes models from the caches."""
    for each in chosen:
        each.remove()
    lines = [f"removed {each.name} ({each.size / 1e6:.0f} MB)" for each in chosen]
    return Report(True, {"removed": [each.name for each in chosen], "bytes": sum(each.size for each in chosen)}, lines)


def found(names: Sequence[str]) -> list[Cached]:
    """Returns the cached models with these names. Raises UsageError for a name that is in no cache."""
    known = {each.name: each for each in cached()}
    for name in names:
        if name not in known:
            hint = f"cached models: {', '.join(known)}" if known else "no model is cached; headstart pull fetches one"
            raise UsageError(f"{name!r} is not in the cache", hint)
    return [known[name] for name in dict.fromkeys(names)]


def cached() -> Iterator[Cached]:
    """Yields the cached models: built-in ones, then those of the Hub client by name."""
    for name in hub.BUILTIN:
        if path := hub.cached_trunk(name):
            stat = path.stat()
            yield Cached(name, stat.st_size, stat.st_atime, path, partial(hub.remove, name))
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        cache = scan_cache_dir(constants.HF_HUB_CACHE)
    except (CacheNotFound, ValueError, OSError):  # no cache yet; not a folder; unreadable
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
    """Returns (format, heads): the kinds of heads in this package for the model, else inspect's verdict."""
    if model.path is None:
        return None, None
    from headstart.formats import open_checkpoint  # slow to import; doctor and prune do not need these
    from headstart.models.shipped_heads import shipped_heads
    from headstart.tools.inspect.run import describe

    try:
        checkpoint = open_checkpoint(model.path)
        heads: str = describe(checkpoint)["heads"]["verdict"]
    except HeadstartError:  # incomplete download, or an unknown format
        return None, None
    return checkpoint.format, ", ".join(shipped_heads(checkpoint)) or heads
