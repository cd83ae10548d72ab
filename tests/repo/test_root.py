"""What stands at the top of the repository: leftovers of a trial are not committed with it."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KNOWN = {
    ".ci", ".dockerignore", ".github", ".gitignore", "CMakeLists.txt", "CONTRIBUTING.md", "Dockerfile", "LICENSE",
    "Makefile", "README.md", "action.yml", "benchmarks", "csrc", "deploy", "docs", "headstart", "pyproject.toml",
    "tests",
}  # fmt: skip


def test_nothing_else_is_there() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {line.split("/", 1)[0] for line in listed.stdout.splitlines()} <= KNOWN
