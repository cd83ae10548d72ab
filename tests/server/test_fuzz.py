"""The fuzzers of grammars and raw HTTP, some seconds (`python -m tests.fuzz server` for longer); test_schema.py makes
bodies."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headstart import hub

pytestmark = pytest.mark.slow  # a server process, for some seconds
MINUTES = 0.2
HEALTH_MS = 1000
"""99 of 100 looks; a quiet machine needs less than a tenth of it."""


def test_nobody_harms_the_server() -> None:
    if hub.cached_trunk() is None:
        pytest.skip("the default model is not in the cache: headstart pull")
    command = [sys.executable, "-m", "tests.fuzz", "server", "--minutes", str(MINUTES), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert all(sum(each["statuses"].values()) > 10 for each in found["fuzzers"].values())
    assert found["monitor"]["health_ms"][1] < HEALTH_MS + found["monitor"]["late_ms"][2]
