"""Links, anchors, commands and flags in documents exist."""

import json
import re
import shlex
import urllib.parse
from functools import cache
from pathlib import Path

import pytest
from source import PACKAGE, ROOT
from test_cli_surface import COMMANDS

FOLDERS = (".", "docs", "docs/cookbook", "docs/decisions", "docs/extend", "docs/log", "benchmarks", "headstart/**")
DOCUMENTS = sorted({str(path.relative_to(ROOT)) for each in FOLDERS for path in ROOT.glob(f"{each}/*.md")})
HISTORY = {name for name in DOCUMENTS if name.startswith("docs/log/")}
"""Tells what was there once."""
PLACES = {"COMMAND", "acme-serve"}
FOREIGN = {"--speculate", "--draft-depth", "--no-deps", "--program"}
"""Of other programs, and of the launcher that docs/extend/launcher.md makes up."""
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def text_of(document: str) -> str:
    return (ROOT / document).read_text("utf-8")


@cache
def anchors(document: Path) -> set[str]:
    """Anchors of the headings, as Markdown renderers build them."""
    found: dict[str, int] = {}
    anchors = set()
    for heading in re.findall(r"^#+ (.*)", FENCE.sub("", document.read_text("utf-8")), re.MULTILINE):
        name = re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        anchors.add(f"{name}-{found[name]}" if name in found else name)
        found[name] = found.get(name, 0) + 1
    return anchors


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_anchors_exist(document: str) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text_of(document))):
        path, _, anchor = urllib.parse.unquote(target).partition("#")
        if ":" in path:
            continue
        there = ((ROOT / document).parent / path) if path else ROOT / document
        if not there.exists() or (anchor and there.suffix == ".md" and anchor not in anchors(there)):
            dead.append(target)
    assert not dead


@cache
def flags_of_others() -> set[str]:
    """Published flags of other engines, and flags of this repository's scripts."""
    published = (PACKAGE / "tools" / "launch" / "published.json").read_text("utf-8")
    assert json.loads(published)
    scripts = [*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    text = published + "".join(path.read_text("utf-8") for path in scripts)
    return set(re.findall(r"[\"'](--[a-z][\w-]*)[\"']", text))


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in HISTORY])
def test_flags_exist(document: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?![\w-]*\()", text_of(document)))
    ours = set[str]().union(*COMMANDS.values(), ("--help", "--help-all", "--version"))
    assert not named - ours - flags_of_others() - FOREIGN


def command_lines(document: str) -> list[str]:
    """The `headstart` command lines of a document, in blocks or backquotes."""
    text = text_of(document)
    quoted = re.findall(r"(?<!`)`(headstart [^`\n]+)`", FENCE.sub("", text))
    return [*re.findall(r"^\$ (headstart .*)", text, re.MULTILINE), *quoted]


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name not in HISTORY])
def test_command_lines_use_existing_options(document: str) -> None:
    wrong = []
    for line in command_lines(document):
        words = shlex.split(re.sub(r"[\[\]|]", " ", line), comments=True)[1:]
        words = words[: words.index("--")] if "--" in words else words
        if words[0] in PLACES or words[:2][-1] in PLACES or words[0].startswith("-"):
            continue
        if words[0] not in {name.split()[0] for name in COMMANDS}:
            wrong.append(line)
            continue
        command = max((name for name in COMMANDS if words[: name.count(" ") + 1] == name.split()), key=len)
        own = (f"{command} {default}" for default in ("run", "list"))  # a group's default command
        command = next((each for each in own if each in COMMANDS), command)
        flags = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
        if flags - COMMANDS[command] - {"--help", "--help-all"}:
            wrong.append(line)
    assert not wrong


def test_documents_and_command_lines_are_found() -> None:
    assert len(DOCUMENTS) > 15
    assert sum(len(command_lines(name)) for name in DOCUMENTS) > 80
