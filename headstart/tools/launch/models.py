"""From which version on an engine knows a model, and can draft with its heads: `models.json`, by model type."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from headstart.errors import UsageError
from headstart.formats.json_object import read_packaged
from headstart.tools.launch.launcher import Launcher
from headstart.tools.launch.versions import Version, at_least, parse, text_of


@cache
def _document() -> Mapping[str, Any]:
    return dict(read_packaged("headstart.tools.launch", "models.json"))


def _row(model_type: str) -> Mapping[str, Any] | None:
    return next((row for row in _document()["models"] if model_type in row["types"]), None)


def check_model(launcher: Launcher, version: Version, model_type: str) -> None:
    """Raises UsageError for a model that this version does not know yet, naming the one that does."""
    row = _row(model_type)
    if row is None or launcher.name not in row["first"]:
        return
    first, who = row["first"][launcher.name], f"{row['title']} ({model_type})"
    oldest, newest = _document()["read"][launcher.name]
    if first is None:
        if at_least(parse(newest), text_of(version)):
            raise UsageError(
                f"{launcher.title} {newest} has no model {who}", "choose another engine or a newer version"
            )
    elif first != oldest and not at_least(version, first):
        raise UsageError(
            f"{launcher.title} {text_of(version)} does not know {who}", f"it takes version {first} or newer"
        )


def no_heads(launcher: Launcher, version: Version, model_type: str) -> str:
    """Why this version cannot draft with the model's own heads; empty where it can."""
    row = _row(model_type)
    if row is None or launcher.name not in row.get("heads", {}):
        return ""
    first = row["heads"][launcher.name]
    if first is not None and at_least(version, first):
        return ""
    since = f"version {first} can" if first else "no version can"
    return f"{launcher.title} {text_of(version)} does not draft with the heads of {row['title']}: {since}"
