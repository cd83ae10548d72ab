"""The HEALTHCHECK command of the Dockerfile, with and without a running server."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from process import Server

DOCKERFILE = (Path(__file__).parents[2] / "Dockerfile").read_text("utf-8")


@pytest.mark.slow
def test_health_check_of_the_image(server: Server) -> None:
    (found,) = re.findall(r"^HEALTHCHECK .*\\\n +CMD (.*)", DOCKERFILE, re.MULTILINE)
    program, *words = json.loads(found)
    assert program == "python"
    here = str(server.client.base_url).removeprefix("http://").rstrip("/")

    def check(address: str) -> int:
        command = [sys.executable, *(word.replace("127.0.0.1:8000", address) for word in words)]
        return subprocess.run(command, capture_output=True, check=False).returncode

    assert "127.0.0.1:8000" in words[-1]
    assert check(here) == 0
    assert check("127.0.0.1:9") != 0
