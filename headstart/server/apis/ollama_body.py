"""Bodies of Ollama's API, and the chat or raw completion that they come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import AliasChoices, Field, StrictBool, StrictFloat, StrictInt, StrictStr

from headstart.errors import UsageError
from headstart.server import limits
from headstart.server.apis.blocks import as_body
from headstart.server.entries import KeepAlive
from headstart.server.errors import BodyError
from headstart.server.schema import Body, ChatRequest, CompletionRequest, Many, Name, Tool

Json = dict[str, Any]
Number = StrictInt | StrictFloat
Texts = StrictStr | Annotated[Many[StrictStr], Field(max_length=limits.PROMPTS)]
RENAMED = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}
"""Options under the names that chat completions have for them; the others have the same or none."""
SILENT = frozenset({
    "numa", "num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "f16_kv", "logits_all", "vocab_only", "use_mmap",
    "use_mlock", "embedding_only", "num_thread", "num_keep", "repeat_last_n", "mirostat_tau", "mirostat_eta",
    "penalize_newline",
})  # fmt: skip
"""Options of how a model is loaded, which was done when the server started, and of samplers that are off."""
NOTHING: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "logprobs": ((False,), "/v1/chat/completions has logprobs"),
    "top_logprobs": ((0,), "/v1/chat/completions has logprobs"),
    "suffix": (("",), "leave it out"),
    "template": (("",), "start the server with --chat-template, or send raw prompts"),
    "images": (([],), "this model reads text only"),
    "context": (([],), "send the conversation to /api/chat"),
}
"""Members of what this server does not have: values that ask for nothing, and what to do instead."""
ENDLESS = 2**31 - 1
"""num_predict where a raw prompt has none: to the end of the text or of the context."""


class OllamaFunction(Body):
    """A call's function; its arguments are an object."""

    name: Name
    arguments: dict[str, Any] | None = None


class OllamaCall(Body):
    """A call that the model has made."""

    function: OllamaFunction


class OllamaMessage(Body):
    """One turn of a conversation."""

    role: Name
    content: StrictStr | None = None
    thinking: StrictStr | None = None
    images: Annotated[Many[StrictStr], Field(max_length=limits.MESSAGES)] | None = None
    tool_calls: Annotated[Many[OllamaCall], Field(max_length=limits.TOOLS)] | None = None
    tool_name: Name | None = None


class Named(Body):
    """What names a model. `keep_alive`: how long it stays without requests, where models come and go."""

    model: StrictStr
    keep_alive: Number | StrictStr | None = None


class Asking(Named):
    """What both kinds of prompts take."""

    stream: StrictBool | None = True
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: StrictBool | StrictStr | None = None


class OllamaChatRequest(Asking):
    """POST /api/chat."""

    messages: Annotated[Many[OllamaMessage], Field(max_length=limits.MESSAGES)] | None = None
    tools: Annotated[Many[Tool], Field(max_length=limits.TOOLS)] | None = None


class GenerateRequest(Asking):
    """POST /api/generate."""

    prompt: StrictStr | None = None
    system: StrictStr | None = None
    raw: StrictBool | None = False


class OllamaEmbedRequest(Named):
    """POST /api/embed."""

    input: Texts
    truncate: StrictBool | None = True
    options: dict[str, Any] | None = None
    dimensions: StrictInt | None = None


class OllamaEmbeddingRequest(Named):
    """POST /api/embeddings: one text."""

    prompt: StrictStr
    options: dict[str, Any] | None = None


class ShowRequest(Body):
    """POST /api/show. Older clients say `name`."""

    model: Annotated[StrictStr, Field(validation_alias=AliasChoices("model", "name"))]
    verbose: StrictBool | None = False


def keep_of(body: Named) -> KeepAlive | None:
    """Raises BodyError for what is no time."""
    try:
        return None if body.keep_alive is None else KeepAlive.of(body.keep_alive)
    except UsageError as error:
        raise BodyError(error.message.replace("keep-alive", "keep_alive", 1), "keep_alive", error.hint) from None


def chat_of(body: OllamaChatRequest) -> ChatRequest:
    """Raises BodyError for what this server does not have."""
    messages = list(_messages(body.messages or ()))
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    return as_body(body, {**_asked(body), "messages": messages, "tools": tools or None}, ChatRequest)


def prompt_of(body: GenerateRequest) -> ChatRequest | CompletionRequest:
    """Raises BodyError for what this server does not have."""
    asked = _asked(body)
    if body.raw:
        if body.system:
            raise BodyError("system is given, but the prompt is raw", "system", "write it into the prompt")
        return as_body(body, {"max_tokens": ENDLESS, **asked, "prompt": body.prompt}, CompletionRequest)
    system = [{"role": "system", "content": body.system}] if body.system else []
    messages = [*system, {"role": "user", "content": body.prompt}]
    return as_body(body, {**asked, "messages": messages}, ChatRequest)


def _asked(body: Asking) -> Json:
    extra = body.model_extra or {}
    for name, (nothing, hint) in NOTHING.items():
        if extra.get(name) is not None and extra[name] not in nothing:
            raise BodyError(f"{name} is not supported", name, hint)
        extra.pop(name, None)
    chat = _options(body.options or {}) | {"model": body.model, "stream": body.stream is not False}
    if body.think is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": body.think not in (False, "none")}
        chat["reasoning_effort"] = body.think if isinstance(body.think, str) else None
    if body.format == "json":
        chat["response_format"] = {"type": "json_object"}
    elif body.format:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": body.format}}
    return {name: value for name, value in chat.items() if value is not None}


def _options(given: Mapping[str, Any]) -> Json:
    """What is not known here is looked at as members of chat completions are, and refused or told."""
    options = {RENAMED.get(name, name): value for name, value in given.items() if name not in SILENT}
    for name, least in (("max_tokens", 1), ("seed", 0)):  # below: no limit, any seed
        if type(value := options.get(name)) is int and value < least:
            del options[name]
    return options


def _messages(messages: list[OllamaMessage] | tuple[()]) -> Iterator[Json]:
    for number, message in enumerate(messages):
        if message.images:
            place = f"messages.{number}.images"
            raise BodyError(f"{place} is not supported", place, NOTHING["images"][1])
        calls = [
            {"type": "function", "function": {"name": each.function.name, "arguments": each.function.arguments or {}}}
            for each in message.tool_calls or ()
        ]
        yield {
            "role": message.role,
            "content": message.content or "",
            **({"reasoning_content": message.thinking} if message.thinking else {}),
            **({"tool_calls": calls} if calls else {}),
            **({"name": message.tool_name} if message.tool_name else {}),
        }
