"""Request bodies: OpenAI's fields and vLLM's extra ones. What becomes of others stands in fields.py.

Every list, text and name has a longest (limits.py), and a list is refused at its first wrong element.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    model_validator,
)

from headstart.server import limits

Item = TypeVar("Item")
Number = StrictInt | StrictFloat


def _range(low: float, high: float | None = None) -> Any:
    """Bounds for the document alone: SamplingParams checks them, in its own words."""
    bounds: dict[str, Any] = {"minimum": low} | ({} if high is None else {"maximum": high})
    return Field(json_schema_extra=bounds)


Name = Annotated[StrictStr, Field(max_length=limits.NAME)]
Many = Annotated[list[Item], Field(fail_fast=True)]
Stop = Annotated[StrictStr, Field(max_length=limits.STOP_LENGTH)]


class Body(BaseModel):
    """Values of another type than the field's are refused, not converted. null is what was not said."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        if not isinstance(given, dict) or None not in given.values():
            return given
        fields = cls.model_fields.items()
        defaults = {
            field.alias or name for name, field in fields if not field.is_required() and field.default is not None
        }
        return {name: value for name, value in given.items() if value is not None or name not in defaults}


class StreamOptions(Body):
    """What a stream tells beside its text."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Speculation(Body):
    """headstart's own: how this request drafts. `depth` only with mode auto, `events` only with stream."""

    mode: Literal["auto", "off"] = "auto"
    depth: StrictInt | None = None
    events: StrictBool = Field(
        default=False, description="Chunks tell of each pass: who drafted which token, how sure, what was rejected."
    )


class StructuredOutputs(Body):
    """vLLM's way to constrain the text; one of them."""

    json_: Any = Field(default=None, alias="json")
    regex: StrictStr | None = None
    choice: Annotated[Many[StrictStr], Field(max_length=limits.CHOICES)] | None = None
    grammar: StrictStr | None = None
    json_object: StrictBool | None = None


class ResponseFormat(Body):
    """OpenAI's way to constrain the text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: dict[str, Any] | None = None


def _bias_of(value: Any) -> Any:
    """Checked here, since pydantic would complain about every member."""
    if not isinstance(value, dict):
        raise ValueError("it must be an object: token id -> number")
    if len(value) > limits.LOGIT_BIAS:
        raise ValueError(f"it has {len(value)} members, but may have {limits.LOGIT_BIAS}")
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"the value of {limits.shortened(str(key))!r} is no number")
    return value


class Common(Body):
    """What both kinds of requests take."""

    model: StrictStr | None = Field(default=None, description="One of the names of /v1/models.")
    max_tokens: Annotated[StrictInt, _range(1)] | None = Field(default=None, description="Longest output, in tokens.")
    temperature: Annotated[Number, _range(0)] | None = None
    top_p: Annotated[Number, _range(0, 1)] | None = None
    top_k: Annotated[StrictInt, _range(-1)] | None = Field(default=None, description="0 or -1: off.")
    min_p: Annotated[Number, _range(0, 1)] | None = None
    n: Annotated[StrictInt, _range(1, 128)] | None = None
    seed: Annotated[StrictInt, _range(0, 2**64 - 1)] | None = None
    stop: Stop | Annotated[Many[Stop], Field(max_length=limits.STOPS)] | None = None
    include_stop_str_in_output: StrictBool = False
    stop_token_ids: Annotated[Many[StrictInt], Field(max_length=limits.TOKEN_IDS)] | None = None
    min_tokens: Annotated[StrictInt, _range(0)] | None = None
    ignore_eos: StrictBool = False
    presence_penalty: Annotated[Number, _range(-2, 2)] | None = None
    frequency_penalty: Annotated[Number, _range(-2, 2)] | None = None
    repetition_penalty: Annotated[Number, _range(1e-3, 1e3)] | None = None
    logit_bias: Annotated[dict[str, Number], BeforeValidator(_bias_of)] | None = Field(
        default=None, max_length=limits.LOGIT_BIAS, description="Token id -> what is added to its logit."
    )
    allowed_token_ids: Annotated[Many[StrictInt], Field(max_length=limits.VALUES)] | None = None
    bad_words: Annotated[Many[Name], Field(max_length=limits.BAD_WORDS)] | None = None
    prompt_logprobs: Annotated[StrictInt, _range(0, 20)] | None = None
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1)] | None = Field(
        default=None, description="Only the last so many tokens of the prompt are read; -1: as many as fit."
    )
    skip_special_tokens: StrictBool = True
    return_tokens_as_token_ids: StrictBool | None = False
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = False
    speculation: Speculation | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Any = None
    guided_regex: StrictStr | None = None
    guided_choice: Annotated[Many[StrictStr], Field(max_length=limits.CHOICES)] | None = None
    guided_grammar: StrictStr | None = None
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=limits.NAME)] | None = Field(
        default=None, description="Prefixes are found in the cache by requests of the same salt only."
    )
    priority: Annotated[StrictInt, Field(ge=-limits.PRIORITY, le=limits.PRIORITY)] | None = Field(
        default=None, description="Lower runs earlier. With an API key: not earlier than the key may."
    )
    user: StrictStr | None = None
    store: StrictBool | None = Field(default=None, description="false: a server that records (--record) leaves it out.")


def kind_of_prompt(value: Any) -> str | None:
    """By its first element: a union would try, and blame, every kind for every element."""
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else 0
    return "texts" if isinstance(first, str) else "lists" if isinstance(first, list) else "ids"


Texts = Annotated[
    Annotated[StrictStr, Tag("text")]
    | Annotated[Many[StrictInt], Tag("ids")]
    | Annotated[Many[StrictStr], Field(max_length=limits.PROMPTS), Tag("texts")]
    | Annotated[Many[Many[StrictInt]], Field(max_length=limits.PROMPTS), Tag("lists")],
    Discriminator(
        kind_of_prompt,
        custom_error_type="texts",
        custom_error_message="it must be a text, a list of texts, token ids, or a list of lists of token ids",
    ),
    Field(description="A text, several, token ids, or several lists of them."),
]


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: Texts
    echo: StrictBool | None = False
    add_special_tokens: StrictBool = True
    logprobs: Annotated[StrictInt, _range(0, 20)] | None = None
    suffix: StrictStr | None = None
    best_of: StrictInt | None = None


class ContentPart(Body):
    """A part of a message; text is all that these models read."""

    type: Name
    text: StrictStr | None = None


class Message(Body):
    """One turn of a conversation."""

    role: Name
    content: StrictStr | Annotated[Many[ContentPart], Field(max_length=limits.MESSAGES)] | None = None
    tool_calls: Annotated[Many[dict[str, Any]], Field(max_length=limits.TOOLS)] | None = None


Messages = Annotated[Many[Message], Field(min_length=1, max_length=limits.MESSAGES)]


class NamedFunction(Body):
    """The name of a tool's function."""

    name: Name


class NamedTool(Body):
    """A tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[StrictStr, Field(min_length=1, max_length=limits.NAME)]
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None


class Tool(Body):
    """A tool of a request."""

    type: Literal["function"] = "function"
    function: Function


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt, _range(0, 20)] | None = None
    tools: Annotated[Many[Tool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: StrictBool | None = True
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = Field(
        default=False, description="Go on in the last message (with add_generation_prompt false)."
    )
    add_special_tokens: StrictBool = False
    echo: StrictBool | None = False
    documents: Annotated[Many[dict[str, Any]], Field(max_length=limits.MESSAGES)] | None = None
    reasoning_effort: Name | None = Field(default=None, description="For templates that read it.")
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: StrictBool = True


class TokenizeRequest(Body):
    """POST /tokenize: a text, or messages."""

    model: StrictStr | None = None
    prompt: StrictStr | None = None
    messages: Messages | None = None
    tools: Annotated[Many[Tool], Field(max_length=limits.TOOLS)] | None = None
    add_special_tokens: StrictBool = True
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool | None = False


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: StrictStr | None = None
    tokens: Annotated[Many[StrictInt], Field(max_length=limits.DETOKENIZED)]
