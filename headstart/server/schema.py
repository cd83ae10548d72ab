"""Request bodies: OpenAI's fields and vLLM's extra ones. Fields that are not named here are accepted and ignored, as
OpenAI's own server does with most."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr

Number = StrictInt | StrictFloat
TokenIds = list[StrictInt]


class Body(BaseModel):
    """Values of another type than the field's are refused, not converted."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


class StreamOptions(Body):
    """What a stream tells beside its text."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Speculation(Body):
    """headstart's own: how this request drafts. `depth` only with mode auto."""

    mode: Literal["auto", "off"] = "auto"
    depth: StrictInt | None = None


class StructuredOutputs(Body):
    """vLLM's way to constrain the text; one of them."""

    json_: Any = Field(default=None, alias="json")
    regex: StrictStr | None = None
    choice: list[StrictStr] | None = None
    grammar: StrictStr | None = None
    json_object: StrictBool | None = None


class ResponseFormat(Body):
    """OpenAI's way to constrain the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


class Common(Body):
    """What both kinds of requests take."""

    model: StrictStr | None = None
    max_tokens: StrictInt | None = Field(default=None, description="Longest output, in tokens.")
    temperature: Number | None = None
    top_p: Number | None = None
    top_k: StrictInt | None = Field(default=None, description="0 or -1: off.")
    min_p: Number | None = None
    n: StrictInt | None = None
    seed: StrictInt | None = None
    stop: StrictStr | list[StrictStr] | None = None
    stop_token_ids: TokenIds | None = None
    min_tokens: StrictInt | None = None
    ignore_eos: StrictBool = False
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    repetition_penalty: Number | None = None
    logit_bias: dict[str, Number] | None = None
    prompt_logprobs: StrictInt | None = None
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = False
    speculation: Speculation | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: StrictStr | None = None
    guided_choice: list[StrictStr] | None = None
    guided_grammar: StrictStr | None = None
    user: StrictStr | None = None


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: StrictStr | TokenIds | list[StrictStr] | list[TokenIds] = Field(
        description="A text, several, token ids, or several lists of them."
    )
    echo: StrictBool | None = False
    logprobs: StrictInt | None = None
    suffix: StrictStr | None = None
    best_of: StrictInt | None = None


class ContentPart(Body):
    """A part of a message; text is all that these models read."""

    type: StrictStr
    text: StrictStr | None = None


class Message(Body):
    """One turn of a conversation."""

    role: StrictStr
    content: StrictStr | list[ContentPart] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class NamedFunction(Body):
    """The name of a tool's function."""

    name: StrictStr


class NamedTool(Body):
    """A tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[StrictStr, Field(min_length=1)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool of a request."""

    type: Literal["function"] = "function"
    function: Function


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = False
    top_logprobs: StrictInt | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = True
    add_generation_prompt: StrictBool = True
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: StrictBool = True


class TokenizeRequest(Body):
    """POST /tokenize: a text, or messages."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True
    return_token_strs: StrictBool | None = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: TokenIds
