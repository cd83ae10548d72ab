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
    """Raises UsageError for what is no address, or where the router could not reach a server on `host`. A name that
    nobody knows may be known later."""
    _place(router)
    with suppress(OSError):
        own_url(router, host, 1, tls=False)


def own_url(router: str, host: str, port: int, *, tls: bool) -> str:
    """Where the router reaches a server that listens on `host`. Looks names up. Raises UsageError where it cannot,
    OSError for a router whose name nobody knows."""
    found = socket.getaddrinfo(*_place(router), type=socket.SOCK_DGRAM)
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
    """Membership of a server that listens on `host` and `port` in the router at `router`, kept up by a task."""

    def __init__(self, router: str, host: str, port: int, *, tls: bool) -> None:
        self.router = router
        self._listens = host, port, tls
        self._own: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._said = ""

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep())

    async def leave(self) -> None:
        """The router sends nothing more."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            if self._own is not None and not await deregister(self.router, self._own):
                log.warning("cannot tell the router at %s that this server leaves", self.router)

    async def _keep(self) -> None:
        host, port, tls = self._listens
        while True:
            try:
                if self._own is None:
                    self._own = await asyncio.to_thread(own_url, self.router, host, port, tls=tls)
                level, said = await self._look(self._own)
            except (OSError, UsageError) as error:
                level, said = logging.WARNING, f"cannot join {self.router}: {error}; trying again"
            if said != self._said:  # once, until it is something else
                self._said = said
                log.log(level, said)
            await asyncio.sleep(EVERY)

    async def _look(self, own: str) -> tuple[int, str]:
        """What is to be said of the router."""
        known = await registered(self.router)
        if known is None:
            return logging.WARNING, f"no router answers at {self.router}; trying again"
        if own in known or await register(self.router, own):
            return logging.INFO, f"joined the router at {self.router} as {own}"
        return logging.WARNING, f"the router at {self.router} does not take {own}; trying again"
