"""Output helpers: stdout is data, everything else goes to stderr."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from headstart.core import Progress, Report, no_progress
from headstart.system import reads_escapes

if TYPE_CHECKING:  # rich costs start-up time that `--help` of other commands need not pay
    from rich.console import Console


SLOW_SECONDS = 2.0
"""Work shorter than this shows no progress bar."""

PIPE_WIDTH = 200


def stdout() -> Console:
    # a pipe has no width that a table would have to be cut to
    return _console(soft_wrap=False, width=None if sys.stdout.isatty() else PIPE_WIDTH)


def stderr() -> Console:
    return _console(stderr=True)


def print_aside(text: str) -> None:
    """A line for people beside the data, dim where they read it on a terminal and have not asked for plain text."""
    dim = reads_escapes(sys.stderr) and not os.environ.get("NO_COLOR")
    print(f"\033[2m{text}\033[0m" if dim else text, file=sys.stderr)


def _console(**options: Any) -> Console:
    from rich.console import Console

    class Plain(Console):
        def on_broken_pipe(self) -> None:
            raise  # rich's own would end the process here, with exit code 1

    return Plain(highlight=False, **options)


def print_json(document: dict[str, Any]) -> None:
    """The one JSON document of a command: what JSON has no number for is null, and bytes of no text are escaped."""
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
    """One line for what was wrong, one for what to do."""
    with suppress(OSError):  # nobody listens: the exit code still says it
        print(f"headstart: error: {' '.join(message.split())}", file=sys.stderr)
        if hint:
            print(f"hint: {' '.join(hint.split())}", file=sys.stderr)


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]], *, footer: str = "") -> None:
    """A table on stdout; the first column is text, the others are right-aligned. A terminal that is narrower gets a
    line for each cell."""
    from rich.table import Table

    table = Table(caption=footer or None, caption_justify="left")
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 else "right", no_wrap=index > 0)
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    console = stdout()
    wanted = console.measure(table, options=console.options.update(width=PIPE_WIDTH)).maximum
    if not sys.stdout.isatty() or wanted <= console.width:
        console.print(table)
        return
    for row in rows:
        for name, cell in zip(columns, row, strict=True):
            print(f"{' '.join(name.split())}: {cell}")
        print()
    if footer:
        print(footer)


def finish(report: Report, as_json: bool, table: Callable[[dict[str, Any]], None] | None = None) -> int:
    """Show a report, for people below a table, and give the exit code: 0 if its answer is yes, else 1."""
    with suppress(BrokenPipeError):  # who stops reading still gets the verdict
        if as_json:
            print_json(report.data)
        else:
            if table:
                table(report.data)
            for line in report.lines:
                print(line)
    return 0 if report.ok else 1


@contextmanager
def progress(what: str, *, quiet: bool = False) -> Iterator[Progress]:
    """A callback that draws a bar on stderr once the work has taken a while; silent when stderr is not a terminal."""
    if quiet or not sys.stderr.isatty():
        yield no_progress
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Bar(*columns, console=stderr(), transient=True)
    task = bar.add_task(what, total=None)
    begin = time.monotonic()

    def report(done: int, total: int, text: str) -> None:
        if not bar.live.is_started and time.monotonic() - begin > SLOW_SECONDS:
            bar.start()
        bar.update(task, completed=done, total=total, description=text or what)

    try:
        yield report
    finally:
        bar.stop()
