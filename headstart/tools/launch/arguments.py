"""Engine versions, the arguments of each version, and a parser that checks a command line as the engine would.

Data files: `arguments.json` (written by benchmarks/engine_definitions.py) lists the value type and spelling of every
argument of one version. `published.json` (written by benchmarks/engine_arguments.py) lists which versions have which
arguments. `rules.json` lists argument combinations that an engine refuses or changes. `models.json` lists the first
version that supports each model.
"""

import difflib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import zip_longest
from typing import Any, Protocol

from headstart.errors import UsageError
from headstart.formats.json_object import read_packaged

Version = tuple[int, ...]  # 0.32.0rc1 is (0, 32, 0, 1), llama.cpp's b11434 is (11434,)


def parse_version(text: str) -> Version:
    """Returns the numbers of a version without its local part (+cu129). Raises UsageError for a text without digits."""
    numbers = re.findall(r"\d+", text.partition("+")[0])
    if not numbers:
        raise UsageError(f"{text!r} is not a version", "for example 0.32.0, or b11434 for llama.cpp")
    return tuple(int(number) for number in numbers)


def at_least(version: Version, bound: str) -> bool:
    """Returns whether a version is `bound` or newer; 0.32 equals 0.32.0."""
    pairs = zip_longest(version, parse_version(bound), fillvalue=0)
    return next((own > other for own, other in pairs if own != other), True)


def is_within(version: Version, since: str, until: str | None) -> bool:
    """Returns whether a version is `since` or newer, and older than `until` (None: no bound)."""
    return at_least(version, since) and (until is None or not at_least(version, until))


def version_text(version: Version) -> str:
    return ".".join(map(str, version))


SHELL = re.compile(r"[$`]")  # marks shell expansions: the final value is unknown before the shell runs
SIZE = re.compile(r"-?\d+(\.\d+)?[kKmMgGtT]?|auto")
NUMBER = re.compile(r"-?\d+")
MAX_NAMES = 8  # of an ambiguous prefix in an error
FLAG = re.compile(r"-(?!$|[\d.]+$)")
SWITCHES = ("switch", "boolean", "logical")  # argument kinds that never consume the next word as their value


@dataclass(frozen=True, eq=False)
class PublishedArguments:
    """The arguments that each recorded version of one engine accepts. An argument name is a flag, a key inside a
    config (`speculative_config.method`), or NAME=VALUE for a known value."""

    versions: Sequence[str]  # recorded versions, ascending
    arguments: Mapping[str, frozenset[str]]  # argument name -> versions that accept it

    def nearest(self, version: Version) -> str:
        """Returns the newest recorded version that is not above `version`, else the oldest recorded one."""
        below = [name for name in self.versions if at_least(version, name)]
        return below[-1] if below else self.versions[0]

    def has(self, name: str, version: Version) -> bool:
        return self.nearest(version) in self.arguments.get(name, ())

    @cache  # noqa: B019  # one object for each engine
    def words(self, name: str) -> frozenset[str]:
        """Returns all values of an argument that any recorded version accepts; empty if none are recorded."""
        return frozenset(each.partition("=")[2] for each in self.arguments if each.startswith(f"{name}="))


@cache
def published(engine: str) -> PublishedArguments | None:
    """Returns the recorded arguments of an engine from published.json; None for an engine without records."""
    own = read_packaged("headstart.tools.launch", "published.json").get(engine)
    if own is None:
        return None
    arguments: dict[str, frozenset[str]] = defaultdict(frozenset)
    for groups in own["files"].values():
        for versions, names in groups.items():
            for name in names:
                arguments[name] |= {*versions.split()}
    return PublishedArguments(tuple(own["versions"]), dict(arguments))


@dataclass(frozen=True)
class ArgumentTable:
    """All flags of one engine version. The *first name* of a flag is its main spelling; aliases map to it."""

    version: str
    kinds: Mapping[str, str]  # first name -> value type: switch, boolean, logical, int, size, float, json, text
    numbers: Mapping[str, str]  # first name -> number of values, as argparse's nargs ("?", "*", "+", "2")
    choices: Mapping[str, frozenset[str]]  # first name -> allowed values
    aliases: Mapping[str, str]  # alias -> first name
    spellings: frozenset[str]  # variants that the parser accepts: underscores, one dash, prefixes, joined, dotted

    def find(self, name: str) -> tuple[str, ...]:
        """Returns the first names that `name` may stand for: several if it is an ambiguous prefix, none if unknown."""
        for word in self._spelled(name):
            if first := self.exact(word):
                return (first,)
        if "prefixes" not in self.spellings or not name.startswith("--"):
            return ()
        prefix = self._spelled(name)[-1]
        negated = (f"--no-{each[2:]}" for each, kind in self.kinds.items() if kind == "boolean")
        return tuple(sorted(word for word in {*self.kinds, *self.aliases, *negated} if word.startswith(prefix)))

    def exact(self, word: str) -> str:
        """Returns the first name of a flag that is spelled in full, as an alias or as --no-NAME; else ""."""
        if word in self.kinds:
            return word
        if word in self.aliases:
            return self.aliases[word]
        positive = word.replace("--no-", "--", 1)
        return positive if self.kinds.get(positive) == "boolean" else ""

    def similar(self, name: str) -> str | None:
        return next(iter(difflib.get_close_matches(name, [*self.kinds, *self.aliases], n=1, cutoff=0.75)), None)

    def _spelled(self, name: str) -> list[str]:
        """Returns `name` and its variants with the dashes that the table uses."""
        words = [name]
        if "underscores" in self.spellings and name.startswith("--"):
            words.append(name.replace("_", "-"))
        if "one dash" in self.spellings:
            bare = name.lstrip("-").replace("-", "_")
            words += [f"--{bare}", *([f"--{bare[2:]}"] if bare.startswith("no") else [])]
        return words


@cache
def argument_table(engine: str) -> ArgumentTable | None:
    own = read_packaged("headstart.tools.launch", "arguments.json").get(engine)
    if own is None:
        return None
    return ArgumentTable(
        version=own["version"], kinds={name: kind for kind, names in own["kinds"].items() for name in names},
        numbers=own["numbers"], choices={name: frozenset(values) for name, values in own["choices"].items()},
        aliases=own["aliases"], spellings=frozenset(own["spellings"]),
    )  # fmt: skip


@cache
def table_for(engine: str, version: Version) -> ArgumentTable | None:
    """Returns the argument table adapted to `version`: arguments that the version lacks are removed, and arguments
    that only this version has accept any text. None for an engine without a table."""
    table, known = argument_table(engine), published(engine)
    if table is None or known is None or known.nearest(version) == known.nearest(parse_version(table.version)):
        return table
    there = {name for name in known.arguments if known.has(name, version)}
    kinds = {name: kind for name, kind in table.kinds.items() if name in there}
    aliases = {name: first for name, first in table.aliases.items() if first in kinds}
    other = {name for name in there if name.startswith("-") and "=" not in name} - kinds.keys() - aliases.keys()
    return replace(
        table, version=known.nearest(version), kinds=kinds | dict.fromkeys(other, "text"),
        numbers={**table.numbers, **dict.fromkeys(other, "?")}, choices={}, aliases=aliases,
    )  # fmt: skip


@dataclass
class ParsedArguments:
    values: dict[str, Any] = field(default_factory=dict)  # first name -> value; True for a switch, a dict for JSON
    positional: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # one text for each argument that the engine would refuse


def parse_arguments(table: ArgumentTable, words: Sequence[str]) -> ParsedArguments:
    """Parses the words after the program name as the engine's own parser does; never raises."""
    parser = _ArgumentParser(table, words)
    while parser.rest:
        word = parser.rest.pop(0)
        if FLAG.match(word):
            parser.read_flag(word)
        else:
            parser.parsed.positional.append(word)
    return parser.parsed


class _ArgumentParser:
    def __init__(self, table: ArgumentTable, words: Sequence[str]) -> None:
        self.table, self.rest, self.parsed = table, list(words), ParsedArguments()

    def read_flag(self, word: str) -> None:
        table, errors = self.table, self.parsed.errors
        flag, equals, joined = word.partition("=")
        base, dot, key = flag.partition(".") if "dotted" in table.spellings else (flag, "", "")
        names = table.find(base)
        if len(names) != 1:
            like = table.similar(flag)
            unknown = f"there is no {flag}" + (f"; did you mean {like}?" if like else "")
            errors.append(f"{flag} may be {' or '.join(names)}" if 0 < len(names) <= MAX_NAMES else unknown)
            if not equals:
                self._take(1)
            return
        (name,) = names
        if equals and "joined" not in table.spellings:
            errors.append(f"{flag} takes its value as the next word, not after =")
        kind, number = table.kinds[name], table.numbers.get(name, "")
        most = 0 if kind in SWITCHES else {"+": len(self.rest), "*": len(self.rest), "2": 2}.get(number, 1)
        values = [joined] if equals else self._take(most)
        if kind in SWITCHES:
            self._switch(name, flag, values)
        elif not values and number not in ("?", "*"):
            errors.append(f"{flag} needs a value")
        elif dot:  # --speculative-config.method mtp
            below = self.parsed.values[name] = self.parsed.values.get(name) or {}
            *path, last = key.split(".")
            for part in path:
                below = below.setdefault(part, {})
            below[last] = parse_json(values[0])
        else:
            taken = [self._value(name, flag, value) for value in values]
            self.parsed.values[name] = taken if number in ("+", "*") else taken[0] if taken else True

    def _take(self, most: int) -> list[str]:
        """Takes up to `most` values from the front of the remaining words."""
        taken: list[str] = []
        while len(taken) < most and self.rest and not FLAG.match(self.rest[0]):
            taken.append(self.rest.pop(0))
        return taken

    def _switch(self, name: str, flag: str, values: list[str]) -> None:
        is_negated = flag.startswith(("--no-", "--no_")) and name != flag
        self.parsed.values[name] = not is_negated if not values else values[0].lower() in ("true", "1", "t", "yes")
        if values and self.table.kinds[name] != "logical":
            self.parsed.errors.append(f"{flag} takes no value, but has {values[0]!r}")

    def _value(self, name: str, flag: str, text: str) -> Any:
        kind, choices = self.table.kinds[name], self.table.choices.get(name)
        if SHELL.search(text):
            return None if kind == "json" else text
        value, problem = _convert(kind, text, is_config=name.endswith("-config"))
        if choices and not problem and not set(text.split(",") if name == "--spec-type" else [text]) <= choices:
            problem = f"one of {', '.join(sorted(choices)[:12])}{' ...' if len(choices) > 12 else ''}"
        if problem:
            self.parsed.errors.append(f"{flag} is {text[:60]!r}, but takes {problem}")
        return value


def _convert(kind: str, text: str, *, is_config: bool) -> tuple[Any, str]:
    """Converts `text` to an argument's value type. Returns the value and an error: "" if the text fits, else a
    description of the expected value."""
    if kind == "json":
        try:
            value = json.loads(text)
        except json.JSONDecodeError as error:
            return {}, f"JSON: {error}"
        return value, "a JSON object" if is_config and not isinstance(value, dict | None) else ""
    is_number = NUMBER.fullmatch(text)
    if kind in ("int", "size"):
        fits = is_number if kind == "int" else SIZE.fullmatch(text)
        wanted = "a whole number" if kind == "int" else "a size such as 32768 or 32k"
        return int(text) if is_number else text, "" if fits else wanted
    if kind == "float":
        try:
            return float(text), ""
        except ValueError:
            return text, "a number"
    return text, ""


def parse_json(text: str) -> Any:
    """Returns the parsed JSON value; returns `text` itself if it is not valid JSON."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


class NamedEngine(Protocol):
    """An engine's name in the data files, and its title in messages."""

    @property
    def name(self) -> str: ...

    @property
    def title(self) -> str: ...


@dataclass(frozen=True)
class EngineRule:
    """A row of rules.json: a combination of arguments that an engine refuses, or changes silently."""

    when: Mapping[str, Any]
    """Argument, config key or fact -> its condition: true (given), false (not given), a list of allowed values, or an
    object {name of a test in TESTS: operand}. An operand that is the name of another entry means that entry's value."""
    says: str  # the message for the user
    source: str  # file of the engine's repository that contains the check
    since: str = "0"  # first version with the rule
    until: str | None = None  # first version without the rule
    level: str = "refuse"  # "refuse": the engine does not start; "note": the engine silently does something else

    def is_broken(self, version: Version, entries: Mapping[str, Any]) -> bool:
        """Returns whether all conditions of `when` hold. A condition on an unknown value does not hold."""
        if not is_within(version, self.since, self.until):
            return False
        try:
            return all(_holds(entries, name, condition) for name, condition in self.when.items())
        except TypeError:  # a value of a wrong type is reported by the parser
            return False


TESTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "not": lambda value, others: value not in others,
    "over": lambda value, other: value > other,
    "under": lambda value, other: value < other,
    "least": lambda value, other: value >= other,
    "differs": lambda value, other: value != other,
    "has": lambda value, other: any(other in each for each in (value if isinstance(value, list) else [value])),
    "no multiple": lambda value, other: value > other and value % other != 0,
}


@cache
def rules(engine: str) -> tuple[EngineRule, ...]:
    return tuple(EngineRule(**each) for each in read_packaged("headstart.tools.launch", "rules.json").get(engine, ()))


def _holds(entries: Mapping[str, Any], name: str, condition: Any) -> bool:
    value = entries.get(name)
    if isinstance(condition, bool):
        return (value not in (None, False)) is condition
    if value is None or (_is_from_shell(value) and not isinstance(condition, list)):
        return False
    if isinstance(condition, list):
        return value in condition
    for test, wanted in condition.items():
        if test == "by":  # added to the other entry's value
            continue
        other = entries.get(wanted) if isinstance(wanted, str) and test != "has" else wanted
        if other is None or _is_from_shell(other):
            return False
        if not TESTS[test](value, other + condition["by"] if "by" in condition else other):
            return False
    return True


def _is_from_shell(value: Any) -> bool:
    return isinstance(value, str) and SHELL.search(value) is not None


@dataclass
class ArgumentCheck:
    """Result of checking a command line for one engine version."""

    errors: list[str] = field(default_factory=list)  # arguments that the engine would refuse
    notes: list[str] = field(default_factory=list)  # arguments that the engine would silently change


def check_arguments(
    program: NamedEngine, version: Version, words: Sequence[str], facts: Mapping[str, Any] | None = None, *,
    num_positional: int = 1,
) -> ArgumentCheck:  # fmt: skip
    """Checks the words after the program name. `facts` adds entries that rules can test, such as configs in files
    (as dictionaries). `num_positional` is the number of words without a flag that the engine allows."""
    table = table_for(program.name, version)
    if table is None:
        return ArgumentCheck()
    parsed, head = parse_arguments(table, words), f"{program.title} {table.version}"
    check = ArgumentCheck([f"{head}: {error}" for error in parsed.errors])
    more = [word for word in parsed.positional if not SHELL.search(word)][num_positional:]
    check.errors += [f"{head}: {word!r} belongs to no flag" for word in more]
    entries = _flattened({**parsed.values, **(facts or {})})
    if known := published(program.name):
        nearest = f"{program.title} {known.nearest(version)}"
        own = argument_table(program.name)
        flags = {name: value for name, value in parsed.values.items() if not own or name not in own.choices}
        check.errors += [f"{nearest} has no {error}" for error in _unknown_values(known, version, flags)]
        check.errors += [f"{nearest} has no {error}" for error in _unknown_keys(known, version, entries)]
    for rule in rules(program.name):
        if rule.is_broken(version, entries):
            (check.notes if rule.level == "note" else check.errors).append(rule.says)
    return check


def _flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Adds an entry for each key of a JSON value: --speculative-config gives speculative_config.method."""
    entries = dict(values)
    for name, value in values.items():
        if isinstance(value, dict):
            base = name.lstrip("-").replace("-", "_")
            entries[base] = value
            entries |= {f"{base}.{key}": each for key, each in value.items()}
    return entries


def _unknown_values(known: PublishedArguments, version: Version, values: Mapping[str, Any]) -> Iterator[str]:
    """Yields an error for each flag value that this version does not accept. Case is ignored."""
    for name, value in values.items():
        if known.words(name) and isinstance(value, str) and not SHELL.search(value):
            there = sorted(word.upper() for word in known.words(name) if known.has(f"{name}={word}", version))
            if value.upper() not in there:
                yield f"{name} {value}: it takes {', '.join(dict.fromkeys(there))}"


def _unknown_keys(known: PublishedArguments, version: Version, entries: Mapping[str, Any]) -> Iterator[str]:
    """Yields an error for each config key, and each value of such a key, that this version does not accept."""
    bases = {name.partition(".")[0] for name in known.arguments if "." in name and not name.startswith("-")}
    for name, value in entries.items():
        base, dot, key = name.partition(".")
        if not dot or base not in bases or base not in entries:
            continue
        if not known.has(name, version):
            yield f"{key!r} in {base}"
        elif known.words(name) and isinstance(value, str) and not known.has(f"{name}={value}", version):
            had = [each for each in known.versions if each in known.arguments.get(f"{name}={value}", ())]
            is_older = had and not at_least(parse_version(had[-1]), known.nearest(version))
            yield f"{key} {value}" + (f" (it was there in {had[-1]})" if is_older else "")


# models.json has, for each model type and engine, the first version that runs it and the first that uses its MTP heads.


def check_model(program: NamedEngine, version: Version, model_type: str) -> None:
    """Raises UsageError for a model type that this version does not support; the text names the first that does."""
    row = _model_row(model_type)
    if row is None or program.name not in row["first"]:
        return
    first, model = row["first"][program.name], f"{row['title']} ({model_type})"
    oldest, newest = read_packaged("headstart.tools.launch", "models.json")["read"][program.name]
    if first is None and at_least(parse_version(newest), version_text(version)):
        what = f"{program.title} {newest} has no model {model}"
        raise UsageError(what, "choose another engine or a newer version")
    if first not in (None, oldest) and not at_least(version, first):
        what = f"{program.title} {version_text(version)} does not know {model}"
        raise UsageError(what, f"it takes version {first} or newer")


def why_no_heads(program: NamedEngine, version: Version, model_type: str) -> str:
    """Returns why this version cannot draft with the model's own heads; empty where it can."""
    row = _model_row(model_type)
    if row is None or program.name not in row.get("heads", {}):
        return ""
    first = row["heads"][program.name]
    if first is not None and at_least(version, first):
        return ""
    since = f"version {first} can" if first else "no version can"
    return f"{program.title} {version_text(version)} does not draft with the heads of {row['title']}: {since}"


def _model_row(model_type: str) -> Mapping[str, Any] | None:
    models = read_packaged("headstart.tools.launch", "models.json")["models"]
    return next((row for row in models if model_type in row["types"]), None)
