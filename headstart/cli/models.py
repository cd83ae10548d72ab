"""`headstart models`: what is kept on this machine. Each subcommand is a function here."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from headstart.cli.help import ListsByDefault
from headstart.cli.options import OutputOptions
from headstart.cli.render import finish, print_table
from headstart.core import Report
from headstart.errors import UsageError

HELP = "List the models that are kept on this machine, or remove some. Without a command: list."
EXAMPLES = ("headstart models", "headstart models list --json", "headstart models remove org/model")
LIST_EXAMPLES = ("headstart models list", "headstart models --json")
REMOVE_EXAMPLES = ("headstart models remove org/model", "headstart models remove smollm2-135m-mtp org/model --yes")


def listed(*, output: OutputOptions) -> int:
    """Models in the caches: name, size, format, heads, and when they were last used."""
    from headstart.tools.inspect import cached

    return finish(cached.run(), output.as_json, _print)


def remove(
    names: Annotated[list[str], typer.Argument(metavar="MODEL", help="As headstart models lists it.")],
    *,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    output: OutputOptions,
) -> int:
    """Remove models from the caches; asks first."""
    from headstart.tools.inspect import cached

    for each in cached.found(names):
        if not yes and not _agreed(f"remove {each.name} ({each.size / 1e6:.0f} MB)?"):
            return finish(Report(True, {"removed": [], "bytes": 0}, ["nothing was removed"]), output.as_json)
    return finish(cached.remove(names), output.as_json)


def _agreed(question: str) -> bool:
    if not sys.stdin.isatty():
        raise UsageError("nobody is there to be asked", "--yes removes without asking")
    return typer.confirm(question, err=True)


def _print(data: dict[str, Any]) -> None:
    if not data["models"]:
        print("none yet: headstart pull fetches one")
        return
    rows = [
        (each["name"], f"{each['bytes'] / 1e6:.0f} MB", each["format"] or "?", each["heads"] or "?",
         each["last_used"].partition("T")[0])
        for each in data["models"]
    ]  # fmt: skip
    print_table(("model", "size", "format", "heads", "last used"), rows)


GROUP = ListsByDefault
COMMANDS = {"list": (listed, LIST_EXAMPLES), "remove": (remove, REMOVE_EXAMPLES)}
