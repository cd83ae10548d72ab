"""A server process: sockets, signals, logs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import uvicorn

from headstart.api import LLM
from headstart.errors import UsageError
from headstart.server.app import ServerConfig, make_app
from headstart.stats import synthetic_note

log = logging.getLogger("headstart.server")


@dataclass(frozen=True, kw_only=True)
class Listen:
    """Where a server listens and how it ends. `shutdown_timeout`: seconds that running requests get after SIGTERM."""

    host: str = "127.0.0.1"
    port: int = 8000
    shutdown_timeout: int = 30
    tls_cert: Path | None = None
    tls_key: Path | None = None
    log_format: str = "text"


def serve(llm: LLM, config: ServerConfig, listen: Listen) -> None:
    """Serve until SIGINT or SIGTERM. Raises UsageError where the address is taken."""
    set_up_logs(listen.log_format)
    app, bridge = make_app(llm, config)
    server = _Server(
        uvicorn.Config(
            app,
            host=listen.host,
            port=listen.port,
            log_config=None,
            access_log=False,  # paths and addresses are the user's business
            timeout_graceful_shutdown=listen.shutdown_timeout,
            ssl_certfile=listen.tls_cert,
            ssl_keyfile=listen.tls_key,
        )
    )

    def drain(*_: object) -> None:
        if bridge.draining:
            server.force_exit = True
            return
        log.info("shutting down: %d s for what runs", listen.shutdown_timeout)
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
        raise UsageError(f"cannot listen on {listen.host}:{listen.port}", "is the port taken? --port") from error


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
