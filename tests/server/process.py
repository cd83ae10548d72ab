"""A real `headstart serve` process on a free port."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from headstart.cli.main import main

PROGRAM = Path(sys.executable).with_name("headstart")
START_SECONDS = 60
MODEL = "smollm2-135m-mtp"
QUESTION = [{"role": "user", "content": "Name three colours."}]
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Arguments of a tool that tells the weather."""


class HttpServer:
    """A server at `url`, and a client for it."""

    url: str
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def metric(self, name: str) -> float:
        found = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        return sum(map(float, found))

    def wait_idle(self, seconds: float = 10.0) -> None:
        """Until nothing runs, waits, or holds KV blocks."""
        deadline = time.monotonic() + seconds
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        while any(left := [self.metric(name) for name in names]):
            assert time.monotonic() < deadline, f"still there: {left}"
            time.sleep(0.02)


@dataclass(eq=False)
class Server(HttpServer):
    """The running process and a client for it."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""
    client: httpx.Client = field(default_factory=httpx.Client)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def running(*arguments: str, port: int = 0) -> Iterator[Server]:
    """`headstart serve ARGUMENTS`, listening; killed at the end if it still runs."""
    log = Path(tempfile.mkdtemp()) / "log"
    with log.open("wb") as file:
        command = [PROGRAM, "serve", "--port", str(port), *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    server = Server(process, log)
    try:
        server.url = _address(server)
        server.client = httpx.Client(base_url=server.url, timeout=60)
        yield server
    finally:
        server.client.close()
        process.kill()
        process.wait()


def refused(*words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `headstart serve` says of words that it refuses; in this process, which is quicker."""
    monkeypatch.setattr("headstart.server.run.serve", lambda *_: pytest.fail("it serves"))
    assert main(["serve", "--port", "0", *words]) == 2
    return capsys.readouterr().err


def _address(server: Server) -> str:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if found := re.search(r"running on (\S+)", server.log.read_text("utf-8")):
            return found[1]
        assert server.process.poll() is None, server.log.read_text("utf-8")
        time.sleep(0.05)
    raise AssertionError(server.log.read_text("utf-8"))
