"""Bodies of Anthropic's Messages API, and the chat that they come to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool, StrictFloat, StrictInt, StrictStr

from headstart.server import limits
from headstart.server.apis.blocks import as_body
from headstart.server.errors import BodyError
from headstart.server.schema import Body, ChatRequest, Many, Name, Stop

Json = dict[str, Any]
Number = StrictInt | StrictFloat
SILENT = frozenset({"cache_control", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id"})
"""Members that change no text here: what is cached, where and how fast a request runs."""
NOTHING: Mapping[str, tuple[Any, ...]] = {"container": (), "mcp_servers": ([],), "context_management": ({},)}
"""Members of what this server does not have, and values that ask for nothing."""


class Part(Body):
    """A content block."""

    type: Name
    text: StrictStr | None = None
    thinking: StrictStr | None = None
    id: Name | None = None
    name: Name | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Name | None = None
    content: StrictStr | Annotated[Many[Part], Field(max_length=limits.MESSAGES)] | None = None


Parts = Annotated[Many[Part], Field(max_length=limits.MESSAGES)]


class Turn(Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: StrictStr | Parts


class MessagesTool(Body):
    """A tool of the client; those that Anthropic runs itself are refused."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=limits.NAME)]
    type: Name | None = None
    description: StrictStr | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Body):
    """Which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: StrictBool = False


class Thinking(Body):
    """Whether the model is to think, where its template can be told."""

    type: Name
    budget_tokens: StrictInt | None = None


class OutputFormat(Body):
    """A JSON schema that the text must fit."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What the text must be, and how much effort it is worth, where a template reads that."""

    format: OutputFormat | None = None
    effort: Name | None = None


class CountRequest(Body):
    """POST /v1/messages/count_tokens."""

    model: StrictStr
    messages: Annotated[Many[Turn], Field(min_length=1, max_length=limits.MESSAGES)]
    system: StrictStr | Parts | None = None
    tools: Annotated[Many[MessagesTool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(CountRequest):
    """POST /v1/messages."""

    max_tokens: StrictInt = Field(json_schema_extra={"minimum": 1}, description="Longest output, in tokens.")
    stop_sequences: Annotated[Many[Stop], Field(max_length=limits.STOPS)] | None = None
    stream: StrictBool | None = False
    temperature: Number | None = Field(default=None, json_schema_extra={"minimum": 0})
    top_k: StrictInt | None = None
    top_p: Number | None = Field(default=None, json_schema_extra={"minimum": 0, "maximum": 1})


def chat_of(body: CountRequest) -> ChatRequest:
    """Raises BodyError for what this server does not have."""
    extra = body.model_extra or {}
    for name, empty in NOTHING.items():
        if extra.get(name) is not None and extra[name] not in empty:
            raise BodyError(f"{name} is not supported", name, "leave it out")
    for name in (SILENT | NOTHING.keys()) & extra.keys():
        del extra[name]
    messages = list(_messages(body))
    prefilled = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    choice, config = body.tool_choice or ToolChoice(type="auto"), body.output_config or OutputConfig()
    chat: Json = {
        "model": body.model,
        "messages": messages,
        "tools": [_tool(number, tool) for number, tool in enumerate(body.tools or ())] or None,
        "tool_choice": _choice(choice) if body.tools or choice.type in ("any", "tool") else None,
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "reasoning_effort": config.effort,
    }
    if body.thinking is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if config.format is not None:
        chat["response_format"] = {"type": "json_schema", "json_schema": {"schema": config.format.schema_}}
    if prefilled:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesRequest):
        chat |= {name: getattr(body, name) for name in ("max_tokens", "stream", "temperature", "top_k", "top_p")}
        chat["stop"] = body.stop_sequences
    return as_body(body, chat, ChatRequest)


def _messages(body: CountRequest) -> Iterator[Json]:
    if body.system:
        yield {"role": "system", "content": _text(body.system, "system")}
    for number, turn in enumerate(body.messages):
        place = f"messages.{number}.content"
        if isinstance(turn.content, str):
            yield {"role": turn.role, "content": turn.content}
        elif turn.role == "assistant":
            yield _assistant(turn.content, place)
        else:
            yield from _user(turn, turn.content, place)


def _assistant(parts: list[Part], place: str) -> Json:
    text, thought, calls = "", "", list[Json]()
    for number, part in enumerate(parts):
        if part.type == "tool_use":
            function = {"name": part.name or "", "arguments": part.input or {}}
            calls.append({"id": part.id or "", "type": "function", "function": function})
        elif part.type == "thinking":
            thought += part.thinking or ""
        elif part.type != "redacted_thinking":
            text += _text_of(part, f"{place}.{number}")
    return {
        "role": "assistant",
        "content": text,
        **({"reasoning_content": thought} if thought else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def _user(turn: Turn, parts: list[Part], place: str) -> Iterator[Json]:
    """Results of tools are messages of their own."""
    text, said = "", False
    for number, part in enumerate(parts):
        if part.type == "tool_result":
            content = _text(part.content or "", f"{place}.{number}.content")
            yield {"role": "tool", "tool_call_id": part.tool_use_id or "", "content": content}
        else:
            text, said = text + _text_of(part, f"{place}.{number}"), True
    if said or not parts:
        yield {"role": turn.role, "content": text}


def _text(content: str | list[Part], place: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(part, f"{place}.{number}") for number, part in enumerate(content))


def _text_of(part: Part, place: str) -> str:
    if part.type != "text":
        shown = limits.shortened(part.type)
        raise BodyError(f"{place}: a block of type {shown!r} stands where only text is read", place, "send its text")
    return part.text or ""


def _tool(number: int, tool: MessagesTool) -> Json:
    if tool.type not in (None, "custom"):
        place = f"tools.{number}.type"
        raise BodyError(f"{place}: {limits.shortened(tool.type)!r} is no tool of the client", place, "leave it out")
    return {
        "type": "function",
        "function": {
            "name": tool.name,
            "parameters": tool.input_schema or {"type": "object", "properties": {}},
            **({"description": tool.description} if tool.description else {}),
        },
    }


def _choice(choice: ToolChoice) -> str | Json:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return {"any": "required"}.get(choice.type, choice.type)
