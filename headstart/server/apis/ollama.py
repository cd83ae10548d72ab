"""Ollama's API (https://docs.ollama.com/api): bodies, their translation to chat requests, and responses."""

import hashlib
import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal

from anyio.to_thread import run_sync
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import AliasChoices, Field, StrictBool, StrictInt, StrictStr

from headstart import hub
from headstart.formats.base import Checkpoint
from headstart.params import names_in
from headstart.server import limits
from headstart.server.apis.blocks import BlockChange, BlockRenderer, ResponseBlock, as_body, joined_text, refuse
from headstart.server.body_reader import CheckedRoute
from headstart.server.errors import BodyError
from headstart.server.generation import Json
from headstart.server.model_manager import ModelSlot, context_length, read_headers, read_sizes
from headstart.server.options import KeepAlive
from headstart.server.pipeline import error_responses, find_model, respond_translated, state_of
from headstart.server.prepare import LATEST_TAG
from headstart.server.renderer import dump_json
from headstart.server.schema import (
    Body,
    ChatRequest,
    CompletionRequest,
    Many,
    Name,
    Number,
    ResponseModel,
    Tool,
    image_part,
    joined_parts,
)
from headstart.version import __version__

router = APIRouter(route_class=CheckedRoute)
Texts = StrictStr | Annotated[Many[StrictStr], Field(max_length=limits.PROMPTS)]
RENAMED = {option: name for name, option in names_in("ollama").items()}
"""Option -> sampling parameter, where their names differ."""
IGNORED_OPTIONS = frozenset({
    "numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "embedding_only", "num_thread", "num_keep", "repeat_last_n", "mirostat_tau", "mirostat_eta",
    "penalize_newline",
})  # fmt: skip
"""Ignored options: how a model is loaded, and settings of samplers that are off."""
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logprobs": ((False,), "/v1/chat/completions has logprobs"),
    "top_logprobs": ((0,), "/v1/chat/completions has logprobs"),
    "template": (("",), "start the server with --chat-template, or send raw prompts"),
    "images": (([],), "give them to a message"),
    "context": (([],), "send the conversation to /api/chat"),
    "tools": (([],), "send them to /api/chat"),
}
"""Unsupported member -> values that change nothing, and what to do instead."""
ENDLESS = 2**31 - 1  # default num_predict of raw prompts: up to the end of the text or of the context


class OllamaFunction(Body):
    """The function of a tool call. Unlike OpenAI's, its arguments are an object."""

    harmless = frozenset({"index", "description"})
    name: StrictStr
    arguments: dict[str, Any] | None = None


class OllamaCall(Body):
    """A tool call of an earlier turn."""

    harmless = frozenset({"id", "type"})
    function: OllamaFunction


class OllamaMessage(Body):
    """One turn of a conversation."""

    harmless = frozenset({"tool_call_id"})
    role: Name
    content: StrictStr | None = None
    thinking: StrictStr | None = None
    images: Annotated[Many[StrictStr], Field(max_length=limits.MESSAGES)] | None = None
    tool_calls: Annotated[Many[OllamaCall], Field(max_length=limits.TOOLS)] | None = None
    tool_name: Name | None = None


class OllamaModelRequest(Body):
    """Members of all requests that use a model."""

    model: StrictStr
    keep_alive: Number | StrictStr | None = Field(
        default=None, description="On servers of several models: how long the model stays in memory without requests."
    )


class OllamaRequest(OllamaModelRequest):
    """Members of /api/chat and /api/generate."""

    stream: StrictBool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: StrictBool | StrictStr | None = None


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat."""

    messages: Annotated[Many[OllamaMessage], Field(max_length=limits.MESSAGES)] | None = None
    tools: Annotated[Many[Tool], Field(max_length=limits.TOOLS)] | None = None


class GenerateRequest(OllamaRequest):
    """POST /api/generate."""

    prompt: StrictStr | None = None
    system: StrictStr | None = None
    images: Annotated[Many[StrictStr], Field(max_length=limits.MESSAGES)] | None = None
    raw: StrictBool | None = False
    suffix: StrictStr | None = None  # makes the prompt raw


class OllamaEmbedRequest(OllamaModelRequest):
    """POST /api/embed."""

    input: Texts
    truncate: StrictBool | None = True
    options: dict[str, Any] | None = None
    dimensions: StrictInt | None = None


class OllamaEmbeddingRequest(OllamaModelRequest):
    """POST /api/embeddings: one text."""

    prompt: StrictStr
    options: dict[str, Any] | None = None


ModelName = Annotated[StrictStr, Field(validation_alias=AliasChoices("model", "name"))]  # older clients say `name`


class PullRequest(Body):
    """POST /api/pull. Older clients say `name`."""

    model: ModelName
    insecure: StrictBool | None = False
    stream: StrictBool | None = True


class ShowRequest(Body):
    """POST /api/show. Older clients say `name`."""

    model: ModelName
    verbose: StrictBool | None = False


def keep_alive_of(body: OllamaModelRequest) -> KeepAlive | None:
    """The keep-alive of a body; None: the default. Raises ParameterError for an invalid time."""
    return None if body.keep_alive is None else KeepAlive.of(body.keep_alive)


def chat_of(body: OllamaChatRequest) -> ChatRequest:
    """The chat request for a body. Raises BodyError for unsupported members."""
    messages = list(_messages(body.messages or ()))
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    return as_body(body, {**_shared_members(body), "messages": messages, "tools": tools or None}, ChatRequest)


def prompt_of(body: GenerateRequest) -> ChatRequest | CompletionRequest:
    """The completion request for a raw prompt or one with a suffix, else the chat request. Raises BodyError for
    unsupported members."""
    shared = _shared_members(body)
    if body.raw or body.suffix:
        if body.system:
            raise BodyError("system is given, but the prompt is raw", "system", "write it into the prompt")
        if body.images:
            raise BodyError("images are given, but the prompt is raw", "images", "leave raw out")
        texts = {"prompt": body.prompt or "", "suffix": body.suffix}
        return as_body(body, {"max_tokens": ENDLESS, **shared, **texts}, CompletionRequest)
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": _content(body.images, body.prompt or "")}]
    return as_body(body, {**shared, "messages": messages}, ChatRequest)


def _shared_members(body: OllamaRequest) -> Json:
    refuse(body, REFUSED, frozenset())
    chat = _options(body.options or {}) | {"model": body.model, "stream": body.stream is not False}
    if body.think is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": body.think not in (False, "none")}
        chat["reasoning_effort"] = body.think if isinstance(body.think, str) else None
    if body.format == "json":
        chat["response_format"] = {"type": "json_object"}
    elif body.format:
        chat["response_format"] = {"type": "json_schema", "schema": body.format}
    return {name: value for name, value in chat.items() if value is not None}


def _options(given: Mapping[str, Any]) -> Json:
    """Options under the names of chat completions. The chat request refuses or reports unknown ones."""
    options = {RENAMED.get(name, name): value for name, value in given.items() if name not in IGNORED_OPTIONS}
    for name, least in (("max_tokens", 1), ("seed", 0)):  # lower values mean no limit, and a random seed
        if type(value := options.get(name)) is int and value < least:
            del options[name]
    return options


def _messages(messages: list[OllamaMessage] | tuple[()]) -> Iterator[Json]:
    for message in messages:
        functions = (each.function for each in message.tool_calls or ())
        functions_called = ({"name": each.name, "arguments": each.arguments or {}} for each in functions)
        calls = [{"type": "function", "function": each} for each in functions_called]
        yield {
            "role": message.role,
            "content": _content(message.images, message.content or ""),
            **({"reasoning_content": message.thinking} if message.thinking else {}),
            **({"tool_calls": calls} if calls else {}),
            **({"name": message.tool_name} if message.tool_name else {}),
        }


def _content(images: list[str] | None, text: str) -> Any:
    """The content of a chat message: images, in base64, come before the text."""
    parts = [image_part(each if each.startswith("data:") else f"data:;base64,{each}") for each in images or ()]
    return joined_parts([*parts, {"type": "text", "text": text}])


OLLAMA_VERSION = "0.12.0"  # version of the supported API; clients check it before they use newer features
NEVER = "2318-01-01T00:00:00+00:00"  # expiry date of a model that is never unloaded; clients need a date


class OllamaError(ResponseModel):
    """Ollama's error response."""

    error: str


class OllamaAnswer(ResponseModel):
    """Members of both kinds of responses; durations in nanoseconds."""

    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"]
    total_duration: int = Field(default=0, ge=0)
    prompt_eval_count: int = Field(default=0, ge=0)
    eval_count: int = Field(default=0, ge=0)


class OllamaChat(OllamaAnswer):
    """Response of /api/chat. A stream has one such line for each piece."""

    message: dict[str, Any]


class OllamaGeneration(OllamaAnswer):
    """Response of /api/generate. A stream has one such line for each piece."""

    response: str


class OllamaModels(ResponseModel):
    """Response of /api/tags and /api/ps."""

    models: list[dict[str, Any]]


ERRORS = error_responses(OllamaError)


@router.post("/api/chat", responses=ERRORS, response_model=OllamaChat)
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """The next turn of a conversation, in Ollama's shape. Streams unless `stream` is false."""
    if not body.messages:
        return await _load_or_unload(body, request, message={"role": "assistant", "content": ""})
    return await respond_translated(request, partial(chat_of, body), OllamaChatRenderer, keep_alive_of(body))


@router.post("/api/generate", responses=ERRORS, response_model=OllamaGeneration)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """The output for one prompt. Streams unless `stream` is false."""
    if not (body.prompt or body.images or body.suffix):
        return await _load_or_unload(body, request, response="")
    return await respond_translated(request, partial(prompt_of, body), OllamaGenerateRenderer, keep_alive_of(body))


async def _load_or_unload(body: OllamaRequest, request: Request, **empty: Any) -> Response:
    """A request without a prompt loads the model; with a keep_alive of 0 it unloads the model."""
    keep_alive, reason = keep_alive_of(body), "load"
    if keep_alive is not None and keep_alive.seconds == 0:
        reason = "unload" if await state_of(request).models.release(body.model) else "load"
    else:
        await find_model(request, body.model, keep_alive)
    return JSONResponse({"model": body.model, "created_at": _now(), **empty, "done": True, "done_reason": reason})


@router.get("/api/tags", response_model=OllamaModels)
async def tags(request: Request) -> Json:
    """The models of this server, in memory or not."""
    slots = state_of(request).models.slots
    return {"models": [each for slot in slots for each in await run_sync(_list_entries, slot)]}


@router.get("/api/ps", response_model=OllamaModels)
async def ps(request: Request) -> Json:
    """The models in memory, and the times when they are unloaded."""
    found: list[Json] = []
    for slot in state_of(request).models.slots:
        if slot.served is not None:
            more = {"expires_at": _expires(slot), "size_vram": 0, "context_length": slot.served.llm.engine.max_length}
            found += [{**each, **more} for each in await run_sync(_list_entries, slot)]
    return {"models": found}


def _expires(slot: ModelSlot) -> str:
    left = slot.expires
    return NEVER if left is None else (datetime.now(UTC) + timedelta(seconds=left)).isoformat()


@router.post("/api/show", responses=ERRORS)
async def show(body: ShowRequest, request: Request) -> Response:
    """One model: its sizes, chat template and capabilities."""
    slot = state_of(request).models.find(body.model)
    return JSONResponse(await run_sync(_description, slot, body.model))


@router.post("/api/pull", responses=ERRORS)
async def pull(body: PullRequest, request: Request) -> Response:
    """Download a model of this server if its files are missing. Models that this server does not have are refused."""
    slot = state_of(request).models.find(body.model)
    await run_sync(_download, slot)
    done = [{"status": "pulling manifest"}, {"status": "success"}]
    if body.stream is False:
        return JSONResponse(done[-1])
    return Response("".join(f"{json.dumps(each)}\n" for each in done), media_type="application/x-ndjson")


def _download(slot: ModelSlot) -> None:
    """Download a model's files unless it is in memory. Raises UsageError if the download fails."""
    if slot.served is None:
        hub.resolve(slot.spec.path)


@router.get("/api/version")
async def version() -> dict[str, str]:
    """Versions of Ollama's API and of headstart."""
    return {"version": OLLAMA_VERSION, "headstart": __version__}


class OllamaChatRenderer(BlockRenderer):
    """Renders a chat response as one document, or as a stream of JSON lines."""

    media_type, path = "application/x-ndjson", "/api/"

    def block_document(self) -> Json:
        return self._document(self._message(self.blocks), self._end())

    def render_change(self, change: BlockChange) -> Iterator[str]:
        """Lines for a change: text is sent as it grows, a call when it is complete."""
        block, is_call = change.block, change.block.kind == "call"
        if change.what == "more" and not is_call:
            yield self._line([ResponseBlock(block.kind, block.index, text=change.text)], {"done": False})
        elif change.what == "close" and is_call:
            yield self._line([block], {"done": False})

    def finish_blocks(self) -> Iterator[str]:
        yield self._line([], self._end())

    def _message(self, blocks: list[ResponseBlock]) -> Json:
        calls = [{"function": {"name": each.name, "arguments": each.arguments}} for each in blocks if each.name]
        content = {"content": joined_text(blocks, "text"), **_thinking(blocks)}
        return {"message": {"role": "assistant", **content, **({"tool_calls": calls} if calls else {})}}

    def _line(self, blocks: list[ResponseBlock], more: Json) -> str:
        return dump_json(self._document(self._message(blocks), more)) + "\n"

    def _document(self, message: Json, more: Json) -> Json:
        return {"model": self.generation.model, "created_at": _now(), **message, **more}

    def _end(self) -> Json:
        choice, usage, completion = self.choice.choice, self.generation.usage(), self.choice.completion
        timing = completion.timing if completion else {"ttft_s": 0.0, "decode_s": 0.0}
        return {
            "done": True, "done_reason": "length" if self.is_truncated else "stop",
            "total_duration": _nanoseconds(time.perf_counter() - choice.started), "load_duration": 0,
            "prompt_eval_count": usage["prompt_tokens"], "prompt_eval_duration": _nanoseconds(timing["ttft_s"]),
            "eval_count": usage["completion_tokens"], "eval_duration": _nanoseconds(timing["decode_s"]),
            "seed": usage["seed"], "speculation": usage["speculation"],
        }  # fmt: skip


class OllamaGenerateRenderer(OllamaChatRenderer):
    """Renders the response of /api/generate, which has the text as `response`."""

    def _message(self, blocks: list[ResponseBlock]) -> Json:
        return {"response": joined_text(blocks, "text"), **_thinking(blocks)}


def _thinking(blocks: list[ResponseBlock]) -> Json:
    text = joined_text(blocks, "reasoning")
    return {"thinking": text} if text else {}


def _now() -> str:
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def _nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def _list_entries(slot: ModelSlot) -> list[Json]:
    """Entries of /api/tags, one for each name of a model and each adapter. Reads files."""
    known = _details(read_headers(slot))
    full = [name if ":" in name else name + LATEST_TAG for name in (*slot.spec.names, *slot.adapters)]
    return [{"name": name, "model": name, **known} for name in full]


def _description(slot: ModelSlot, name: str) -> Json:
    """The response of /api/show. Reads files."""
    checkpoint, config = read_headers(slot), read_sizes(slot)
    known = _details(checkpoint)
    family = known["details"]["family"]
    info: Json = {"general.architecture": family}
    if checkpoint is not None and config is not None:
        info |= {
            "general.parameter_count": _parameters(checkpoint),
            f"{family}.context_length": context_length(slot),
            f"{family}.embedding_length": config.hidden_size,
            f"{family}.block_count": config.num_layers,
            f"{family}.vocab_size": config.vocab_size,
        }
    template = slot.served.llm.chat_template if slot.served else checkpoint and checkpoint.chat_template()
    recommended = slot.served.llm.chat_sampling if slot.served else {}
    served = slot.served
    can = {
        "tools": True,
        "thinking": served is not None and served.formats.reasoning is not None,
        "vision": served is not None and served.llm.image_processor is not None,
    }
    return {
        "modelfile": f"FROM {name.removesuffix(LATEST_TAG)}",
        "parameters": "\n".join(f"{name} {value}" for name, value in recommended.items()),
        "template": next(iter(template.sources.values()), "") if template else "",
        "details": known["details"],
        "model_info": info,
        "capabilities": ["completion", *(name for name, yes in can.items() if yes)],
        "modified_at": known["modified_at"],
    }


def _details(checkpoint: Checkpoint | None) -> Json:
    """Size, date and format of a model; empty values if its files are not on this machine. `digest` is a hash over
    names, types and shapes of all tensors, not over a file."""
    tensors = list(checkpoint.tensors.values()) if checkpoint else []
    family = str(checkpoint.config.get("model_type", "")) if checkpoint else ""
    table = "\n".join(sorted(f"{each.name} {each.dtype} {each.shape}" for each in tensors))
    types = Counter[str]()
    for each in tensors:
        types[each.dtype] += each.nbytes
    times = [path.stat().st_mtime for path in checkpoint.files if path.exists()] if checkpoint else []
    return {
        "modified_at": datetime.fromtimestamp(max(times, default=0), UTC).isoformat(),
        "size": sum(each.nbytes for each in tensors),
        "digest": hashlib.sha256(table.encode()).hexdigest(),
        "details": {
            "parent_model": "",
            "format": checkpoint.format if checkpoint else "",
            "family": family,
            "families": [family],
            "parameter_size": _short(_parameters(checkpoint) if checkpoint else 0),
            "quantization_level": max(types, key=lambda kind: types[kind], default=""),
        },
    }


def _parameters(checkpoint: Checkpoint) -> int:
    return sum(math.prod(each.shape) for each in checkpoint.tensors.values())


def _short(count: int) -> str:
    """A parameter count as Ollama writes it in `parameter_size`: 135M, 1.7B."""
    return f"{count / 1e9:.1f}B" if count >= 1e9 else f"{count / 1e6:.0f}M"
