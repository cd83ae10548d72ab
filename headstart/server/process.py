"""Set-up of every server process before models are loaded: the log, and the listening sockets."""

import errno
import json
import logging
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from headstart.errors import UsageError


def set_up_logs(log_format: str, access_log: bool = False, process: str = "") -> None:
    """Log to stderr, as text or JSON lines. `process`: name of this one of several processes, shown in log lines."""
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter(f"%(asctime)s %(levelname)s {f'{process}: ' if process else ''}%(message)s")
    handler.setFormatter(_JsonFormatter(process) if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ["headstart.server", "headstart.engine", "uvicorn.error"] + ["headstart.access"] * access_log:
        logging.getLogger(name).setLevel(logging.INFO)


class _JsonFormatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        document = {"time": self.formatTime(record), "level": record.levelname.lower()}
        document |= {"logger": record.name, "message": record.getMessage()}
        if self._process:
            document["process"] = self._process
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)


def host_and_port(host: str, port: int) -> str:
    """host:port, with brackets around an IPv6 address."""
    return f"{f'[{host}]' if ':' in host else host}:{port}"


def base_url(host: str, port: int, *, tls: bool = False) -> str:
    """The URL of a server."""
    return f"{'https' if tls else 'http'}://{host_and_port(host, port)}"


@contextmanager
def listening(host: str, port: int) -> Iterator[list[socket.socket]]:
    """Sockets bound to all addresses of the host: localhost has two, and `::` includes IPv4. They do not accept
    connections yet: binding early reports a wrong address or a taken port before a model is loaded. Raises
    UsageError."""
    sockets = list[socket.socket]()
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {host}: {error}", "is --host right?") from error
    try:
        has_ipv4 = any(family == socket.AF_INET for family, *_ in found)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                unbound = socket.socket(family, kind, protocol)
                sockets.append(_bind(unbound, (address[0], port, *address[2:]), only_ipv6=has_ipv4))
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                    continue  # a host name may have an IPv6 address on a machine without IPv6
                is_foreign = error.errno == errno.EADDRNOTAVAIL  # no address of this machine
                hint = "is --host right?" if is_foreign else "is the port taken? --port 0 takes a free one"
                raise UsageError(f"cannot listen on {host_and_port(host, port)}: {error.strerror}", hint) from error
            port = sockets[0].getsockname()[1]
        if not sockets:
            raise UsageError(f"cannot listen on {host}: no such address here", "is --host right?")
        yield sockets
    finally:
        for each in sockets:
            each.close()


def _bind(unbound: socket.socket, address: tuple[str | int, ...], *, only_ipv6: bool) -> socket.socket:
    try:
        unbound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if unbound.family == socket.AF_INET6:
            unbound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_ipv6)
        unbound.bind(address)
    except OSError:
        unbound.close()
        raise
    return unbound
