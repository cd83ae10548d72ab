"""vllm-router in front of replicas: its process, its list of engines, and HTTP requests between our own processes.

Its flags were tried with 0.1.17 (docs/scale.md). The engines that it knows are addresses of the relay (relay.py).
"""

from __future__ import annotations

import asyncio
import importlib.util
import ipaddress
import logging
import re
import socket
import sys
from collections import deque
from collections.abc import Mapping, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Literal
from urllib.parse import quote, urlsplit

from headstart.errors import UsageError
from headstart.server import limits
from headstart.server.process import base_url
from headstart.system import child_environment, describe_exit, end_with_parent

if TYPE_CHECKING:
    import ssl

    import httpx

log = logging.getLogger("headstart.server")
PACKAGE, MODULE = "vllm-router", "vllm_router"
Policy = Literal["cache_aware", "round_robin", "consistent_hash", "power_of_two", "random"]
RETRIES = 5
FIRST_PAUSE_MS, MAX_PAUSE_MS = 100, 1000
MAX_DIFFERENCE = 4
"""Requests that one engine may have more than another before balance counts more than a cached prefix."""
DAY = 86400  # seconds that a request may take; the engines have their own limits
CHECK_INTERVAL_S = 5.0  # time between two checks that the router knows this server
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def check_installed() -> None:
    """Raise UsageError if vllm-router is not installed."""
    if importlib.util.find_spec(MODULE) is None:
        raise UsageError(f"--replicas needs {PACKAGE}, which is not installed", f"pip install {PACKAGE}")


@dataclass(eq=False)
class RouterProcess:
    """The router's process."""

    host: str
    port: int
    metrics_port: int  # on this machine's own address only
    origins: tuple[str, ...] = ()  # of web pages that may call; without any, the router would allow all
    policy: Policy = "cache_aware"  # benchmarks/replicas.py compares them
    process: asyncio.subprocess.Process | None = None
    last_lines: deque[str] = field(default_factory=lambda: deque(maxlen=20))

    @property
    def url(self) -> str:
        """The router's address from this machine."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return base_url(host, self.port)

    @property
    def metrics(self) -> str:
        """Address of the router's metrics."""
        return f"http://127.0.0.1:{self.metrics_port}"

    def command(self, engines: Seq[str]) -> list[str]:
        """Command line of the process, which listens once all `engines` answer."""
        flags = {
            "host": self.host, "port": self.port, "policy": self.policy, "log-level": "warning",
            "prometheus-host": "127.0.0.1", "prometheus-port": self.metrics_port,
            "worker-startup-check-interval": 1, "balance-abs-threshold": MAX_DIFFERENCE,
            "health-check-interval-secs": 5, "health-check-timeout-secs": 10,
            "request-timeout-secs": DAY, "max-payload-size": limits.BODY_BYTES,
            "retry-max-retries": RETRIES, "retry-initial-backoff-ms": FIRST_PAUSE_MS,
            "retry-max-backoff-ms": MAX_PAUSE_MS,
        }  # fmt: skip
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        words.append("--disable-circuit-breaker")  # it takes a 503 of a full engine for a failure
        lists = {"cors-allowed-origins": self.origins or (self.url,), "worker-urls": tuple(engines)}
        words += [word for name, values in lists.items() for word in (f"--{name}", *values)]
        return [sys.executable, "-m", f"{__package__}.router", *words]

    async def start(self, engines: Seq[str]) -> None:
        """Start the router and wait until it answers. Raises UsageError, with the last line of output, if the process
        ends first."""
        self.last_lines.clear()
        self.process = await asyncio.create_subprocess_exec(
            *self.command(engines), stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT, start_new_session=True, limit=2**20, env=child_environment(),
        )  # fmt: skip
        listening = asyncio.create_task(self._read_output(self.process))
        while not await self._answers():
            if self.process.returncode is not None:
                await listening
                last = next((line for line in reversed(self.last_lines) if line), "no output")
                raise UsageError(f"{PACKAGE} ended {describe_exit(self.process.returncode)}: {last[:300]}")
            await asyncio.sleep(0.1)

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        """Keep the last lines of the router's output. Most are about requests that were sent again."""
        assert process.stdout is not None
        async for line in process.stdout:
            self.last_lines.append(_COLOURS.sub("", line.decode("utf-8", "replace")).strip())

    async def _answers(self) -> bool:
        response = await send("GET", f"{self.url}/liveness")
        return response is not None and response.status_code == 200


async def register(router: str, engine: str) -> bool:
    """Add an engine to a router. False where the router cannot be reached, or does not reach the engine."""
    return await _change(router, "/add_worker", engine, 10.0)


async def deregister(router: str, engine: str) -> bool:
    """Remove an engine from a router; running requests go on."""
    return await _change(router, "/remove_worker", engine, 3.0)


async def registered(router: str) -> list[str] | None:
    """URLs of the engines that a router knows; None where it does not answer."""
    response = await send("GET", f"{router.rstrip('/')}/list_workers")
    try:
        found = response.json()["urls"] if response is not None and response.status_code == 200 else None
    except (ValueError, KeyError, TypeError):
        return None
    return [str(each) for each in found] if isinstance(found, list) else None


async def _change(router: str, path: str, engine: str, seconds: float) -> bool:
    response = await send("POST", f"{router.rstrip('/')}{path}?url={quote(engine, safe=':/')}", seconds)
    return response is not None and response.status_code == 200


async def send(
    method: str, url: str, timeout: float = 5.0, headers: Mapping[str, str] | None = None
) -> httpx.Response | None:
    """The response of another server of ours, without proxies; None where no server answers in time."""
    import httpx

    try:
        async with httpx.AsyncClient(timeout=timeout, trust_env=False, verify=_verify(url)) as client:
            return await client.request(method, url, headers=headers)
    except (OSError, httpx.HTTPError, httpx.InvalidURL):
        return None


@cache
def _certificates() -> ssl.SSLContext:
    import httpx

    return httpx.create_ssl_context()


def _verify(url: str) -> ssl.SSLContext | bool:
    return _certificates() if url.startswith("https:") else False


def check_address(router: str, host: str) -> None:
    """Raise UsageError for an invalid address of a router, and if the router could not reach a server on `host`. A host
    name that is unknown now may become known later."""
    _host_and_port(router)
    with suppress(OSError):
        own_url(router, host, 1, tls=False)


def own_url(router: str, host: str, port: int, *, tls: bool) -> str:
    """The URL at which the router reaches a server that listens on `host`. Raises UsageError where it cannot reach it,
    OSError for an unknown name of the router."""
    found = socket.getaddrinfo(*_host_and_port(router), type=socket.SOCK_DGRAM)
    if host in ("0.0.0.0", "::", ""):
        host = _address_towards(found[0][0], found[0][4])
    if _is_loopback(host) and not all(_is_loopback(str(each[4][0])) for each in found):
        what = f"--join: the router at {router} cannot reach {host}, which is this machine's own address"
        raise UsageError(what, "--host 0.0.0.0, or the address by which others know this machine")
    return base_url(host, port, tls=tls)


def _host_and_port(router: str) -> tuple[str, int]:
    try:
        parts = urlsplit(router)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--join is {router!r}, which is no address", "for example http://router:8000")
    return parts.hostname, port or (443 if parts.scheme == "https" else 80)


def _address_towards(family: int, address: tuple[object, ...]) -> str:
    """This machine's address on the route to another. Sends nothing."""
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        tried.connect(address)
        return str(tried.getsockname()[0])


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class RouterMembership:
    """Registers a server that listens on `host` and `port`, and again where the router has forgotten it."""

    def __init__(self, router: str, host: str, port: int, *, tls: bool) -> None:
        self.router = router
        self._listens = host, port, tls
        self._own_url: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._last_message = ""

    def start(self) -> None:
        """Start the task that registers this server."""
        self._task = asyncio.create_task(self._keep_registered())

    async def leave(self) -> None:
        """Deregister this server from the router."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            if self._own_url is not None and not await deregister(self.router, self._own_url):
                log.warning("cannot tell the router at %s that this server leaves", self.router)

    async def _keep_registered(self) -> None:
        host, port, tls = self._listens
        while True:
            try:
                if self._own_url is None:
                    self._own_url = await asyncio.to_thread(own_url, self.router, host, port, tls=tls)
                level, message = await self._check(self._own_url)
            except (OSError, UsageError) as error:
                level, message = logging.WARNING, f"cannot join {self.router}: {error}; trying again"
            if message != self._last_message:  # once, until it changes
                self._last_message = message
                log.log(level, message)
            await asyncio.sleep(CHECK_INTERVAL_S)

    async def _check(self, own: str) -> tuple[int, str]:
        """Register if needed. Level and message for the log."""
        known = await registered(self.router)
        if known is None:
            return logging.WARNING, f"no router answers at {self.router}; trying again"
        if own in known or await register(self.router, own):
            return logging.INFO, f"joined the router at {self.router} as {own}"
        return logging.WARNING, f"the router at {self.router} does not take {own}; trying again"


if __name__ == "__main__":  # vllm-router's own program, which ends with the process that started it
    end_with_parent()
    from vllm_router.launch_router import main

    main()
