"""`SamplingParams`: how a request picks its tokens, checked when it is made."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from headstart.errors import UsageError

MOST = 1e18
"""No parameter means anything above this."""
LEAST_PENALTY, MOST_PENALTY = 1e-3, 1e3
"""Of repetition: what multiplies logits beyond these leaves no numbers to choose by."""
RECOMMENDED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields that a model's generation_config.json may say; one that is not given has that value."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request picks its tokens. Raises UsageError for a value of another type or outside its range.

    bad_words: texts that the output shall not hold, each as the tokenizer writes it, with and without a space before.
    allowed_token_ids: nothing else is chosen; None: everything may be.
    """

    temperature: float = 0.0
    top_k: int = 0  # 0 = off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: Seq[str] = ()
    allowed_token_ids: Seq[int] | None = None
    seed: int | None = None  # None: drawn at random and reported
    max_tokens: int = 256
    min_tokens: int = 0
    ignore_eos: bool = False
    stop: Seq[str] = ()  # a tuple once it is made, as are the other lists
    stop_token_ids: Seq[int] = ()
    logprobs: int | None = None  # number of top alternatives beside the chosen token
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        self._number("temperature", 0, hint="0 is greedy")
        self._whole("top_k", 0, hint="0 turns top-k off")
        self._number("top_p", 0, 1, "1 turns top-p off")
        self._number("min_p", 0, 1, "0 turns min-p off")
        if isinstance(self.repetition_penalty, Real) and not self.repetition_penalty > 0:
            raise UsageError(f"repetition_penalty is {self.repetition_penalty}, but must be above 0", "1 is off")
        self._number("repetition_penalty", LEAST_PENALTY, MOST_PENALTY, "1 is off")
        self._number("presence_penalty", -2, 2)
        self._number("frequency_penalty", -2, 2)
        self._whole("max_tokens", 1)
        self._whole("min_tokens", 0, self.max_tokens, "min_tokens cannot exceed max_tokens")
        self._whole("n", 1, 128)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, 20)
        if self.seed is not None:
            _check_whole("seed", self.seed)
            if not 0 <= self.seed < 2**64:
                raise UsageError(f"seed is {self.seed}, but must be between 0 and 2^64 - 1")
        self._check_lists()

    def _check_lists(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise UsageError(f"logit_bias is {_shown(self.logit_bias)}, but must be a mapping", "token id: bias")
        for token, bias in self.logit_bias.items():
            _check_whole("a token of logit_bias", token)
            _in_range(f"logit_bias[{token}]", bias, -100, 100)
        for name, what in (("stop", "stop string"), ("bad_words", "bad word")):
            texts = self._list(name, str, "a text or a list of texts")
            if any(not text for text in texts):
                raise UsageError(f"a {what} is empty", "leave it out")
        self._list("stop_token_ids", Integral, "a list of token ids")
        if self.allowed_token_ids is not None and not self._list("allowed_token_ids", Integral, "a list of token ids"):
            raise UsageError("allowed_token_ids is empty", "leave it out, or allow at least one token")

    def _list(self, name: str, kind: type, wanted: str) -> tuple[Any, ...]:
        """The field as a tuple, which it is from now on; one text stands for a list of it."""
        value: Any = getattr(self, name)
        values = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
        if values is None or isinstance(value, bytes | Mapping):
            raise UsageError(f"{name} is {_shown(value)}, but must be {wanted}")
        for each in values:
            if not isinstance(each, kind) or isinstance(each, bool):
                raise UsageError(f"{name} holds {_shown(each)}, but must be {wanted}")
        object.__setattr__(self, name, values)
        return values

    def _number(self, name: str, low: float, high: float = math.inf, hint: str = "") -> None:
        _in_range(name, getattr(self, name), low, high, hint)

    def _whole(self, name: str, low: float, high: float = math.inf, hint: str = "") -> None:
        value = getattr(self, name)
        _check_whole(name, value)
        _in_range(name, value, low, high, hint)


def recommended(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's generation_config.json says of sampling, as fields of SamplingParams; nothing where it is silent.
    Raises UsageError for values that mean nothing.

    As vLLM reads it: `do_sample` need not be there. Where it is false, decoding is greedy (transformers)."""
    found = {name: generation_config[name] for name in RECOMMENDED if generation_config.get(name) is not None}
    sampled = generation_config.get("do_sample")
    if sampled is False:
        found = {name: value for name, value in found.items() if name == "repetition_penalty"} | {"temperature": 0.0}
    elif sampled or found.keys() - {"repetition_penalty"}:
        found = {"temperature": 1.0} | found
    SamplingParams(**found)
    return found


def _check_whole(name: str, value: Any) -> None:
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise UsageError(f"{name} is {_shown(value)}, but must be a whole number")


def _in_range(name: str, value: Any, low: float, high: float, hint: str = "") -> None:
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number:
        raise UsageError(f"{name} is {_shown(value)}, but must be a number", hint)
    if not low <= value <= min(high, MOST):  # NaN is in no range; integers may be too large for a float
        bound = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
        raise UsageError(f"{name} is {value}, but must be a finite number {bound}", hint)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
