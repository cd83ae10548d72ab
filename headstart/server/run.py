"""A server process: its loop and its signals."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gc
import logging
import signal
import socket
import sys
from collections.abc import Callable, Iterator

import uvicorn

from headstart.errors import UsageError
from headstart.server.app import ServerConfig, app_over
from headstart.server.logs import set_up_logs
from headstart.server.protocol import Protocol
from headstart.server.replicas.join import Joined
from headstart.server.shelf import Shelf
from headstart.stats import synthetic_note
from headstart.system import HANG_UP, has_terminal, on_signal

log = logging.getLogger("headstart.server")


SWITCH_SECONDS = 0.001
"""How long a thread may keep the others from running; /health is answered between those that prepare requests."""
LAST_SECONDS = 5
"""After --shutdown-timeout, for telling so."""


def serve(
    shelf: Shelf, config: ServerConfig, sockets: list[socket.socket], head: Callable[[], str | None] = lambda: None
) -> None:
    """Serve until SIGINT or SIGTERM; SIGHUP has the head of a model that stays read anew. `sockets`: from
    `sockets.listening`; `head`: where it lies by now. Raises UsageError where somebody else has begun to listen there
    meanwhile."""
    set_up_logs(config.log_format, config.access_log, config.said)
    app = app_over(shelf, config)
    sys.setswitchinterval(SWITCH_SECONDS)
    if shelf.stays:
        gc.freeze()  # what the model is made of needs no looking through
    server = _Server(
        config.member is None,
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
        ),
    )

    _tell(shelf)

    async def main() -> None:
        joined = _joined(config, sockets)
        _handle_signals(server, shelf, config.shutdown_timeout, head, joined)
        if joined is not None:
            joined.start()
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
    for recorder in [served.bridge.watch.recorder for served in shelf.loaded]:
        if recorder is not None:
            log.info("token ids of prompts and answers are kept in %s", recorder.folder)
    if not shelf.stays:
        log.info("models, loaded as they are asked for: %s", ", ".join(shelf.names))


def _joined(config: ServerConfig, sockets: list[socket.socket]) -> Joined | None:
    """Membership in a router elsewhere."""
    if config.join is None:
        return None
    return Joined(config.join, config.host, sockets[0].getsockname()[1], tls=config.ssl_certfile is not None)


def _handle_signals(
    server: _Server, shelf: Shelf, timeout: int, head: Callable[[], str | None], joined: Joined | None
) -> None:
    """Of this process, on the running event loop."""
    loop = asyncio.get_running_loop()
    attached = HANG_UP is not None and has_terminal() and signal.getsignal(HANG_UP) is not signal.SIG_IGN

    leaving: list[asyncio.Task[None]] = []

    def drain() -> None:
        if shelf.draining or leaving:
            server.should_exit = server.force_exit = True
            return
        log.info("shutting down: %d s for what runs", timeout)
        if joined is None:
            end()
        else:  # while it still takes what the router has sent
            leaving.append(loop.create_task(joined.leave()))
            leaving[-1].add_done_callback(lambda _: end())

    def end() -> None:
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

    def __init__(self, says_where: bool, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._says_where = says_where

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Says where it listens, unless that is a router's business."""
        await super().startup(sockets)
        if not self._says_where:
            return
        scheme = "https" if self.config.is_ssl else "http"
        host = f"[{self.config.host}]" if ":" in self.config.host else self.config.host
        for each in (sockets or ())[:1]:
            log.info("running on %s://%s:%d (Ctrl-C to stop)", scheme, host, each.getsockname()[1])

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
