"""One engine as a child process."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field

from headstart.server.replicas.ask import ask
from headstart.server.replicas.shares import Share
from headstart.server.replicas.siblings import NUMBERS, OWN, total
from headstart.server.replicas.state import Known, Member, State

HOST = "127.0.0.1"
LOOK_SECONDS = 0.2
HEALTH_SECONDS = 10.0


class EndedError(Exception):
    """A process ended before it was ready. `code`: its exit code; negative: the signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")
        self.code = code


@dataclass(eq=False)
class Child:
    """The process of a replica, of which there are two for a while when it is renewed."""

    number: int
    port: int
    share: Share
    starts: int
    process: asyncio.subprocess.Process
    state: State = "starting"
    since: float = field(default_factory=time.time)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"

    @property
    def known(self) -> Known:
        return Known(
            number=self.number, url=self.url, pid=self.process.pid, state=self.state, starts=self.starts,
            since=self.since, cpus=self.share.cpus,
        )  # fmt: skip

    @property
    def alive(self) -> bool:
        return self.process.returncode is None

    async def ready(self) -> None:
        """Until it answers. Raises EndedError."""
        while not await self.healthy():
            if not self.alive:
                raise EndedError(self.process.returncode or 0)
            await asyncio.sleep(LOOK_SECONDS)
        self.state = "ready"

    async def healthy(self) -> bool:
        try:
            return (await asyncio.to_thread(ask, self.url, "/health", "GET", None, HEALTH_SECONDS))[0] == 200
        except OSError:
            return False

    async def idle(self, token: str) -> bool:
        """Has it nothing left to do? Also where it does not tell."""
        try:
            asked = {OWN: token}
            status, text = await asyncio.to_thread(ask, self.url, "/metrics", "GET", asked, HEALTH_SECONDS)
        except OSError:
            return True
        return status != 200 or not any(total(text, metric) for metric in NUMBERS.values())

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()

    async def end(self, seconds: float) -> None:
        """Let what runs there end within that time."""
        self.state = "leaving"
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            await asyncio.wait_for(self.process.wait(), seconds)
        except TimeoutError:
            self.kill()
            await self.process.wait()


def command(words: Seq[str], member: Member, port: int, threads: int) -> list[str]:
    """The supervisor's own command line, but where it listens and how wide it is: the last of an option counts."""
    own = ["--host", HOST, "--port", str(port), "--threads", str(threads), "--replica", str(member)]
    end = list(words).index("--") if "--" in words else len(words)
    return [sys.executable, "-m", "headstart", *words[:end], *own, *words[end:]]


async def spawn(words: Seq[str], member: Member, share: Share, starts: int) -> Child:
    """A new process on a free port. What it says goes where the supervisor's own words go."""
    with socket.socket() as kept:  # until it has the port itself
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind((HOST, 0))
        port = kept.getsockname()[1]
    process = await asyncio.create_subprocess_exec(
        *command(words, member, port, share.threads), stdin=asyncio.subprocess.DEVNULL, start_new_session=True
    )
    return Child(member.number, port, share, starts, process)


def how(code: int) -> str:
    """An exit code for people."""
    if code >= 0:
        return f"with code {code}"
    with suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"
