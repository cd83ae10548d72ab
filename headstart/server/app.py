"""The ASGI application: endpoints, errors, and the guards in front of them."""

from __future__ import annotations

import hmac
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

import headstart
from headstart.api import LLM
from headstart.server import errors
from headstart.server.bridge import Bridge
from headstart.server.prepare import Formats
from headstart.server.routes import State, router
from headstart.server.watch import Watch
from headstart.text.parsers import format_in, make_parser

MOST_BODY_BYTES = 16 * 2**20
OPEN_PATHS = frozenset({"/health"})
"""What needs no API key: whoever restarts a server has none."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How one engine is served, and where. `served_model_name`: by which requests may call the model. Times in seconds,
    None: no limit; `shutdown_timeout` is what running requests get after SIGTERM."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    max_queue: int = 256
    request_timeout: float | None = None
    shutdown_timeout: int = 30
    api_key: str | None = None
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    price_per_hour: float | None = None
    log_format: str = "text"


def make_app(llm: LLM, config: ServerConfig) -> tuple[ASGIApp, Bridge]:
    """The application over a loaded model, and its engine thread, which runs while the application does."""
    names = config.served_model_name or (llm.model.name,)
    bridge = Bridge(llm, Watch(llm.engine, names[0], config.price_per_hour), config.max_queue)
    template = "\n".join(llm.chat_template.sources.values()) if llm.chat_template else ""
    formats = Formats(
        config.tool_call_parser or format_in(template, "tool_formats"),
        config.reasoning_parser or format_in(template, "reasoning_formats"),
    )
    make_parser(formats.tools, (), formats.reasoning)  # a wrong name fails now, not at the first request

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        llm.grammars.prepare()  # no other thread runs meanwhile, so not at the first request that needs it
        bridge.start()
        yield
        bridge.stop()

    app = FastAPI(
        title="headstart",
        version=headstart.__version__,
        description="An OpenAI-compatible endpoint over one model, decoded with multi-token prediction.",
        lifespan=lifespan,
        max_body_size=MOST_BODY_BYTES,
    )
    app.state.headstart = State(bridge, names, formats, int(time.time()), config.request_timeout)
    app.include_router(router)
    errors.install(app)
    if config.api_key:
        app.add_middleware(ApiKey, key=config.api_key)
    return DeclaredLength(app, MOST_BODY_BYTES), bridge  # outermost: before FastAPI's own limit and its plain text


class DeclaredLength:
    """413 in OpenAI's shape for bodies that say they are too long; FastAPI counts those that say nothing."""

    def __init__(self, app: ASGIApp, most: int) -> None:
        self.app, self.most = app, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        declared = dict(scope.get("headers", ())).get(b"content-length", b"0")
        if scope["type"] == "http" and declared.isdigit() and int(declared) > self.most:
            body = errors.document(f"the body is larger than {self.most} bytes", 413)
            await JSONResponse(body, 413, {"Connection": "close"})(scope, receive, send)
        else:
            await self.app(scope, receive, send)


class ApiKey:
    """401 without the right bearer token."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self.app, self.wanted = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self.wanted):  # takes the same time wherever they differ
                body = errors.document("the API key is missing or wrong", 401)
                await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
        await self.app(scope, receive, send)
