"""The `headstart` program: commands, and the one place where an error becomes a line on stderr and an exit code."""

from __future__ import annotations

import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from headstart import __version__
from headstart.cli import bench
from headstart.cli.options import expand
from headstart.cli.render import print_error
from headstart.errors import INTERNAL, HeadstartError, UsageError, status_of


def _examples(lines: Sequence[str]) -> str:
    """Help text that ends a command's `--help`; blank lines keep one example per line."""
    return "\n\n".join(["Examples:", *lines])


TRACEBACK_VARIABLE = "HEADSTART_TRACEBACK"

app = typer.Typer(
    name="headstart",
    help="An LLM engine built around multi-token prediction: the model's own heads draft, the text stays the same.",
    epilog=_examples(["headstart demo", "headstart generate --prompt 'Why is the sky blue?'"]),
    add_completion=False,
    rich_markup_mode="rich",
)
COMMANDS = (
    "demo", "generate", "chat", "serve", "verify", "inspect", "launch", "probe", "plan", "tune", "data", "train",
    "export", "graft", "pull", "doctor",
)  # fmt: skip
"""Modules of this package, in the order of `--help`."""
for name in COMMANDS:
    module = import_module(f"headstart.cli.{name}")
    app.command(name, epilog=_examples(module.EXAMPLES))(expand(module.run))


class RunsByDefault(TyperGroup):
    """A group whose command `run` is meant when none is named."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args[:1] and args[0] in (*self.commands, "--help") else ["run", *args])


bench_app = typer.Typer(name="bench", cls=RunsByDefault, help=bench.HELP, epilog=_examples(bench.EXAMPLES))
bench_app.command("run", epilog=_examples(bench.RUN_EXAMPLES))(expand(bench.run))
bench_app.command("step", epilog=_examples(bench.STEP_EXAMPLES))(expand(bench.step))
app.add_typer(bench_app)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"headstart {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code (the `headstart` script exits with it)."""
    try:
        with _terminated_as_interrupted():
            code = typer.main.get_command(app).main(
                None if arguments is None else list(arguments), prog_name="headstart", standalone_mode=False
            )
    except HeadstartError as error:
        print_error(error.message, error.hint)
        return status_of(error).exit_code
    except typer.TyperException as error:
        return _wrong_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        print_error("interrupted")
        return status_of(KeyboardInterrupt()).exit_code
    except Exception as error:  # noqa: BLE001  # the process edge
        return _internal(error)
    if code == status_of(KeyboardInterrupt()).exit_code:  # typer turns Ctrl-C into this code
        print_error("interrupted")
    return int(code or 0)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM, and the end of the terminal, end a command as Ctrl-C does: nothing half-written stays, and no engine
    that it started."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    numbers = [signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else [])]
    before = {number: signal.getsignal(number) for number in numbers}
    for number, handler in before.items():
        if handler != signal.SIG_IGN:  # nohup
            signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _wrong_usage(error: typer.TyperException) -> int:
    """An option or argument that typer itself refused."""
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "headstart"
    print_error(error.format_message(), f"see {path} --help")
    return status_of(UsageError("")).exit_code


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


if __name__ == "__main__":
    sys.exit(main())
