"""Benchmarks can be imported, and documents name existing scripts."""

import re
import subprocess
import sys

import pytest
from source import ROOT

FOLDER = ROOT / "benchmarks"
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.py"))
FOREIGN = ("engines/vllm_worker.py", "engines/openvino_server.py")
"""Run in the interpreter of their engine."""


def test_index_names_every_script_once() -> None:
    rows = re.findall(r"^\| `(\w+)` \|.*\| `(\w+\.py)[ `]", (FOLDER / "README.md").read_text("utf-8"), re.MULTILINE)
    assert [f"{name}.py" for name, _ in rows] == [script for _, script in rows]
    assert sorted(script for _, script in rows) == SCRIPTS


@pytest.mark.parametrize("document", ["README.md", "docs/benchmarks.md", "docs/log/2026-11.md"])
def test_documents_name_files_that_exist(document: str) -> None:
    named = set(re.findall(r"benchmarks/[\w/]+\.py", (ROOT / document).read_text("utf-8")))
    assert not {name for name in named if not (ROOT / name).exists()}


@pytest.mark.slow
def test_benchmarks_can_be_imported() -> None:
    files = [path.relative_to(FOLDER).with_suffix("") for path in FOLDER.rglob("*.py")]
    names = [".".join(each.parts) for each in files if str(each.with_suffix(".py")) not in FOREIGN]
    code = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"
    done = subprocess.run([sys.executable, "-c", code, *names], cwd=FOLDER, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
