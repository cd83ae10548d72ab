"""The ASGI application: endpoints, errors and middleware over the models of a server."""

import time
from collections.abc import AsyncIterator, Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

from fastapi import FastAPI
from fastapi.responses import HTMLResponse
from fastapi.routing import APIRoute
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from headstart.api import LLM
from headstart.engine.async_engine import AsyncEngine
from headstart.errors import UsageError
from headstart.server import errors, prefill_server
from headstart.server.accounts import RATE_LIMIT_HEADERS, Accounts
from headstart.server.admission import Admission
from headstart.server.apis import adapters, completions, embeddings, messages, ollama, responses
from headstart.server.guards import REQUEST_ID, ApiKeyGuard, NormalizedPaths, RequestLog
from headstart.server.image_urls import url_policy
from headstart.server.metrics import ServerMetrics
from headstart.server.model_manager import ModelManager, ModelSpec, ServedModel, default_names
from headstart.server.options import KeepAlive, ServerOptions, check_origins
from headstart.server.pages import Pages, docs_page
from headstart.server.pipeline import ServerState
from headstart.server.prefill_client import PrefillClient
from headstart.server.prepare import OutputFormats
from headstart.server.records import RecordedModel, RecordFiles, TextRecorder, claim_folder
from headstart.server.replicas.frames import FramedResponses
from headstart.server.replicas.group import ReplicaId
from headstart.server.routes import router
from headstart.server.schema import IGNORED_FIELDS
from headstart.text.parsers import format_in, make_parser
from headstart.version import __version__

EXPOSED_HEADERS = [REQUEST_ID, IGNORED_FIELDS, "Retry-After", *chain(*RATE_LIMIT_HEADERS.values())]
"""Response headers that web pages of --allowed-origins may read."""


@dataclass(frozen=True, kw_only=True)
class ServerConfig(ServerOptions):
    """Options of a server: ServerOptions, and the fields that only the command `serve` sets."""

    keep_alive: KeepAlive | None = None  # with several models: time in memory without requests
    memory: int | None = None  # with several models: maximum bytes of all together
    join: str | None = None  # URL of the router that this server registers at
    replica: ReplicaId | None = None  # this server's identity among the replicas behind one router

    def __post_init__(self) -> None:
        check_origins(self.allowed_origins)
        make_parser(self.tool_call_parser, (), self.reasoning_parser)  # an unknown name fails before a model is loaded


def single_model_manager(llm: LLM, config: ServerConfig) -> ModelManager:
    """A manager of one loaded model, which is never unloaded."""
    names = tuple(config.served_model_name or default_names(llm.model.name))
    accounts = Accounts.of(config.api_key or (), config.api_key_file)
    if config.replica is not None:
        accounts.share(config.replica.folder)
    spec = ModelSpec(names=names, path=llm.model.name, config=llm.config)
    models = ModelManager([spec], partial(_make_served, config, accounts), accounts, is_fixed=True)
    models.add_loaded(llm)
    return models


def multi_model_manager(specs: Seq[ModelSpec], config: ServerConfig) -> ModelManager:
    """A manager of several models, none of them in memory yet. Raises UsageError for wrong API keys."""
    config = replace(config, price_per_hour=None)  # of the machine, not of each model
    accounts = Accounts.of(config.api_key or (), config.api_key_file)

    def make_served(llm: LLM, names: tuple[str, ...]) -> ServedModel:
        return _make_served(config, accounts, llm, names, f"{names[0]}: ")

    return ModelManager(specs, make_served, accounts, config.keep_alive, config.memory)


def _make_served(
    config: ServerConfig, accounts: Accounts, llm: LLM, names: tuple[str, ...], log_prefix: str = ""
) -> ServedModel:
    """A served model whose engine thread is not started. Raises UsageError for a record folder of another model, and
    for --record with --synthetic-acceptance."""
    template = "\n".join(llm.chat_template.sources.values()) if llm.chat_template else ""
    formats = OutputFormats(
        config.tool_call_parser or format_in(template, "tool_formats"),
        config.reasoning_parser or format_in(template, "reasoning_formats"),
        config.parse_special_tokens,
    )
    if twice := set(names) & set(llm.adapters):
        raise UsageError(f"--lora: the model and an adapter are named {min(twice)}", "give the adapter another name")
    prefill = None
    if config.prefill is not None:
        prefill = PrefillClient(config.prefill, next(iter(config.api_key or ()), None), llm.engine.memory)
    recorder = None
    if config.record is not None:
        if llm.engine.synthetic is not None:
            raise UsageError("--record cannot keep the texts of --synthetic-acceptance", "leave out one of them")
        claim_folder(config.record, RecordedModel.of(llm.model))
        recorder = TextRecorder(RecordFiles(config.record, config.record_limit * 2**20))
    admission = Admission(accounts, llm.config.max_num_seqs + config.max_queue)
    counts = prefill.counts if prefill else None
    metrics = ServerMetrics(llm.engine, names[0], admission, config.price_per_hour, recorder, log_prefix, counts)
    engine = AsyncEngine(llm.shared, metrics.log_load)
    return ServedModel(llm, names, formats, engine, admission, metrics, prefill)


def app_over(models: ModelManager, config: ServerConfig) -> ASGIApp:
    """The ASGI application with all middleware. Its lifespan starts and stops the engine threads."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        models.start()
        yield
        models.stop()

    app = _App(
        title="headstart",
        version=__version__,
        description="An OpenAI-compatible endpoint, decoded with multi-token prediction.",
        lifespan=lifespan,
        docs_url=None,  # FastAPI's own pages are blank without the network
        redoc_url=None,
    )
    app.state.headstart = ServerState(
        models, int(time.time()), config.request_timeout, config.replica,
        url_policy(config.allow_image_urls, config.allowed_media_domains),
        allow_lora_updates=config.allow_lora_updates,
    )  # fmt: skip
    routers = [part.router for part in (adapters, completions, messages, responses, ollama, embeddings)] + [router]
    if config.role == "prefill":
        routers.append(prefill_server.router)
    for each in routers:
        app.include_router(each)
    app.add_route("/docs", lambda _: HTMLResponse(docs_page(app.openapi())), include_in_schema=False)
    # not from the OpenAPI document, which takes a second to build
    paths = [route.path_format for each in routers for route in each.routes if isinstance(route, APIRoute)]
    errors.install_handlers(app, paths)
    guarded: ASGIApp = ApiKeyGuard(app, models.accounts, config.replica) if models.accounts else app
    guarded = NormalizedPaths(guarded)
    guarded = guarded if config.no_web else Pages(guarded)
    if config.allowed_origins:
        anything = {"allow_methods": ["*"], "allow_headers": ["*"], "expose_headers": EXPOSED_HEADERS}
        guarded = CORSMiddleware(guarded, list(config.allowed_origins), **anything)  # type: ignore[arg-type]
    logged = RequestLog(guarded, config.access_log)
    return logged if config.replica is None else FramedResponses(logged, config.replica.token)


class _App(FastAPI):
    """FastAPI whose OpenAPI document omits status 422: this server answers 400 instead."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            for methods in super().openapi()["paths"].values():
                for operation in methods.values():
                    operation["responses"].pop("422", None)
        return super().openapi()
