"""Settings: values of options from headstart.toml and the environment.

headstart.toml sets options by name: `port = 9000` in [serve] for one command, or at the top for all commands with that
option. The environment sets them as HEADSTART_SERVE_PORT or HEADSTART_PORT. Precedence: command line, environment,
file, default. Within each of them, a value for one command comes before a value for all commands.
"""

import json
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from headstart.cli.parser import CONFIG, Command
from headstart.errors import UsageError, did_you_mean
from headstart.files import read_text, user_path
from headstart.options import Option
from headstart.wording import OptionText, Removal

PREFIX = "HEADSTART_"
FILE = "headstart.toml"
CONFIG_VARIABLE = "HEADSTART_CONFIG"
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "HEADSTART_CACHE", "HEADSTART_TRACEBACK"})  # variables that set no option
KUBERNETES_VARIABLE = re.compile(r"SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)\w*")
"""Variables without PREFIX that Kubernetes sets for a service named headstart, besides HEADSTART_PORT (a URL)."""
MODELS = "models"  # the table of a server's models: per model `path` and engine options of serve
SECRET_OPTIONS = frozenset({"api-key"})
EXCLUSIVE = (
    frozenset({"depth", "no-mtp", "speculative-config"}),
    frozenset({"drafter", "speculative-config"}),
    frozenset({"head", "speculative-config"}),
    frozenset({"prompt", "prompt-file"}),
)
"""Groups of options that contradict each other: the one with the highest precedence replaces the others."""
NOT_SHARED: Mapping[str, frozenset[str]] = {
    "verify": frozenset({"speculative-config"}),
    "tune": frozenset({"speculative-config"}),
    "demo": frozenset({"no-mtp"}),
    "bench run": frozenset({"temperature", "speculative-config"}),
    "bench step": frozenset({"speculative-config", "context", "rows"}),
    "train": frozenset({"depth", "draft-vocab"}),
    "data": frozenset({"speculative-config"}),
    "plan": frozenset({"depth", "drafter", "context"}),
    "probe": frozenset({"model", "max-tokens"}),
    "gate": frozenset({"model"}),
}
"""Options that a command does not take from settings for all commands, besides those it refuses: the command chooses
them, or uses the name for something else."""
ALONE = {("bench run", "url"), ("tune", "url"), ("train", "from-scratch")}
"""Command and option beside which MODEL and options of the engine are not taken from settings for all commands."""
SWITCH_WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Setting:
    """One value of an option."""

    scope: str  # the command that the value is for; empty: all commands
    name: str
    value: Any
    place: str  # an environment variable, or a file and its table

    @property
    def shown(self) -> str:
        return "***" if self.name in SECRET_OPTIONS else str(self.value)


class Settings:
    """The settings of the environment and of one file (`file` None: the first that exists). Raises UsageError for
    unknown options and an unreadable file."""

    def __init__(
        self, commands: Mapping[str, Command], environment: Mapping[str, str], file: Path | None = None
    ) -> None:
        self.options = {name: options_of(command) for name, command in commands.items()}
        self._by_scope: dict[str, dict[str, Option]] = {}  # scope -> options of its commands by name
        for command, options in self.options.items():
            for scope in (*_scopes(command), ""):
                self._by_scope[scope] = options | self._by_scope.get(scope, {})
        variables = {name: text for name, text in environment.items() if name.startswith(PREFIX)}
        if file is None and variables.get(CONFIG_VARIABLE):
            file = Path(variables[CONFIG_VARIABLE])
        self.file = file or _find_file(environment)
        self.models: dict[str, dict[str, Any]] = {}
        self.from_environment = [self._read_variable(*item) for item in variables.items() if _is_setting(*item)]
        self.from_file = list(self._read_table(self._load(), "")) if self.file else []

    def for_command(self, command: str, given: Iterable[str] = ()) -> dict[str, Setting]:
        """The settings of a command by option. `given`: options of its command line, which have precedence."""
        options = self.options[command]
        found: dict[str, Setting] = {}
        for source in (self.from_environment, self.from_file):
            for scope in (*_scopes(command), ""):
                first = {*given, *found}
                hidden = first.union(*(group for group in EXCLUSIVE if group & first))
                if not scope:
                    hidden |= _not_shared(command, options, first)
                for each in source:
                    if each.scope == scope and each.name in options.keys() - hidden:
                        found[each.name] = replace(each, value=_in_form(options[each.name], each.value))
        return found

    def replaced_by(self, setting: Setting) -> Setting | None:
        """The environment variable that replaces a line of the file."""
        variables = self.from_environment if setting in self.from_file else []
        hiding = (each for each in variables if each.name == setting.name and setting.scope.startswith(each.scope))
        return next(hiding, None)

    @cached_property
    def _variables(self) -> dict[str, tuple[str, str]]:
        """Environment variable -> scope and name of its option."""
        return {
            PREFIX + re.sub(r"\W", "_", f"{scope} {name}".strip()).upper(): (scope, name)
            for scope, options in self._by_scope.items()
            for name in options
        }

    def _read_variable(self, variable: str, text: str) -> Setting:
        if variable not in self._variables:
            raise UsageError(f"{variable} is no setting", suggest(variable, self._variables))
        scope, name = self._variables[variable]
        return Setting(scope, name, _from_text(self._by_scope[scope][name], text, variable), variable)

    def _load(self) -> dict[str, Any]:
        assert self.file is not None
        try:
            return tomllib.loads(read_text(self.file, f"{CONFIG} names the file with settings"))
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise UsageError(f"{self.file} is no TOML: {error}", "for example: threads = 4") from None

    def _read_table(self, table: Mapping[str, Any], scope: str) -> Iterator[Setting]:
        place = f"{self.file} [{scope.replace(' ', '.')}]" if scope else str(self.file)
        options = self._by_scope[scope]
        for key, value in table.items():
            name, below = key.replace("_", "-"), f"{scope} {key}".strip()
            if isinstance(value, dict) and below == MODELS:
                self.models = value
            elif isinstance(value, dict) and below in self._by_scope:
                yield from self._read_table(value, below)
            elif name in options:
                yield Setting(scope, name, _from_toml(options[name], value, f"{place}: {key}"), place)
            else:
                tables = {each.removeprefix(scope).strip() for each in self._by_scope if each.startswith(scope)}
                raise UsageError(f"{place}: {key} is no setting", suggest(name, {*options, *tables} - {""}))


def are_given(environment: Mapping[str, str], words: Sequence[str]) -> bool:
    """True if there is a setting to read. `words`: the command line, which may name the file."""
    variables = any(name.startswith(PREFIX) and _is_setting(name, text) for name, text in environment.items())
    return variables or bool(named_file(words) or environment.get(CONFIG_VARIABLE) or _find_file(environment))


def named_file(words: Sequence[str]) -> Path | None:
    """The value of --config."""
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if word == CONFIG and after:
            return user_path(after)
        if word.startswith(f"{CONFIG}="):
            return user_path(word.partition("=")[2])
    return None


def add_places(message: str, hint: str, places: Mapping[str, str]) -> tuple[str, str]:
    """Returns the message with the places of the options that it names, and the hint with its Removal from the first of
    these places. `places`: flag, or value of MODEL -> headstart.toml and its table, or a variable."""
    named = [flag for flag in places if re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", message)]
    if not named:
        return message, hint
    message = f"{message} ({', '.join(f'{flag} is set by {places[flag]}' for flag in named)})"
    place = places[named[0]]
    removal = f"unset {place}" if place.startswith(PREFIX) else f"take it out of {place}"
    if isinstance(hint, OptionText):
        hint = hint.worded(lambda part: removal if isinstance(part, Removal) else str(part))
    return message, hint


def options_of(command: Command) -> dict[str, Option]:
    """The options that settings may set, by flag without dashes, and the argument MODEL."""
    return {
        item.name if item.is_argument else item.label.removeprefix("--"): item
        for item in command.options
        if (item.is_refused or not item.is_hidden)
        and (item.name == "model" or not item.is_argument)
        and CONFIG not in item.flags
    }


def suggest(word: str, known: Iterable[str]) -> str:
    """A hint for an unknown word."""
    return did_you_mean(word, known) or "its name is that of an option: see headstart COMMAND --help-all"


def _not_shared(command: str, options: Mapping[str, Option], given: Set[str]) -> frozenset[str]:
    """Names of options that the command does not take from settings for all commands. given: options that are set."""
    refused = {name for name, item in options.items() if item.is_refused}
    if any((command, name) in ALONE for name in given):
        refused |= {name for name, item in options.items() if item.is_argument or item.panel.startswith("Engine")}
    return NOT_SHARED.get(command, frozenset()) | refused


def _scopes(command: str) -> list[str]:
    """A command's own name, and the names of its groups."""
    words = command.split()
    return [" ".join(words[:count]) for count in range(len(words), 0, -1)]


def _find_file(environment: Mapping[str, str]) -> Path | None:
    """The file in the current folder, else in the user's folder for settings."""
    name = "APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME"
    home = environment.get("HOME") or environment.get("USERPROFILE") or ""
    folder = Path(environment.get(name) or Path(home, ".config"))
    for path in (Path(FILE), folder / "headstart" / FILE):
        with suppress(OSError):  # a folder without rights
            if path.is_file():
                return path
    return None


def _is_setting(variable: str, text: str) -> bool:
    name = variable.removeprefix(PREFIX)
    foreign = KUBERNETES_VARIABLE.fullmatch(name) or (name == "PORT" and "://" in text)
    return bool(text) and variable not in OTHER_VARIABLES and not foreign


def _from_text(option: Option, text: str, place: str) -> Any:
    """The value of a variable: for a switch a word, for a repeated option a TOML list or words, else the text."""
    if option.is_switch:
        if text.strip().lower() not in SWITCH_WORDS:
            raise UsageError(f"{place} is {text!r}, but must be true or false", "it is a switch")
        return SWITCH_WORDS[text.strip().lower()]
    if not option.is_list and option.num_values == 1:
        return text
    if not text.lstrip().startswith("["):
        return [text] if option.is_argument else text.split()
    try:
        return [str(each) for each in tomllib.loads(f"list = {text}")["list"]]
    except tomllib.TOMLDecodeError:
        raise UsageError(f"{place} is {text!r}, which is no list", """for example ["one", "two"]""") from None


def _in_form(option: Option, value: Any) -> Any:
    """A value, read as an option of the same name has it, in the form of this one; of several values the first."""
    takes_list = option.is_list or option.num_values > 1
    if takes_list == isinstance(value, list):
        return value
    return [value] if takes_list else value[0] if value else ""


def _from_toml(option: Option, value: Any, place: str) -> Any:
    """The value of a line of the file in the form of the command line. Raises UsageError for another type."""
    if option.is_switch != isinstance(value, bool):
        wanted = "true or false" if option.is_switch else "a text or a number"
        raise UsageError(f"{place} is {json.dumps(value, default=str)}, but must be {wanted}", "see --help")
    if option.is_switch:
        return value
    if option.is_list or option.num_values > 1:
        return [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, list | dict) for each in value)):
        return json.dumps(value, default=str)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
