"""`SamplingParams`, and the table of its fields from which flags, request bodies, OpenAPI and docs derive."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field, fields, replace
from functools import cache
from numbers import Integral, Real
from typing import Any, Literal

from headstart.errors import ParameterError, quoted
from headstart.wording import LEAVE_OUT

MAX_VALUE = 1e18  # upper bound of numbers without one of their own
Kind = Literal["number", "integer", "boolean", "texts", "token_ids", "token_numbers"]
_KINDS: Mapping[str, Kind] = {
    "float": "number", "int": "integer", "bool": "boolean", "Seq[str]": "texts", "Seq[int]": "token_ids",
    "Mapping[int, float]": "token_numbers",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Control:
    """The input of the playground's settings panel for one parameter."""

    label: str
    step: float = 1
    low: float | None = None  # of the input; None: the parameter's own range
    high: float | None = None
    empty: str | None = None  # shown in an empty input; None: the default of requests over HTTP
    is_main: bool = False  # shown at once; other inputs are folded
    fallback: str = ""  # sent for an empty input if the model recommends no value
    initial: str = ""  # value on a first visit; empty: the parameter is not sent


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A row of the table of sampling parameters. The command line, request bodies, OpenAPI, docs/server.md and the
    playground derive from it."""

    name: str = ""
    kind: Kind = "number"
    default: Any = None  # of SamplingParams and the command line
    help: str  # one sentence
    low: float = -math.inf
    high: float = math.inf
    hint: str = ""  # of the error for a value out of range
    flag: str | None = ""  # of the command line; "": --name; None: no flag here
    in_generation_config: bool = False  # may generation_config.json set the default?
    http_default: Any = None  # of requests over HTTP, where it differs from `default`
    http_low: float | None = None  # of requests over HTTP, where it differs from `low`
    http_modulus: int | None = None  # values below `low` over HTTP stand for their remainder; None: for `low`
    http_help: str = ""  # meaning of values below `low` over HTTP
    names: Mapping[str, str] = field(default_factory=dict)  # API -> its own field; OpenAI's completions take `name`
    control: Control | None = None


def _parameter(default: Any, help: str, **row: Any) -> Any:
    metadata = {"parameter": Parameter(help=help, default=default, **row)}
    if isinstance(default, dict):
        return field(default_factory=dict, metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request picks its tokens. Raises ParameterError for a value of another type or outside its range.
    Lists become tuples; one text stands for a list of one."""

    max_tokens: int = _parameter(
        256, "Longest output, in tokens.", low=1,
        names={"anthropic": "max_tokens", "responses": "max_output_tokens", "ollama": "num_predict"},
        control=Control(label="Max tokens", empty="all", initial="512", is_main=True),
    )  # fmt: skip
    min_tokens: int = _parameter(0, "Shortest output, in tokens.", low=0)
    temperature: float = _parameter(
        0.0, "Divides the logits; 0 is greedy.", low=0, hint="0 is greedy", http_default=1.0,
        in_generation_config=True, names={"anthropic": "temperature", "responses": "temperature"},
        control=Control(label="Temperature", step=0.1, high=2, fallback="0.7", is_main=True),
    )  # fmt: skip
    top_p: float = _parameter(
        1.0, "Keep the most likely tokens of this total probability; 1 is off.", low=0, high=1,
        hint="1 turns top-p off", in_generation_config=True, names={"anthropic": "top_p", "responses": "top_p"},
        control=Control(label="Top p", step=0.05),
    )  # fmt: skip
    top_k: int = _parameter(
        0, "Keep the k most likely tokens; 0 is off.", low=0, http_low=-1, http_help="-1 means 0.",
        hint="0 turns top-k off", in_generation_config=True, names={"anthropic": "top_k"},
        control=Control(label="Top k", low=0, empty="off"),
    )  # fmt: skip
    min_p: float = _parameter(
        0.0, "Drop tokens below this share of the most likely token's probability; 0 is off.", low=0, high=1,
        hint="0 turns min-p off", in_generation_config=True, control=Control(label="Min p", step=0.01),
    )  # fmt: skip
    repetition_penalty: float = _parameter(
        1.0, "Divides the logits of tokens that the prompt or the output holds; 1 is off.", low=1e-3, high=1000,
        hint="1 is off", in_generation_config=True, names={"ollama": "repeat_penalty"},
        control=Control(label="Repetition", step=0.05, low=0.1, high=2),
    )  # fmt: skip
    presence_penalty: float = _parameter(
        0.0, "Subtracted from the logits of tokens that the output holds.", low=-2, high=2,
        control=Control(label="Presence", step=0.1),
    )  # fmt: skip
    frequency_penalty: float = _parameter(
        0.0, "Subtracted from a token's logit for each time that the output holds the token.", low=-2, high=2,
        control=Control(label="Frequency", step=0.1),
    )  # fmt: skip
    logit_bias: Mapping[int, float] = _parameter(
        {}, "Token id -> number that is added to its logit.", low=-100, high=100
    )
    stop: Seq[str] = _parameter((), "Texts before which the output stops.", names={"anthropic": "stop_sequences"})
    stop_token_ids: Seq[int] = _parameter((), "Tokens at which the output stops.", flag="--stop-token-id")
    bad_words: Seq[str] = _parameter(
        (), "Texts that the output does not hold, as the tokenizer writes each, with and without a space before.",
        flag=None,
    )  # fmt: skip
    allowed_token_ids: Seq[int] | None = _parameter(None, "The only tokens that may be chosen.", flag=None)
    ignore_eos: bool = _parameter(False, "Go on past the model's end of text.")
    logprobs: int | None = _parameter(None, "Report so many of the most likely tokens per position.", low=0, high=20)
    prompt_logprobs: int | None = _parameter(None, "The same for each token of the prompt.", low=0, high=20, flag=None)
    n: int = _parameter(1, "Number of outputs.", low=1, high=128)
    seed: int | None = _parameter(
        None, "Seed of the random numbers. Default: drawn at random, and reported.", low=0, high=2**64 - 1, flag=None,
        http_low=-(2**63), http_modulus=2**64,
        http_help="-1 means none; other negative seeds stand for 2**64 more.",
        control=Control(label="Seed", empty="random"),
    )  # fmt: skip

    def __post_init__(self) -> None:
        for row in parameters().values():
            value = getattr(self, row.name)
            if row.kind in _CHECKS and (value is not None or row.default is not None):
                _CHECKS[row.kind](self, row, value)
        _check_range("min_tokens", self.min_tokens, 0, self.max_tokens, "min_tokens cannot exceed max_tokens")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ParameterError("allowed_token_ids", "is empty", LEAVE_OUT + ", or allow at least one token")

    def _check_number(self, row: Parameter, value: Any) -> None:
        _check_range(row.name, value, row.low, row.high, row.hint)

    def _check_integer(self, row: Parameter, value: Any) -> None:
        _check_whole(row.name, value)
        is_scoring = row.name == "max_tokens" and self.prompt_logprobs is not None  # of the prompt, without a text
        _check_range(row.name, value, 0 if is_scoring else row.low, row.high, row.hint)
        object.__setattr__(self, row.name, int(value))  # integers of numpy overflow, and are not JSON

    def _check_token_numbers(self, row: Parameter, value: Any) -> None:
        if not isinstance(value, Mapping):
            raise ParameterError(row.name, f"is {quoted(value)}, but must be a mapping", "token id: bias")
        for token, number in value.items():
            if not isinstance(token, Integral) or isinstance(token, bool):
                raise ParameterError(row.name, f"has the key {quoted(token)}, but keys are token ids")
            _check_range(row.name, number, row.low, row.high, verb=f"of token {token} is")

    def _check_boolean(self, row: Parameter, value: Any) -> None:
        if not isinstance(value, bool):
            raise ParameterError(row.name, f"is {quoted(value)}, but must be true or false")

    def _check_texts(self, row: Parameter, value: Any) -> None:
        if any(not text for text in self._as_tuple(row, str, "a text or a list of texts")):
            raise ParameterError(row.name, "has an empty text", LEAVE_OUT)

    def _check_token_ids(self, row: Parameter, value: Any) -> None:
        self._as_tuple(row, Integral, "a list of token ids")

    def _as_tuple(self, row: Parameter, kind: type, wanted: str) -> tuple[Any, ...]:
        """The field as a tuple, which replaces the list that was given."""
        value: Any = getattr(self, row.name)
        values = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
        if values is None or isinstance(value, bytes | Mapping):
            raise ParameterError(row.name, f"is {quoted(value)}, but must be {wanted}")
        for each in values:
            if not isinstance(each, kind) or isinstance(each, bool):
                raise ParameterError(row.name, f"holds {quoted(each)}, but must be {wanted}")
        object.__setattr__(self, row.name, values)
        return values


_CHECKS: Mapping[Kind, Callable[[SamplingParams, Parameter, Any], None]] = {
    "number": SamplingParams._check_number, "integer": SamplingParams._check_integer,
    "boolean": SamplingParams._check_boolean,
    "texts": SamplingParams._check_texts, "token_ids": SamplingParams._check_token_ids,
    "token_numbers": SamplingParams._check_token_numbers,
}  # fmt: skip


@cache
def parameters() -> dict[str, Parameter]:
    """The table of sampling parameters by name, in order of declaration."""
    rows = {}
    for item in fields(SamplingParams):
        row: Parameter = item.metadata["parameter"]
        flag = f"--{item.name.replace('_', '-')}" if row.flag == "" else row.flag
        kind = _KINDS[str(item.type).removesuffix(" | None")]
        rows[item.name] = replace(row, name=item.name, kind=kind, flag=flag)
    return rows


def names_in(api: str) -> dict[str, str]:
    """Sampling parameters that an API has fields for: SamplingParams' name -> the API's."""
    return {row.name: row.names[api] for row in parameters().values() if api in row.names}


def recommended_names() -> list[str]:
    """SamplingParams fields that a model's generation_config.json may set."""
    return [row.name for row in parameters().values() if row.in_generation_config]


def recommended(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """SamplingParams fields that a model's generation_config.json sets. Raises ParameterError for values out of range.

    Read as vLLM reads it: `do_sample` may be absent. Where it is false, decoding is greedy (transformers)."""
    found = {name: generation_config[name] for name in recommended_names() if generation_config.get(name) is not None}
    sampled = generation_config.get("do_sample")
    if sampled is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    elif sampled or found.keys() - {"repetition_penalty"}:
        found = {"temperature": 1.0} | found
    SamplingParams(**found)
    return found


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ParameterError(name, f"is {quoted(value)}, but must be a whole number")


def _check_range(name: str, value: Any, low: float, high: float, hint: str = "", verb: str = "is") -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise ParameterError(name, f"{verb} {quoted(value)}, but must be a number", hint)
    most = MAX_VALUE if high == math.inf else high
    if not low <= value <= most:  # NaN is in no range
        bound = f"at least {low:g}" if high == math.inf and value < low else f"between {low:g} and {most}"
        raise ParameterError(name, f"{verb} {value}, but must be {bound}", hint)
