"""Settings: what a file and the environment say where the command line is silent.

There is one table, made of the commands' own options: `headstart.toml` has them under their names (`port = 9000` in
[serve], or at the top for every command that has the option), the environment as HEADSTART_PORT or
HEADSTART_SERVE_PORT. The command line comes first, then the environment, the file, the default; in each of them what is
said for one command comes before what is said for all.
"""

from __future__ import annotations

import difflib
import json
import os
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from headstart.errors import UsageError

PREFIX = "HEADSTART_"
FILE = "headstart.toml"
CONFIG = "--config"
CONFIG_VARIABLE = "HEADSTART_CONFIG"
OTHER_VARIABLES = frozenset({CONFIG_VARIABLE, "HEADSTART_CACHE", "HEADSTART_TRACEBACK"})
"""Those that are no option's."""
OF_KUBERNETES = re.compile(r"SERVICE_(HOST|PORT\w*)|PORT_\d+_(TCP|UDP|SCTP)\w*")
"""What it puts into the environment where a service is called headstart; so is HEADSTART_PORT, with an address."""
MODELS = "models"
"""The table of models that a server has; each has the keys of serve's options for the engine, and `path`."""
SECRET = frozenset({"api-key"})
TOGETHER = (
    frozenset({"depth", "no-mtp", "speculative-config"}),
    frozenset({"drafter", "speculative-config"}),
    frozenset({"head", "speculative-config"}),
    frozenset({"prompt", "prompt-file"}),
)
"""Options that say the same: one that comes first hides the others behind it."""
APART: Mapping[str, frozenset[str]] = {
    "verify": frozenset({"depth", "drafter", "seed", "max-num-batched-tokens", "no-enable-prefix-caching", "no-mtp",
                         "speculative-config"}),
    "tune": frozenset({"depth", "depth-by-batch", "rule", "no-mtp", "speculative-config"}),
    "demo": frozenset({"no-mtp"}),
    "bench run": frozenset({"depth", "no-mtp", "temperature"}),
    "bench step": frozenset({"draft-vocab", "depth-by-batch", "rule", "max-model-len", "max-num-seqs", "kv-blocks",
                             "seed", "max-num-batched-tokens", "no-enable-prefix-caching", "ngram-min", "ngram-max",
                             "no-shared-lookup", "speculative-config", "context", "rows"}),
    "train": frozenset({"depth", "draft-vocab"}),
    "plan": frozenset({"depth", "drafter", "context"}),
    "probe": frozenset({"model"}),
}  # fmt: skip
"""Options that a command does not take from what is said for all: they mean something else there, or it chooses."""
WORDS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True)
class Setting:
    """One value. `scope`: the command that it is for, empty: all; `place`: a variable, or file and table."""

    scope: str
    name: str
    value: Any
    place: str

    @property
    def shown(self) -> str:
        return "***" if self.name in SECRET else str(self.value)


class Settings:
    """All settings of the environment and of the file (None: of the one that is found), for the commands below `root`.
    Raises UsageError for what is no option, and for a file that cannot be read."""

    def __init__(self, root: Any, environment: Mapping[str, str], file: Path | None = None) -> None:
        self.commands = dict(_commands(root))
        variables = {name: text for name, text in environment.items() if name.startswith(PREFIX)}
        if file is None and variables.get(CONFIG_VARIABLE):
            file = Path(variables[CONFIG_VARIABLE])
        self.file = file or _found(environment)
        self.models: dict[str, dict[str, Any]] = {}
        self.environment = [self._of_variable(name, text) for name, text in variables.items() if _is_ours(name, text)]
        self.of_file = list(self._of_table(self._read(), "")) if self.file else []

    def of(self, command: str, given: Iterable[str] = ()) -> dict[str, Setting]:
        """By option, what holds for a command whose line names the options `given`."""
        found: dict[str, Setting] = {}
        for source in (self.environment, self.of_file):
            for scope in (*_scopes(command), ""):
                first = {*given, *found}
                hidden = first.union(*(group for group in TOGETHER if group & first), () if scope else _apart(command))
                found |= {
                    each.name: each
                    for each in source
                    if each.scope == scope and each.name in self.commands[command] and each.name not in hidden
                }
        return found

    def hidden_by(self, setting: Setting) -> Setting | None:
        """The variable that takes the place of a line of the file."""
        for each in self.environment if setting in self.of_file else ():
            if each.name == setting.name and setting.scope.startswith(each.scope):
                return each
        return None

    @cached_property
    def _variables(self) -> dict[str, tuple[str, str]]:
        """Variable -> scope and name of an option."""
        return {
            PREFIX + re.sub(r"\W", "_", f"{scope} {name}".strip()).upper(): (scope, name)
            for command, options in self.commands.items()
            for scope in (*_scopes(command), "")
            for name in options
        }

    def _of_variable(self, variable: str, text: str) -> Setting:
        if variable not in self._variables:
            raise UsageError(f"{variable} is no setting", close_to(variable, self._variables))
        scope, name = self._variables[variable]
        return Setting(scope, name, _of_text(self._option(scope, name), text, variable), variable)

    def _read(self) -> dict[str, Any]:
        assert self.file is not None
        try:
            return tomllib.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
            raise UsageError(f"cannot read {self.file}: {reason}", f"{CONFIG} names the file with settings") from None
        except (tomllib.TOMLDecodeError, RecursionError) as error:
            raise UsageError(f"{self.file} is no TOML: {error}", "for example: threads = 4") from None

    def _of_table(self, table: Mapping[str, Any], scope: str) -> Iterator[Setting]:
        place = f"{self.file} [{scope.replace(' ', '.')}]" if scope else str(self.file)
        for key, value in table.items():
            name, below = key.replace("_", "-"), f"{scope} {key}".strip()
            if isinstance(value, dict) and below == MODELS:
                self.models = value
            elif isinstance(value, dict) and below in self._tables:
                yield from self._of_table(value, below)
            elif (item := self._option(scope, name)) is None:
                options = {each for command in self._commands_of(scope) for each in self.commands[command]}
                tables = {each.removeprefix(scope).strip() for each in self._tables if each.startswith(scope)}
                raise UsageError(f"{place}: {key} is no setting", close_to(name, options | tables))
            else:
                yield Setting(scope, name, _of_value(item, value, f"{place}: {key}"), place)

    def _option(self, scope: str, name: str) -> Any:
        """The first of its name in this scope."""
        fitting = (self.commands[command] for command in self._commands_of(scope))
        return next((options[name] for options in fitting if name in options), None)

    def _commands_of(self, scope: str) -> list[str]:
        return [command for command in self.commands if scope in (*_scopes(command), "")]

    @cached_property
    def _tables(self) -> set[str]:
        return {scope for command in self.commands for scope in _scopes(command)}


def any_said(environment: Mapping[str, str], words: Sequence[str]) -> bool:
    """Is there anything that Settings would read?"""
    variables = any(name.startswith(PREFIX) and _is_ours(name, text) for name, text in environment.items())
    return variables or bool(_named_file(words) or environment.get(CONFIG_VARIABLE) or _found(environment))


def of_context(context: Any, words: Sequence[str] = ()) -> Settings:
    """Those of this run, read once; `words`: of the command line, which may name the file."""
    root = context.find_root()
    if PREFIX not in root.meta:
        root.meta[PREFIX] = Settings(root.command, os.environ, _named_file(words))
    found: Settings = root.meta[PREFIX]
    return found


def defaults(context: Any, words: Sequence[str]) -> dict[str, Any]:
    """Values of a command's parameters, by their names, that its command line does not give; where they come from is
    noted in the context's `obj`, a dict, by flag."""
    settings, options = of_context(context, words), options_of(context.command)
    found = settings.of(" ".join(context.command_path.split()[1:]), _given(options, words))
    if isinstance(context.obj, dict):
        context.obj |= {_spelled(options[name], each.value): each.place for name, each in found.items()}
    return {options[name].name: each.value for name, each in found.items()}


def told(message: str, places: Mapping[str, str]) -> str:
    """A message with where the options (and the model) that it names are set, if not on the command line."""
    named = [flag for flag in places if re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", message)]
    return f"{message} ({', '.join(f'{flag} is set by {places[flag]}' for flag in named)})" if named else message


def options_of(command: Any) -> dict[str, Any]:
    """A command's options by their names without dashes, and its argument MODEL."""
    return {
        _flag(item).removeprefix("--"): item
        for item in command.params
        if not getattr(item, "hidden", False)
        and (item.param_type_name == "option" or item.name == "model")
        and _flag(item) not in (CONFIG, "--help", "--version")
    }


def close_to(word: str, known: Iterable[str]) -> str:
    """A hint for a word that is none of the known ones."""
    near = difflib.get_close_matches(word, sorted(known), n=1)
    return f"did you mean {near[0]}?" if near else "its name is that of an option: see headstart COMMAND --help-all"


def _commands(group: Any, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All commands by their full name, with their options."""
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, options_of(command)


def _scopes(command: str) -> list[str]:
    """Its own name, and those of the groups it is in."""
    words = command.split()
    return [" ".join(words[:count]) for count in range(len(words), 0, -1)]


def _apart(command: str) -> frozenset[str]:
    return APART.get(command, frozenset())


def _flag(item: Any) -> str:
    """The longest spelling of an option; an argument has its name."""
    return f"--{item.name}" if item.param_type_name == "argument" else max(item.opts, key=len)


def _spelled(item: Any, value: Any) -> str:
    """How a message names it: an option by its flag, the model by its name."""
    if item.param_type_name != "argument":
        return _flag(item)
    return str(value[0] if isinstance(value, list) and value else value)


def _given(options: Mapping[str, Any], words: Sequence[str]) -> set[str]:
    """The options that a command line names."""
    flags = {flag: name for name, item in options.items() for flag in item.opts}
    heads = [word if word in flags else word.partition("=")[0] if word[:2] == "--" else word[:2] for word in words]
    return {flags[head] for head in heads if head in flags}


def _named_file(words: Sequence[str]) -> Path | None:
    for word, after in zip(words, [*words[1:], ""], strict=False):
        if word == CONFIG and after:
            return Path(after).expanduser()
        if word.startswith(f"{CONFIG}="):
            return Path(word.partition("=")[2]).expanduser()
    return None


def _found(environment: Mapping[str, str]) -> Path | None:
    """The file in the current folder, else in the user's folder for settings."""
    name = "APPDATA" if sys.platform == "win32" else "XDG_CONFIG_HOME"
    home = environment.get("HOME") or environment.get("USERPROFILE") or ""
    folder = Path(environment.get(name) or Path(home, ".config"))
    places = (Path(FILE), folder / "headstart" / FILE)
    return next((path for path in places if _is_file(path)), None)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:
        return False


def _is_ours(variable: str, text: str) -> bool:
    name = variable.removeprefix(PREFIX)
    foreign = OF_KUBERNETES.fullmatch(name) or (name == "PORT" and "://" in text)
    return bool(text) and variable not in OTHER_VARIABLES and not foreign


def _of_text(item: Any, text: str, place: str) -> Any:
    """What a variable says: a switch's word; of an option that may be repeated a TOML list, or words."""
    if getattr(item, "is_flag", False):
        if text.strip().lower() not in WORDS:
            raise UsageError(f"{place} is {text!r}, but must be true or false", "it is a switch")
        return WORDS[text.strip().lower()]
    if not getattr(item, "multiple", False) and item.nargs == 1:
        return text
    if not text.lstrip().startswith("["):
        return [text] if item.param_type_name == "argument" else text.split()
    try:
        return [str(each) for each in tomllib.loads(f"list = {text}")["list"]]
    except tomllib.TOMLDecodeError:
        raise UsageError(f"{place} is {text!r}, which is no list", """for example ["one", "two"]""") from None


def _of_value(item: Any, value: Any, place: str) -> Any:
    """What a line of the file says, as the command line would. Raises UsageError for another kind of value."""
    switch, several = getattr(item, "is_flag", False), getattr(item, "multiple", False) or item.nargs != 1
    if switch != isinstance(value, bool):
        wanted = "true or false" if switch else "a text or a number"
        raise UsageError(f"{place} is {json.dumps(value, default=str)}, but must be {wanted}", "see --help")
    if switch:
        return value
    if several:
        return [str(each) for each in value] if isinstance(value, list) else [str(value)]
    if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(each, list | dict) for each in value)):
        return json.dumps(value, default=str)
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
