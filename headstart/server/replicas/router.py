"""vllm-router in front of replicas: its command line, and which engines it knows.

What its flags mean was tried with 0.1.17 (docs/scale.md). It sends a failed request again, up to RETRIES times, unless
a part of the answer has been sent on; it asks the same policy then, so a dead engine has to be taken out at once.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import sys
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import quote

from headstart.errors import UsageError
from headstart.server import limits
from headstart.server.replicas.ask import ask

PACKAGE, MODULE = "vllm-router", "vllm_router"
Policy = Literal["cache_aware", "round_robin", "consistent_hash", "power_of_two", "random"]
RETRIES = 5
FIRST_PAUSE_MS, LONGEST_PAUSE_MS = 100, 1000
LEAST_DIFFERENCE = 4
"""Requests that one engine may have more than another before a prefix counts less than that."""
DAY = 86400
"""How long a request may take: engines know that better."""
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def check_installed() -> None:
    """Raises UsageError."""
    if importlib.util.find_spec(MODULE) is None:
        raise UsageError(f"--replicas needs {PACKAGE}, which is not installed", "pip install 'headstart[router]'")


@dataclass(eq=False)
class Router:
    """The process at `host`:`port`, with its metrics at `metrics_port` of this machine alone. `origins`: of web pages
    that may call; without any, it would let all of them."""

    host: str
    port: int
    metrics_port: int
    origins: tuple[str, ...] = ()
    policy: Policy = "cache_aware"
    process: asyncio.subprocess.Process | None = None
    said: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def url(self) -> str:
        """As this machine reaches it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"

    @property
    def metrics(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}"

    def command(self, engines: Seq[str]) -> list[str]:
        """Of the process. It begins to listen when all `engines` answer."""
        flags = {
            "host": self.host, "port": self.port, "policy": self.policy, "log-level": "warning",
            "prometheus-host": "127.0.0.1", "prometheus-port": self.metrics_port,
            "worker-startup-check-interval": 1, "balance-abs-threshold": LEAST_DIFFERENCE,
            "health-check-interval-secs": 5, "health-check-timeout-secs": 10,
            "request-timeout-secs": DAY, "max-payload-size": limits.BODY_BYTES,
            "retry-max-retries": RETRIES, "retry-initial-backoff-ms": FIRST_PAUSE_MS,
            "retry-max-backoff-ms": LONGEST_PAUSE_MS,
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        words.append("--disable-circuit-breaker")  # it takes 503 of engines that are full for their end
        lists = {"cors-allowed-origins": self.origins or (self.url,), "worker-urls": tuple(engines)}
        words += [word for name, values in lists.items() for word in (f"--{name}", *values)]
        return [sys.executable, "-m", f"{__package__}._routing", *words]

    async def start(self, engines: Seq[str]) -> None:
        """Until it answers. Raises UsageError when it ends before, with what it has said last."""
        self.said.clear()
        self.process = await asyncio.create_subprocess_exec(
            *self.command(engines), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True, limit=2**20,
        )  # fmt: skip
        listening = asyncio.create_task(self._listen(self.process))
        while not await self._answers():
            if self.process.returncode is not None:
                await listening
                last = next((line for line in reversed(self.said) if line), "it said nothing")
                raise UsageError(f"{PACKAGE} ended with code {self.process.returncode}: {last[:300]}")
            await asyncio.sleep(0.1)

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Its last lines are kept. Most are of requests that were sent again."""
        assert process.stdout is not None
        async for line in process.stdout:
            self.said.append(_COLOURS.sub("", line.decode("utf-8", "replace")).strip())

    async def _answers(self) -> bool:
        try:
            return (await asyncio.to_thread(ask, self.url, "/liveness"))[0] == 200
        except OSError:
            return False

    async def add(self, engine: str) -> bool:
        return await register(self.url, engine)

    async def remove(self, engine: str) -> bool:
        return await deregister(self.url, engine)

    async def known(self) -> list[str] | None:
        return await registered(self.url)


async def register(router: str, engine: str) -> bool:
    """Have a router send requests to an engine. False where it cannot be reached, or does not reach the engine."""
    return await _told(router, "/add_worker", engine, 10.0)


async def deregister(router: str, engine: str) -> bool:
    """Have it send no more; those that run go on."""
    return await _told(router, "/remove_worker", engine, 3.0)


async def registered(router: str) -> list[str] | None:
    """The engines that a router knows; None where it does not tell."""
    try:
        status, text = await asyncio.to_thread(ask, router, "/list_workers")
        found = json.loads(text)["urls"] if status == 200 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return [str(each) for each in found] if isinstance(found, list) else None


async def _told(router: str, path: str, engine: str, seconds: float) -> bool:
    try:
        asked = f"{path}?url={quote(engine, safe=':/')}"
        return (await asyncio.to_thread(ask, router, asked, "POST", None, seconds))[0] == 200
    except OSError:
        return False
