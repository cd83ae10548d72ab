"""stdin, stdout and stderr as a command finds them: closed, a pipe that nobody reads, a full disk, no UTF-8."""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO

from headstart.cli.render import print_error
from headstart.errors import UsageError, status_of
from headstart.system import has_no_reader

NULL = Path(os.devnull)


def make_ready() -> None:
    """Closed streams become the null device; a character that a stream cannot encode becomes its escape."""
    sys.stdin = sys.stdin or NULL.open(encoding="utf-8")
    sys.stdout = sys.stdout or NULL.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or NULL.open("w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")


def stdout_error() -> OSError | None:
    """Why nothing can be written to stdout any more: what failed lies in its buffer still, where it has one."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) if has_no_reader(sys.stdout) else None


def lost_stdout(error: OSError, code: int = 0) -> int:
    """The exit code when stdout is lost. A reader that has enough, such as head, is no fault: `code`."""
    _forget(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return code
    print_error(f"cannot write to stdout: {error.strerror}", "is the disk full?")
    return status_of(UsageError("")).exit_code


def flushed(code: int) -> int:
    """The exit code of a command that ends with `code`, when all it wrote has left the process."""
    if (error := stdout_error()) is not None:
        code = lost_stdout(error, code)
    try:
        sys.stderr.flush()
    except OSError:
        _forget(sys.stderr)
    return code


def _forget(stream: TextIO) -> None:
    """What lies in the buffer would fail again, with a trace, when the interpreter ends."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
