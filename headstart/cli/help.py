"""Text of `--help`: options in panels, as wide as the terminal; rare panels with --help-all only."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence

from headstart.cli.parser import HELP, HELP_ALL, Command, CommandGroup
from headstart.options import REQUIRED, Option

MAX_WIDTH, MIN_WIDTH = 100, 24
NAME_COLUMN = 30  # width of the column of names; a longer name has a line of its own
TWO_COLUMNS = 60  # in narrower terminals the description of an option is below its name


def help_text(entry: Command | CommandGroup, path: str, *, rare: bool = False) -> str:
    """The help of a command. `path`: its words, such as "headstart bench run"."""
    width = max(min(shutil.get_terminal_size().columns, MAX_WIDTH), MIN_WIDTH)
    arguments, panels = arguments_of(entry), panels_of(entry)
    blocks = [_wrap(f"Usage: {usage(entry, path)}", width, "       ")]
    blocks += [_wrap(" ".join(each.split()), width) for each in entry.help.split("\n\n") if each]
    if arguments:
        blocks.append(_section("Arguments", arguments, width))
    if isinstance(entry, CommandGroup):
        sections = entry.sections or {"Commands": entry.commands}
        for title, names in sections.items():
            blocks.append(_section(title, [(name, summary(entry.commands[name])) for name in names], width))
    hidden = {item.panel for item in options_of(entry) if item.is_rare and not rare}
    blocks += [_section(name, rows, width) for name, rows in panels.items() if name not in hidden]
    if hidden:
        count = sum(len(panels[name]) for name in hidden)
        blocks.append(_wrap(f"{count} more option{'' if count == 1 else 's'}: {path} {HELP_ALL}", width))
    blocks.append("\n".join(["Examples:", *(f"  {line}" for line in entry.examples)]))  # users copy these lines
    return "\n\n".join(blocks)


def summary(entry: Command | CommandGroup) -> str:
    """The first paragraph of a command's description."""
    return " ".join(entry.help.split("\n\n")[0].split())


def usage(entry: Command | CommandGroup, path: str) -> str:
    """The command line with its arguments."""
    arguments = []
    for item in options_of(entry):
        if item.is_argument:
            name = f"{item.label}..." if item.is_list else item.label
            arguments.append(name if item.default is REQUIRED else f"[{name}]")
    return " ".join((path, "[OPTIONS]", *arguments, *(["COMMAND ..."] if isinstance(entry, CommandGroup) else [])))


def arguments_of(entry: Command | CommandGroup) -> list[tuple[str, str]]:
    """Name and description of each positional argument."""
    return [(item.label, item.help) for item in options_of(entry) if item.is_argument]


def panels_of(entry: Command | CommandGroup) -> dict[str, list[tuple[str, str]]]:
    """Spelling and description of each option by panel; the command's own panel first, with -h at its end."""
    panels: dict[str, list[tuple[str, str]]] = {"Options": []}
    for item in options_of(entry):
        if not item.is_argument and not item.is_hidden:
            panels.setdefault(item.panel, []).append(_row(item))
    panels["Options"].append((", ".join(HELP), "Show this message."))
    return panels


def options_of(entry: Command | CommandGroup) -> Sequence[Option]:
    """The options of a command; of a group those of its default command."""
    if isinstance(entry, Command):
        return entry.options
    return options_of(entry.commands[entry.default]) if entry.default else entry.options


def _row(item: Option) -> tuple[str, str]:
    names = ", ".join(sorted(item.flags, key=len))
    description = item.help
    if item.default is REQUIRED:
        description += " Required."
    elif item.default_text:
        description += f" Default: {item.default_text}."
    return names if item.is_switch else f"{names} {item.value_name}", description


def _section(name: str, rows: Iterable[tuple[str, str]], width: int) -> str:
    rows = list(rows)
    lines = [f"{name}:"]
    column = min(max(len(first) for first, _ in rows) + 4, NAME_COLUMN) if width >= TWO_COLUMNS else 6
    for first, second in rows:
        wrapped = textwrap.wrap(second, width - column) or [""]
        if len(first) + 4 <= column:
            lines.append(f"  {first}".ljust(column) + wrapped.pop(0))
        else:
            lines.append(f"  {first}")
        lines += [" " * column + line for line in wrapped]
    return "\n".join(line.rstrip() for line in lines)


def _wrap(text: str, width: int, indent: str = "") -> str:
    return textwrap.fill(text, width, subsequent_indent=indent, break_on_hyphens=False)
