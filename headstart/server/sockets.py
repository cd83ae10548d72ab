"""Addresses that a server listens on."""

from __future__ import annotations

import contextlib
import errno
import socket
from collections.abc import Iterator

from headstart.errors import UsageError


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """All addresses of the host (localhost has two), taken but not answered yet: before a model is loaded for nothing.
    Raises UsageError."""
    sockets = list[socket.socket]()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {host}: {error}", "is --host right?") from error
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sockets.append(_bound(socket.socket(family, kind, protocol), (address[0], port, *address[2:])))
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                    continue  # a machine without IPv6 has a name for it nevertheless
                raise UsageError(
                    f"cannot listen on {host}:{port}: {error.strerror}", "is the port taken? --port 0 takes a free one"
                ) from error
            port = sockets[0].getsockname()[1]
        if not sockets:
            raise UsageError(f"cannot listen on {host}: no such address here", "is --host right?")
        yield sockets
    finally:
        for each in sockets:
            each.close()


def _bound(made: socket.socket, address: tuple[str | int, ...]) -> socket.socket:
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if made.family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made
