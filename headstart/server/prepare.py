"""Turns request bodies into engine requests: prompt ids, sampling parameters, constraint, and the output's parser.

Chat templates, tokenizing and grammars may take long, so these functions run in worker threads.
"""

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from headstart.api import LLM
from headstart.api.images import EncodedPrompt, data_of, encode_images, require_image_processor, split_images
from headstart.core import Request, SamplingParams
from headstart.errors import CapacityError, ContextError, ModelError, ParameterError, UsageError, quoted
from headstart.params import parameters
from headstart.server import limits
from headstart.server.accounts import Account
from headstart.server.body_reader import call_arguments
from headstart.server.schema import (
    ChatRequest,
    Common,
    CompletionRequest,
    Message,
    NamedTool,
    StructuredOutputs,
    TokenizeRequest,
    ToolChoiceAllowed,
)
from headstart.text.conversation import Conversation
from headstart.text.grammar_spec import GrammarSpec, ToolCalls
from headstart.text.image_prompt import ImageProcessor
from headstart.text.images import Image, ImageError, decode_image
from headstart.text.infill import infill_prompt
from headstart.text.message_fallbacks import with_functions, with_one_system, with_plain_calls
from headstart.text.parsers import Parser, is_opened, make_parser

RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
"""Template variables that chat_template_kwargs must not set."""
THOUGHTS = ("reasoning_content", "reasoning")
"""Fields for the reasoning of earlier turns. Clients send either one; chat templates read the first."""
COMPLETION_TOKENS = 16  # default max_tokens of /v1/completions, as in OpenAI and vLLM
HTTP_DEFAULTS = {row.name: row.http_default for row in parameters().values() if row.http_default is not None}
LATEST_TAG = ":latest"  # tag that Ollama's clients append to model names
FORCED_FORMAT = "hermes"  # format of tool calls that a grammar enforces (tool_choice), whatever the model's own format


@dataclass(frozen=True)
class OutputFormats:
    """Formats of a model's tool calls and reasoning, and the treatment of special tokens in messages."""

    tools: str | None = None  # name of a parser in text/parsers; None: FORCED_FORMAT
    reasoning: str | None = None  # name of a parser in text/reasoning; None: the model writes no reasoning
    parse_special: bool = False  # names of special tokens in messages become those tokens


@dataclass(frozen=True)
class PreparedRequest:
    """One HTTP request, ready to run."""

    requests: list[Request]  # one for each prompt
    prompts: list[str] = field(default_factory=list)  # texts to echo
    make_parser: Callable[[], Parser] | None = None  # of one choice
    keeps_special: bool = False  # special tokens stay in the text
    keeps_stop: bool = False  # stop strings stay in the text
    continues: bool = False  # the output continues a text: its first token keeps a leading space


def with_owner(request: Request, account: Account, priority: int | None = None) -> Request:
    """The request with its account's name and scheduler share, and with the priority that the account allows."""
    share, first = account.limits.share, account.priority(priority)
    return replace(request, owner=account.name, share=share, priority=first)


def num_choices(body: Common) -> int:
    """Number of outputs that a body asks for: prompts times `n`."""
    prompts = len(list_of_texts(body.prompt, "prompt")) if isinstance(body, CompletionRequest) else 1
    return prompts * max(body.n or 1, 1)


def is_constrained(body: Common) -> bool:
    """Whether preparing the body may compile a grammar."""
    named = (body.response_format, body.structured_outputs, body.guided_json, body.guided_regex, body.guided_choice,
             body.guided_grammar, body.tools if isinstance(body, ChatRequest) else None)  # fmt: skip
    return any(each is not None for each in named)


def prepare(llm: LLM, formats: OutputFormats, account: Account, body: Common, seed: int) -> PreparedRequest:
    """The engine requests of a body. `seed` is used if neither the body nor the server sets one. Raises UsageError,
    CapacityError or ModelError."""
    if isinstance(body, ChatRequest):
        prepared = _prepare_chat(llm, formats, account, body)
    else:
        assert isinstance(body, CompletionRequest)
        prepared = _prepare_completion(llm, account, body)
    if body.seed is not None or llm.config.seed is not None:
        return prepared
    return replace(prepared, requests=[replace(request, seed=seed) for request in prepared.requests])


def _prepare_completion(llm: LLM, account: Account, body: CompletionRequest) -> PreparedRequest:
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise ParameterError("best_of", "is not supported", "use n")
    top = body.prompt_logprobs if body.prompt_logprobs is not None else (body.logprobs if body.echo else None)
    if body.echo and body.max_tokens == 0:  # SamplingParams takes 0 only with prompt logprobs
        top = top or 0
    params, constraint = _params(llm, body, _limit(body), body.logprobs, top), constraint_of(body)
    requests: list[Request] = []
    texts: list[str] = []
    for prompt in list_of_texts(body.prompt, "prompt"):
        if prompt == "" and not body.suffix:
            raise ParameterError("prompt", "is empty", "give at least one character")
        given, ids = _encode_prompt(llm, body, prompt)
        requests.append(_request(llm, account, ids, params, body, constraint))
        if body.echo:
            is_whole = isinstance(prompt, str) and len(ids) == len(given)
            texts.append(str(prompt) if is_whole else llm.tokenizer.decode(ids, skip_special=False))
    _check_prompt_logprobs(requests)
    special, stop = not body.skip_special_tokens, body.include_stop_str_in_output
    return PreparedRequest(requests, texts, keeps_special=special, keeps_stop=stop, continues=True)


def _prepare_chat(llm: LLM, formats: OutputFormats, account: Account, body: ChatRequest) -> PreparedRequest:
    if body.top_logprobs and not body.logprobs:
        raise ParameterError("top_logprobs", "needs logprobs", "set logprobs to true")
    if body.echo:
        raise ParameterError("echo", "is not supported in chats", "use /v1/completions")
    if (forced := _forced_tools(body)) is not None:
        body = body.model_copy(update={"response_format": None})  # of the content, which forced calls leave empty
    constraint = constraint_of(body)
    if forced is not None:
        if constraint is not None:
            raise UsageError("tool_choice and a constraint both decide the text", "ask for one of them")
        constraint = GrammarSpec("tools", forced)
    limit = _limit(body)
    prompt = encode_chat(llm, formats, body)
    ids = _truncated(llm, body, prompt.ids)
    room = llm.engine.max_length - len(ids)
    if room <= 0:
        raise ContextError(f"it has {len(ids)} tokens", llm.engine.max_length, "shorten the messages")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _params(llm, body, room if limit is None else limit, logprobs, body.prompt_logprobs)
    request = _request(llm, account, ids, params, body, constraint)
    requests = [replace(request, images=prompt.images)]
    _check_prompt_logprobs(requests)
    own = formats.tools or FORCED_FORMAT  # the system prompt for templates without tools asks for FORCED_FORMAT
    calls = FORCED_FORMAT if forced is not None else own if body.functions else None
    thinks = formats.reasoning if forced is None and constraint is None else None
    parser = None
    if calls is not None or thinks is not None:
        opened = thinks is not None and is_opened(thinks, prompt.text)
        one = not body.parallel_tool_calls
        parser = partial(make_parser, calls, body.functions, thinks, reasoning_opened=opened, one_call=one)
    return PreparedRequest(
        requests, make_parser=parser, keeps_special=parser is not None or not body.skip_special_tokens,
        keeps_stop=body.include_stop_str_in_output, continues=body.continue_final_message,
    )  # fmt: skip


def prompt_ids(llm: LLM, formats: OutputFormats, body: Common) -> list[list[int]]:
    """Token ids of each prompt of a body. Raises UsageError, CapacityError or ModelError."""
    if isinstance(body, ChatRequest):
        return [_truncated(llm, body, encode_chat(llm, formats, body).ids)]
    assert isinstance(body, CompletionRequest)
    return [_encode_prompt(llm, body, prompt)[1] for prompt in list_of_texts(body.prompt, "prompt")]


def _limit(body: Common) -> int | None:
    """Maximum output tokens of a body; None: as many as the context allows."""
    if isinstance(body, ChatRequest):
        return body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    return COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens


def _encode_prompt(llm: LLM, body: CompletionRequest, prompt: str | list[int]) -> tuple[list[int], list[int]]:
    """Token ids of a prompt, before and after truncation to `truncate_prompt_tokens`. With a `suffix` the prompt is
    that of `infill_prompt`."""
    if body.suffix:
        if not isinstance(prompt, str):
            raise ParameterError("suffix", "is given, but the prompt is token ids", "give the prompt as a text")
        if body.truncate_prompt_tokens is not None:
            hint = "leave it out of requests with a suffix"
            raise ParameterError("truncate_prompt_tokens", "could cut the token that begins the prompt", hint)
        prompt = infill_prompt(llm.tokenizer, prompt, body.suffix)
    ids = encode_text(llm, prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
    return ids, _truncated(llm, body, ids)


def encode_text(llm: LLM, text: str, add_special: bool) -> list[int]:
    """Token ids of a raw text. Raises ContextError, before tokenizing, if the text cannot fit the context."""
    if not llm.tokenizer.may_fit(text, llm.engine.max_length):
        raise ContextError(f"it has {len(text)} characters", llm.engine.max_length, "shorten the prompt")
    return llm.tokenizer.encode(text, add_special=add_special)


def encode_chat(llm: LLM, formats: OutputFormats, body: ChatRequest | TokenizeRequest) -> EncodedPrompt:
    """The prompt that the chat template makes of the messages and their images. Raises UsageError (with the
    template's own message if the template refuses the messages) and CapacityError."""
    messages, images = split_images([_message(each) for each in body.messages or ()])
    if not images:
        return EncodedPrompt(*_encode_messages(llm, formats, body, messages))
    processor = check_images(llm, len(images))
    if isinstance(body, ChatRequest) and body.truncate_prompt_tokens is not None:
        raise ParameterError("truncate_prompt_tokens", "could cut an image", "leave it out of requests with images")
    prompt = _encode_messages(llm, formats, body, messages)
    return encode_images(processor, prompt, images, llm.engine.max_length, partial(_read_image, body._downloaded))


def _encode_messages(
    llm: LLM, formats: OutputFormats, body: ChatRequest | TokenizeRequest, messages: list[dict[str, Any]]
) -> tuple[list[int], str]:
    """Token ids and text of the rendered chat template."""
    tools = body.functions
    # the default of TokenizeRequest, true, is for texts: messages need the field in the request
    add_special = body.add_special_tokens and (
        isinstance(body, ChatRequest) or "add_special_tokens" in body.model_fields_set
    )
    is_set = "add_generation_prompt" in body.model_fields_set
    if body.continue_final_message and body.add_generation_prompt and is_set:
        what = "continue_final_message and add_generation_prompt exclude each other"
        raise UsageError(what, "set the latter to false")
    variables = _variables(body)
    if (template := llm.chat_template) is None:
        raise UsageError(f"{llm.model.name} has no chat template", "use /v1/completions")
    has_tools = any("tools" in source for source in template.sources.values())
    if tools and not has_tools:
        messages = with_functions(messages, tools)
    if formats.tools in (None, FORCED_FORMAT) and not template.writes_calls:
        messages = with_plain_calls(messages)
    if not template.takes_developer:
        messages = [each | {"role": "system"} if each["role"] == "developer" else each for each in messages]
    if not template.takes_late_system:
        messages = with_one_system(messages)
    conversation = Conversation(
        messages, (tools or None) if has_tools else None, body.add_generation_prompt, variables, formats.parse_special,
        body.continue_final_message, max_tokens=llm.engine.max_length,
    )  # fmt: skip
    try:
        return conversation.encode(template, llm.tokenizer, add_special=add_special)
    except ModelError as error:  # the template's complaint is about the messages
        raise UsageError(error.message, error.hint) from error


def _variables(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """Further variables of the chat template."""
    variables = dict(body.chat_template_kwargs or {})
    if reserved := variables.keys() & RESERVED:
        raise ParameterError("chat_template_kwargs", f"cannot set {', '.join(sorted(reserved))}")
    if isinstance(body, ChatRequest):
        named = {"documents": body.documents, "reasoning_effort": body.reasoning_effort}
        variables |= {name: value for name, value in named.items() if value is not None}
        if body.reasoning_effort == "none":
            variables.setdefault("enable_thinking", False)
    return variables


def check_images(llm: LLM, count: int) -> ImageProcessor:
    """The image processor for a request with `count` images. Raises UsageError without one, or for too many."""
    processor = require_image_processor(llm.model)
    if count > limits.IMAGES:
        raise UsageError(f"the request has {count} images, and {limits.IMAGES} are allowed", "send fewer")
    return processor


def _read_image(downloaded: Mapping[str, bytes], source: Any) -> Image:
    """The image of a URL: a data URL, or a downloaded one. Raises ImageError."""
    data = downloaded.get(source) if isinstance(source, str) else None
    if data is None and (data := data_of(source)) is None:
        raise ImageError(f"{limits.shortened(str(source))!r} is no data URL", "send data:image/png;base64,...")
    if len(data) > limits.IMAGE_BYTES:
        raise ImageError(f"it has {len(data)} bytes, and {limits.IMAGE_BYTES} are allowed", "make it smaller")
    return decode_image(data)


def _message(message: Message) -> dict[str, Any]:
    """A message in the form that templates read, but for its content: call arguments are objects."""
    document = message.model_dump(exclude_none=True)
    document.setdefault("content", "")
    if not document.get("tool_calls"):
        document.pop("tool_calls", None)  # templates take an empty list for calls
    if thought := next((document[name] for name in THOUGHTS if isinstance(document.get(name), str)), None):
        document[THOUGHTS[0]] = thought
    for function in (call["function"] for call in document.get("tool_calls", ())):
        if isinstance(arguments := function.get("arguments", ""), str):
            function["arguments"] = call_arguments(arguments)
    return document


def _truncated(llm: LLM, body: Common, ids: list[int]) -> list[int]:
    """The last `truncate_prompt_tokens` ids; -1: as many as leave room for the output."""
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return ids
    num_tokens = max(llm.engine.max_length - (_limit(body) or 1), 1) if wanted == -1 else wanted
    if num_tokens == 0:
        raise ParameterError("truncate_prompt_tokens", "is 0, which leaves no prompt", "give at least 1, or -1")
    return ids[-num_tokens:]


def spellings(model: str) -> tuple[str, str]:
    """A requested name of a model or adapter as it is, and without LATEST_TAG."""
    return model, model.removesuffix(LATEST_TAG)


def adapter_of(llm: LLM, model: str | None) -> str:
    """The adapter that a request names as its model; empty if it names the model itself, or nothing."""
    return next((name for name in spellings(model or "") if name in llm.adapters), "")


def _request(
    llm: LLM, account: Account, ids: list[int], params: SamplingParams, body: Common, constraint: GrammarSpec | None
) -> Request:
    lora = adapter_of(llm, body.model)
    request = llm.request(ids, params, depth=_depth(body), constraint=constraint, lora=lora)
    request = with_owner(request, account, body.priority)
    return replace(request, cache_salt=body.cache_salt) if body.cache_salt else request


def _check_prompt_logprobs(requests: Seq[Request]) -> None:
    count = 0
    for request in requests:
        if (num_top := request.params.prompt_logprobs) is not None:
            count += len(request.prompt_ids) * (num_top + 1) * request.params.n
    if count > limits.PROMPT_LOGPROBS:
        what = f"{count} logprobs of prompt tokens are asked for, but a response holds {limits.PROMPT_LOGPROBS}"
        raise CapacityError(what, "ask for fewer alternatives, or send fewer prompts at once")


def constraint_of(body: Common) -> GrammarSpec | None:
    """The grammar constraint of a body, or None. Raises UsageError if several constraints are given."""
    specs: list[GrammarSpec] = []
    if (wanted := body.response_format) is not None and wanted.type != "text":
        if (schema := wanted.schema_given) is None and wanted.type == "json_schema":
            raise UsageError("response_format json_schema has no schema", 'give {"json_schema": {"schema": {...}}}')
        specs.append(GrammarSpec("json_object") if schema is None else GrammarSpec("json_schema", schema))
    outputs = body.structured_outputs or StructuredOutputs()
    named = {
        "json_schema": (body.guided_json, outputs.json_),
        "regex": (body.guided_regex, outputs.regex),
        "choice": (body.guided_choice, outputs.choice),
        "grammar": (body.guided_grammar, outputs.grammar),
    }
    for kind, values in named.items():
        specs += [GrammarSpec(kind, value) for value in values if value is not None]  # type: ignore[arg-type]
    if outputs.json_object:
        specs.append(GrammarSpec("json_object"))
    if len(specs) > 1:
        kinds = ", ".join(each.kind for each in specs)
        raise UsageError(f"several constraints are given: {kinds}", "give one of them")
    return specs[0] if specs else None


def _forced_tools(body: ChatRequest) -> ToolCalls | None:
    """The tool calls that `tool_choice` enforces; None if calls are optional. Raises UsageError without tools."""
    choice = body.tool_choice
    if isinstance(choice, ToolChoiceAllowed):
        choice = choice.allowed_tools.mode
    if choice in (None, "none", "auto"):
        return None
    if not (tools := body.functions):
        raise ParameterError("tool_choice", "demands a call, but there are no tools that are functions", "give tools")
    name = choice.function.name if isinstance(choice, NamedTool) else None
    if name is not None and name not in {tool["function"]["name"] for tool in tools}:
        raise ParameterError("tool_choice", f"names {name!r}, which is not in tools", "give its tool")
    return ToolCalls(tools, name, may_repeat=bool(body.parallel_tool_calls) and name is None)


def list_of_texts(given: str | list[Any], name: str) -> list[str | list[int]]:
    """The texts, or lists of token ids, of a body's field `name`, whose value `given` holds one or several. Raises
    UsageError for an empty list."""
    if isinstance(given, str) or (given and isinstance(given[0], int)):
        return [given]
    if not given:
        raise ParameterError(name, "is an empty list", "give at least one text")
    return list(given)


def _params(
    llm: LLM, body: Common, limit: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    """Sampling parameters of a body. Fields that are null get the model's recommended value, else the API's default.
    Raises UsageError for values out of range."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    given: dict[str, Any] = {name: getattr(body, name) for name in parameters() if name != "logprobs"} | {
        "logit_bias": _logit_bias(body.logit_bias),
        "max_tokens": limit,
        "stop": (*llm.turn_end, *(text for text in stop if text)),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    for row in parameters().values():
        if row.http_low is not None and given[row.name] is not None and row.http_low <= given[row.name] < row.low:
            given[row.name] = given[row.name] % row.http_modulus if row.http_modulus else row.low
    chosen = {name: value for name, value in given.items() if value is not None}
    recommended = llm.chat_sampling if isinstance(body, ChatRequest) else llm.recommended
    try:
        return SamplingParams(**{**HTTP_DEFAULTS, **recommended, **chosen})
    except ParameterError as error:
        raise error.renamed(_chat_names(body).get(error.param, error.param)) from None


def _chat_names(body: Common) -> dict[str, str]:
    """Sampling parameters that a chat request names otherwise."""
    if not isinstance(body, ChatRequest):
        return {}
    names = {"logprobs": "top_logprobs"}
    return names if body.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    found = {}
    for token, bias in given.items():
        try:
            found[int(token)] = float(bias)
        except ValueError:
            raise ParameterError("logit_bias", f"has the key {quoted(token)}, but keys are token ids") from None
        except OverflowError:
            raise ParameterError("logit_bias", "has a number that is too large") from None
    return found


def _depth(body: Common) -> int | None:
    wanted = body.speculation
    if wanted is None:
        return None
    if wanted.mode == "off":
        if wanted.depth:
            raise ParameterError("speculation", f"is off, but has depth {wanted.depth}", "leave depth out")
        return 0
    return wanted.depth
