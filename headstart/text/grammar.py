"""Constraints of generated text: which tokens may come next, by grammar, JSON schema, regex, choice or tools.

`GrammarCompiler` is made once per model, `GrammarCompiler.compile` gives the start state of a `GrammarSpec`, and each
sequence walks a copy of it. Whatever is not known to be light is compiled in another process first.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any
from weakref import ref

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headstart.core import Mask
from headstart.errors import UsageError
from headstart.text.grammar_limits import LIMITS, GrammarLimits, is_light
from headstart.text.grammar_spec import GrammarSpec, Kind, ToolCalls, ToolFrame, source_of, what_is_wrong
from headstart.text.grammar_state import GrammarState, Lexer
from headstart.text.grammar_trial import TooSlowError, Trial, on_stack
from headstart.text.grammar_vocabulary import Speller, Spelling, Vocabulary

__all__ = ["GrammarCompiler", "GrammarSpec", "GrammarState", "Mask", "ToolCalls", "ToolFrame"]

RENEWED_SECONDS = 0.2
"""A grammar that took longer is not compiled again while texts are made."""
LIGHT_FIXED, LIGHT_FACTOR = 2**17, 128
"""Memory of what was not tried: a part for each grammar, and a factor to its bytes (110 was the most measured)."""


class GrammarCompiler:
    """Grammars over one vocabulary. Nothing is built before `prepare` or the first `compile`. Any thread may compile.

    vocab_size: ids that logits have; the ids that the tokenizer has no text for are never allowed. limits: of what
    is compiled (GrammarSpec knows those of its value).
    """

    def __init__(self, tokenizer: Speller, vocab_size: int, limits: GrammarLimits = LIMITS) -> None:
        self.vocab_size = vocab_size
        self.limits = limits
        self.num_words = -(-vocab_size // 32)
        self._tokenizer = tokenizer
        self._kept = _Kept(limits.cached_bytes)
        quick = replace(limits, seconds=min(limits.quick_seconds, limits.seconds))
        self._quick, self._slow = (Trial(lambda: Spelling.of(tokenizer), vocab_size, each) for each in (quick, limits))

    def prepare(self) -> None:
        """Build what all grammars need: seconds for a large vocabulary, in which no other thread runs."""
        assert self._library is not None
        self._tokenizer.encode("", parse_special=False)

    def compile(self, spec: GrammarSpec) -> GrammarState:
        """A new state at the start of `spec`. Raises UsageError for a bad schema, regex, grammar or list of tools, and
        for one that costs too much, BusyError when too many wait for their trial."""
        if (known := self._kept.find(spec)) is not None:
            return known.copy()
        if is_light(spec.kind, spec.plain, len(spec.key)):
            return self._keep(spec, LIGHT_FIXED + LIGHT_FACTOR * len(spec.key))
        try:
            return self._tried(spec, self._quick)
        except TooSlowError:
            return self._tried(spec, self._slow)

    def _tried(self, spec: GrammarSpec, trial: Trial) -> GrammarState:
        with trial.turn():
            known = self._kept.find(spec)  # made while this one waited
            return known.copy() if known is not None else self._keep(spec, len(spec.key) + trial.run(spec))

    def _keep(self, spec: GrammarSpec, num_bytes: int) -> GrammarState:
        begun = time.perf_counter()
        state = on_stack(2 * self.limits.stack, lambda: self.start(spec, num_bytes))
        state.lexer.compile_seconds = time.perf_counter() - begun
        self._kept.add(spec, state)
        return state.copy()

    def renewed(self, spec: GrammarSpec, failed: Lexer) -> GrammarState | None:
        """A start of `spec` with another lexer than the one that has failed; None where that takes too long."""
        known = self._kept.find(spec)
        if known is not None and known.lexer is not failed:
            return known
        return self._keep(spec, failed.compiled_bytes) if failed.compile_seconds < RENEWED_SECONDS else None

    def start(self, spec: GrammarSpec, num_bytes: int = 0) -> GrammarState:
        """The state that `compile` keeps, made here and now. num_bytes: what it is said to hold."""
        limits = LLParserLimits(max_lexer_states=self.limits.lexer_states)
        matcher = LLMatcher(self._library, source_of(spec, self._special), log_level=0, limits=limits)
        if matcher.is_error():
            reason = what_is_wrong(spec.kind, matcher.get_error())
            raise UsageError(f"the {spec.kind} constraint is not valid: {reason}")
        masks = self.end_ids, self._with_text, self._ends, self._special_bits
        state = GrammarState(matcher, Lexer(num_bytes), *masks, partial(_renewed, ref(self), spec.kind, spec.key))
        state.mask()  # finds a dead end
        if state.error:
            raise UsageError(f"the {spec.kind} constraint cannot be used: {state.error}")
        return state

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """End-of-text ids that logits have."""
        return frozenset(token for token in self._tokenizer.eos_ids if 0 <= token < self.vocab_size)

    @cached_property
    def _library(self) -> Any:
        vocabulary = Vocabulary(self._tokenizer, self.vocab_size, self.end_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=sorted(self.end_ids) or [self.vocab_size])

    @cached_property
    def _special(self) -> dict[str, int]:
        ids = sorted(self._tokenizer.special_ids)
        return {name: token for token in ids if token < self.vocab_size if (name := self._tokenizer.token_text(token))}

    @cached_property
    def _special_bits(self) -> Mask:
        ids = [token for token in self._tokenizer.special_ids if token < self.vocab_size]
        return _bits(ids, self.num_words) & self._with_text

    @cached_property
    def _with_text(self) -> Mask:
        known = range(min(self.vocab_size, self._tokenizer.vocab_size))
        return _bits([token for token in known if self._tokenizer.token_bytes(token)], self.num_words) & ~self._ends

    @cached_property
    def _ends(self) -> Mask:
        return _bits(self.end_ids, self.num_words)


class _Kept:
    """The latest compiled grammars within a number of bytes. Those that failed are not kept."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._lock = threading.Lock()
        self._states: OrderedDict[tuple[str, str], GrammarState] = OrderedDict()

    def find(self, spec: GrammarSpec) -> GrammarState | None:
        """None also for one whose lexer has grown too much: a new one begins small."""
        key = spec.kind, spec.key
        with self._lock:
            state = self._states.pop(key, None)
            if state is None or state.lexer.has_failed or state.lexer.num_bytes > self._most // 2:
                return None
            self._states[key] = state
            return state

    def add(self, spec: GrammarSpec, state: GrammarState) -> None:
        with self._lock:
            self._states[spec.kind, spec.key] = state
            while self.num_bytes > self._most:
                self._states.popitem(last=False)

    @property
    def num_bytes(self) -> int:
        return sum(each.lexer.num_bytes for each in self._states.values())


def _renewed(compiler: ref[GrammarCompiler], kind: Kind, key: str, failed: Lexer) -> GrammarState | None:
    """For states, which do not keep their compiler alive."""
    made = compiler()
    return made.renewed(GrammarSpec.of_key(kind, key), failed) if made is not None else None


def _bits(ids: Iterable[int], num_words: int) -> Mask:
    flags = np.zeros(num_words * 32, bool)
    flags[list(ids)] = True
    packed: Mask = np.packbits(flags, bitorder="little").view(np.uint32)
    return packed
