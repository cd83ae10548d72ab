"""Output of commands: data goes to stdout, everything else to stderr; both may be closed, full, or without a reader."""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from headstart.errors import UsageError, status_of
from headstart.system import has_no_reader, supports_escapes

if TYPE_CHECKING:
    from rich.console import Console

    from headstart.core import Progress, Report

SLOW_SECONDS = 2.0  # work shorter than this shows no progress bar
LOG_SECONDS = 10.0  # between two lines of progress where stderr is no terminal
PIPE_WIDTH = 200  # columns of a table in a pipe


def print_note(text: str) -> None:
    """Print a line for people on stderr, dim on a terminal unless NO_COLOR is set."""
    dim = supports_escapes(sys.stderr) and not os.environ.get("NO_COLOR")
    print(f"\033[2m{text}\033[0m" if dim else text, file=sys.stderr)


def _console(**options: Any) -> Console:
    from rich.console import Console

    class RaisingConsole(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich's own would end the process here, with exit code 1

    return RaisingConsole(highlight=False, **options)


def print_json(document: dict[str, Any]) -> None:
    """Print the JSON document of a command. NaN and infinities become null, lone surrogates are escaped."""
    try:
        text = json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)
        text.encode(sys.stdout.encoding or "utf-8")
    except (ValueError, LookupError):  # NaN and infinities; lone surrogates, or a stdout that is not UTF-8
        text = json.dumps(_finite(document), indent=2)
    print(text)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_error(message: str, hint: str = "") -> None:
    """Print an error and its hint on stderr, a line each."""
    with suppress(OSError):  # stderr is closed: the exit code reports the error
        print(f"headstart: error: {' '.join(message.split())}", file=sys.stderr)
        if hint:
            print(f"hint: {' '.join(hint.split())}", file=sys.stderr)


def print_records(columns: Mapping[str, str], records: Iterable[Mapping[str, Any]], *, footer: str = "") -> None:
    """A table with a row for each record. `columns`: heading -> format of a cell, with the record's keys."""
    rows = [[cell.format_map(each) for cell in columns.values()] for each in records]
    print_table(tuple(columns), rows, footer=footer)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, footer: str = "") -> None:
    """A table on stdout: text, then right-aligned columns. A narrower terminal gets a line for each cell."""
    from rich.table import Table

    table = Table(caption=footer or None, caption_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    is_terminal = sys.stdout.isatty()
    console = _console(soft_wrap=False, width=None if is_terminal else PIPE_WIDTH)
    wanted = console.measure(table, options=console.options.update(width=PIPE_WIDTH)).maximum
    if not is_terminal or wanted <= console.width:
        console.print(table)
        return
    for row in rows:
        for name, cell in zip(columns, row, strict=True):
            print(f"{' '.join(name.split())}: {cell}")
        print()
    if footer:
        print(footer)


def finish(report: Report, as_json: bool, table: Callable[[dict[str, Any]], None] | None = None) -> int:
    """Print a report, for people below a table; returns the exit code."""
    with suppress(BrokenPipeError):  # a reader such as head has enough: the exit code still counts
        if as_json:
            print_json(report.data)
        else:
            if table:
                table(report.data)
            for line in report.lines:
                print(line)
    return 0 if report.ok else 1


class _ProgressBar:
    """A bar on stderr that appears after SLOW_SECONDS. rich is imported then."""

    def __init__(self, what: str) -> None:
        self._state: tuple[int, int | None, str] = 0, None, what
        self._what = what
        self._bar: Any = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(SLOW_SECONDS, self._show)
        self._timer.daemon = True
        self._timer.start()

    def _show(self) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with self._lock:
            if self._timer.finished.is_set():
                return
            self._bar = Bar(*columns, console=_console(stderr=True), transient=True)
            self._bar.add_task(self._what, total=None)
            self._bar.start()
        self.report(*self._state)

    def report(self, done: int, total: int | None, text: str) -> None:
        self._state = done, total, text
        if self._bar is not None:
            self._bar.update(0, completed=done, total=total, description=text or self._what)

    def stop(self) -> None:
        self._timer.cancel()
        with self._lock:
            if self._bar is not None:
                self._bar.stop()


class _ProgressLines:
    """A line every LOG_SECONDS, for logs and pipes."""

    def __init__(self, what: str, write: Callable[[str], None]) -> None:
        self._what, self._write = what, write
        self._due = time.monotonic() + LOG_SECONDS

    def report(self, done: int, total: int | None, text: str) -> None:
        if (now := time.monotonic()) < self._due:
            return
        self._due = now + LOG_SECONDS
        with suppress(OSError):  # stderr is closed
            self._write(f"{text or self._what} ({done}" + (f" of {total})" if total else ")"))

    def stop(self) -> None:
        """Lines need no end."""


@contextmanager
def progress(what: str, write: Callable[[str], None] = print_note) -> Iterator[Progress]:
    """A callback that draws a bar on stderr once the work has taken SLOW_SECONDS, or writes lines if stderr is no
    terminal."""
    bar = _ProgressBar(what) if sys.stderr.isatty() else _ProgressLines(what, write)
    try:
        yield bar.report
    finally:
        bar.stop()


NULL = Path(os.devnull)


def prepare_streams() -> None:
    """Replace closed streams by the null device; escape characters that a stream cannot encode; read stdin without a
    byte order mark, and strictly (see `text_stdin`) unless it is a terminal."""
    sys.stdin = sys.stdin or NULL.open(encoding="utf-8")
    sys.stdout = sys.stdout or NULL.open("w", encoding="utf-8")
    sys.stderr = sys.stderr or NULL.open("w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdin, TextIOWrapper):
        encoding = sys.stdin.encoding.lower()
        errors = "replace" if sys.stdin.isatty() else "strict"
        with suppress(OSError):  # it was read before
            sys.stdin.reconfigure(encoding="utf-8-sig" if encoding in ("utf-8", "ascii") else encoding, errors=errors)


@contextmanager
def text_stdin() -> Iterator[TextIO]:
    """stdin; raises UsageError for other bytes than text."""
    try:
        yield sys.stdin
    except UnicodeDecodeError as error:
        what = f"stdin is not {error.encoding.upper()} text: {error.reason}"
        raise UsageError(what, "is it the right file?") from None


def stdout_error() -> OSError | None:
    """Returns the error of flushing stdout; None if it works. Unwritten text stays in the buffer."""
    try:
        sys.stdout.flush()
    except OSError as error:
        return error
    return BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE)) if has_no_reader(sys.stdout) else None


def lost_stdout(error: OSError, code: int = 0) -> int:
    """Returns the exit code after an error of stdout: `code` if a reader, such as `head`, has closed the pipe."""
    _discard(sys.stdout)
    if isinstance(error, BrokenPipeError):
        return code
    print_error(f"cannot write to stdout: {error.strerror}", "is the disk full?")
    return status_of(UsageError("")).exit_code


def flush_all(code: int) -> int:
    """Flush stdout and stderr; returns the exit code of a command that ended with `code`."""
    if (error := stdout_error()) is not None:
        code = lost_stdout(error, code)
    try:
        sys.stderr.flush()
    except OSError:
        _discard(sys.stderr)
    return code


def _discard(stream: TextIO) -> None:
    """Drop the buffer of a stream: at exit the interpreter would fail on it again, with a traceback."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
