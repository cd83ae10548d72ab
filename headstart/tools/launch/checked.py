"""Is a command line one that an engine takes? By names, values, keys and values inside documents, and combinations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from headstart.tools.launch.definitions import SHELL, Definitions, definitions, resolve
from headstart.tools.launch.launcher import Launcher
from headstart.tools.launch.published import Published, published
from headstart.tools.launch.rules import broken, flattened
from headstart.tools.launch.versions import Version, padded, parse


@dataclass
class Checked:
    """What the engine would refuse, and what it would take otherwise than it looks."""

    errors: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


@cache
def definitions_of(engine: str, version: Version) -> Definitions | None:
    """The argument definitions as far as they hold in this version: names that it lacks are left out, those that only
    it has take anything."""
    known, named = definitions(engine), published(engine)
    if known is None or named is None or named.nearest(version) == named.nearest(parse(known.version)):
        return known
    there = {name for name, versions in named.arguments.items() if named.nearest(version) in versions}
    kinds = {name: kind for name, kind in known.kinds.items() if name in there}
    aliases = {name: first for name, first in known.aliases.items() if first in kinds}
    other = {name for name in there if name.startswith("-") and "=" not in name} - kinds.keys() - aliases.keys()
    return Definitions(
        version=named.nearest(version),
        kinds=kinds | dict.fromkeys(other, "text"),
        numbers=dict(known.numbers) | dict.fromkeys(other, "?"),
        choices={},
        aliases=aliases,
        spellings=known.spellings,
    )


def check_words(
    launcher: Launcher,
    version: Version,
    words: Sequence[str],
    facts: Mapping[str, Any] | None = None,
    *,
    positional: int = 1,
) -> Checked:
    """`words`: those after the program. `facts`: what is known beside (`Rule`); documents in files stand among them as
    their dictionaries. `positional`: how many words without a flag there may be."""
    known = definitions_of(launcher.name, version)
    if known is None:
        return Checked()
    found = resolve(known, words)
    entries = flattened({**found.values, **(facts or {})})
    checked = Checked([f"{launcher.title} {known.version}: {error}" for error in found.errors])
    more = [word for word in found.positional if not SHELL.search(word)][positional:]
    checked.errors += [f"{launcher.title} {known.version}: {word!r} belongs to no flag" for word in more]
    if named := published(launcher.name):
        checked.errors += _words(launcher, named, version, found.values)
        checked.errors += _documents(launcher, named, version, entries)
    for rule in broken(launcher.name, version, entries):
        (checked.notes if rule.level == "note" else checked.errors).append(rule.says)
    return checked


def _words(launcher: Launcher, named: Published, version: Version, values: Mapping[str, Any]) -> list[str]:
    """Values of flags whose words are known, in any case, and that this version lacks."""
    errors, nearest = [], named.nearest(version)
    for name, value in values.items():
        words = {each.partition("=")[2] for each in named.arguments if each.startswith(f"{name}=")}
        if not words or not isinstance(value, str) or SHELL.search(value):
            continue
        there = {word.upper() for word in words if named.has(f"{name}={word}", version)}
        if name not in _choices(launcher.name) and value.upper() not in there:
            errors.append(f"{launcher.title} {nearest} has no {name} {value}: it takes {', '.join(sorted(there))}")
    return errors


def _choices(engine: str) -> Mapping[str, Any]:
    """Flags whose words the definitions check themselves."""
    known = definitions(engine)
    return known.choices if known else {}


def _documents(launcher: Launcher, named: Published, version: Version, entries: Mapping[str, Any]) -> list[str]:
    """Keys of documents, and values of those whose words are known, that this version lacks."""
    nearest, errors = named.nearest(version), []
    known = {name.partition("=")[0] for name in named.arguments}
    bases = {name.partition(".")[0] for name in known if "." in name and not name.startswith("-")}
    for name, value in entries.items():
        base, dot, key = name.partition(".")
        if not dot or base not in bases or base not in entries:
            continue
        if not named.has(name, version):
            errors.append(f"{launcher.title} {nearest} has no {key!r} in {base}")
            continue
        words = {each.partition("=")[2] for each in named.arguments if each.startswith(f"{name}=")}
        if words and isinstance(value, str) and not named.has(f"{name}={value}", version):
            had = max((v for v in named.arguments.get(f"{name}={value}", ())), key=_number, default="")
            since = f" (it was there in {had})" if had and _number(had) < _number(nearest) else ""
            errors.append(f"{launcher.title} {nearest} has no {key} {value}{since}")
    return errors


def _number(version: str) -> Version:
    return padded(parse(version), 6)
