"""Files and folders that are there in full or not at all: written aside, then renamed.

What is written aside lies beside its place, called `.NAME.` and twelve hex digits, and is locked by its writer. What a
killed process has left there is nobody's, and the next writer of that name removes it.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headstart import system
from headstart.errors import CapacityError, UsageError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OLD = ".old"
_READ = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)
"""A pipe would wait for its writer."""


def read_regular(path: Path, most: int | None = None) -> bytes:
    """The bytes of a regular file. Raises OSError, also for a pipe or a device, which would never end, and for a file
    of more than `most` bytes."""
    with os.fdopen(os.open(path, _READ), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISDIR(found.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
        if most is not None and found.st_size > most:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, and at most {most} make sense")
        return file.read()


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Readers see the old file or the new one. Raises OSError, which names `path`."""
    write_pieces(path, [content.encode() if isinstance(content, str) else content])


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """The same, of pieces that are made while it is written."""
    remove_leftovers(path)
    aside = _aside(path)
    try:
        with aside.open("xb") as file:
            system.lock(file.fileno())
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())  # else a crash could leave the name without the bytes
            if system.RENAMES_OPEN_FILES:
                aside.replace(path)  # locked until then
        if not system.RENAMES_OPEN_FILES:
            aside.replace(path)
    except OSError as error:
        if error.filename in (None, str(aside)):  # a full disk names none, and nobody knows the name aside
            error.filename = str(path)
        raise
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def written_aside(out: Path, *, keep: bool = False) -> Iterator[Path]:
    """A new folder that takes the place of `out` (or of what that links to) when the block ends well; otherwise nothing
    is left of it. `keep`: what else lies in the old folder moves into the new one. Raises CapacityError where it cannot
    be written."""
    out = out.resolve()
    made = [folder for folder in out.parents if not folder.exists()]
    aside = _aside(out)
    done = False
    try:
        remove_leftovers(out)
        aside.mkdir(parents=True)
        with _locked(aside):
            yield aside
            _replace(aside, out, keep)
        done = True
    except OSError as error:
        raise _cannot_write(out, error) from None
    finally:
        if not done:
            shutil.rmtree(aside, ignore_errors=True)
            for folder in made:
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A folder, made if need be, that no other process works in so; one that stays empty goes again. Raises UsageError,
    or OSError where it cannot be made."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = system.open_folder(folder)
    try:
        if handle is not None and system.taken(handle):
            raise UsageError(f"another process writes into {folder}", "wait until it has ended, or give another name")
        try:
            yield
        finally:
            with suppress(OSError):
                folder.rmdir()
    finally:
        if handle is not None:
            os.close(handle)


def remove_leftovers(path: Path) -> None:
    """Remove what killed writers of `path` have left beside it. A folder that one of them had moved away, and put
    nothing in its place, comes back."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}({re.escape(_OLD)})?")
    with suppress(OSError):  # whoever cannot look there cannot write there: that is said later
        for left in list(path.parent.iterdir()):
            found = pattern.fullmatch(left.name)
            if found and not left.is_symlink() and _is_left(left):
                if found[1] and not path.exists():
                    left.rename(path)
                elif left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}")


def _replace(aside: Path, out: Path, keep: bool) -> None:
    if not out.exists():
        aside.rename(out)
        return
    old = aside.with_name(f"{aside.name}{_OLD}")
    with _locked(out):
        out.rename(old)
        try:
            aside.rename(out)
        except BaseException:
            old.rename(out)
            raise
        for entry in list(old.iterdir()) if keep else ():
            if not (out / entry.name).exists():
                entry.rename(out / entry.name)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Other processes see that somebody is at work on it."""
    handle = system.open_folder(folder)
    try:
        if handle is not None:
            system.lock(handle)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _is_left(path: Path) -> bool:
    handle = os.open(path, _READ)
    try:
        return system.lock(handle)
    finally:
        os.close(handle)


def _cannot_write(out: Path, error: OSError) -> CapacityError:
    if error.errno in FULL:
        hint = "make room (or raise the limit on file sizes), then try again: nothing was left behind"
        return CapacityError(f"no space to write {out}: {error.strerror}", hint)
    return CapacityError(f"cannot write {out}: {error.strerror}", "may you write there?")
