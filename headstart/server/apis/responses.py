"""OpenAI's Responses API (https://platform.openai.com/docs/api-reference/responses): bodies, translation, responses."""

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import count
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from headstart.errors import HeadstartError, UsageError
from headstart.params import names_in
from headstart.server import limits
from headstart.server.apis.blocks import BlockChange, BlockRenderer, ResponseBlock, as_body, refuse
from headstart.server.body_reader import CheckedRoute
from headstart.server.errors import BodyError, error_response
from headstart.server.generation import Generation, Json
from headstart.server.model_manager import ServedModel
from headstart.server.pipeline import ERRORS, respond_from_thread, respond_translated
from headstart.server.prepare import encode_chat
from headstart.server.renderer import dump_json
from headstart.server.schema import (
    Body,
    ChatRequest,
    Many,
    Name,
    ResponseModel,
    image_part,
    joined_parts,
    with_sampling,
)

router = APIRouter(route_class=CheckedRoute)
NOT_STORED = "this server keeps no responses: send the whole conversation as input"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), NOT_STORED),
    "conversation": ((), NOT_STORED),
    "prompt": ((), "send instructions and input"),
    "background": ((False,), NOT_STORED),
    "truncation": (("disabled",), "shorten the input"),
    "context_management": (([],), "shorten the input"),
    "moderation": ((), "leave it out"),
    "top_logprobs": ((0,), "/v1/chat/completions has logprobs"),
}
"""Unsupported member -> values that change nothing, and what to do instead."""
IGNORED = frozenset({
    "access_programs", "background_options", "image", "max_tool_calls", "prompt_cache_options",
})  # fmt: skip
"""Ignored members, without effect on the text."""
LOGPROBS = "message.output_text.logprobs"  # value of `include` that is refused


class InputPart(Body):
    """Text or an image in a message or in the output of a function, or text in reasoning."""

    harmless = frozenset({"annotations", "logprobs", "detail"})
    refused: ClassVar[Mapping[str, str]] = {"file_id": NOT_STORED}
    type: Name
    text: StrictStr | None = None
    refusal: StrictStr | None = None
    image_url: StrictStr | None = None


class InputItem(Body):
    """A message, a call of a function, its output, or earlier reasoning."""

    harmless = frozenset({"id", "status", "phase", "encrypted_content"})
    type: Name = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: StrictStr | Annotated[Many[InputPart], Field(max_length=limits.MESSAGES)] | None = None
    summary: Annotated[Many[InputPart], Field(max_length=limits.MESSAGES)] | None = None
    call_id: Name | None = None
    name: StrictStr | None = None
    arguments: StrictStr | None = None
    output: StrictStr | Annotated[Many[InputPart], Field(max_length=limits.MESSAGES)] | None = None


class FunctionTool(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: Name
    name: Name | None = None
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.type == "function" and not self.name:
            raise ValueError("a tool of type function has no name")
        return self


class FunctionChoice(Body):
    """A function that must be called."""

    type: Name
    name: Name | None = None


class ToolChoice(FunctionChoice):
    """A function that must be called, or the tools (type `allowed_tools`) that may be."""

    mode: Literal["auto", "required"] | None = None
    tools: Annotated[Many[FunctionChoice], Field(max_length=limits.TOOLS)] | None = None


class TextFormat(Body):
    """A constraint of the text."""

    harmless = frozenset({"description", "strict"})
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")


class TextConfig(Body):
    """A constraint of the text. `verbosity`: as in chat completions."""

    format: TextFormat | None = None
    verbosity: Name | None = None


class ReasoningConfig(Body):
    """An effort that is passed to the chat template; `none` switches thinking off."""

    effort: Name | None = None


class ResponsesRequest(with_sampling(Body, names_in("responses"))):  # type: ignore[misc]
    """POST /v1/responses."""

    model: StrictStr | None = None
    input: StrictStr | Annotated[Many[InputItem], Field(min_length=1, max_length=limits.MESSAGES)]
    instructions: StrictStr | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    stream: StrictBool | None = False
    tools: Annotated[Many[FunctionTool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ToolChoice | None = None
    parallel_tool_calls: StrictBool | None = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    store: StrictBool | None = Field(default=None, description="As in /v1/chat/completions. No response is stored.")
    include: Annotated[Many[Name], Field(max_length=limits.NAME)] | None = None


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """The chat request for a body. Raises BodyError for unsupported members."""
    refuse(body, REFUSED, IGNORED)
    if LOGPROBS in (body.include or ()):
        raise BodyError(f"include: {LOGPROBS} is not supported", "include", REFUSED["top_logprobs"][1])
    chat: Json = {
        "model": body.model, "messages": list(_messages(body)),
        **{name: getattr(body, member) for name, member in names_in("responses").items()}, "stream": body.stream,
        "tools": [_tool(tool) for tool in body.tools or ()] or None, "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text.format if body.text else None),
        "reasoning_effort": body.reasoning.effort if body.reasoning else None,
        "verbosity": body.text.verbosity if body.text else None, "store": body.store,
    }  # fmt: skip
    return as_body(body, chat, ChatRequest)


def repeated_members(body: ResponsesRequest) -> Json:
    """Members of a request that its response repeats."""
    document = body.model_dump(by_alias=True, exclude_none=True, include={"tools", "tool_choice", "text", "reasoning"})
    format_ = {"format": {"type": "text"}}
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": None, "summary": None, **document.get("reasoning", {})},
        "text": {**format_, **document.get("text", {})},
        "tool_choice": document.get("tool_choice", "auto"),
        "tools": document.get("tools", []),
        "metadata": (body.model_extra or {}).get("metadata") or {},
    }


def _messages(body: ResponsesRequest) -> Iterator[Json]:
    """The chat messages of a body. The items of one assistant turn (reasoning, text, calls) become one message."""
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    turn: Json | None = None
    for number, item in enumerate(body.input):
        members = _assistant_members(item, f"input.{number}")
        if turn is not None and (members is None or _begins_a_turn(turn, members)):
            yield turn
            turn = None
        if members is None:
            yield _other_message(item, f"input.{number}")
        else:
            turn = _with_members(turn or {"role": "assistant", "content": ""}, members)
    if turn is not None:
        yield turn


def _assistant_members(item: InputItem, place: str) -> Json | None:
    """The members of an assistant message that an item stands for; None for an item of another role."""
    if item.type == "reasoning":
        return {"reasoning_content": _text(item.content, place) or _text(item.summary, place)}
    if item.type == "function_call":
        _check_given(item, place, "name")
        function = {"name": item.name, "arguments": item.arguments}
        return {"tool_calls": [{"id": item.call_id or "", "type": "function", "function": function}]}
    if item.type == "message" and item.role == "assistant":
        return {"content": _text(item.content, place)}
    return None


def _begins_a_turn(turn: Json, members: Json) -> bool:
    """Whether `members` begin a new assistant turn. A turn has reasoning first, then one text, then calls."""
    has_text = bool(turn["content"]) or "tool_calls" in turn
    return has_text and ("reasoning_content" in members or "content" in members)


def _with_members(turn: Json, members: Json) -> Json:
    calls = [*turn.get("tool_calls", ()), *members.get("tool_calls", ())]
    return {**turn, **members, **({"tool_calls": calls} if calls else {})}


def _other_message(item: InputItem, place: str) -> Json:
    """The chat message of an item that is not the assistant's. Raises BodyError."""
    if item.type == "message":
        _check_given(item, place, "role", "content")
        return {"role": item.role, "content": _content(item.content, place)}
    if item.type == "function_call_output":
        _check_given(item, place, "output")
        return {"role": "tool", "tool_call_id": item.call_id or "", "content": _content(item.output, place)}
    hint = NOT_STORED if item.type == "item_reference" else "leave it out"
    raise BodyError(f"{place}: an item of type {limits.shortened(item.type)!r} is not supported", place, hint)


def _check_given(item: InputItem, place: str, *names: str) -> None:
    """Raises BodyError for a member that an item of this type needs and lacks."""
    if missing := next((name for name in names if getattr(item, name) is None), None):
        raise BodyError(f"{place}.{missing} is missing", f"{place}.{missing}")


def _content(content: str | list[InputPart] | None, place: str) -> Any:
    """The content of a chat message: a text, or parts if there is an image."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = list[Json]()
    for part in content:
        if part.type != "input_image":
            parts.append({"type": "text", "text": _text([part], place)})
        elif part.image_url:
            parts.append(image_part(part.image_url))
        else:
            raise BodyError(f"{place}: a part of type input_image has no image_url", place, "give a data URL")
    return joined_parts(parts)


def _text(content: str | list[InputPart] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None and part.refusal is None:
            if part.type in ("input_text", "output_text", "text"):
                raise BodyError(f"{place}: a part of type {part.type!r} has no text", place)
            shown = limits.shortened(part.type)
            raise BodyError(f"{place}: a part of type {shown!r} is not supported here", place, "send its text")
    return "".join(part.text or part.refusal or "" for part in content)


def _tool(tool: FunctionTool) -> Json:
    if tool.type != "function":
        return {"type": tool.type}  # left out of the chat, and reported
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: str | FunctionChoice | None) -> str | Json | None:
    if not isinstance(choice, FunctionChoice):
        return choice
    if isinstance(choice, ToolChoice) and choice.type == "allowed_tools":
        allowed = {"mode": choice.mode, "tools": [_choice(each) for each in choice.tools or ()]}
        return {"type": choice.type, choice.type: allowed}
    if choice.type != "function":
        shown = limits.shortened(choice.type)
        raise BodyError(f"tool_choice.type: {shown!r} is not supported", "tool_choice.type", "name a function")
    return {"type": "function", "function": {"name": choice.name or ""}}


def _format(wanted: TextFormat | None) -> Json | None:
    if wanted is None:
        return None
    if wanted.schema_ is None and wanted.type == "json_schema":
        raise BodyError("text.format.schema is missing", "text.format.schema")
    return {"type": wanted.type, "schema": wanted.schema_}


PREFIXES = {"reasoning": "rs", "text": "msg", "call": "fc"}  # of item ids, by kind of block


class ResponseUsage(ResponseModel):
    """Token counts, the seed that reproduces the text, and the drafting statistics."""

    input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    seed: int
    speculation: dict[str, Any]


class ResponseAnswer(ResponseModel):
    """Response of /v1/responses. A stream's last event has it as `response`."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[dict[str, Any]]
    usage: ResponseUsage


@router.post("/v1/responses", responses=ERRORS, response_model=ResponseAnswer)
async def responses(body: ResponsesRequest, request: Request) -> Response:
    """The next turn of a conversation, as items. Nothing is stored."""
    return await respond_translated(request, partial(chat_of, body), partial(ResponsesRenderer, repeated_members(body)))


class InputTokens(ResponseModel):
    """Response of /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"]
    input_tokens: int = Field(ge=0)


@router.post("/v1/responses/input_tokens", responses=ERRORS, response_model=InputTokens)
async def input_tokens(body: ResponsesRequest, request: Request) -> Response:
    """Number of tokens of the prompt for this input."""
    return await respond_from_thread(request, body, _counted)


def _counted(served: ServedModel, body: ResponsesRequest) -> Json:
    prompt = encode_chat(served.llm, served.formats, chat_of(body))
    return {"object": "response.input_tokens", "input_tokens": len(prompt.ids)}


@router.api_route("/v1/responses/resp_{rest:path}", methods=["GET", "POST", "DELETE"], include_in_schema=False)
async def response(rest: str) -> Response:
    """Refuse to read, cancel or delete a response: none is stored. Other names below /v1/responses are not ids."""
    raise UsageError("stored responses are not supported", NOT_STORED)


class ResponsesRenderer(BlockRenderer):
    """Renders a response object, or the stream events that build it."""

    def __init__(self, echo: Json, generation: Generation) -> None:
        super().__init__(generation)
        self._echo = echo  # members of the request that the response repeats
        self._numbers = count()  # of events

    def start(self) -> Iterator[str]:
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def render_change(self, change: BlockChange) -> Iterator[str]:
        status = "incomplete" if change.is_last and self.is_truncated else "completed"
        for kind, members in _events(change, status):
            yield self._event(kind, output_index=change.block.index, **members)

    def finish_blocks(self) -> Iterator[str]:
        ended = self.block_document()
        yield self._event(f"response.{ended['status']}", response=ended)

    def error_event(self, error: HeadstartError) -> str:
        status, document = error_response(error)
        found = document["error"]
        code = "server_error" if status >= 500 else "invalid_prompt"
        return self._event("error", code=code, message=found["message"], param=found["param"])

    def _event(self, kind: str, **members: Any) -> str:
        document = {"type": kind, "sequence_number": next(self._numbers), **members}
        return f"event: {kind}\ndata: {dump_json(document)}\n\n"

    def block_document(self) -> Json:
        """The response object. If it was truncated, its last item has status incomplete."""
        status = "incomplete" if self.is_truncated else "completed"
        output = [_item(block, status if block is self.blocks[-1] else "completed") for block in self.blocks]
        document = self._response(status, output)
        if self.is_truncated:
            document["incomplete_details"] = {"reason": "max_output_tokens"}
        return document | {"usage": self._usage()}

    def _response(self, status: str, output: list[Json]) -> Json:
        generation = self.generation
        return {
            "id": f"resp_{generation.id}", "object": "response", "created_at": generation.created, "status": status,
            "error": None, "incomplete_details": None, "model": generation.model, "output": output, "background": False,
            "previous_response_id": None, "store": False, "truncation": "disabled",
            "temperature": generation.params.temperature, "top_p": generation.params.top_p, "usage": None, **self._echo,
        }  # fmt: skip

    def _usage(self) -> Json:
        usage = self.generation.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self.num_reasoning_tokens},
            "total_tokens": usage["total_tokens"],
            "seed": usage["seed"],
            "speculation": usage["speculation"],
        }


def _item(block: ResponseBlock, status: str) -> Json:
    item: Json = {"id": f"{PREFIXES[block.kind]}_{block.id}", "status": status}
    if block.kind == "call":
        call = {"call_id": f"call_{block.id}", "name": block.name, "arguments": block.text}
        return {**item, "type": "function_call", **call}
    if block.kind == "reasoning":
        return {**item, "type": "reasoning", "summary": [], "content": [_part(block, block.text)]}
    return {**item, "type": "message", "role": "assistant", "content": [_part(block, block.text)]}


def _part(block: ResponseBlock, text: str) -> Json:
    if block.kind == "reasoning":
        return {"type": "reasoning_text", "text": text}
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _events(change: BlockChange, status: str) -> Iterator[tuple[str, Json]]:
    """Names and members of a change's events. Items except calls have one part with events. `status`: at the end."""
    block = change.block
    item = _item(block, status)
    if change.what == "open":
        empty: Json = {} if block.kind == "call" else {"content": []}
        yield "response.output_item.added", {"item": {**item, "status": "in_progress", **empty}}
    place: Json = {"item_id": item["id"]} | ({} if block.kind == "call" else {"content_index": 0})
    if change.what == "open" and block.kind != "call":
        yield "response.content_part.added", {**place, "part": _part(block, "")}
    names = {"call": "function_call_arguments", "reasoning": "reasoning_text", "text": "output_text"}
    name = f"response.{names[block.kind]}"
    logprobs: Json = {"logprobs": []} if block.kind == "text" else {}
    if change.what == "more":
        yield f"{name}.delta", {**place, "delta": change.text, **logprobs}
    elif change.what == "close":
        done = {"name": block.name, "arguments": block.text} if block.kind == "call" else {"text": block.text}
        yield f"{name}.done", {**place, **done, **logprobs}
        if block.kind != "call":
            yield "response.content_part.done", {**place, "part": _part(block, block.text)}
        yield "response.output_item.done", {"item": item}
