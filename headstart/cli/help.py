"""What `--help` prints: options by group and as wide as the terminal, rare ones with --help-all alone."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_origin

import typer
from typer.core import TyperCommand, TyperGroup

from headstart.cli import settings
from headstart.cli.values import with_values
from headstart.errors import UsageError

ALL = "--help-all"
MAY_BE_EMPTY = ("--system",)
NAMES = ["-h", "--help"]
MORE = "More: "
"""Begins the name of a group of options that only --help-all shows."""
WIDEST = 100
NARROWEST = 24
NAME_COLUMN = 30
"""Widest column of names; a longer name has a line of its own."""
TWO_COLUMNS = 60
"""A terminal narrower than this has what an option means below its name."""
WORDS = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class Command(TyperCommand):
    """A command with its options in groups."""

    def get_params(self, ctx: Any) -> list[Any]:
        return with_values(super().get_params(ctx))

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ours = args[: args.index("--")] if "--" in args else args
        if ctx.resilient_parsing:  # a line that is being typed
            return super().parse_args(ctx, args)
        if ALL in ours:
            show(self, ctx, rare=True)
        self._refuse_empty(ours)
        if not {*NAMES} & {*ours}:
            ctx.default_map = settings.defaults(ctx, ours)
        return super().parse_args(ctx, args)

    def _refuse_empty(self, words: list[str]) -> None:
        """`--api-key "$KEY"` with no such variable must not mean "none"."""
        flags = {flag for item in self.params if not getattr(item, "is_flag", False) for flag in item.opts}
        for before, word in zip(["", *words], words, strict=False):
            flag = before if word == "" and before in flags else word[:-1] if word.endswith("=") else ""
            if (flag in flags or word == "") and flag not in MAY_BE_EMPTY:
                raise UsageError(
                    f"{flag or 'an argument'} is empty", "is a variable not set? Give a value, or leave it out"
                )

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(text_of(self, ctx))


class Group(TyperGroup):
    """A list of commands."""

    command_class = Command

    def get_params(self, ctx: Any) -> list[Any]:
        return with_values(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        formatter.write(text_of(self, ctx))


class RunsByDefault(Group):
    """A group with a command that is meant when none is named; its help is that of this one, and names the others."""

    default = "run"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] and args[0] in NAMES and not ctx.resilient_parsing:
            show(self, ctx)
        named = ctx.resilient_parsing or (bool(args) and args[0] in self.commands)
        return super().parse_args(ctx, args if named else [self.default, *args])


class ListsByDefault(RunsByDefault):
    """The same with `list`."""

    default = "list"


def show(command: Any, ctx: Any, *, rare: bool = False) -> None:
    """Print the help and end."""
    print(text_of(command, ctx, rare=rare))
    raise typer.Exit


def text_of(command: Any, ctx: Any, *, rare: bool = False) -> str:
    """The whole help of a command."""
    width = max(min(shutil.get_terminal_size().columns, WIDEST), NARROWEST)
    arguments = arguments_of(command)
    blocks = [_wrap(f"Usage: {usage(command, ctx)}", width, "       ")]
    blocks += [_wrap(" ".join(each.split()), width) for each in (command.help or "").split("\n\n") if each]
    if arguments:
        blocks.append(_section("Arguments", arguments, width))
    if hasattr(command, "commands"):
        rows = [(name, _first_paragraph(each.help)) for name, each in command.commands.items()]
        blocks.append(_section("Commands", rows, width))
    panels = panels_of(command)
    hidden = [name for name in panels if name.startswith(MORE) and not rare]
    blocks += [_section(name, rows, width) for name, rows in panels.items() if name not in hidden]
    if hidden:
        count = sum(len(panels[name]) for name in hidden)
        blocks.append(_wrap(f"{count} more option{'' if count == 1 else 's'}: {ctx.command_path} {ALL}", width))
    if command.epilog:  # to be copied, so never broken
        first, *examples = command.epilog.split("\n\n")
        blocks.append("\n".join([first, *(f"  {line}" for line in examples)]))
    return "\n\n".join(blocks)


def meant(command: Any) -> Any:
    """The command that runs when this one is named."""
    return command.commands[command.default] if isinstance(command, RunsByDefault) else command


def usage(command: Any, ctx: Any) -> str:
    """How it is written, with its arguments."""
    of = meant(command)
    pieces = [_piece(item) for item in of.params if item.param_type_name == "argument" and not item.hidden]
    pieces += ["COMMAND ..."] if hasattr(command, "commands") else []
    return " ".join((ctx.command_path, "[OPTIONS]", *pieces))


def arguments_of(command: Any) -> list[tuple[str, str]]:
    """Names and meanings."""
    found = [item for item in meant(command).params if item.param_type_name == "argument" and not item.hidden]
    return [(_name(item), item.help or "") for item in found]


def panels_of(command: Any) -> dict[str, list[tuple[str, str]]]:
    """Rows of options by group, the command's own and -h first."""
    panels: dict[str, list[tuple[str, str]]] = {"Options": []}
    for item in meant(command).params:
        if item.param_type_name == "option" and not item.hidden:
            panels.setdefault(item.rich_help_panel or "Options", []).append(_option(item))
    panels["Options"].append((", ".join(NAMES), "Show this message."))
    return panels


def _option(item: Any) -> tuple[str, str]:
    """How an option is written, and what it means."""
    names = sorted(item.opts, key=len)
    value = "" if item.is_flag else f" {item.metavar or _value(item.type_descriptor.annotation)}"
    meaning = item.help or ""
    if item.required:
        meaning += " Required."
    elif item.show_default and not item.is_flag and item.default not in (None, []):
        meaning += f" Default: {item.default}."
    return f"{', '.join(names)}{value}", meaning


def _value(kind: Any) -> str:
    """The word that stands for a value of this type."""
    if get_origin(kind) is list:
        return _value(get_args(kind)[0])
    if get_origin(kind) is tuple:
        return " ".join(_value(each) for each in get_args(kind))
    members = [each for each in get_args(kind) if each is not type(None)]
    if members and all(isinstance(each, str) for each in members):
        return "|".join(members)
    return WORDS.get(members[0] if members else kind, "TEXT")


def _name(item: Any) -> str:
    return str(item.metavar or item.name).upper()


def _piece(item: Any) -> str:
    many = f"{_name(item)}..." if item.nargs != 1 else _name(item)
    return many if item.required else f"[{many}]"


def _section(name: str, rows: Iterable[tuple[str, str]], width: int) -> str:
    rows = list(rows)
    lines = [f"{name.removeprefix(MORE)}:"]
    column = min(max(len(first) for first, _ in rows) + 4, NAME_COLUMN) if width >= TWO_COLUMNS else 6
    for first, second in rows:
        wrapped = textwrap.wrap(second, width - column) or [""]
        if len(first) + 4 <= column:
            lines.append(f"  {first}".ljust(column) + wrapped.pop(0))
        else:
            lines.append(f"  {first}")
        lines += [" " * column + line for line in wrapped]
    return "\n".join(line.rstrip() for line in lines)


def _first_paragraph(text: str | None) -> str:
    return " ".join((text or "").split("\n\n")[0].split())


def _wrap(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)
