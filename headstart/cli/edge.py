"""The edge of the process: the one place where an error becomes a line on stderr and an exit code."""

from __future__ import annotations

import errno
import os
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from typer.completion import completion_init

from headstart.cli import habits, settings, streams
from headstart.cli.app import application
from headstart.cli.completion import COMPLETION_VARIABLE
from headstart.cli.render import print_error
from headstart.errors import INTERNAL, HeadstartError, UsageError, status_of
from headstart.system import ENDING

TRACEBACK_VARIABLE = "HEADSTART_TRACEBACK"
WRONG = status_of(UsageError("")).exit_code
PLACES = "is the path right? HEADSTART_CACHE and HF_HOME say where caches are"
FULL = {
    errno.ENOSPC: "free some space there, or write to another place",
    errno.EDQUOT: "free some space there, or write to another place",
    errno.EFBIG: "a limit on the size of files is set: see ulimit -f",
}
HINTS = {
    **FULL,
    errno.EMFILE: "a limit on open files is set: see ulimit -n",
    errno.ENOMEM: "free some memory",
    **dict.fromkeys(
        (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ELOOP,
         errno.ENAMETOOLONG, errno.ENXIO, errno.ENODEV, errno.ENOTEMPTY),
        PLACES,
    ),
}  # fmt: skip
"""What the system may refuse with reason, and what to do then."""


def run(arguments: list[str]) -> int:
    """Run the command that `arguments` name; the exit code. Everything is flushed then."""
    streams.make_ready()
    places: dict[str, str] = {}
    try:
        with _interruptible():
            code = _invoke(arguments, places)
    except HeadstartError as error:
        print_error(settings.told(error.message, places), error.hint)
        code = status_of(error).exit_code
    except typer.TyperException as error:
        code = _wrong_usage(error, arguments, places)
    except (KeyboardInterrupt, typer.Abort) as error:
        print_error("interrupted", str(error))  # a command that can go on says how
        code = status_of(KeyboardInterrupt()).exit_code
    except Exception as error:  # noqa: BLE001  # the process edge
        code = _of_the_system(error) if isinstance(error, OSError | MemoryError) else _internal(error)
    return streams.flushed(code)


def _invoke(arguments: list[str], places: dict[str, str]) -> int:
    """Run it; `places` then says where options were set that the line does not give."""
    if COMPLETION_VARIABLE in os.environ:
        return _completed(typer.main.get_command(application()))
    alone = bool(arguments) and not settings.any_said(os.environ, arguments)  # else names of all options are checked
    command = typer.main.get_command(application(arguments[0] if alone else None))
    try:
        with command.make_context("headstart", arguments, obj=places) as context:
            return int(command.invoke(context) or 0)
    except typer.Exit as end:
        return end.exit_code


def _completed(command: Any) -> int:
    """What the shell asks for while a line is being typed."""
    completion_init()
    try:
        command.main([], "headstart")
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C, SIGTERM and a closed terminal end a command alike: nothing half-written stays, and no engine that it
    started."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = {number: signal.getsignal(number) for number in ENDING}
    for number, handler in before.items():
        if handler is not signal.SIG_IGN:  # as nohup wants it
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wrong_usage(error: typer.TyperException, arguments: list[str], places: dict[str, str]) -> int:
    """An option or argument that typer itself refused."""
    context: Any = getattr(error, "ctx", None)
    if context is None:
        message, hint, command = error.format_message(), "", " ".join(["headstart", *arguments[:1]])
    else:
        (message, hint), command = habits.told(error, arguments), context.command_path
    print_error(settings.told(message, places), hint or f"see {command} --help")
    return WRONG


def _of_the_system(error: OSError | MemoryError) -> int:
    """A full disk, a missing right, no memory: where and what to do. Anything else that it says is a bug of ours."""
    if isinstance(error, MemoryError):
        print_error("the memory is full", "close other programs, or take a smaller model, context or batch")
        return WRONG
    if (lost := streams.stdout_error()) is not None:  # not a socket of the command
        return streams.lost_stdout(lost)
    if error.errno not in HINTS or (error.filename is None and error.errno not in FULL):
        return _internal(error)
    where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else "cannot write: "
    print_error(f"{where}{error.strerror}", HINTS[error.errno])
    return WRONG


def _internal(error: Exception) -> int:
    """A bug: one line, and the trace for those who ask."""
    if os.environ.get(TRACEBACK_VARIABLE) == "1":
        traceback.print_exc()
    where = traceback.extract_tb(error.__traceback__)[-1]
    print_error(
        f"internal error: {type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})",
        f"{TRACEBACK_VARIABLE}=1 shows the trace; please report it",
    )
    return INTERNAL.exit_code
