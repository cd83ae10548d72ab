"""Every module has a summary; files, numbers, verdicts and exit codes in documents are correct."""

import ast
import re
import subprocess
import sys
from typing import get_args

import pytest
from source import PACKAGE, ROOT, trees

from headstart.errors import INTERNAL, STATUS
from headstart.models.head_state import Word

README = (ROOT / "README.md").read_text("utf-8")
DECLARED = {"95 %", "3 %"}
"""Not measured: the width of an interval, and the margin of a verdict."""


MAX_SUMMARY = 120
"""Characters of a module's summary: the first line of its docstring, shown in the index of modules (make docs)."""


@pytest.mark.parametrize("path", sorted(trees()))
def test_every_module_has_a_summary(path: str) -> None:
    docstring = ast.get_docstring(trees()[path]) or ""
    if trees()[path].body:
        assert 0 < len(docstring.partition("\n")[0]) <= MAX_SUMMARY


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "docs/ARCHITECTURE.md", "docs/inspect.md"])
def test_files_named_in_documents_exist(document: str) -> None:
    text = (ROOT / document).read_text("utf-8")
    named = set(re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", text))
    places = (PACKAGE, ROOT, (ROOT / document).parent)
    assert named
    unknown = {name for name in named if not any((place / name).exists() for place in places)}
    assert unknown <= {"org/model/file.gguf"}


@pytest.mark.slow
def test_numbers_in_documents_match_results_json() -> None:
    """`python benchmarks/results.py` would change no document."""
    command = [sys.executable, "benchmarks/results.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_readme_has_measured_numbers_only_from_results() -> None:
    text = re.sub(r"<!-- numbers: .*?<!-- /numbers -->", "", README, flags=re.DOTALL)
    text = re.sub(r"^```.*?^```|`[^`]*`", "", text, flags=re.DOTALL | re.MULTILINE)
    measured = (
        r"\d[\d.,]*\s?(?:x\b|%|times\b|tokens?\b|passes\b|texts\b|differences\b|MB\b|GB\b|ms\b|seconds?\b|families\b)"
    )
    assert not [found for found in re.findall(measured, text) if found not in DECLARED]


def test_verdicts_of_inspect_are_documented() -> None:
    words = set(get_args(Word))
    table = (ROOT / "docs" / "inspect.md").read_text("utf-8").partition("## Verdicts")[2].partition("\n\n`alive`")[0]
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)) == words


def test_exit_codes_are_documented() -> None:
    (text,) = re.findall(r"Exit codes: (.*?)\.", " ".join(README.split()).replace("...", ""))
    documented = {int(number) for number in re.findall(r"(?:^|, )(\d+) ", text)}
    assert documented == {0, INTERNAL.exit_code, *(status.exit_code for status in STATUS.values())}
