"""Results file of verify_families.py, so that a stopped run can be continued."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RED = "**RED** "


def marked(text: str, good: bool) -> str:
    return text if good else f"{RED}{text}"


def commit() -> str:
    """Commit of this checkout; empty outside a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip()


class ResultsFile:
    """By row and column: `texts` of the table, what was `found`, settings and commit. Without a path nothing is
    saved."""

    def __init__(self, path: Path | None, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """`settings`: those of each column."""
        self._path, self._settings, self._commit = path, settings, commit()
        self.rows: dict[str, dict[str, dict[str, Any]]] = {}
        if path and path.exists():
            self.rows = json.loads(path.read_text("utf-8"))

    def good(self, row: str, column: str) -> bool:
        """Whether the cell was measured with these settings and is not red."""
        found = self.rows.get(row, {}).get(column, {})
        return found.get("settings") == self._settings[column] and not red(found)

    def add(self, row: str, column: str, texts: Mapping[str, str], found: Any, seconds: float) -> None:
        told = {"texts": dict(texts), "found": found, "seconds": round(seconds, 1)}
        told |= {"settings": self._settings[column], "commit": self._commit, "ended": time.strftime("%F %T")}
        self.rows.setdefault(row, {})[column] = told
        if self._path:
            beside = self._path.with_suffix(".part")
            beside.write_text(json.dumps(self.rows, indent=1), "utf-8")
            beside.replace(self._path)


def red(found: Mapping[str, Any]) -> list[str]:
    """The red texts of a column without their marks."""
    return [f"{head}: {text.removeprefix(RED)}" for head, text in found.get("texts", {}).items() if RED in text]
