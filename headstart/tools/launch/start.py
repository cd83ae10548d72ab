"""An engine as a child process: started, waited for, warmed up, and asked by its metrics whether it drafts."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.core import Progress
from headstart.errors import UsageError
from headstart.system import end_group
from headstart.tools.advice import advise
from headstart.tools.client import Server, get
from headstart.tools.engine_metrics import Counts
from headstart.tools.launch.launcher import Launcher, Step, Wanted
from headstart.tools.probe.endpoint import Endpoint
from headstart.tools.probe.run import PREDICTABLE

START_SECONDS = 3600
"""Large models take half an hour to load and compile."""
END_SECONDS = 20
HEALTH_SECONDS = 5
WARM_TOKENS = 64


@dataclass
class Running:
    """The process, where it writes, and where it answers."""

    process: subprocess.Popen[bytes]
    log: Path
    server: Server
    health: str
    started_s: float = 0.0

    def wait(self, progress: Progress) -> None:
        """Until it is healthy. Raises UsageError when it ends before, or takes an hour."""
        begin = time.monotonic()
        while (passed := time.monotonic() - begin) < START_SECONDS:
            if self.process.poll() is not None:
                raise self.failed(f"the engine ended with code {self.process.returncode} before it answered")
            try:
                if asyncio.run(healthy(self.server, self.health)):
                    self.started_s = passed
                    return
            except OSError:
                pass  # not listening yet
            progress(int(passed), START_SECONDS, "waiting for the engine")
            time.sleep(0.5)
        raise self.failed(f"the engine does not answer after {START_SECONDS} s")

    def failed(self, what: str) -> UsageError:
        """The end of the log is the reason."""
        lines = self.log.read_text("utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line or "error:" in line]
        reason = (errors or lines or [""])[-1].strip()
        return UsageError(f"{what}: {reason[:300]}", f"its log is {self.log}")


async def healthy(server: Server, path: str) -> bool:
    async with asyncio.timeout(HEALTH_SECONDS):
        return (await get(server, path)).status == 200


@contextmanager
def start(
    launcher: Launcher, step: Step, words: list[str], files: Mapping[str, str], wanted: Wanted
) -> Iterator[Running]:
    """Run a command in a folder of its own with its files; its whole process group is ended with the context."""
    _check_free(wanted)
    folder = Path(tempfile.mkdtemp(prefix=f"headstart-{launcher.name}-"))
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    log = folder / "log"
    local = [str(folder / word) if word in files else word for word in words]
    environment = {**step.environment, **os.environ}  # what the user has set wins
    with log.open("wb") as output:
        try:
            process = subprocess.Popen(
                local, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )
        except OSError as error:
            raise UsageError(f"cannot run {words[0]}: {error.strerror}", "is --program right?") from None
    host = "127.0.0.1" if wanted.host == "0.0.0.0" else wanted.host
    tls, key = bool(wanted.settings.get("ssl_certfile")), wanted.settings.get("api_key")
    key = key[0] if isinstance(key, tuple | list) else key
    server = Server(host, wanted.port, tls, api_key=key, trusted=True)  # our own process
    try:
        yield Running(process, log, server, launcher.health)
    finally:
        _end(process)


def _check_free(wanted: Wanted) -> None:
    """Raises UsageError where something listens already: its answers would be taken for the engine's."""
    host = "127.0.0.1" if wanted.host == "0.0.0.0" else wanted.host
    with socket.socket() as tried:
        tried.settimeout(2)
        if tried.connect_ex((host, wanted.port)) == 0:
            raise UsageError(f"--port {wanted.port} is in use on {wanted.host}", "choose another one")


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask, wait, then kill whatever is left of the group."""
    for kill in (False, True):
        if not end_group(process, kill=kill):
            break
        try:
            process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


FEW = 10
"""Drafts that tell something of text as easy as the warm-up's."""


def check(running: Running, wanted: Wanted, progress: Progress) -> dict[str, Any]:
    """Warm up with text that is easy to guess, and read what was counted meanwhile."""
    endpoint = Endpoint(running.server)
    before = endpoint.metrics()
    tokens = 0
    for done, prompt in enumerate(PREDICTABLE):
        progress(done, len(PREDICTABLE), "warming up")
        tokens += endpoint.stream("predictable", prompt, WARM_TOKENS, 0.0).tokens or 0
    now = _settled(endpoint, before) if wanted.depth_drafted else endpoint.metrics()
    counts = now.since(before) if now and before else now
    if counts is None:
        unknown = "it shows no metrics that are known"
        return {"alive": False, "acceptance_length": None, "tokens": tokens, "why": unknown}
    length = counts.acceptance_length
    return {
        "alive": counts.active and (length is None or length > 1.0),
        "acceptance_length": length,
        "tokens": tokens,
        "drafts": counts.drafts,
        "drafted": counts.drafted,
        "accepted": counts.accepted,
        "per_position": counts.per_position,
        "advice": advise(counts, FEW),
        "why": "" if counts.active else "its metrics count no drafts",
    }


def _settled(endpoint: Endpoint, before: Counts | None) -> Counts | None:
    """Some engines count with a delay: look again for a few seconds while nothing has moved."""
    for _ in range(10):
        now = endpoint.metrics()
        if now is None or (before is not None and now != before) or (before is None and now.active):
            return now
        time.sleep(0.3)
    return endpoint.metrics()
