"""Bodies of OpenAI's Responses API, and the chat that they come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from headstart.server import limits
from headstart.server.apis.blocks import as_body
from headstart.server.errors import BodyError
from headstart.server.schema import Body, ChatRequest, Many, Name

Json = dict[str, Any]
Number = StrictInt | StrictFloat
KEEPS_NOTHING = "this server keeps no responses: send the whole conversation as input"
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "previous_response_id": ((), KEEPS_NOTHING),
    "conversation": ((), KEEPS_NOTHING),
    "prompt": ((), "send instructions and input"),
    "background": ((False,), KEEPS_NOTHING),
    "truncation": (("disabled",), "shorten the input"),
    "context_management": (([],), "shorten the input"),
    "moderation": ((), "leave it out"),
    "top_logprobs": ((0,), "/v1/chat/completions has logprobs"),
}
"""What this server does not have: values that ask for nothing, and what to do instead."""
SILENT = frozenset({
    "access_programs", "background_options", "image", "max_tool_calls", "metadata", "prompt_cache_options", "include",
    "stream_options", "store",
})  # fmt: skip
"""Members that change no text here; `include` asks for parts of tools that OpenAI runs, and for thoughts."""
LOGPROBS = "message.output_text.logprobs"


class InputPart(Body):
    """Text in a message, in the output of a function, or in what the model thought."""

    type: Name
    text: StrictStr | None = None


class InputItem(Body):
    """A message, a call of a function, its output, or what the model thought before."""

    type: Name = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: StrictStr | Annotated[Many[InputPart], Field(max_length=limits.MESSAGES)] | None = None
    summary: Annotated[Many[InputPart], Field(max_length=limits.MESSAGES)] | None = None
    call_id: Name | None = None
    name: Name | None = None
    arguments: StrictStr | None = None
    output: StrictStr | Annotated[Many[InputPart], Field(max_length=limits.MESSAGES)] | None = None


class FunctionTool(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    type: Name
    name: Name | None = None
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class FunctionChoice(Body):
    """A function that must be called."""

    type: Name
    name: Name | None = None


class TextFormat(Body):
    """What the text must be."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: StrictBool | None = None


class TextConfig(Body):
    """What the text must be, and how long it is said to be, which nobody reads."""

    format: TextFormat | None = None
    verbosity: Name | None = None


class ReasoningConfig(Body):
    """For templates that read an effort; `none` has them leave thinking out."""

    effort: Name | None = None


class ResponsesRequest(Body):
    """POST /v1/responses."""

    model: StrictStr | None = None
    input: StrictStr | Annotated[Many[InputItem], Field(min_length=1, max_length=limits.MESSAGES)]
    instructions: StrictStr | None = None
    max_output_tokens: Annotated[StrictInt, Field(ge=1)] | None = None
    temperature: Number | None = Field(default=None, json_schema_extra={"minimum": 0})
    top_p: Number | None = Field(default=None, json_schema_extra={"minimum": 0, "maximum": 1})
    stream: StrictBool | None = False
    tools: Annotated[Many[FunctionTool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = None
    parallel_tool_calls: StrictBool | None = True
    text: TextConfig | None = None
    reasoning: ReasoningConfig | None = None
    store: StrictBool | None = Field(default=None, description="Nothing is kept; see store of /v1/chat/completions.")
    include: Annotated[Many[Name], Field(max_length=limits.NAME)] | None = None


def chat_of(body: ResponsesRequest) -> ChatRequest:
    """Raises BodyError for what this server does not have."""
    extra = body.model_extra or {}
    for name, (nothing, hint) in REFUSED.items():
        if extra.get(name) is not None and extra[name] not in nothing:
            raise BodyError(f"{name} is not supported", name, hint)
    if LOGPROBS in (body.include or ()):
        raise BodyError(f"include: {LOGPROBS} is not supported", "include", REFUSED["top_logprobs"][1])
    for name in (SILENT | REFUSED.keys()) & extra.keys():
        del extra[name]
    effort = body.reasoning.effort if body.reasoning else None
    chat: Json = {
        "model": body.model,
        "messages": list(_messages(body)),
        "max_completion_tokens": body.max_output_tokens,
        "stream": body.stream,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "tools": [_tool(number, tool) for number, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _choice(body.tool_choice),
        "parallel_tool_calls": body.parallel_tool_calls,
        "response_format": _format(body.text.format if body.text else None),
        "reasoning_effort": effort,
        "store": body.store,
    }
    if effort == "none":
        chat["chat_template_kwargs"] = {"enable_thinking": False}
    return as_body(body, chat, ChatRequest)


def echo_of(body: ResponsesRequest) -> Json:
    """What a response says again of its request."""
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
    """Thoughts, text and calls of one turn of the assistant's, which are items of their own here, come together."""
    if body.instructions:
        yield {"role": "system", "content": body.instructions}
    if isinstance(body.input, str):
        yield {"role": "user", "content": body.input}
        return
    turn: Json | None = None
    for number, item in enumerate(body.input):
        more = _of_assistant(item, f"input.{number}")
        if turn is not None and (more is None or _begins_a_turn(turn, more)):
            yield turn
            turn = None
        if more is None:
            yield _other(item, f"input.{number}")
        else:
            turn = _joined(turn or {"role": "assistant", "content": ""}, more)
    if turn is not None:
        yield turn


def _of_assistant(item: InputItem, place: str) -> Json | None:
    if item.type == "reasoning":
        return {"reasoning_content": _text(item.content, place) or _text(item.summary, place)}
    if item.type == "function_call":
        function = {"name": item.name or "", "arguments": item.arguments or "{}"}
        return {"tool_calls": [{"id": item.call_id or "", "type": "function", "function": function}]}
    if item.type == "message" and item.role == "assistant":
        return {"content": _text(item.content, place)}
    return None


def _begins_a_turn(turn: Json, more: Json) -> bool:
    """Thoughts stand first; text stands once, and before calls."""
    said = bool(turn["content"]) or "tool_calls" in turn
    return said if "reasoning_content" in more else said and "content" in more


def _joined(turn: Json, more: Json) -> Json:
    calls = [*turn.get("tool_calls", ()), *more.get("tool_calls", ())]
    return {**turn, **more, **({"tool_calls": calls} if calls else {})}


def _other(item: InputItem, place: str) -> Json:
    if item.type == "message":
        if item.role is None:
            raise BodyError(f"{place}.role: Field required", f"{place}.role")
        return {"role": item.role, "content": _text(item.content, place)}
    if item.type == "function_call_output":
        return {"role": "tool", "tool_call_id": item.call_id or "", "content": _text(item.output, place)}
    hint = KEEPS_NOTHING if item.type == "item_reference" else "leave it out"
    raise BodyError(f"{place}: an item of type {limits.shortened(item.type)!r} is not supported", place, hint)


def _text(content: str | list[InputPart] | None, place: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.text is None:
            shown = limits.shortened(part.type)
            raise BodyError(f"{place}: a part of type {shown!r} stands where only text is read", place, "send its text")
    return "".join(part.text or "" for part in content)


def _tool(number: int, tool: FunctionTool) -> Json:
    place = f"tools.{number}"
    if tool.type != "function":
        shown = limits.shortened(tool.type)
        raise BodyError(f"{place}.type: {shown!r} is not supported", f"{place}.type", "this server runs no tools")
    function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}


def _choice(choice: str | FunctionChoice | None) -> str | Json | None:
    if not isinstance(choice, FunctionChoice):
        return choice
    if choice.type != "function":
        shown = limits.shortened(choice.type)
        raise BodyError(f"tool_choice.type: {shown!r} is not supported", "tool_choice.type", "name a function")
    return {"type": "function", "function": {"name": choice.name or ""}}


def _format(wanted: TextFormat | None) -> Json | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return {"type": "json_object"}
    if wanted.schema_ is None:
        raise BodyError("text.format.schema: Field required", "text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": wanted.name or "", "schema": wanted.schema_}}
