"""A server process: sockets, signals, logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Iterator

import uvicorn

from headstart.api import LLM
from headstart.errors import UsageError
from headstart.server.app import ServerConfig, make_app
from headstart.stats import synthetic_note

log = logging.getLogger("headstart.server")


def serve(llm: LLM, config: ServerConfig) -> None:
    """Serve until SIGINT or SIGTERM. Raises UsageError where the address is taken."""
    set_up_logs(config.log_format)
    app, bridge = make_app(llm, config)
    server = _Server(
        uvicorn.Config(
            app,
            host=config.host,
            port=config.port,
            log_config=None,
            access_log=False,  # paths and addresses are the user's business
            timeout_graceful_shutdown=config.shutdown_timeout,
            ssl_certfile=config.ssl_certfile,
            ssl_keyfile=config.ssl_keyfile,
        )
    )

    def drain(*_: object) -> None:
        if bridge.draining:
            server.force_exit = True
            return
        log.info("shutting down: %d s for what runs", config.shutdown_timeout)
        bridge.draining = server.should_exit = True

    info = llm.info
    log.info("%(model)s on %(backend)s: drafter %(drafter)s, depth %(depth)s, context %(context)d", info)
    if rates := info.get("synthetic_acceptance"):
        log.warning(synthetic_note(rates))

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, drain)
        await server.serve()

    try:
        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:  # uvloop where it is installed
            runner.run(main())
    except SystemExit as error:  # uvicorn's way to say that it could not start; it has logged why
        raise UsageError(f"cannot listen on {config.host}:{config.port}", "is the port taken? --port") from error


class _Server(uvicorn.Server):
    """Leaves signals to us: uvicorn raises them again at its end, so that the exit code would not be 0."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def set_up_logs(log_format: str) -> None:
    """Text for people or a JSON object per line, on stderr. Prompts are in neither."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Json() if log_format == "json" else logging.Formatter("%(asctime)s %(levelname)s %(message)s")
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    for name in ("headstart.server", "uvicorn.error"):
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
