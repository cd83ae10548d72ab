"""Engines and their router as child processes: started, waited for, ended."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headstart.core import Progress
from headstart.errors import HeadstartError, UsageError
from headstart.system import end_group
from headstart.tools.client import Server, get
from headstart.tools.launch.launcher import Launcher, Step, Wanted

START_SECONDS = 3600
"""Large models take half an hour to load and compile."""
END_SECONDS = 20
HEALTH_SECONDS = 5
LOOK_SECONDS = 0.5


@dataclass
class Part:
    """One process: an engine's server, or the router before several. `starts`: when it was started (monotonic)."""

    step: Step
    words: list[str]
    environment: Mapping[str, str]
    log: Path
    server: Server
    health: str
    process: subprocess.Popen[bytes] | None = None
    starts: list[float] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "the engine" if self.step.server == "server" else self.step.server

    def start(self) -> None:
        """Its output is appended to the log. Raises UsageError for a program that cannot be run."""
        self.starts.append(time.monotonic())
        with self.log.open("ab") as output:
            try:
                self.process = subprocess.Popen(
                    self.words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=dict(self.environment),
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                what = f"cannot run {self.words[0]}: {error.strerror}"
                raise UsageError(what, "is --program right?") from None

    def ended(self) -> str | None:
        """How it ended; None while it runs."""
        code = self.process.poll() if self.process else 0
        if code is None:
            return None
        if code >= 0:
            return f"ended with code {code}"
        return f"was killed by signal {-code} ({signal.Signals(-code).name})"

    def answers(self) -> bool:
        try:
            return asyncio.run(healthy(self.server, self.health))
        except OSError:
            return False  # not listening

    def reason(self) -> str:
        """What the end of its log says."""
        lines = self.log.read_text("utf-8", errors="replace").splitlines()
        errors = [line for line in lines if "Error" in line or "error:" in line]
        return (errors or lines or [""])[-1].strip()[:300]

    def failed(self, what: str, kind: type[HeadstartError] = UsageError) -> HeadstartError:
        return kind(f"{what}: {self.reason()}", f"its log is {self.log}")

    def end(self) -> None:
        """Ask, wait, then kill whatever is left of the group."""
        if self.process is None:
            return
        for kill in (False, True):
            if not end_group(self.process, kill=kill):
                break
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                continue
        self.process.wait()


@dataclass
class Running:
    """The processes, the router's last, and where requests go."""

    parts: list[Part]
    folder: Path
    started_s: float = 0.0
    over: bool = False
    """They are being ended on purpose."""

    @property
    def engines(self) -> list[Part]:
        return [part for part in self.parts if part.step.role != "router"]

    @property
    def front(self) -> Part:
        return self.parts[-1]

    @property
    def log(self) -> Path:
        """The log, or the folder of several."""
        return self.parts[0].log if len(self.parts) == 1 else self.folder

    def wait(self, progress: Progress) -> None:
        """Until all are healthy; the router, which looks seldom, is started when its servers are. Raises UsageError
        when one ends before, or takes an hour."""
        begin = time.monotonic()
        for group in (self.engines, [part for part in self.parts if part.step.role == "router"]):
            for part in group:
                if part.process is None:
                    part.start()
            self._wait(group, begin, progress)
        self.started_s = time.monotonic() - begin

    def _wait(self, group: Sequence[Part], begin: float, progress: Progress) -> None:
        left = list(group)
        while left and (passed := time.monotonic() - begin) < START_SECONDS:
            for part in group:
                if how := part.ended():
                    raise part.failed(f"{part.name} {how} before it answered")
            left = [part for part in left if not part.answers()]
            names = ", ".join(part.name for part in left)
            progress(int(passed), START_SECONDS, f"waiting for {names}")
            if left:
                time.sleep(LOOK_SECONDS)
        if left:
            raise left[0].failed(f"{left[0].name} does not answer after {START_SECONDS} s")


async def healthy(server: Server, path: str) -> bool:
    async with asyncio.timeout(HEALTH_SECONDS):
        return (await get(server, path)).status == 200


@contextmanager
def start(
    launcher: Launcher, commands: Sequence[tuple[Step, list[str]]], files: Mapping[str, str], wanted: Wanted
) -> Iterator[Running]:
    """Run commands in a folder of their own with their files; whole process groups are ended with the context."""
    host = "127.0.0.1" if wanted.host == "0.0.0.0" else wanted.host
    key = wanted.settings.get("api_key")
    key = key[0] if isinstance(key, tuple | list) else key
    folder = Path(tempfile.mkdtemp(prefix=f"headstart-{launcher.name}-"))
    for name, text in files.items():
        (folder / name).write_text(text, "utf-8")
    parts = []
    for step, words in commands:
        assert step.port is not None
        _check_free(step.port, host)
        server = Server(host, step.port, bool(wanted.settings.get("ssl_certfile")), api_key=key, trusted=True)
        health = "/health" if step.role == "router" else launcher.health
        local = [str(folder / word) if word in files else word for word in words]
        log = folder / ("log" if step.server == "server" else f"{step.server}.log")
        environment = {**step.environment, **os.environ}  # what the user has set wins
        if step.server != "server":  # but for what makes it this one of several
            environment |= step.environment
        parts.append(Part(step, local, environment, log, server, health))
    running = Running(parts, folder)
    try:
        for part in running.engines:
            part.start()
        yield running
    finally:
        running.over = True
        for part in reversed(parts):
            part.end()


def _check_free(port: int, host: str) -> None:
    """Raises UsageError where something listens already: its answers would be taken for the engine's."""
    with socket.socket() as tried:
        tried.settimeout(2)
        if tried.connect_ex((host, port)) == 0:
            raise UsageError(f"--port {port} is in use on {host}", "choose another one")
