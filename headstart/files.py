"""Files and folders that are there in full or not at all: written aside, then renamed."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from headstart.errors import CapacityError

FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_whole(path: Path, content: str | bytes | memoryview) -> None:
    """Readers see the old file or the new one. Raises OSError."""
    write_pieces(path, [content.encode() if isinstance(content, str) else content])


def write_pieces(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """The same, of pieces that are made while it is written."""
    aside = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with aside.open("xb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())  # else a crash could leave the name without the bytes
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


@contextmanager
def written_aside(out: Path) -> Iterator[Path]:
    """A new folder that takes the place of `out` when the block ends well; otherwise nothing is left of it. Raises
    CapacityError where it cannot be written."""
    made = [folder for folder in out.absolute().parents if not folder.exists()]
    aside = out.absolute().with_name(f".{out.name}.{secrets.token_hex(6)}")
    done = False
    try:
        aside.mkdir(parents=True)
        yield aside
        _replace(aside, out)
        done = True
    except OSError as error:
        raise _cannot_write(out, error) from None
    finally:
        if not done:
            shutil.rmtree(aside, ignore_errors=True)
            for folder in made:
                if folder.exists() and not any(folder.iterdir()):
                    folder.rmdir()


def _replace(aside: Path, out: Path) -> None:
    old = aside.with_name(f"{aside.name}.old")
    if out.exists():
        out.rename(old)
    try:
        aside.rename(out)
    except BaseException:
        if old.exists():
            old.rename(out)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _cannot_write(out: Path, error: OSError) -> CapacityError:
    if error.errno in FULL:
        hint = "make room (or raise the limit on file sizes), then try again: nothing was left behind"
        return CapacityError(f"no space to write {out}: {error.strerror}", hint)
    return CapacityError(f"cannot write {out}: {error.strerror}", "may you write there?")
