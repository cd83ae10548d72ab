"""`serve`: runs a server process, its event loop and its signals."""

import asyncio
import errno
import gc
import logging
import socket
import sys
from collections.abc import Callable

import uvicorn

from headstart.errors import UsageError
from headstart.hub import DEFAULT_MODEL, DEMO_NOTE
from headstart.server.app import ServerConfig, app_over
from headstart.server.model_manager import ModelManager
from headstart.server.process import base_url, host_and_port, set_up_logs
from headstart.server.protocol import HttpProtocol
from headstart.server.replicas.router import RouterMembership
from headstart.stats import synthetic_note
from headstart.system import handle_signals

log = logging.getLogger("headstart.server")
SWITCH_INTERVAL_S = 0.001
"""Python's thread switch interval, shorter than its default so that /health answers while requests are prepared."""
LAST_RESPONSES_S = 5  # time after --shutdown-timeout for sending errors to clients whose requests were ended


def serve(
    models: ModelManager, config: ServerConfig, sockets: list[socket.socket],
    find_head: Callable[[], str | None] = lambda: None,
) -> None:  # fmt: skip
    """Serve until SIGINT or SIGTERM. On SIGHUP a server of one fixed model loads its head again.

    sockets: from `process.listening`. find_head: returns the path of the head to load on SIGHUP. Raises UsageError if
    another process now listens on the sockets' addresses."""
    set_up_logs(config.log_format, config.access_log, config.replica.process if config.replica else "")
    app = app_over(models, config)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    if models.is_fixed:
        gc.freeze()  # the model's objects need no collection
    server = uvicorn.Server(
        uvicorn.Config(
            app,
            host=config.host,
            http=HttpProtocol,
            ws="none",
            log_config=None,
            access_log=False,  # paths and addresses are private
            timeout_graceful_shutdown=config.shutdown_timeout + LAST_RESPONSES_S,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        )
    )
    _log_models(models)
    try:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop where it is installed
            runner.run(_run(server, models, config, sockets, find_head))
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        address = host_and_port(config.host, config.port)
        raise UsageError(f"cannot listen on {address}: {error.strerror}", "--port") from error


async def _run(
    server: uvicorn.Server, models: ModelManager, config: ServerConfig, sockets: list[socket.socket],
    find_head: Callable[[], str | None],
) -> None:  # fmt: skip
    port, tls = sockets[0].getsockname()[1], server.config.is_ssl
    serving = asyncio.create_task(server.serve(sockets=sockets))
    while not (server.started or serving.done()):  # uvicorn installs signal handlers before ours, and restores them
        await asyncio.sleep(0.005)
    if not (server.should_exit or serving.done()):  # a signal may have come before our handlers
        membership = None
        if config.join is not None:
            membership = RouterMembership(config.join, config.host, port, tls=tls)
            membership.start()
        _handle_signals(server, models, config.shutdown_timeout, find_head, membership)
        if config.replica is None:  # for replicas the supervisor logs the router's address
            log.info("running on %s (Ctrl-C to stop)", base_url(config.host, port, tls=tls))
    await serving


def _log_models(models: ModelManager) -> None:
    """Log the loaded models. Holds no reference to a model afterwards, so that it can be unloaded."""
    for info in [served.llm.info for served in models.loaded]:
        log.info("%(model)s on %(backend)s: drafter %(drafter)s, depth %(depth)s, context %(context)d", info)
        if info["model"] == DEFAULT_MODEL:
            log.info(DEMO_NOTE)
        if info["draft_vocab"] is not None:
            log.info("the head computes %(draft_vocab)d logits for each drafted token (--draft-vocab)", info)
        if rates := info.get("synthetic_acceptance"):
            log.warning(synthetic_note(rates))
    for recorder in [served.metrics.recorder for served in models.loaded]:
        if recorder is not None:
            log.info("token ids of prompts and answers are kept in %s", recorder.folder)
    if not models.is_fixed:
        log.info("models, loaded when requests name them: %s", ", ".join(models.names))


def _handle_signals(
    server: uvicorn.Server, models: ModelManager, timeout: int, find_head: Callable[[], str | None],
    membership: RouterMembership | None,
) -> None:  # fmt: skip
    loop = asyncio.get_running_loop()
    leaving: list[asyncio.Task[None]] = []

    def drain() -> None:
        if models.draining or leaving:
            server.should_exit = server.force_exit = True
            return
        log.info("shutting down: %d s for what runs", timeout)
        if membership is None:
            end()
        else:  # requests that the router has already sent are still accepted
            leaving.append(loop.create_task(membership.leave()))
            leaving[-1].add_done_callback(lambda _: end())

    def end() -> None:
        server.should_exit = True
        models.drain()
        loop.call_later(timeout, models.expire)

    def renew() -> None:
        if models.is_fixed:
            models.loaded[0].change_head(find_head())

    handle_signals(loop, drain, renew)
