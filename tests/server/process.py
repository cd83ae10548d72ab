"""A `headstart serve` process on a free port."""

import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from support import PATIENCE, until

PROGRAM = Path(sys.executable).with_name("headstart")
MODEL = "smollm2-135m-mtp"
QUESTION = [{"role": "user", "content": "Name three colours."}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"],
        "additionalProperties": False}  # fmt: skip
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "The weather of a city.", "parameters": CITY}
"""A tool definition."""


class HttpServer:
    """A server's URL and an HTTP client for it."""

    url: str
    client: httpx.Client

    def post(self, path: str, **body: Any) -> httpx.Response:
        return self.client.post(path, json=body)

    def metric(self, name: str) -> float:
        found = re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)$", self.client.get("/metrics").text, re.MULTILINE)
        return sum(map(float, found))

    def wait_idle(self) -> None:
        """Waits until no request runs or is queued and no KV block is in use."""
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
        until(lambda: not any(self.metric(name) for name in names), lambda: self.client.get("/metrics").text)


@dataclass(eq=False)
class Server(HttpServer):
    """The process of a server, its log and an HTTP client."""

    process: subprocess.Popen[bytes]
    log: Path
    url: str = ""
    client: httpx.Client = field(default_factory=httpx.Client)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=PATIENCE)


@contextmanager
def running(*arguments: str, port: int = 0, folder: Path | None = None) -> Iterator[Server]:
    """A listening `headstart serve ARGUMENTS`; killed at the end if still running. folder: its working directory."""
    log = Path(tempfile.mkdtemp()) / "log"
    with log.open("wb") as file:
        command = [PROGRAM, "serve", "--port", str(port), *arguments]
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=folder)
    server = Server(process, log)
    try:
        server.url = until(lambda: _address(server), lambda: log.read_text("utf-8"))
        server.client = httpx.Client(base_url=server.url, timeout=PATIENCE)
        yield server
    finally:
        server.client.close()
        process.kill()
        process.wait()


def _address(server: Server) -> str | None:
    said, has_ended = server.log.read_text("utf-8"), server.process.poll() is not None
    found = re.search(r"running on (\S+)", said)
    assert found or not has_ended, said
    return found and found[1]
