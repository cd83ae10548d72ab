"""The README's curl lines, as printed."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
from process import Server

from headstart.cli import serve

pytestmark = pytest.mark.slow  # a server process; each line bounds its answer, which at T = 1 may else fill the context
README = Path(__file__).parents[2] / "README.md"
COMMANDS = re.findall(r"^\$ (curl .*?)(?=^\$|^```)", README.read_text("utf-8"), re.MULTILINE | re.DOTALL)
COMMANDS += [line for line in serve.EXAMPLES if line.startswith("curl")]


@pytest.mark.parametrize("command", COMMANDS, ids=[str(i) for i in range(len(COMMANDS))])
def test_curl(server: Server, command: str) -> None:
    assert "localhost:8000" in command
    address = server.url.removeprefix("http://")
    shell = ["bash", "-c", command.replace("localhost:8000", address)]
    done = subprocess.run(shell, capture_output=True, text=True, check=True, timeout=60)
    assert "error" not in done.stdout
    if "stream" in command:
        assert done.stdout.rstrip().endswith("[DONE]")
    elif "json_schema" in command:
        assert set(json.loads(json.loads(done.stdout)["choices"][0]["message"]["content"])) >= {"name", "legs"}
    elif "metrics" not in command:
        assert json.loads(done.stdout)["choices"]


def test_there_are_some() -> None:
    assert len(COMMANDS) >= 5
