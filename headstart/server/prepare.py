"""From a request body to what the engine takes: prompt ids, parameters, constraint, and how to read the answer.

Everything here may take a while (templates, tokenizing, grammars): it runs in a worker thread.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from headstart.api import LLM
from headstart.core import Request, SamplingParams
from headstart.errors import CapacityError, ModelError, UsageError
from headstart.server.schema import ChatRequest, Common, CompletionRequest, Message, NamedTool, StructuredOutputs
from headstart.text.grammar_spec import GrammarSpec, ToolCalls, ToolFrame
from headstart.text.parsers import Parser, is_opened, make_parser

COMPLETION_TOKENS = 16
"""max_tokens of /v1/completions where none is given, as OpenAI and vLLM have it."""
AS_GIVEN = ("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "min_tokens",
            "ignore_eos", "n")  # fmt: skip
"""Fields of a body that are those of SamplingParams."""
FORCED_FORMAT = "hermes"
"""How calls are written that a grammar enforces: whatever the model's own format, this one is then read."""


@dataclass(frozen=True)
class Formats:
    """How this model writes calls and thoughts; None: it has no way of its own."""

    tools: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class Job:
    """One HTTP request, ready to run. `requests`: one for each prompt; `parser` makes the reader of one answer."""

    requests: list[Request]
    prompts: list[str] = field(default_factory=list)  # texts to echo
    parser: Callable[[], Parser] | None = None
    keeps_special: bool = False
    continues: bool = False  # the output goes on in the middle of a text


def num_choices(body: Common) -> int:
    """How many texts a body asks for."""
    prompts = len(_prompts(body.prompt)) if isinstance(body, CompletionRequest) else 1
    return prompts * max(body.n or 1, 1)


def completion_job(llm: LLM, body: CompletionRequest) -> Job:
    """Raises UsageError, CapacityError or ModelError for what cannot be done."""
    if body.suffix:
        raise UsageError("suffix is not supported", "leave it out")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise UsageError("best_of is not supported", "use n")
    prompts = _prompts(body.prompt)
    logprobs = body.logprobs
    top = body.prompt_logprobs if body.prompt_logprobs is not None else (logprobs if body.echo else None)
    limit = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    params, constraint = _params(body, limit, logprobs, top), constraint_of(body)
    requests: list[Request] = []
    for prompt in prompts:
        requests.append(llm.request(prompt, params, raw=True, depth=_depth(body), constraint=constraint))
        params = replace(params, seed=requests[0].seed)  # one drawn seed for all of them, since one is reported
    texts = [p if isinstance(p, str) else llm.tokenizer.decode(p, skip_special=False) for p in prompts]
    return Job(requests, texts if body.echo else [], continues=True)


def chat_job(llm: LLM, formats: Formats, body: ChatRequest) -> Job:
    """Raises UsageError, CapacityError or ModelError for what cannot be done."""
    if body.top_logprobs is not None and not body.logprobs:
        raise UsageError("top_logprobs needs logprobs", "set logprobs to true")
    tools = [tool.model_dump(exclude_none=True) for tool in body.tools or ()]
    forced = _forced_tools(body, tools)
    constraint = constraint_of(body)
    if forced is not None:
        if constraint is not None:
            raise UsageError("tool_choice and a response format both constrain the text", "ask for one of them")
        constraint = GrammarSpec("tools", forced)
    ids, prompt = rendered(llm, body, tools if body.tool_choice != "none" else [])
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    room = llm.engine.max_length - len(ids)
    if room <= 0:
        raise CapacityError(
            f"the prompt has {len(ids)} tokens, but the context holds {llm.engine.max_length}", "shorten the messages"
        )
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = _params(body, room if limit is None else limit, logprobs, body.prompt_logprobs)
    request = llm.request(ids, params, depth=_depth(body), constraint=constraint)
    own = formats.tools or FORCED_FORMAT  # as `_tool_prompt` asks for where the template has no place for tools
    calls = FORCED_FORMAT if forced is not None else own if tools and body.tool_choice != "none" else None
    thinks = formats.reasoning if forced is None and constraint is None else None
    if calls is None and thinks is None:
        return Job([request])
    opened = thinks is not None and is_opened(thinks, prompt)
    return Job([request], parser=lambda: make_parser(calls, tools, thinks, reasoning_opened=opened), keeps_special=True)


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


def rendered(llm: LLM, body: ChatRequest, tools: list[dict[str, Any]]) -> tuple[list[int], str]:
    """Prompt ids, and the text they stand for."""
    template = llm.chat_template
    if template is None:
        raise UsageError(f"{llm.model.name} has no chat template", "use /v1/completions")
    messages = [_message(each) for each in body.messages]
    own = any("tools" in source for source in template.sources.values())
    if tools and not own:
        messages.insert(0, {"role": "system", "content": _tool_prompt(tools)})
    shown = (tools or None) if own else None
    try:
        text = template.render(messages, body.add_generation_prompt, shown, **_kwargs(body))
    except ModelError as error:  # here it is the messages that the template cannot cope with
        raise UsageError(error.message, error.hint) from error
    return llm.tokenizer.encode(text, add_special=False), text


def _kwargs(body: ChatRequest) -> dict[str, Any]:
    given = dict(body.chat_template_kwargs or {})
    if reserved := given.keys() & {"messages", "tools", "add_generation_prompt"}:
        raise UsageError(f"chat_template_kwargs cannot set {', '.join(sorted(reserved))}")
    return given


def _tool_prompt(tools: Seq[Mapping[str, Any]]) -> str:
    """For templates that have no place for tools: the words that Hermes models are trained on, in short."""
    listed = "\n".join(json.dumps(tool) for tool in tools)
    call = '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
    return f"You may call these functions:\n<tools>\n{listed}\n</tools>\nTo call one, answer with:\n{call}"


def _message(message: Message) -> dict[str, Any]:
    """As templates want it: one text, and arguments of calls as objects."""
    document = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        if other := next((part.type for part in message.content if part.type != "text"), None):
            raise UsageError(f"a message holds a part of type {other!r}", "this model reads text only")
        document["content"] = "".join(part.text or "" for part in message.content)
    document.setdefault("content", "")
    for call in document.get("tool_calls", ()):
        function = call.get("function")
        if isinstance(function, dict) and isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                raise UsageError(f"the arguments of a tool call in the messages are no JSON: {error}") from error
    return document


def _prompts(prompt: Any) -> list[str | list[int]]:
    if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)):
        return [prompt]
    if not prompt:
        raise UsageError("prompt is an empty list", "give at least one prompt")
    return list(prompt)


def _params(body: Common, limit: int, logprobs: int | None, prompt_logprobs: int | None) -> SamplingParams:
    """Raises UsageError for values out of range. What is null has OpenAI's default."""
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    given: dict[str, Any] = {name: getattr(body, name) for name in AS_GIVEN} | {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_k": None if body.top_k is None else max(body.top_k, 0) if body.top_k >= -1 else body.top_k,
        "logit_bias": _logit_bias(body.logit_bias),
        "max_tokens": limit,
        "stop": tuple(text for text in stop if text),
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    return SamplingParams(**{name: value for name, value in given.items() if value is not None})


def _logit_bias(given: Mapping[str, float] | None) -> dict[int, float] | None:
    if not given:
        return None
    try:
        return {int(token): float(bias) for token, bias in given.items()}
    except (ValueError, OverflowError) as error:
        raise UsageError(f"logit_bias: {error}", "keys are token ids") from None


def _depth(body: Common) -> int | None:
    wanted = body.speculation
    if wanted is None:
        return None
    if wanted.mode == "off":
        if wanted.depth:
            raise UsageError(f"speculation is off, but has depth {wanted.depth}", "leave depth out")
        return 0
    return wanted.depth
