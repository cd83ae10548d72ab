"""Atomic writes of files and folders: a temporary file or folder is written, then renamed.

Temporary names are `.NAME.` and twelve hex digits, beside the target, with `.new` until the writer holds a lock. The
next writer of the same name removes temporary files that a killed process has left.
"""

import errno
import hashlib
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

DISK_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_OLD = ".old"
_READ_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)  # O_NONBLOCK: opening a pipe would wait for its writer


def user_path(path: str | os.PathLike[str]) -> Path:
    """The path with a leading ~ or ~USER replaced by the home directory; as it is for an unknown user."""
    with suppress(RuntimeError):  # there is no such user
        return Path(path).expanduser()
    return Path(path)


def home_directory() -> Path:
    """The user's home directory; without HOME and an entry in the user database `/`, as container runtimes set HOME."""
    with suppress(RuntimeError):
        return Path.home()
    return Path(os.sep)


def read_regular(path: Path, max_bytes: int | None = None) -> bytes:
    """The bytes of a regular file. Raises OSError, also for a pipe, a device, and a file of more than `max_bytes`."""
    with os.fdopen(os.open(path, _READ_FLAGS), "rb") as file:
        found = os.fstat(file.fileno())
        if stat.S_ISDIR(found.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
        if max_bytes is not None and found.st_size > max_bytes:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, but the limit is {max_bytes}")
        return file.read()


def read_text(path: str | Path, hint: str = "is the path right?", flag: str = "") -> str:
    """The text of a regular UTF-8 file, without a byte order mark. flag: the option that names it. Raises UsageError
    with this hint."""
    try:
        return read_regular(user_path(path)).decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise UsageError((flag + ": " if flag else "") + f"cannot read {path}: {reason}", hint) from None


def content_digest(files: Iterable[Path]) -> str:
    """SHA-256 over the files' contents, in this order, whatever their paths. Raises OSError."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def write_atomic(path: Path, content: str | bytes | memoryview) -> None:
    """Write a file so that readers see the old or the new content. Raises OSError, which names `path`."""
    write_atomic_chunks(path, [content.encode() if isinstance(content, str) else content])


def write_atomic_chunks(path: Path, chunks: Iterable[bytes | memoryview]) -> None:
    """Write a file like `write_atomic`, from chunks that are produced while it is written."""
    remove_leftovers(path)
    temporary = _temporary_path(path)
    unlocked = _unlocked_path(temporary) if system.RENAMES_OPEN_FILES else temporary
    try:
        with unlocked.open("xb") as file:
            system.try_lock(file.fileno())
            if unlocked != temporary:
                unlocked.rename(temporary)
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())  # else a crash could leave the name without the bytes
            if system.RENAMES_OPEN_FILES:
                temporary.replace(path)  # locked until then
        if not system.RENAMES_OPEN_FILES:
            temporary.replace(path)
    except OSError as error:
        if error.filename in (None, str(unlocked), str(temporary)):  # a full disk names no file
            error.filename = str(path)
        raise
    finally:
        for left in (unlocked, temporary):
            left.unlink(missing_ok=True)


@contextmanager
def atomic_folder(out: Path, *, keep: bool = False) -> Iterator[Path]:
    """A new folder that replaces `out` (or the target of that link) when the block ends without an error; else it is
    removed. `keep`: other files of the old folder move into the new one. Raises CapacityError if a write fails."""
    out = out.resolve()
    made = [folder for folder in out.parents if not folder.exists()]
    temporary = _temporary_path(out)
    done = False
    try:
        remove_leftovers(out)
        with _new_folder(temporary):
            yield temporary
            _replace(temporary, out, keep)
        done = True
    except OSError as error:
        raise _cannot_write(out, error) from None
    finally:
        if not done:
            shutil.rmtree(temporary, ignore_errors=True)
            for folder in made:
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()


@contextmanager
def temporary_folder(target: Path) -> Iterator[Path]:
    """A folder beside `target` for the files that it is made of, removed at the end. Raises OSError."""
    target.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(target)
    folder = _temporary_path(target)
    try:
        with _new_folder(folder):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Create and lock a folder; a folder that stays empty is removed. Raises UsageError if another process has locked
    it, OSError if it cannot be made."""
    folder.mkdir(parents=True, exist_ok=True)
    handle = system.open_folder(folder)
    try:
        if handle is not None and system.try_lock(handle) is False:
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
    """Remove temporary files that killed writers of `path` have left. A folder that was moved away without a
    replacement is moved back."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{12}}({re.escape(_OLD)})?")
    with suppress(OSError):  # the write that follows reports it
        for left in list(path.parent.iterdir()):
            found = pattern.fullmatch(left.name)
            if found and not left.is_symlink() and _is_abandoned(left):
                if found[1] and not path.exists():
                    left.rename(path)
                elif left.is_dir():
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink(missing_ok=True)


def _temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(6)}")


def _unlocked_path(temporary: Path) -> Path:
    """Name of a temporary file or folder until it is locked: `remove_leftovers` of another process does not take it."""
    return temporary.with_name(f"{temporary.name}.new")


@contextmanager
def _new_folder(temporary: Path) -> Iterator[None]:
    """Create and lock a temporary folder, and its parents."""
    unlocked = _unlocked_path(temporary)
    unlocked.mkdir(parents=True)
    with _locked(unlocked):
        unlocked.rename(temporary)
        yield


def _replace(temporary: Path, out: Path, keep: bool) -> None:
    if not out.exists():
        temporary.rename(out)
        return
    old = temporary.with_name(f"{temporary.name}{_OLD}")
    with _locked(out):
        out.rename(old)
        try:
            temporary.rename(out)
        except BaseException:
            old.rename(out)
            raise
        for entry in list(old.iterdir()) if keep else ():
            if not (out / entry.name).exists():
                entry.rename(out / entry.name)
        shutil.rmtree(old, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder, to show other processes that it is being written."""
    handle = system.open_folder(folder)
    try:
        if handle is not None:
            system.try_lock(handle)
        yield
    finally:
        if handle is not None:
            os.close(handle)


def _is_abandoned(path: Path) -> bool:
    handle = os.open(path, _READ_FLAGS)
    try:
        return bool(system.try_lock(handle))
    finally:
        os.close(handle)


def _cannot_write(out: Path, error: OSError) -> CapacityError:
    if error.errno in DISK_FULL:
        hint = "make room (or raise the limit on file sizes), then try again: nothing was left behind"
        return CapacityError(f"no space to write {out}: {error.strerror}", hint)
    hint = "is the disk intact?" if error.errno == errno.EIO else "check the permissions of this path"
    return CapacityError(f"cannot write {out}: {error.strerror}", hint)
