"""Command lines as guides, issues and scripts show them: brought up to date, a shell reads them, and so do the engines'
own argument definitions."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from headstart.tools.launch.checked import check_words, definitions_of
from headstart.tools.launch.commands import CommandLine
from headstart.tools.launch.shell import commands
from headstart.tools.launch.translate import find_engine, translate_text
from headstart.tools.launch.versions import parse

LINES = json.loads(Path(__file__).with_name("stale_lines.json").read_text("utf-8"))
AT_LEAST = 40


def test_there_are_enough() -> None:
    assert len(LINES) >= AT_LEAST


@pytest.mark.parametrize("entry", LINES, ids=[entry["source"] for entry in LINES])
def test_stale_line(entry: dict[str, Any]) -> None:
    version = entry.get("version")
    done = translate_text(entry["line"], version, None)
    shell = subprocess.run(["bash", "-n", "-c", done.text], capture_output=True, text=True)
    assert shell.returncode == 0, f"{shell.stderr}\n{done.text}"
    wanted = entry.get("human", "")
    assert done.changes or wanted
    assert any(wanted in warning for warning in done.warnings) if wanted else not done.warnings, done.warnings
    if not wanted:
        assert not refused(done.text), done.text
        again = translate_text(done.text, version, None) if find(done.text) else None
        assert again is None or again.text == done.text


def find(text: str) -> bool:
    return any(find_engine(tokens) for tokens in commands(text))


def refused(text: str) -> list[str]:
    """What the engines' definitions say against the commands of a text."""
    errors = []
    for tokens in commands(text):
        if (found := find_engine(tokens)) is None:
            continue
        launcher, begin = found
        version = parse(launcher.newest)
        line = CommandLine.parse(text, tokens, begin, definitions_of(launcher.name, version), model=True)
        words = [part for word in line.words for part in word.text()]
        errors += check_words(launcher, version, words).errors
    return errors
