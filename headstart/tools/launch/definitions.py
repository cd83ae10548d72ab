"""Command lines read as engines read them: `arguments.json`, written by benchmarks/engine_definitions.py, says of each
argument what value it takes and how it may be spelled.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from headstart.formats.json_object import read_packaged

SHELL = re.compile(r"[$`]")
"""A value that the shell makes is not known here."""
SIZE = re.compile(r"-?\d+(\.\d+)?[kKmMgGtT]?|auto")
NUMBER = re.compile(r"-?\d+")


@dataclass(frozen=True)
class Definitions:
    """The arguments of one engine, in the one version they were read of. `kinds`: what each takes (`Argument` of the
    generator), by its first name; `aliases`: other names -> first names."""

    version: str
    kinds: Mapping[str, str]
    numbers: Mapping[str, str]
    choices: Mapping[str, frozenset[str]]
    aliases: Mapping[str, str]
    spellings: frozenset[str]

    def find(self, name: str) -> tuple[str, ...]:
        """First names that a spelling may stand for: one where the engine takes it, none where it does not, several
        where it is the beginning of several."""
        for word in self._spelled(name):
            if word in self.kinds:
                return (word,)
            if word in self.aliases:
                return (self.aliases[word],)
            positive = word.replace("--no-", "--", 1)
            if self.kinds.get(positive) == "boolean":
                return (positive,)
        if "prefixes" not in self.spellings or not name.startswith("--"):
            return ()
        begun = self._spelled(name)[-1]
        full = {*self.kinds, *self.aliases} | {f"--no-{n[2:]}" for n, kind in self.kinds.items() if kind == "boolean"}
        return tuple(sorted(word for word in full if word.startswith(begun)))

    def like(self, name: str) -> str | None:
        """The argument with the most similar name."""
        return next(iter(difflib.get_close_matches(name, [*self.kinds, *self.aliases], n=1, cutoff=0.75)), None)

    def _spelled(self, name: str) -> list[str]:
        words = [name]
        if "underscores" in self.spellings and name.startswith("--"):
            words.append(name.replace("_", "-"))
        if "one dash" in self.spellings:
            bare = name.lstrip("-").replace("-", "_")
            words += [f"--{bare}", *([f"--{bare[2:]}"] if bare.startswith("no") else [])]
        return words


@cache
def definitions(engine: str) -> Definitions | None:
    """None for an engine that was never read."""
    own = read_packaged("headstart.tools.launch", "arguments.json").get(engine)
    if own is None:
        return None
    return Definitions(
        version=own["version"],
        kinds={name: kind for kind, names in own["kinds"].items() for name in names},
        numbers=own["numbers"],
        choices={name: frozenset(values) for name, values in own["choices"].items()},
        aliases=own["aliases"],
        spellings=frozenset(own["spellings"]),
    )


@dataclass
class Resolved:
    """What a command line says: values by first names (True: a switch; a list: several; a dictionary: JSON),
    positional words, and what the engine would refuse."""

    values: dict[str, Any] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def resolve(known: Definitions, words: Sequence[str]) -> Resolved:
    """The words after the program, as the engine's own parser would take them."""
    found, rest = Resolved(), list(words)
    while rest:
        word = rest.pop(0)
        if not _is_flag(word):
            found.positional.append(word)
            continue
        flag, equals, joined = word.partition("=")
        base, dot, key = flag.partition(".") if "dotted" in known.spellings else (flag, "", "")
        names = known.find(base)
        if len(names) != 1:
            found.errors.append(_unknown(known, flag, names))
            if not equals and rest and not _is_flag(rest[0]):
                rest.pop(0)
            continue
        if equals and "joined" not in known.spellings:
            found.errors.append(f"{flag} takes its value as the next word, not after =")
        values = [joined] if equals else list(_take(known, names[0], rest))
        _store(known, found, names[0], flag, values, key if dot else "")
    return found


def _is_flag(word: str) -> bool:
    return len(word) > 1 and word.startswith("-") and not re.fullmatch(r"-[\d.]+", word)


def _unknown(known: Definitions, flag: str, names: tuple[str, ...]) -> str:
    if names:
        return f"{flag} may be {' or '.join(names)}"
    like = known.like(flag)
    return f"there is no {flag}" + (f"; did you mean {like}?" if like else "")


def _take(known: Definitions, name: str, rest: list[str]) -> Iterator[str]:
    """Its values from the front of `rest`."""
    if known.kinds[name] in ("switch", "boolean"):
        return
    if known.kinds[name] == "logical":  # --flag alone is true; a value stands behind =
        return
    most = {"+": len(rest), "*": len(rest), "2": 2}.get(known.numbers.get(name, ""), 1)
    while most and rest and not _is_flag(rest[0]):
        most -= 1
        yield rest.pop(0)


def _store(known: Definitions, found: Resolved, name: str, flag: str, values: list[str], key: str) -> None:
    kind, number = known.kinds[name], known.numbers.get(name, "")
    if kind in ("switch", "boolean", "logical"):
        says_no = flag.startswith(("--no-", "--no_")) and name != flag
        found.values[name] = not says_no if not values else values[0].lower() in ("true", "1", "t", "yes")
        if values and kind != "logical":
            found.errors.append(f"{flag} takes no value, but has {values[0]!r}")
        return
    if not values and number not in ("?", "*"):
        found.errors.append(f"{flag} needs a value")
        return
    if key:  # --speculative-config.method mtp
        below = found.values.get(name) or {}
        found.values[name] = below
        for part in key.split(".")[:-1]:
            below = below.setdefault(part, {})
        below[key.rpartition(".")[2]] = _plain(values[0])
        return
    taken = [_value(known, found, name, flag, value) for value in values]
    found.values[name] = taken if number in ("+", "*") else taken[0] if taken else True


def _plain(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _value(known: Definitions, found: Resolved, name: str, flag: str, text: str) -> Any:
    if SHELL.search(text) and known.kinds[name] != "json":
        return text
    kind, problem = known.kinds[name], ""
    value: Any = text
    if kind == "json":
        value, problem = _json(text)
        if not problem and name.endswith("-config") and not isinstance(value, dict | None):
            problem = "a JSON object"
    elif kind == "int":
        problem = "" if NUMBER.fullmatch(text) else "a whole number"
        value = text if problem else int(text)
    elif kind == "size":
        problem = "" if SIZE.fullmatch(text) else "a size such as 32768 or 32k"
        value = int(text) if NUMBER.fullmatch(text) else text
    elif kind == "float":
        try:
            value = float(text)
        except ValueError:
            problem = "a number"
    choices = known.choices.get(name)
    if choices and not problem and not set(text.split(",") if name == "--spec-type" else [text]) <= choices:
        problem = f"one of {', '.join(sorted(choices)[:12])}{' ...' if len(choices) > 12 else ''}"
    if problem:
        found.errors.append(f"{flag} is {text[:60]!r}, but takes {problem}")
    return value


def _json(text: str) -> tuple[Any, str]:
    if SHELL.search(text):
        return None, ""
    try:
        return json.loads(text), ""
    except json.JSONDecodeError as error:
        return {}, f"JSON: {error}"
