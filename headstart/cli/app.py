"""The commands of `headstart`, put together from the modules of this package."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

from headstart import __version__
from headstart.cli import bench, models
from headstart.cli.help import NAMES, Command, Group, ListsByDefault, RunsByDefault
from headstart.cli.options import expand


def _examples(lines: Sequence[str]) -> str:
    """Help text that ends a command's `--help`, an example a paragraph."""
    return "\n\n".join(["Examples:", *lines])


app = typer.Typer(
    name="headstart",
    cls=Group,
    help="An LLM engine built around multi-token prediction: the model's own heads draft, the text stays the same.\n\n"
    "Options may also stand in headstart.toml, or in the environment as HEADSTART_...: headstart doctor shows them.",
    epilog=_examples(["headstart demo", "headstart generate --prompt 'Why is the sky blue?'"]),
    add_completion=False,
    context_settings={"help_option_names": NAMES},
    rich_markup_mode=None,  # it would read "[ngram]" in a help text as a colour
)
COMMANDS = (
    "demo", "generate", "chat", "serve", "verify", "inspect", "launch", "probe", "plan", "tune", "data", "train",
    "adapt", "export", "graft", "pull", "ps", "stop", "doctor",
    "completion",
)  # fmt: skip
"""Modules of this package, in the order of `--help`."""
for name in COMMANDS:
    module = import_module(f"headstart.cli.{name}")
    app.command(name, cls=getattr(module, "COMMAND", Command), epilog=_examples(module.EXAMPLES))(expand(module.run))

bench_app = typer.Typer(name="bench", cls=RunsByDefault, help=bench.HELP, epilog=_examples(bench.EXAMPLES))
bench_app.command("run", cls=Command, epilog=_examples(bench.RUN_EXAMPLES))(expand(bench.run))
bench_app.command("step", cls=Command, epilog=_examples(bench.STEP_EXAMPLES))(expand(bench.step))
app.add_typer(bench_app)

models_app = typer.Typer(name="models", cls=ListsByDefault, help=models.HELP, epilog=_examples(models.EXAMPLES))
models_app.command("list", cls=Command, epilog=_examples(models.LIST_EXAMPLES))(expand(models.listed))
models_app.command("remove", cls=Command, epilog=_examples(models.REMOVE_EXAMPLES))(expand(models.remove))
app.add_typer(models_app)


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(f"headstart {__version__}")
    elif context.invoked_subcommand is None:
        print(context.get_help())
