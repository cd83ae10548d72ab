"""Command-line parser: a command is a function whose parameters are dataclasses of options.

Not argparse: options may stand between arguments, values may begin with a dash, settings supply defaults, and a start
does not wait for its import.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, get_type_hints

from headstart.options import REQUIRED, Option, OptionGroup, ParseError

HELP = ("-h", "--help")
HELP_ALL = "--help-all"
CONFIG = "--config"
Rewrite = Callable[[list[str], Mapping[str, Option]], list[str]]
"""Translates other spellings: (words of the command line, options by flag) -> words."""


CONFIG_OPTION = Option(
    name="config_file",
    help="TOML file with settings. Default: headstart.toml here, else in the user's folder for settings.",
    kind=Path,
    flags=(CONFIG,),
    panel="Settings",
    is_rare=True,
)


@dataclass(frozen=True)
class Command:
    """A command. Each parameter of `run` is an OptionGroup, or Settings: then it gets the settings of this run."""

    run: Callable[..., int]
    examples: tuple[str, ...]
    rewrite: Rewrite | None = None

    @property
    def help(self) -> str:
        return self.run.__doc__ or ""

    @cached_property
    def _groups(self) -> dict[str, tuple[type[OptionGroup], list[Option]] | None]:
        """By parameter of `run`: its OptionGroup with the options; None for the settings."""
        hints = get_type_hints(self.run)
        hints.pop("return")
        return {name: (kind, kind.options()) if issubclass(kind, OptionGroup) else None for name, kind in hints.items()}

    @cached_property
    def options(self) -> list[Option]:
        """The options of all groups, and --config."""
        return [item for group in self._groups.values() if group for item in group[1]] + [CONFIG_OPTION]

    @cached_property
    def flags(self) -> dict[str, Option]:
        return {flag: item for item in self.options for flag in item.flags}

    def split(self, words: Sequence[str]) -> tuple[dict[str, Any], str]:
        """Values of a command line as texts, by option name, and the flag for help if it has one. Raises ParseError."""
        rest, given, arguments = list(words), dict[str, Any](), list[str]()
        if self.rewrite:
            rest = self.rewrite(rest, self.flags)
        while rest:
            word = rest.pop(0)
            if word == "--":
                arguments += rest
                break
            if word in (*HELP, HELP_ALL):
                return {}, word
            if word[:1] == "-" and word != "-":
                self._take_option(word, rest, given)
            elif word:
                arguments.append(word)
            else:
                raise _empty("an argument")
        for item in self.options:
            if item.is_argument and arguments:
                given[item.name], arguments = (arguments, []) if item.is_list else (arguments[0], arguments[1:])
        if arguments:
            raise ParseError(f"Got unexpected extra argument(s) ({' '.join(arguments)})", is_extra=True)
        return given, ""

    def _take_option(self, word: str, rest: list[str], given: dict[str, Any]) -> None:
        """Add an option to `given`, with its values from the front of `rest`."""
        flag, equals, text = word.partition("=")
        if flag not in self.flags and word[:2] in self.flags:  # -pTEXT
            flag, equals, text = word[:2], "=", word[2:]
        if flag not in self.flags:
            raise ParseError(f"No such option: {flag}", flag=flag)
        item = self.flags[flag]
        if item.is_switch:
            if equals:
                raise ParseError(f"{flag} takes no value", f"write {flag} alone, or leave it out")
            given[item.name] = True
            return
        texts = [text] if equals else []
        missing = item.num_values - len(texts)
        texts += rest[:missing]
        del rest[:missing]
        if len(texts) < item.num_values:
            number = "a value" if item.num_values == 1 else f"{item.num_values} values"
            raise ParseError(f"{flag} needs {number}", item.usage)
        if "" in texts and not item.may_be_empty:
            raise _empty(flag)
        if item.is_list:
            given.setdefault(item.name, []).extend(texts)
        else:
            given[item.name] = texts if item.num_values > 1 else texts[0]

    def read(self, given: Mapping[str, Any], settings: Any = None) -> dict[str, Any]:
        """The arguments of `run`: values that are given as texts, else defaults. Raises UsageError."""
        values = {}
        for item in self.options:
            if item.name in given:
                values[item.name] = item.read(given[item.name])
            elif item.default is REQUIRED:
                raise ParseError(f"{item.label} is missing", f"for example: {self.examples[0]}")
            else:
                values[item.name] = item.default_value
        found = {}
        for name, group in self._groups.items():
            found[name] = group[0].collect({item.name: values[item.name] for item in group[1]}) if group else settings
        return found


def command(*examples: str, rewrite: Rewrite | None = None) -> Callable[[Callable[..., int]], Command]:
    """Makes a function a command with these example lines."""
    return lambda run: Command(run, examples, rewrite)


@dataclass(frozen=True)
class CommandGroup:
    """A command of commands."""

    commands: "Mapping[str, Command | CommandGroup]"
    help: str
    examples: tuple[str, ...]
    default: str = ""  # the command that runs when none is named
    options: tuple[Option, ...] = ()
    sections: Mapping[str, Iterable[str]] = field(default_factory=dict)  # of --help -> commands; empty: one section


def all_commands(group: CommandGroup, prefix: str = "") -> dict[str, Command]:
    """All commands by their full name."""
    found: dict[str, Command] = {}
    for name, each in group.commands.items():
        found |= all_commands(each, f"{prefix}{name} ") if isinstance(each, CommandGroup) else {prefix + name: each}
    return found


def _empty(label: str) -> ParseError:
    """Returns the error for an empty value: `--api-key "$KEY"` with an unset variable must not mean "no key"."""
    return ParseError(f"{label} is empty", "is a variable not set? Give a value, or leave it out")
