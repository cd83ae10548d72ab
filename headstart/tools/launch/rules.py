"""What engines refuse after parsing: combinations of arguments, from `rules.json`, each with the file that says it.

A rule's `when` names arguments, keys of configs (`speculative_config.method`) and facts (`head.kind`, `device`), and
what must be true of each: true (given), false (not given), a list (one of these), or words of TESTS with their value.
A value that is the name of another entry stands for that entry's; a rule about something unknown does not apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from headstart.formats.json_object import read_packaged
from headstart.tools.launch.definitions import SHELL
from headstart.tools.launch.versions import Version, at_least


@dataclass(frozen=True)
class Rule:
    """`level`: refuse, or note where the engine goes on and does something else."""

    when: Mapping[str, Any]
    says: str
    source: str
    since: str = "0"
    until: str | None = None
    level: str = "refuse"

    def serves(self, version: Version) -> bool:
        return at_least(version, self.since) and (self.until is None or not at_least(version, self.until))


@cache
def rules(engine: str) -> tuple[Rule, ...]:
    return tuple(Rule(**each) for each in read_packaged("headstart.tools.launch", "rules.json").get(engine, ()))


TESTS: Mapping[str, Callable[[Any, Any], bool]] = {
    "not": lambda value, others: value not in others,
    "over": lambda value, other: value > other,
    "under": lambda value, other: value < other,
    "least": lambda value, other: value >= other,
    "differs": lambda value, other: value != other,
    "has": lambda value, other: any(other in each for each in (value if isinstance(value, list) else [value])),
    "not in": lambda value, others: value not in others,
    "no multiple": lambda value, other: value > other and value % other != 0,
}


def broken(engine: str, version: Version, entries: Mapping[str, Any]) -> list[Rule]:
    """The rules that these arguments, keys and facts break in this version."""
    return [rule for rule in rules(engine) if rule.serves(version) and _applies(rule, entries)]


def _applies(rule: Rule, entries: Mapping[str, Any]) -> bool:
    try:
        return all(_holds(entries, name, wanted) for name, wanted in rule.when.items())
    except TypeError:  # a value of another type has its own message, or is made by the shell
        return False


def _holds(entries: Mapping[str, Any], name: str, wanted: Any) -> bool:
    value = entries.get(name)
    if isinstance(wanted, bool):
        return (value not in (None, False)) is wanted
    if value is None:
        return False
    if isinstance(wanted, list):
        return value in wanted
    if _from_shell(value):
        return False
    by = wanted.get("by", 0)
    for word, other in wanted.items():
        if word == "by":
            continue
        meant = entries.get(other) if isinstance(other, str) and word != "has" else other
        if meant is None or _from_shell(meant) or not TESTS[word](value, meant + by if by else meant):
            return False
    return True


def _from_shell(value: Any) -> bool:
    return isinstance(value, str) and SHELL.search(value) is not None


def flattened(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments, and the keys of those that are documents: --speculative-config gives speculative_config.method."""
    entries = dict(values)
    for name, value in values.items():
        if isinstance(value, dict):
            base = name.lstrip("-").replace("-", "_")
            entries[base] = value
            entries |= {f"{base}.{key}": each for key, each in value.items()}
    return entries
