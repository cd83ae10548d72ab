"""The commands of `headstart`, put together from the modules of this package."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated, Any

import typer

from headstart import __version__
from headstart.cli.help import NAMES, Command, Group
from headstart.cli.options import expand

COMMANDS = (
    "demo", "generate", "chat", "serve", "verify", "inspect", "launch", "probe", "plan", "tune", "data", "train",
    "adapt", "export", "graft", "pull", "ps", "stop", "doctor",
    "completion",
)  # fmt: skip
GROUPS = ("bench", "models")
"""Modules of this package, in the order of `--help`."""


def _examples(lines: Sequence[str]) -> str:
    """Help text that ends a command's `--help`, an example a paragraph."""
    return "\n\n".join(["Examples:", *lines])


def application(only: str | None = None) -> typer.Typer:
    """All commands; or what a line begins with, a command or --version, as all of them take a third of a second."""
    app = typer.Typer(
        name="headstart",
        cls=Group,
        help="An LLM engine built around multi-token prediction: the model's own heads draft, the text stays the same."
        "\n\nOptions may also stand in headstart.toml, or in the environment as HEADSTART_...: headstart doctor shows "
        "them.",
        epilog=_examples(["headstart demo", "headstart generate --prompt 'Why is the sky blue?'"]),
        add_completion=False,
        context_settings={"help_option_names": NAMES},
        rich_markup_mode=None,  # it would read "[ngram]" in a help text as a colour
    )
    known = (*COMMANDS, *GROUPS)
    for name in (only,) if only in known else () if only == "--version" else known:
        module = import_module(f"headstart.cli.{name}")
        if name in COMMANDS:
            app.command(name, cls=getattr(module, "COMMAND", Command), epilog=_examples(module.EXAMPLES))(
                expand(module.run)
            )
        else:
            app.add_typer(_group(name, module))
    app.callback(invoke_without_command=True)(_root)
    return app


def _group(name: str, module: Any) -> typer.Typer:
    """A command of commands; alone it does what its first one does."""
    group = typer.Typer(name=name, cls=module.GROUP, help=module.HELP, epilog=_examples(module.EXAMPLES))
    for each, (run, examples) in module.COMMANDS.items():
        group.command(each, cls=Command, epilog=_examples(examples))(expand(run))
    return group


def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"headstart {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
