"""A server process: sockets, signals, logs."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from headstart.errors import UsageError
from headstart.server.app import ServerConfig, app_over
from headstart.server.protocol import Protocol
from headstart.server.shelf import Shelf
from headstart.stats import synthetic_note
from headstart.system import HANG_UP, has_terminal, on_signal

log = logging.getLogger("headstart.server")


SWITCH_SECONDS = 0.001
"""How long a thread may keep the others from running; /health is answered between those that prepare requests."""
LAST_SECONDS = 5
"""After --shutdown-timeout, for telling so."""


@contextlib.contextmanager
def listening(config: ServerConfig) -> Iterator[list[socket.socket]]:
    """All addresses of the host (localhost has two), taken but not answered yet: before a model is loaded for nothing.
    Raises UsageError."""
    port, sockets = config.port, list[socket.socket]()
    try:
        found = socket.getaddrinfo(config.host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"cannot listen on {config.host}: {error}", "is --host right?") from error
    try:
        for family, kind, protocol, _, address in dict.fromkeys(found):
            try:
                sockets.append(_bound(socket.socket(family, kind, protocol), (address[0], port, *address[2:])))
            except OSError as error:
                if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT) and len(found) > 1:
                    continue  # a machine without IPv6 has a name for it nevertheless
                raise UsageError(
                    f"cannot listen on {config.host}:{port}: {error.strerror}", "is the port taken? --port"
                ) from error
            port = sockets[0].getsockname()[1]
        if not sockets:
            raise UsageError(f"cannot listen on {config.host}: no such address here", "is --host right?")
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


def serve(
    shelf: Shelf, config: ServerConfig, sockets: list[socket.socket], head: Callable[[], str | None] = lambda: None
) -> None:
    """Serve until SIGINT or SIGTERM; SIGHUP has the head of a model that stays read anew. `sockets`: from
    `listening`; `head`: where it lies by now. Raises UsageError where somebody else has begun to listen there
    meanwhile."""
    set_up_logs(config.log_format, config.access_log)
    app = app_over(shelf, config)
    sys.setswitchinterval(SWITCH_SECONDS)
    if shelf.stays:
        gc.freeze()  # what the model is made of needs no looking through
    server = _Server(
        uvicorn.Config(
            app,
            host=config.host,
            http=Protocol,
            ws="none",
            log_config=None,
            access_log=False,  # paths and addresses are the user's business
            timeout_graceful_shutdown=config.shutdown_timeout + LAST_SECONDS,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        )
    )

    _tell(shelf)

    async def main() -> None:
        _handle_signals(server, shelf, config.shutdown_timeout, head)
        await server.serve(sockets=sockets)

    try:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop where it is installed
            runner.run(main())
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise UsageError(f"cannot listen on {config.host}:{config.port}: {error.strerror}", "--port") from error


def _tell(shelf: Shelf) -> None:
    """What is in memory. Nothing of it is held here: it may leave."""
    for info in [served.llm.info for served in shelf.loaded]:
        log.info("%(model)s on %(backend)s: drafter %(drafter)s, depth %(depth)s, context %(context)d", info)
        if info["draft_vocab"] is not None:
            log.info("the head computes %(draft_vocab)d logits in full for each drafted token", info)
        if rates := info.get("synthetic_acceptance"):
            log.warning(synthetic_note(rates))
    if not shelf.stays:
        log.info("models, loaded as they are asked for: %s", ", ".join(shelf.names))


def _handle_signals(server: _Server, shelf: Shelf, timeout: int, head: Callable[[], str | None]) -> None:
    """Of this process, on the running event loop."""
    loop = asyncio.get_running_loop()
    attached = HANG_UP is not None and has_terminal() and signal.getsignal(HANG_UP) is not signal.SIG_IGN

    def drain() -> None:
        if shelf.draining:
            server.force_exit = True
            return
        log.info("shutting down: %d s for what runs", timeout)
        server.should_exit = True
        shelf.drain()
        loop.call_later(timeout, shelf.expire)

    def hang_up() -> None:
        if attached and not has_terminal():  # closed, with the server in it
            drain()
        elif shelf.stays:
            shelf.loaded[0].bridge.change_head(head())

    for number in (signal.SIGINT, signal.SIGTERM):
        on_signal(loop, number, drain)
    if HANG_UP is not None:
        on_signal(loop, HANG_UP, hang_up)


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn raises them again at its end, so that the exit code would not be 0."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens."""
        await super().startup(sockets)
        scheme = "https" if self.config.is_ssl else "http"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        for each in (sockets or ())[:1]:
            log.info("running on %s://%s:%d (Ctrl-C to stop)", scheme, host, each.getsockname()[1])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def set_up_logs(log_format: str, access_log: bool = False) -> None:
    """Text for people or a JSON object per line, on stderr. Prompts are in neither."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Json() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("headstart.server", "uvicorn.error", *(["headstart.access"] if access_log else [])):
        logging.getLogger(name).setLevel(logging.INFO)


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            document["exception"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)
