"""A server that takes part in a router elsewhere: it registers there, again where that has forgotten it, and leaves."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from contextlib import suppress
from urllib.parse import urlsplit

from headstart.errors import UsageError
from headstart.server.replicas.router import deregister, register, registered

log = logging.getLogger("headstart.server")

EVERY = 5.0
"""Seconds between two looks at the router."""


def check(router: str, host: str) -> None:
    """Raises UsageError for what is no address, or where the router could not reach a server on `host`."""
    _place(router)
    own_url(router, host, 1, tls=False)


def own_url(router: str, host: str, port: int, *, tls: bool) -> str:
    """Where the router reaches a server that listens on `host`. Raises UsageError where it cannot."""
    there = _place(router)
    try:
        found = socket.getaddrinfo(*there, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise UsageError(f"--join: there is no {there[0]}: {error}", "is the address right?") from None
    if host in ("0.0.0.0", "::", ""):
        host = _address_towards(found[0][0], found[0][4])
    if _is_loopback(host) and not all(_is_loopback(str(each[4][0])) for each in found):
        what = f"--join: the router at {router} cannot reach {host}, which is this machine's own address"
        raise UsageError(what, "--host 0.0.0.0, or the address by which others know this machine")
    return f"{'https' if tls else 'http'}://{f'[{host}]' if ':' in host else host}:{port}"


def _place(router: str) -> tuple[str, int]:
    try:
        parts = urlsplit(router)
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"--join is {router!r}, which is no address", "for example http://router:8000")
    return parts.hostname, port or (443 if parts.scheme == "https" else 80)


def _address_towards(family: int, address: tuple[object, ...]) -> str:
    """Of this machine, on the way to another. Nothing is sent."""
    with socket.socket(family, socket.SOCK_DGRAM) as tried:
        tried.connect(address)
        return str(tried.getsockname()[0])


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


class Joined:
    """Membership of the server at `own` in the router at `router`, kept up by a task."""

    def __init__(self, router: str, own: str) -> None:
        self.router, self.own = router, own
        self._task: asyncio.Task[None] | None = None
        self._said = ""

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def leave(self) -> None:
        """The router sends nothing more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            if not await deregister(self.router, self.own):
                log.warning("cannot tell the router at %s that this server leaves", self.router)

    async def _keep(self) -> None:
        while True:
            known = await registered(self.router)
            if known is None:
                self._say(logging.WARNING, f"no router answers at {self.router}; trying again")
            elif self.own in known:
                self._say(logging.INFO, f"joined the router at {self.router} as {self.own}")
            elif await register(self.router, self.own):
                continue
            else:
                self._say(logging.WARNING, f"the router at {self.router} does not take {self.own}; trying again")
            await asyncio.sleep(EVERY)

    def _say(self, level: int, text: str) -> None:
        """Once, until it is something else."""
        if text != self._said:
            self._said = text
            log.log(level, text)
