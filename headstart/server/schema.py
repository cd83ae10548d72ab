"""Request bodies of OpenAI's APIs with vLLM's extra fields. Other fields are ignored and reported, or refused.

Every list, text and name has a maximum length (limits.py). Validation of a list stops at its first wrong element.
"""

import logging
import math
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    StrictBool,
    StrictFloat,
    StrictInt,
    StrictStr,
    Tag,
    create_model,
    model_validator,
)

from headstart.errors import ParameterError
from headstart.params import parameters
from headstart.server import limits
from headstart.server.errors import BodyError
from headstart.text.grammar_spec import NO_PARAMETERS

log = logging.getLogger("headstart.server")
Item = TypeVar("Item")
Number = StrictInt | StrictFloat


Name = Annotated[StrictStr, Field(max_length=limits.NAME)]
GivenName = Annotated[StrictStr, Field(min_length=1, max_length=limits.NAME)]
Many = Annotated[list[Item], Field(fail_fast=True)]
Stop = Annotated[StrictStr, Field(max_length=limits.STOP_LENGTH)]


class ResponseModel(BaseModel):
    """Base of responses in OpenAPI: declared fields are always present, and there may be others."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())


SENTINELS: Mapping[str, Any] = {
    "seed": -1, "max_tokens": -1, "max_completion_tokens": -1, "max_output_tokens": -1, "model": "",
    "reasoning_effort": "", "effort": "", "tool_choice": "", "response_format": {}, "format": {}, "guided_regex": "",
    "guided_grammar": "", "guided_json": "", "guided_choice": [], "regex": "", "grammar": "", "choice": [], "json": "",
}  # fmt: skip
"""Optional field -> the value that, like null, means the default."""


class Body(BaseModel):
    """Base of bodies and objects in them. Values of a wrong type are refused. null and SENTINELS mean the default."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    harmless: ClassVar[frozenset[str]] = frozenset()  # undeclared members that are ignored without a report
    refused: ClassVar[Mapping[str, str]] = {}  # undeclared members that are refused -> what to do instead

    @model_validator(mode="before")
    @classmethod
    def _without_defaults(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        neutral = {name for name, value in given.items() if value is None or _is_sentinel(name, value)}
        if not neutral:
            return given
        optional = {(each.alias or name): each for name, each in cls.model_fields.items() if not each.is_required()}
        neutral = {name for name in neutral & optional.keys() if not given[name] is optional[name].default is None}
        return {name: value for name, value in given.items() if name not in neutral}

    def unknown_members(self, place: str = "") -> Iterator[str]:
        """Paths of the ignored members of nested objects, without list indices. Raises BodyError for refused ones."""
        for name in type(self).model_fields:
            value = getattr(self, name)
            for each in value if isinstance(value, list) else (value,):
                if isinstance(each, Body):
                    path = f"{place}{name.removesuffix('_')}."
                    yield from each.unknown_here(path)
                    yield from each.unknown_members(path)

    def unknown_here(self, place: str) -> Iterator[str]:
        """Paths of the ignored members of this object, without nested ones. Raises BodyError for refused ones."""
        for name, value in (self.model_extra or {}).items():
            if name in self.refused and value not in (None, False):
                raise BodyError(f"{place}{name} is not supported", place + name, self.refused[name])
            if value is not None and name not in self.harmless and name != "cache_control":
                yield place + name


def _is_sentinel(name: str, value: Any) -> bool:
    return name in SENTINELS and type(value) is type(SENTINELS[name]) and bool(value == SENTINELS[name])


class StreamOptions(Body):
    """Whether a stream reports usage: in a last chunk, or in every chunk."""

    harmless = frozenset({"include_obfuscation"})
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False


class Speculation(Body):
    """headstart's own field: how this request drafts. `depth` needs mode auto, `events` needs a stream."""

    mode: Literal["auto", "off"] = "auto"
    depth: StrictInt | None = None
    events: StrictBool = Field(
        default=False, description="Chunks report each pass: drafted tokens, drafter, scores and rejected tokens."
    )


class StructuredOutputs(Body):
    """vLLM's constraints of the text. At most one may be given."""

    refused = {"structural_tag": "use grammar"}
    json_: Any = Field(default=None, alias="json")
    regex: StrictStr | None = None
    choice: Annotated[Many[StrictStr], Field(max_length=limits.CHOICES)] | None = None
    grammar: StrictStr | None = None
    json_object: StrictBool | None = None


class JsonSchemaFormat(Body):
    """A JSON schema for the text. It is always enforced; `strict` has no effect."""

    harmless = frozenset({"name", "description", "strict"})
    schema_: Any = Field(default=None, alias="schema")


class ResponseFormat(Body):
    """OpenAI's constraint of the text. `schema` is where llama.cpp and Together put the schema."""

    harmless = frozenset({"name", "description", "strict"})
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None
    schema_: Any = Field(default=None, alias="schema")

    @property
    def schema_given(self) -> Any:
        """The schema of `json_schema`, else of `schema`; None without one."""
        inner = self.json_schema.schema_ if self.json_schema is not None else None
        return self.schema_ if inner is None else inner

    @model_validator(mode="after")
    def _fits_type(self) -> Self:
        if self.type == "text" and self.schema_given is not None:
            raise ValueError("it has a schema, but its type is text: set type to json_schema")
        return self


def _bias_of(value: Any) -> Any:
    """Check logit_bias here, since Pydantic would report an error for every member."""
    if not isinstance(value, dict):
        raise ValueError("it must be an object from token ids to numbers")
    if len(value) > limits.LOGIT_BIAS:
        raise ValueError(f"it has {len(value)} members, but may have {limits.LOGIT_BIAS}")
    for key, bias in value.items():
        if isinstance(bias, bool) or not isinstance(bias, int | float):
            raise ValueError(f"the value of {limits.shortened(str(key))!r} is no number")
    return value


LIST_TYPES: Mapping[str, Any] = {
    "stop": Stop | Annotated[Many[Stop], Field(max_length=limits.STOPS)],
    "bad_words": Annotated[Many[Name], Field(max_length=limits.BAD_WORDS)],
    "stop_token_ids": Annotated[Many[StrictInt], Field(max_length=limits.TOKEN_IDS)],
    "allowed_token_ids": Annotated[Many[StrictInt], Field(max_length=limits.VALUES)],
    "logit_bias": Annotated[dict[str, Number], BeforeValidator(_bias_of), Field(max_length=limits.LOGIT_BIAS)],
}
"""Types, with maximum lengths, of the sampling parameters that are lists or objects."""


def bounds(name: str) -> Any:
    """A Field with the range of a sampling parameter, for OpenAPI only: SamplingParams checks the range."""
    row = parameters()[name]
    limits_of = {"minimum": row.low if row.http_low is None else row.http_low, "maximum": row.high}
    shown: dict[str, Any] = {word: limit for word, limit in limits_of.items() if not math.isinf(limit)}
    return Field(json_schema_extra=shown)


def with_sampling(base: type[Body], names: Mapping[str, str]) -> Any:
    """A subclass of `base` with a field for each sampling parameter of `names` (parameter -> name of the field)."""
    members: dict[str, Any] = {}
    for name, member in names.items():
        row = parameters()[name]
        kind: Any = {"number": Number, "integer": StrictInt, "boolean": StrictBool}.get(row.kind)
        if row.kind in ("number", "integer"):
            kind = Annotated[kind, bounds(name)]
        default = row.default if row.kind == "boolean" else None
        kind = LIST_TYPES.get(name, kind)
        field_info = Field(default=default, description=f"{row.help} {row.http_help}".rstrip())
        members[member] = (kind | None if default is None else kind, field_info)
    return create_model(base.__name__, __base__=base, **members)


class MessagesBody(Body):
    """Base of bodies with messages, which may have images, and with tools."""

    # URL of an image -> its bytes, once they are downloaded
    _downloaded: dict[str, bytes] = PrivateAttr(default_factory=dict)

    def image_urls(self) -> list[str]:
        """The URLs of the images of all messages, data URLs too."""
        messages: list[Message] = getattr(self, "messages", None) or []
        parts = [part for each in messages if isinstance(each.content, list) for part in each.content]
        found = [part.image_url for part in parts if part.image_url is not None]
        return [each if isinstance(each, str) else each.url for each in found]

    @cached_property
    def functions(self) -> list[dict[str, Any]]:
        """The tools that are functions, as chat templates and grammars read them."""
        tools: list[Tool] = getattr(self, "tools", None) or []
        return [tool.model_dump(exclude_none=True, exclude=UNREAD) for tool in tools if tool.type == "function"]


class Common(with_sampling(MessagesBody, {name: name for name in parameters() if name != "logprobs"})):  # type: ignore[misc]
    """Fields of both chat and completion requests. `logprobs` is declared in each, with different types."""

    _left_out: list[str] = PrivateAttr(default_factory=list)  # ignored members of the body that was translated to this
    model: StrictStr | None = Field(default=None, description="One of the names of /v1/models.")
    include_stop_str_in_output: StrictBool = False
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1)] | None = Field(
        default=None, description="Keep only this many tokens, the last ones, of the prompt; -1: as many as fit."
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
    cache_salt: GivenName | None = Field(
        default=None, description="The prefix cache is shared only between requests with the same salt."
    )
    priority: Annotated[StrictInt, Field(ge=-limits.PRIORITY, le=limits.PRIORITY)] | None = Field(
        default=None, description="Lower runs earlier. API keys have a lowest priority that they may ask for."
    )
    user: StrictStr | None = None
    store: StrictBool | None = Field(default=None, description="false: a server with --record does not record it.")


def kind_of_prompt(value: Any) -> str | None:
    """The Tag in Texts for a prompt, by its first element, or None. Without tags Pydantic lists errors of all types."""
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
    Field(description="A text, a list of texts, token ids, or a list of lists of token ids."),
]


class CompletionRequest(Common):
    """POST /v1/completions."""

    prompt: Texts
    echo: StrictBool | None = False
    add_special_tokens: StrictBool = True
    logprobs: Annotated[StrictInt, bounds("logprobs")] | None = None
    suffix: StrictStr | None = None
    best_of: StrictInt | None = None


class ImageUrl(Body):
    """Where an image is. `detail` has no effect: a model's own settings decide its size."""

    harmless = frozenset({"detail"})
    url: StrictStr


class ContentPart(Body):
    """A part of a message: of type text, or image_url with a data URL (or a URL, with `serve --allow-image-urls`)."""

    harmless = frozenset({"annotations", "detail", "uuid"})
    type: Name
    text: StrictStr | None = None
    refusal: StrictStr | None = None
    image_url: ImageUrl | StrictStr | None = None


def image_part(url: str) -> dict[str, Any]:
    """The content part of an image."""
    return {"type": "image_url", "image_url": {"url": url}}


def joined_parts(parts: list[dict[str, Any]]) -> Any:
    """The content of a message: one text, or the parts if there is an image among them."""
    if any(part["type"] != "text" for part in parts):
        return parts
    return "".join(part["text"] for part in parts)


class CalledFunction(Body):
    """Name and arguments of a call: a JSON text, or an object."""

    name: GivenName
    arguments: StrictStr | dict[str, Any] | None = None


class MessageCall(Body):
    """A tool call of an earlier turn."""

    harmless = frozenset({"id", "type", "index"})
    function: CalledFunction


class Message(Body):
    """One turn of a conversation. Undeclared members are passed to the chat template."""

    harmless = frozenset({
        "name", "tool_call_id", "tool_name", "reasoning_content", "reasoning", "thinking", "refusal", "annotations",
        "id",
    })  # fmt: skip
    refused = {
        "function_call": "use tool_calls", "prefix": "use continue_final_message",
        "partial": "use continue_final_message",
    }  # fmt: skip
    role: Name
    content: StrictStr | Annotated[Many[ContentPart], Field(max_length=limits.MESSAGES)] | None = None
    tool_calls: Annotated[Many[MessageCall], Field(max_length=limits.TOOLS)] | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.role == "user" and self.content is None:
            raise ValueError("a user message has no content")
        return self


Messages = Annotated[Many[Message], Field(min_length=1, max_length=limits.MESSAGES)]


class NamedFunction(Body):
    """The name of a tool's function."""

    name: Name


class NamedTool(Body):
    """A tool that must be called."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedTools(Body):
    """The tools of the request that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[Many[NamedTool], Field(max_length=limits.TOOLS)]


UNREAD: Any = {"cache_control": True, "function": {"strict", "cache_control"}}
"""Members of a tool that are kept from the chat template, as all APIs ignore them."""


class ToolChoiceAllowed(Body):
    """A choice among some of the request's tools; the prompt names these tools only."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


class Function(Body):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: GivenName
    description: StrictStr | None = ""  # some templates fail without it, or without parameters
    parameters: dict[str, Any] | None = NO_PARAMETERS


class Tool(Body):
    """A tool of a request. Only functions are shown to the model; tools that the server would run are ignored."""

    type: Name = "function"
    function: Function | None = None

    @model_validator(mode="after")
    def _has_function(self) -> Self:
        if self.type == "function" and self.function is None:
            raise ValueError("a tool of type function has no function")
        return self

    def unknown_here(self, place: str) -> Iterator[str]:
        """Ignored members; an ignored tool is named by its type."""
        if self.type != "function":
            return iter((place + self.type,))
        return super().unknown_here(place)


class ChatRequest(Common):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: StrictInt | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[StrictInt, bounds("logprobs")] | None = None
    tools: Annotated[Many[Tool], Field(max_length=limits.TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | ToolChoiceAllowed | None = None
    parallel_tool_calls: StrictBool | None = True
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = Field(
        default=False, description="Continue the last message (with add_generation_prompt false)."
    )
    add_special_tokens: StrictBool = False
    echo: StrictBool | None = False
    documents: Annotated[Many[dict[str, Any]], Field(max_length=limits.MESSAGES)] | None = None
    reasoning_effort: Name | None = Field(default=None, description="Passed to the chat template; none: no thinking.")
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: StrictBool = True

    @cached_property
    def functions(self) -> list[dict[str, Any]]:
        """The functions that may be called. Raises ParameterError for allowed tools that the request does not have."""
        functions = [] if self.tool_choice == "none" else super().functions
        if not isinstance(self.tool_choice, ToolChoiceAllowed):
            return functions
        allowed = {each.function.name for each in self.tool_choice.allowed_tools.tools}
        if unknown := allowed - {tool["function"]["name"] for tool in functions}:
            raise ParameterError("tool_choice", f"allows {min(unknown)!r}, which is not in tools", "give its tool")
        return [tool for tool in functions if tool["function"]["name"] in allowed]


class TokenizeRequest(MessagesBody):
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


HARMLESS = frozenset({
    "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "user",
    "prediction", "cache_prompt", "request_id", "keep_alive", "rid", "id_slot", "separate_reasoning",
})  # fmt: skip
"""Fields that are ignored without a report, since they do not change the text: bookkeeping, or hints for speed."""
_NUMBERS = ", ".join(row.name for row in parameters().values() if row.kind == "number")
_OTHER_SAMPLER = f"this server has {_NUMBERS} and top_k"
REFUSED_BY_HINT: Mapping[str, Mapping[str, tuple[Any, ...]]] = {
    _OTHER_SAMPLER: {
        "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,), "logits_processors": ([],),
        "repetition_detection": (), "custom_logit_processor": (), "typical_p": (1,), "top_n_sigma": (-1,),
        "mirostat": (0,), "dynatemp_range": (0,), "dry_multiplier": (0,), "xtc_probability": (0,), "samplers": (),
        "watermark": (False,),
    },
    "leave it out": {
        "web_search_options": (), "spaces_between_special_tokens": (True,), "vllm_xargs": ({},), "custom_params": ({},),
        "kv_transfer_params": ({},), "guided_decoding_backend": ("auto", "guidance", "llguidance"),
    },
    "use response_format, structured_outputs or guided_grammar": {
        "guided_whitespace_pattern": (), "json_schema": (), "format": (),
    },
    "use max_tokens": {"thinking_token_budget": (), "n_predict": (), "max_new_tokens": ()},
    "use guided_grammar": {"ebnf": (), "grammar": ()},
    "use guided_regex": {"regex": ()},
    "use stop": {"stop_regex": ()},
    "use include_stop_str_in_output": {"no_stop_trim": (False,)},
    "use repetition_penalty": {"repeat_penalty": (1,)},
    "use chat_template_kwargs": {"think": ()},
    "use tools": {"functions": ([],)},
    "use tool_choice": {"function_call": ("none", "auto")},
    "say it in the messages": {"verbosity": ("medium",)},
    "give its members as fields of the body": {"options": ({},)},
    "give the prompt as text or token ids": {"prompt_embeds": ()},
    "start the server with --chat-template": {"chat_template": ()},
    "this server writes text only": {"audio": (), "modalities": (["text"],)},
    "the model's own settings are used": {"mm_processor_kwargs": ({},)},
    "start the server with --lora NAME=PATH, and give the name as model": {"lora_path": ()},
}  # fmt: skip
"""Fields of other servers that would change the text: hint -> field -> values that, like null, change nothing."""
REFUSED = {name: (nothing, hint) for hint, names in REFUSED_BY_HINT.items() for name, nothing in names.items()}
IGNORED_FIELDS = "X-Ignored-Fields"
_logged: set[str] = set()


def check_refused(extra: Mapping[str, Any], refused: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
    """Raises BodyError for a field in `refused` (name -> values that, like null, change nothing; and a hint) with any
    other value."""
    for name, value in extra.items():
        if value is None or name not in refused:
            continue
        nothing, hint = refused[name]
        if value not in nothing or isinstance(value, bool) != any(isinstance(each, bool) for each in nothing):
            raise BodyError(f"{name} is not supported", name, hint)


def ignored_fields_header(body: Body) -> dict[str, str]:
    """The header X-Ignored-Fields, with the ignored fields of a body; {} without any. BodyError for refused fields."""
    extra = body.model_extra or {}
    check_refused(extra, REFUSED)
    unknown = list(dict.fromkeys([*getattr(body, "_left_out", ()), *body.unknown_members()]))
    unknown += [name for name in extra if extra[name] is not None and name not in HARMLESS and name not in REFUSED]
    for name in unknown[:20]:
        if name not in _logged and len(_logged) < 1000:
            _logged.add(name)
            log.warning("a request has a field that this server ignores: %r", limits.shortened(name))
    shown = [name for name in unknown if name.isascii() and name.isprintable() and len(name) <= limits.QUOTED]
    return {IGNORED_FIELDS: ", ".join(shown[:20]) or str(len(unknown))} if unknown else {}
