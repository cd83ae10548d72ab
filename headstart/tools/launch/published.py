"""Which arguments engines really take, by version: `published.json`, written by benchmarks/engine_arguments.py."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from headstart.formats.json_object import read_packaged
from headstart.tools.launch.versions import Version, padded, parse


@dataclass(frozen=True)
class Published:
    """One engine. `versions`: those that were read, ascending, with where; `arguments`: versions that have each."""

    versions: Mapping[str, str]
    arguments: Mapping[str, frozenset[str]]
    files: Mapping[str, frozenset[str]]  # of each argument, over all versions

    def nearest(self, version: Version) -> str:
        """The newest version that was read and is not above `version`; else the oldest."""
        below = [name for name in self.versions if padded(parse(name), 6) <= padded(version, 6)]
        return below[-1] if below else next(iter(self.versions))

    def has(self, name: str, version: Version) -> bool:
        """Does the nearest version take this argument?"""
        return self.nearest(version) in self.arguments.get(name, frozenset())

    def like(self, name: str, version: Version) -> str | None:
        """The argument of the nearest version with the most similar name."""
        nearest = self.nearest(version)
        known = [each for each, versions in self.arguments.items() if nearest in versions and each.startswith("-")]
        return next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.75)), None)


@cache
def _document() -> Mapping[str, Any]:
    return dict(read_packaged("headstart.tools.launch", "published.json"))


@cache
def published(engine: str) -> Published | None:
    """None for an engine that was never read."""
    own = _document().get(engine)
    if own is None:
        return None
    arguments: dict[str, set[str]] = {}
    files: dict[str, set[str]] = {}
    for file, groups in own["files"].items():
        for versions, names in groups.items():
            for name in names:
                arguments.setdefault(name, set()).update(versions.split())
                files.setdefault(name, set()).add(file)
    return Published(
        versions=own["versions"],
        arguments={name: frozenset(versions) for name, versions in arguments.items()},
        files={name: frozenset(places) for name, places in files.items()},
    )
