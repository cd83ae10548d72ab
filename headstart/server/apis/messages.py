"""Anthropic's Messages API (https://platform.claude.com/docs/en/api/messages): bodies, translation, responses."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field, StrictBool, StrictInt, StrictStr, model_validator

from headstart.params import names_in
from headstart.server import limits, schema
from headstart.server.apis.blocks import BlockChange, BlockKind, BlockRenderer, ResponseBlock, as_body, refuse
from headstart.server.body_reader import CheckedRoute
from headstart.server.errors import BodyError
from headstart.server.generation import Json
from headstart.server.model_manager import ServedModel
from headstart.server.pipeline import error_responses, respond_from_thread, respond_translated
from headstart.server.prepare import encode_chat
from headstart.server.renderer import dump_json

router = APIRouter(route_class=CheckedRoute)
IGNORED = frozenset({
    "cache_control", "context_management", "diagnostics", "inference_geo", "speed", "user_profile_id", "workspace_id",
})  # fmt: skip
"""Ignored members, without effect on the text: caching, place and speed of a request, clearing of conversations."""
REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "container": ((), "leave it out"), "mcp_servers": (([],), "leave it out"),
    "output_format": ((), "use output_config.format"),
}  # fmt: skip
"""Unsupported member -> values that change nothing, and what to do instead."""
BILLING_HEADER = "x-anthropic-billing-header"
"""First text of a system block that Claude Code sends. The block has a hash that changes with each request: in a prompt
it would leave no cached prefix."""


class ImageSource(schema.Body):
    """An image: base64 with its media type, or a URL."""

    harmless = frozenset({"media_type"})
    type: schema.Name
    data: StrictStr | None = None
    url: StrictStr | None = None


class MessageBlock(schema.Body):
    """A content block."""

    harmless = frozenset({"signature", "data", "citations", "caller"})
    type: schema.Name
    text: StrictStr | None = None
    thinking: StrictStr | None = None
    id: schema.Name | None = None
    name: StrictStr | None = None
    input: dict[str, Any] | None = None
    tool_use_id: schema.Name | None = None
    source: ImageSource | None = None
    content: "StrictStr | Annotated[schema.Many[MessageBlock], Field(max_length=limits.MESSAGES)] | None" = None

    @model_validator(mode="after")
    def _has_name(self) -> Self:
        if self.type == "tool_use" and not self.name:
            raise ValueError("a block of type tool_use has no name")
        return self


Parts = Annotated[schema.Many[MessageBlock], Field(max_length=limits.MESSAGES)]


class Turn(schema.Body):
    """One message."""

    role: Literal["user", "assistant", "system"]
    content: StrictStr | Parts


class MessagesTool(schema.Body):
    """A tool of the client. Tools that Anthropic's own servers run are ignored."""

    name: schema.GivenName
    type: schema.Name | None = None
    description: StrictStr | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(schema.Body):
    """Which tool is called."""

    type: Literal["auto", "any", "tool", "none"]
    name: schema.Name | None = None
    disable_parallel_tool_use: StrictBool = False


class Thinking(schema.Body):
    """Whether the model thinks, if its chat template has a switch. `budget_tokens` has no effect."""

    type: schema.Name


class OutputFormat(schema.Body):
    """A JSON schema that the text must fit."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(schema.Body):
    """A constraint of the text, and an effort that is passed to the chat template."""

    format: OutputFormat | None = None
    effort: schema.Name | None = None


class CountRequest(schema.Body):
    """POST /v1/messages/count_tokens."""

    model: StrictStr
    messages: Annotated[schema.Many[Turn], Field(min_length=1, max_length=limits.MESSAGES)]
    system: StrictStr | Parts | None = None
    tools: Annotated[schema.Many[MessagesTool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None


class MessagesRequest(schema.with_sampling(CountRequest, names_in("anthropic"))):  # type: ignore[misc]
    """POST /v1/messages."""

    max_tokens: StrictInt = Field(json_schema_extra={"minimum": 1}, description="Longest output, in tokens.")
    stop_sequences: Annotated[schema.Many[schema.Stop], Field(max_length=limits.STOPS)] | None = None
    stream: StrictBool | None = False


def chat_of(body: CountRequest) -> schema.ChatRequest:
    """The chat request for a body. Raises BodyError for unsupported members."""
    refuse(body, REFUSED, IGNORED)
    messages = list(_messages(body))
    prefilled = messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls")
    choice, config = body.tool_choice or ToolChoice(type="auto"), body.output_config or OutputConfig()
    chat: Json = {
        "model": body.model,
        "messages": messages,
        "tools": [_tool(tool) for tool in body.tools or ()] or None,
        "tool_choice": _choice(choice) if body.tools or choice.type in ("any", "tool") else None,
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
        "reasoning_effort": config.effort,
    }
    if body.thinking is not None:
        chat["chat_template_kwargs"] = {"enable_thinking": body.thinking.type != "disabled"}
    if config.format is not None:
        chat["response_format"] = {"type": "json_schema", "schema": config.format.schema_}
    if prefilled:
        chat |= {"continue_final_message": True, "add_generation_prompt": False}
    if isinstance(body, MessagesRequest):
        chat |= {name: getattr(body, member) for name, member in names_in("anthropic").items()}
        chat["stream"] = body.stream
    return as_body(body, chat, schema.ChatRequest)


def _messages(body: CountRequest) -> Iterator[Json]:
    system = body.system
    if isinstance(system, list):
        system = [part for part in system if not (part.text or "").startswith(BILLING_HEADER)]
    if system:
        yield {"role": "system", "content": _text(system, "system")}
    for number, turn in enumerate(body.messages):
        place = f"messages.{number}.content"
        if isinstance(turn.content, str):
            yield {"role": turn.role, "content": turn.content}
        elif turn.role == "assistant":
            yield _assistant(turn.content, place)
        else:
            yield from _user(turn, turn.content, place)


def _assistant(parts: list[MessageBlock], place: str) -> Json:
    text, thought, calls = "", "", list[Json]()
    for number, part in enumerate(parts):
        if part.type == "tool_use":
            function = {"name": part.name, "arguments": part.input or {}}
            calls.append({"id": part.id or "", "type": "function", "function": function})
        elif part.type == "thinking":
            thought += part.thinking or ""
        elif part.type != "redacted_thinking":
            text += _text_of(part, f"{place}.{number}")
    optional = {"reasoning_content": thought, "tool_calls": calls}
    return {"role": "assistant", "content": text} | {name: value for name, value in optional.items() if value}


def _user(turn: Turn, parts: list[MessageBlock], place: str) -> Iterator[Json]:
    """The chat messages of a user's turn: one for each tool result, then one for texts and images."""
    content_parts = list[Json]()
    for number, part in enumerate(parts):
        if part.type == "tool_result":
            content: Any = part.content or ""
            if not isinstance(content, str):
                where = f"{place}.{number}.content"
                content = schema.joined_parts([_part_of(each, f"{where}.{i}") for i, each in enumerate(content)])
            yield {"role": "tool", "tool_call_id": part.tool_use_id or "", "content": content}
        else:
            content_parts.append(_part_of(part, f"{place}.{number}"))
    if content_parts or not parts:
        yield {"role": turn.role, "content": schema.joined_parts(content_parts)}


def _text(content: str | list[MessageBlock], place: str) -> str:
    if isinstance(content, str):
        return content
    return "".join(_text_of(part, f"{place}.{number}") for number, part in enumerate(content))


def _part_of(part: MessageBlock, place: str) -> Json:
    """The content part of a text or image."""
    if part.type != "image":
        return {"type": "text", "text": _text_of(part, place)}
    source = part.source
    if source is not None and source.type == "url" and source.url:
        return schema.image_part(source.url)
    if source is not None and source.type == "base64" and source.data:
        return schema.image_part(f"data:;base64,{source.data}")
    where = f"{place}.source"
    raise BodyError(f"{where} is no image", where, "give type base64 with data, or type url with url")


def _text_of(part: MessageBlock, place: str) -> str:
    if part.type != "text":
        shown = limits.shortened(part.type)
        raise BodyError(f"{place}: a block of type {shown!r} is not supported here", place, "send its text")
    if part.text is None:
        raise BodyError(f"{place}.text is missing", f"{place}.text")
    return part.text


def _tool(tool: MessagesTool) -> Json:
    if tool.type not in (None, "custom"):
        return {"type": tool.type}  # left out of the chat, and reported
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


PATH = "/v1/messages"


class MessagesFault(schema.ResponseModel):
    """Type and message of an error."""

    type: str
    message: str


class MessagesError(schema.ResponseModel):
    """Anthropic's error response."""

    type: Literal["error"]
    error: MessagesFault


class MessageUsage(schema.ResponseModel):
    """Token counts. `input_tokens` excludes the prompt's cached tokens."""

    input_tokens: int = Field(ge=0)
    cache_read_input_tokens: int = Field(ge=0)
    output_tokens: int = Field(ge=0)


class MessageAnswer(schema.ResponseModel):
    """Response of /v1/messages."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "model_context_window_exceeded", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(schema.ResponseModel):
    """Response of /v1/messages/count_tokens."""

    input_tokens: int = Field(ge=0)


ERRORS = error_responses(MessagesError)


@router.post(PATH, responses=ERRORS, response_model=MessageAnswer)
async def messages(body: MessagesRequest, request: Request) -> Response:
    """The next turn of a conversation, in Anthropic's shape."""
    return await respond_translated(request, partial(chat_of, body), MessagesRenderer)


@router.post(f"{PATH}/count_tokens", responses=ERRORS, response_model=TokenCount)
async def count_tokens(body: CountRequest, request: Request) -> Response:
    """Number of tokens of the prompt for these messages."""
    return await respond_from_thread(request, body, _counted)


def _counted(served: ServedModel, body: CountRequest) -> Json:
    return {"input_tokens": len(encode_chat(served.llm, served.formats, chat_of(body)).ids)}


class MessagesRenderer(BlockRenderer):
    """Renders an Anthropic message, or the stream events that build it."""

    path = PATH

    def block_document(self) -> Json:
        return {**self._head([_content(block) for block in self.blocks]), **self._stop(), "usage": self._usage()}

    def start(self) -> Iterator[str]:
        none = {"stop_reason": None, "stop_sequence": None}
        counts = {"input_tokens": self.generation.num_prompt, "output_tokens": 0}
        yield _event("message_start", message={**self._head([]), **none, "usage": counts})
        yield _event("ping")

    def render_change(self, change: BlockChange) -> Iterator[str]:
        block = change.block
        if change.what == "open":
            empty = ResponseBlock(block.kind, 0, block.name, id=block.id)
            yield _event("content_block_start", index=block.index, content_block=_content(empty))
        elif change.what == "close":
            yield _event("content_block_stop", index=block.index)
        else:
            deltas: dict[BlockKind, Json] = {
                "text": {"type": "text_delta", "text": change.text},
                "call": {"type": "input_json_delta", "partial_json": change.text},
                "reasoning": {"type": "thinking_delta", "thinking": change.text},
            }
            yield _event("content_block_delta", index=block.index, delta=deltas[block.kind])

    def finish_blocks(self) -> Iterator[str]:
        yield _event("message_delta", delta=self._stop(), usage=self._usage())
        yield _event("message_stop")

    def _head(self, content: list[Json]) -> Json:
        model = self.generation.model
        name = f"msg_{self.generation.id}"
        return {"id": name, "type": "message", "role": "assistant", "model": model, "content": content}

    def _stop(self) -> Json:
        choice = self.choice.choice
        stop = choice.output.stop_string
        has_room = len(choice.tokens) < choice.request.params.max_tokens
        reasons = {
            "tool_calls": "tool_use",
            "length": "model_context_window_exceeded" if has_room else "max_tokens",
            "stop": "end_turn" if stop is None else "stop_sequence",
        }
        return {"stop_reason": reasons[self.choice.finish_reason or "stop"], "stop_sequence": stop}

    def _usage(self) -> Json:
        """Anthropic's usage, where input_tokens excludes cached tokens."""
        usage = self.generation.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached, "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached, "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"thinking_tokens": self.num_reasoning_tokens}, "seed": usage["seed"],
            "speculation": usage["speculation"],
        }  # fmt: skip


def _content(block: ResponseBlock) -> Json:
    if block.kind == "call":
        return {"type": "tool_use", "id": f"toolu_{block.id}", "name": block.name, "input": block.arguments}
    if block.kind == "reasoning":
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    return {"type": "text", "text": block.text}


def _event(kind: str, **members: Any) -> str:
    return f"event: {kind}\ndata: {dump_json({'type': kind, **members})}\n\n"
