"""The documentation site: pages of documents and commands, links, pictures, recording."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from source import ROOT
from test_cli_surface import COMMANDS
from test_links import DOCUMENTS

from headstart.cli.app import application
from headstart.cli.parser import all_commands
from headstart.cli.serve import run as serve


def run_script(path: str) -> Any:
    return SimpleNamespace(**runpy.run_path(str(ROOT / path)))


site = run_script("docs/site/make.py")
HIDDEN = {"--replica", "--vllm"}
DECLARED = all_commands(application())


def test_every_document_is_a_page() -> None:
    assert set(site.PAGES) == {*DOCUMENTS, "docs/python.ipynb"}


def test_every_command_has_a_page_with_all_its_options() -> None:
    pages = dict(site.command_pages())
    assert set(COMMANDS) == set(pages)
    for name, flags in COMMANDS.items():
        shown = set(re.findall(r"(?<![\w-])--?[a-z][a-z0-9-]*", re.sub(r"&#\d+;", " ", pages[name])))
        declared = DECLARED[name].flags if name in DECLARED else {}  # a group of commands has none
        refused = {flag for flag, item in declared.items() if item.is_refused}
        assert {flag for flag in flags if flag not in shown} <= HIDDEN | refused, name
        assert not refused & shown, name
        assert f"$ headstart {name}" in pages[name]


def test_links_are_adapted_to_the_site(tmp_path: Path) -> None:
    path = ROOT / "docs" / "cookbook" / "agents.md"
    text = (
        "[a](../adapt.md#recording) [b](../../Dockerfile) ![c](../demo.svg) [d](https://e.org) ```[a](../adapt.md)```"
    )
    found = site.adapt_links(text, path, "cookbook/agents.md", tmp_path)
    assert found.startswith("[a](../adapt.md#recording) b ![c](../demo.svg) [d](https://e.org)")
    assert (tmp_path / "demo.svg").is_file()


def test_guide_lines_have_an_outcome() -> None:
    lines = json.loads(site.GUIDE_LINES.read_text("utf-8"))
    outcomes = [site.serve_outcome(entry["line"]) for entry in lines]
    assert "runs" in outcomes
    assert not [each for each in outcomes if each.endswith((": ", "--help", "all options"))]
    written = [
        line for each in outcomes for line in re.findall(r": write headstart (serve .*?)(?: \(without .*)?$", each)
    ]
    assert len(written) > 30
    for line in written:  # the hinted command line is valid
        serve.read(serve.split(shlex.split(line)[1:])[0])
    assert site.serve_outcome("vllm serve m -tp 2").startswith("--tensor-parallel-size 2 cannot be honoured: ")
    assert site.guide_lines_page().count("\n| ") == 1 + len(lines)


def test_external_urls_are_found(tmp_path: Path) -> None:
    page = (
        '<link href="a.css"><a href="https://a.org"></a><script src="https://b.org/x.js"></script><img src=//c.org/y>'
    )
    (tmp_path / "page.html").write_text(page)
    (tmp_path / "style.css").write_text("a { background: url('https://d.org/z') }")
    assert sorted(each.split("//")[1] for each in site.external_urls(tmp_path)) == ["b.org/x.js", "c.org/y", "d.org/z"]


def test_pictures_match_their_script(tmp_path: Path) -> None:
    pictures = run_script("docs/pictures/make.py")
    pictures.write(tmp_path)
    for name in pictures.PICTURES:
        assert (tmp_path / name).read_text() == (ROOT / "docs" / "pictures" / name).read_text(), "docs/pictures/make.py"


def test_recording_uses_existing_commands() -> None:
    """The recording is asciicast version 2; the picture is self-contained."""
    folder = ROOT / "docs" / "recording"
    head, *rows = [json.loads(line) for line in (folder / "headstart.cast").read_text("utf-8").splitlines()]
    assert head["version"] == 2
    times = [seconds for seconds, kind, _ in rows if kind == "o"]
    assert times == sorted(times)
    assert len(times) == len(rows)
    recording = run_script("docs/recording/make.py")
    assert recording.read_cast(folder / "headstart.cast")[-1].seconds < 90
    names = {name for scene in recording.SCENES for name in re.findall(r"(?:^|; )headstart (\w+)", scene)}
    assert names
    assert names <= COMMANDS.keys()
    picture = (folder / "headstart.svg").read_text("utf-8")
    assert not re.findall(r"<script|href=|url\(|@import", picture)


@pytest.mark.slow
def test_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "docs/site/make.py", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    pages = (tmp_path / "site").rglob("*.html")
    assert len(list(pages)) > 40
    assert "/v1/chat/completions" in (tmp_path / "site" / "http.html").read_text("utf-8")
