"""The ASGI application: endpoints, errors, and the guards in front of them."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

import headstart
from headstart.api import LLM
from headstart.errors import UsageError
from headstart.server import errors, handed_over
from headstart.server.accounts import Accounts
from headstart.server.answering import State
from headstart.server.apis import embeddings, messages, ollama, render, responses
from headstart.server.bridge import Bridge
from headstart.server.docs_page import page
from headstart.server.entries import KeepAlive, Offer, Served
from headstart.server.guards import REQUEST_ID, ApiKeys, HeadAsGet, PlainPaths, Traced
from headstart.server.handoff import Handoff
from headstart.server.pages import Pages
from headstart.server.prepare import Formats
from headstart.server.recorder import Recorder
from headstart.server.records import RecordedModel, RecordFiles, claim_folder
from headstart.server.replicas.state import Member
from headstart.server.routes import router
from headstart.server.shelf import Shelf
from headstart.server.watch import Watch
from headstart.text.parsers import format_in, make_parser


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """How models are served, and where. `served_model_name`: by which requests may call the model. Times in seconds,
    None: no limit; `shutdown_timeout` is what running requests get after SIGTERM. `allowed_origins`: of web pages that
    may call (CORS); `api_key_file`: more keys, with what each may have (accounts.py); `web`: our own at `/` and
    `/dashboard`; `parse_special_tokens`: names of special tokens in messages become those tokens. `record`: a folder
    that keeps token ids of what is asked and written, within `record_limit` megabytes. Of several models: `keep_alive`,
    how long one stays without requests, and `memory`, the bytes that all may take. `join`: a router elsewhere that this
    server takes part in; `member`: which of several replicas behind one router it is. `role`: prefill hands computed
    prompts to other servers; `prefill`: the URL of one that does."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()
    max_queue: int = 256
    request_timeout: float | None = None
    shutdown_timeout: int = 30
    api_key: tuple[str, ...] = ()
    api_key_file: Path | None = None
    allowed_origins: tuple[str, ...] = ()
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    parse_special_tokens: bool = False
    price_per_hour: float | None = None
    log_format: str = "text"
    access_log: bool = False
    web: bool = True
    record: Path | None = None
    record_limit: int = 256
    keep_alive: KeepAlive | None = None
    memory: int | None = None
    role: str | None = None
    prefill: str | None = None
    join: str | None = None
    member: Member | None = None

    @property
    def said(self) -> str:
        """Begins its lines in a log of several."""
        return "" if self.member is None else f"replica {self.member.number}"


def make_app(llm: LLM, config: ServerConfig) -> tuple[ASGIApp, Bridge]:
    """The application over one loaded model, and its engine thread, which runs while the application does."""
    shelf = shelf_of_one(llm, config)
    return app_over(shelf, config), shelf.loaded[0].bridge


def shelf_of_one(llm: LLM, config: ServerConfig) -> Shelf:
    """One loaded model, which stays."""
    names = config.served_model_name or (llm.model.name,)
    recorder = _recorder(llm, config)
    accounts = Accounts.of(config.api_key, config.api_key_file)
    if config.member is not None:
        accounts.share(config.member.folder)
    offer = Offer(names=names, path=llm.model.name, config=llm.config)
    shelf = Shelf([offer], partial(_served, config, accounts, recorder, ""), accounts, stays=True)
    shelf.put(llm)
    return shelf


def shelf_of(offers: Seq[Offer], config: ServerConfig) -> Shelf:
    """Several models, none of them in memory yet. Raises UsageError for wrong API keys."""
    cost = replace(config, price_per_hour=None)  # the machine's, not each model's
    accounts = Accounts.of(config.api_key, config.api_key_file)

    def make(llm: LLM, names: tuple[str, ...]) -> Served:
        return _served(cost, accounts, None, f"{names[0]}: ", llm, names)

    return Shelf(offers, make, accounts, config.keep_alive, config.memory)


def _served(
    config: ServerConfig, accounts: Accounts, recorder: Recorder | None, said: str, llm: LLM, names: tuple[str, ...]
) -> Served:
    """A model behind its engine thread, which does not run yet. Raises UsageError for a format that nobody knows."""
    watch = Watch(llm.engine, names[0], config.price_per_hour, recorder, accounts, said)
    template = "\n".join(llm.chat_template.sources.values()) if llm.chat_template else ""
    formats = Formats(
        config.tool_call_parser or format_in(template, "tool_formats"),
        config.reasoning_parser or format_in(template, "reasoning_formats"),
        config.parse_special_tokens,
    )
    make_parser(formats.tools, (), formats.reasoning)  # a wrong name fails now, not at the first request
    bridge = Bridge(llm, watch, config.max_queue)
    if config.prefill is not None:
        bridge.handoff = Handoff(config.prefill, next(iter(config.api_key), None), llm.engine.memory)
        watch.handoff = bridge.handoff.counts
    return Served(bridge, names, formats)


def app_over(shelf: Shelf, config: ServerConfig) -> ASGIApp:
    """The application over models; engine threads run while it does."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        shelf.prepare()
        shelf.start()
        recorders = [served.bridge.watch.recorder for served in shelf.loaded if served.bridge.watch.recorder]
        for recorder in recorders:
            recorder.start()
        yield
        shelf.stop()
        for recorder in recorders:
            recorder.stop()

    app = _App(
        title="headstart",
        version=headstart.__version__,
        description="An OpenAI-compatible endpoint, decoded with multi-token prediction.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages are blank without the network
        redoc_url=None,
    )
    app.state.headstart = State(shelf, int(time.time()), config.request_timeout, config.member)
    for each in (router, messages.router, responses.router, ollama.router, embeddings.router, render.router):
        app.include_router(each)
    if config.role == "prefill":
        app.include_router(handed_over.router)
    app.add_route("/docs", lambda _: HTMLResponse(page(app.openapi())), include_in_schema=False)
    errors.install(app)
    guarded: ASGIApp = ApiKeys(app, shelf.accounts, config.member) if shelf.accounts else app
    guarded = PlainPaths(guarded)
    guarded = HeadAsGet(Pages(guarded) if config.web else guarded)
    if config.allowed_origins:
        anything = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": [REQUEST_ID]}
        guarded = CORSMiddleware(guarded, list(config.allowed_origins), **anything)  # type: ignore[arg-type]
    return Traced(guarded, config.access_log)


def _recorder(llm: LLM, config: ServerConfig) -> Recorder | None:
    """Raises UsageError for a folder of another model's records, or where the texts are not the model's."""
    if config.record is None:
        return None
    if llm.engine.synthetic is not None:
        raise UsageError("--synthetic-acceptance makes texts that --record must not keep", "leave out one of them")
    claim_folder(config.record, RecordedModel.of(llm.model))
    return Recorder(RecordFiles(config.record, config.record_limit * 2**20))


class _App(FastAPI):
    """Describes itself when it is first asked to, without FastAPI's word for what is 400 here."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            for methods in super().openapi()["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
        return super().openapi()
