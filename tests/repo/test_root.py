"""The top folder of the repository has known entries only."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KNOWN = {
    ".ci", ".dockerignore", ".github", ".gitignore", "CMakeLists.txt", "CONTRIBUTING.md", "Dockerfile", "LICENSE",
    "Makefile", "README.md", "action.yml", "benchmarks", "csrc", "deploy", "docs", "headstart", "pyproject.toml",
    "tests",
}  # fmt: skip


def test_top_folder_has_known_entries_only() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("not a git checkout")
    assert {line.split("/", 1)[0] for line in listed.stdout.splitlines()} <= KNOWN
