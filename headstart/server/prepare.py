"""From a request body to what the engine takes: prompt ids, parameters, constraint, and how to read the answer.

Everything here may take a while (templates, tokenizing, grammars): it runs in a worker thread.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from headstart.api import LLM
from headstart.core import Request, SamplingParams
from headstart.errors import CapacityError, UsageError
from headstart.server import limits
from headstart.server.accounts import Account
from headstart.server.chat_prompt import Chat
from headstart.server.schema import ChatRequest, Common, CompletionRequest, NamedTool, StructuredOutputs
from headstart.text.grammar_spec import GrammarSpec, ToolCalls, ToolFrame
from headstart.text.parsers import Parser, is_opened, make_parser

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where none is given, as OpenAI and vLLM have it."""
AS_GIVEN = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "min_tokens",
            "ignore_eos", "n", "bad_words", "allowed_token_ids")  # fmt: skip
"""Fields of a body that are those of SamplingParams."""
FORCED_FORMAT = "hermes"
"""How calls are written that a grammar enforces: whatever the model's own format, this one is then read."""


@dataclass(frozen=True)
class Formats:
    """How this model writes calls and thoughts; None: it has no way of its own. `parse_special`: names of special
    tokens in messages become those tokens."""

    tools: str | None = None
    reasoning: str | None = None
    parse_special: bool = False


@dataclass(frozen=True)
class Job:
    """One HTTP request, ready to run. `requests`: one for each prompt; `parser` makes the reader of one answer."""

    requests: list[Request]
    prompts: list[str] = field(default_factory=list)  # texts to echo
    parser: Callable[[], Parser] | None = None
    keeps_special: bool = False
    keeps_stop: bool = False
    continues: bool = False  # the output goes on in the middle of a text

    def owned(self, account: Account, priority: int | None) -> Job:
        """Asked for by somebody, whose answers nobody else gets to see as drafts."""
        return replace(self, requests=[owned(request, account, priority) for request in self.requests])


def owned(request: Request, account: Account, priority: int | None = None) -> Request:
    """With its turn among those of others."""
    share, first = account.limits.share, account.priority(priority)
    return replace(request, owner=account.name, share=share, priority=first)


def num_choices(body: Common) -> int:
    """How many texts a body asks for."""
    prompts = len(_prompts(body.prompt)) if isinstance(body, CompletionRequest) else 1
    return prompts * max(body.n or 1, 1)


def is_constrained(body: Common) -> bool:
    """May a grammar have to be compiled?"""
    named = (body.response_format, body.structured_outputs, body.guided_json, body.guided_regex, body.guided_choice,
             body.guided_grammar, body.tools if isinstance(body, ChatRequest) else None)  # fmt: skip
    return any(each is not None for each in named)


def completion_job(llm: LLM, body: CompletionRequest) -> Job:
    """Raises UsageError, CapacityError or ModelError for what cannot be done."""
    if body.suffix:
        raise UsageError("suffix is not supported", "leave it out")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UsageError("best_of is not supported", "use n")
    logprobs = body.logprobs
    top = body.prompt_logprobs if body.prompt_logprobs is not None else (logprobs if body.echo else None)
    limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params, constraint = _params(llm, body, limit, logprobs, top), constraint_of(body)
    requests: list[Request] = []
    texts: list[str] = []
    for prompt in _prompts(body.prompt):
        if prompt == "":
            raise UsageError("the prompt is empty", "give at least one character")
        given = encoded(llm, prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
        ids = _truncated(llm, body, given, limit)
        requests.append(_request(llm, ids, params, body, constraint))
        params = replace(params, seed=requests[0].seed)  # one drawn seed for all of them, since one is reported
        if body.echo:
            whole = isinstance(prompt, str) and len(ids) == len(given)
            texts.append(str(prompt) if whole else llm.tokenizer.decode(ids, skip_special=False))
    _check_prompt_logprobs(requests)
    return Job(
        requests,
        texts,
        keeps_special=not body.skip_special_tokens,
        keeps_stop=body.include_stop_str_in_output,
        continues=True,
    )


def chat_job(llm: LLM, formats: Formats, body: ChatRequest) -> Job:
    """Raises UsageError, CapacityError or ModelError for what cannot be done."""
    if body.top_logprobs is not None and not body.logprobs:
        raise UsageError("top_logprobs needs logprobs", "set logprobs to true")
    if body.echo:
        raise UsageError("echo is not supported in chats", "use /v1/completions")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    forced = _forced_tools(body, tools)
    constraint = constraint_of(body)
    if forced is not None:
        if constraint is not None:
            raise UsageError("tool_choice and a response format both constrain the text", "ask for one of them")
        constraint = GrammarSpec("tools", forced)
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    ids, prompt = _chat_prompt(llm, formats, body, tools, limit)
    room = llm.engine.max_length - len(ids)
    if room <= 0:
        raise CapacityError(
            f"the prompt has {len(ids)} tokens, but the context holds {llm.engine.max_length}", "shorten the messages"
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _params(llm, body, room if limit is None else limit, logprobs, body.prompt_logprobs)
    requests = [_request(llm, ids, params, body, constraint)]
    _check_prompt_logprobs(requests)
    own = formats.tools or FORCED_FORMAT  # as the prompt asks for where the template has no place for tools
    calls = FORCED_FORMAT if forced is not None else own if tools and body.tool_choice != "none" else None
    thinks = formats.reasoning if forced is None and constraint is None else None
    parser = None
    if calls is not None or thinks is not None:
        opened = thinks is not None and is_opened(thinks, prompt)
        parser = partial(make_parser, calls, tools, thinks, reasoning_opened=opened)
    return Job(
        requests,
        parser=parser,
        keeps_special=parser is not None or not body.skip_special_tokens,
        keeps_stop=body.include_stop_str_in_output,
        continues=body.continue_final_message,
    )


def _chat_prompt(
    llm: LLM, formats: Formats, body: ChatRequest, tools: list[dict[str, Any]], limit: int | None
) -> tuple[list[int], str]:
    chat = Chat.of(body, tools if body.tool_choice != "none" else [], formats.parse_special)
    ids, prompt = chat.encoded(llm)
    return _truncated(llm, body, ids, limit or 1), prompt


def prompt_ids(llm: LLM, formats: Formats, body: Common) -> list[list[int]]:
    """What a body's prompts come to, without the rest of the work. Raises UsageError, CapacityError or ModelError."""
    if isinstance(body, ChatRequest):
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
        limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
        return [_chat_prompt(llm, formats, body, tools, limit)[0]]
    assert isinstance(body, CompletionRequest)
    limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    given = (
        encoded(llm, each, body.add_special_tokens) if isinstance(each, str) else each for each in _prompts(body.prompt)
    )
    return [_truncated(llm, body, ids, limit) for ids in given]


def encoded(llm: LLM, text: str, add_special: bool) -> list[int]:
    """Ids of a raw text. Raises CapacityError before it costs anything where it is longer than any that fits."""
    check_length(llm, text)
    return llm.tokenizer.encode(text, add_special=add_special)


def check_length(llm: LLM, text: str) -> None:
    """A text has at least as many tokens as it has bytes, divided by those of the longest token."""
    most = llm.engine.max_length * llm.tokenizer.longest
    if len(text) > most:
        raise CapacityError(
            f"the prompt has {len(text)} characters, but the context holds {llm.engine.max_length} tokens",
            "shorten the prompt",
        )


def _truncated(llm: LLM, body: Common, ids: list[int], limit: int) -> list[int]:
    wanted = body.truncate_prompt_tokens
    if wanted is None:
        return ids
    most = max(llm.engine.max_length - limit, 1) if wanted == -1 else wanted
    if most == 0:
        raise UsageError("truncate_prompt_tokens is 0, which leaves no prompt", "give at least 1, or -1")
    return ids[-most:]


def _request(llm: LLM, ids: list[int], params: SamplingParams, body: Common, constraint: GrammarSpec | None) -> Request:
    request = llm.request(ids, params, depth=_depth(body), constraint=constraint)
    return replace(request, cache_salt=body.cache_salt) if body.cache_salt else request


def _check_prompt_logprobs(requests: Seq[Request]) -> None:
    count = sum(
        len(request.prompt_ids) * (request.params.prompt_logprobs + 1) * request.params.n
        for request in requests
        if request.params.prompt_logprobs is not None
    )
    if count > limits.PROMPT_LOGPROBS:
        raise CapacityError(
            f"{count} logprobs of prompt tokens are asked for, but an answer holds {limits.PROMPT_LOGPROBS}",
            "ask for fewer alternatives, or send fewer prompts at once",
        )


def constraint_of(body: Common) -> GrammarSpec | None:
    """The one constraint that a body asks for. Raises UsageError for several."""
    specs: list[GrammarSpec] = []
    if body.response_format is not None and body.response_format.type == "json_object":
        specs.append(GrammarSpec("json_object"))
    elif body.response_format is not None and body.response_format.type == "json_schema":
        wrapper = body.response_format.json_schema
        if wrapper is None or "schema" not in wrapper:
            raise UsageError("response_format json_schema has no schema", 'give {"json_schema": {"schema": {...}}}')
        specs.append(GrammarSpec("json_schema", wrapper["schema"]))
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


def _forced_tools(body: ChatRequest, tools: list[dict[str, Any]]) -> ToolCalls | None:
    """The calls that tool_choice demands."""
    choice = body.tool_choice
    if choice in (None, "none", "auto"):
        return None
    if not tools:
        raise UsageError("tool_choice demands a call, but there are no tools", "give tools")
    separator = "\n" if body.parallel_tool_calls and not isinstance(choice, NamedTool) else None
    name = choice.function.name if isinstance(choice, NamedTool) else None
    return ToolCalls(tools, name, ToolFrame(separator=separator))


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise UsageError("prompt is an empty list", "give at least one prompt")
    return list(prompt)


def _params(llm: LLM, body: Common, limit: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    """Raises UsageError for values out of range. What is null is as the model recommends, or has OpenAI's default."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    given: dict[str, Any] = {name: getattr(body, name) for name in AS_GIVEN} | {
        "temperature": body.temperature,
        "top_k": None if body.top_k is None else max(body.top_k, 0) if body.top_k >= -1 else body.top_k,
        "logit_bias": _logit_bias(body.logit_bias),
        "max_tokens": limit,
        "stop": tuple(text for text in stop if text),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return SamplingParams(**{"temperature": 1.0, **llm.recommended, **chosen})


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    try:
        return {int(token): float(bias) for token, bias in given.items()}
    except (ValueError, OverflowError) as error:
        raise UsageError(f"logit_bias: {limits.shortened(str(error))}", "keys are token ids") from None


def _depth(body: Common) -> int | None:
    wanted = body.speculation
    if wanted is None:
        return None
    if wanted.mode == "off":
        if wanted.depth:
            raise UsageError(f"speculation is off, but has depth {wanted.depth}", "leave depth out")
        return 0
    return wanted.depth
