"""Constraints of generated text: which tokens may come next, by grammar, JSON schema, regex, choice or tools.

There is one `GrammarCompiler` per model. `GrammarCompiler.compile` returns a start state of a `GrammarSpec`, which one
sequence advances. A constraint that may be expensive is first compiled in another process, as a test.
"""

import threading
import time
from collections import OrderedDict
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any
from weakref import ref

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from headstart.core import Mask, token_mask
from headstart.errors import UsageError
from headstart.text.grammar_limits import LIMITS, GrammarLimits, is_light
from headstart.text.grammar_sandbox import CompileSandbox, TooSlowError, run_with_stack
from headstart.text.grammar_spec import GrammarSpec, Kind, ToolCalls, error_cause, llguidance_source
from headstart.text.grammar_state import GrammarState, SharedLexer
from headstart.text.grammar_vocabulary import LibraryVocabulary, TokenTable

if TYPE_CHECKING:
    from headstart.text.tokenizer import Tokenizer

__all__ = ["GrammarCompiler", "GrammarSpec", "GrammarState", "Mask", "ToolCalls"]

RECOMPILE_SECONDS = 0.2  # a grammar that takes longer to compile is not compiled again during generation
LIGHT_FIXED, LIGHT_FACTOR = 2**17, 128
"""Estimated bytes of a light grammar: LIGHT_FIXED + LIGHT_FACTOR * length of its text (at most 110 was measured)."""


class GrammarCompiler:
    """Compiles grammars over one vocabulary. Thread-safe. `prepare` or the first `compile` builds the vocabulary.

    vocab_size: number of logits; ids without text are never allowed. limits: of compilation and cache. (The limits of
    a constraint's value are checked by GrammarSpec.)
    """

    def __init__(self, tokenizer: "Tokenizer | TokenTable", vocab_size: int, limits: GrammarLimits = LIMITS) -> None:
        self.vocab_size = vocab_size
        self.limits = limits
        self._tokenizer = tokenizer
        self._cache = _CompiledCache(limits.cached_bytes)
        self._preparing = threading.Lock()
        quick = replace(limits, seconds=min(limits.quick_seconds, limits.seconds))
        table = partial(TokenTable.of, tokenizer)
        self._quick, self._slow = (CompileSandbox(table, vocab_size, each) for each in (quick, limits))

    def prepare(self) -> None:
        """Build llguidance's vocabulary. A large one takes a second, during which the GIL is held."""
        with self._preparing:
            assert self._library is not None

    def compile(self, spec: GrammarSpec) -> GrammarState:
        """A new state at the start of `spec`. Raises UsageError for an invalid or too expensive constraint, BusyError
        if too many wait to be compiled."""
        if (cached := self._cache.find(spec)) is not None:
            return cached.copy()
        if is_light(spec.kind, spec.plain, len(spec.key)):
            return self._compile_here(spec, LIGHT_FIXED + LIGHT_FACTOR * len(spec.key))
        try:
            return self._compile_in_sandbox(spec, self._quick)
        except TooSlowError:
            return self._compile_in_sandbox(spec, self._slow)

    def _compile_in_sandbox(self, spec: GrammarSpec, sandbox: CompileSandbox) -> GrammarState:
        with sandbox.reserve():
            cached = self._cache.find(spec)  # compiled meanwhile
            return cached.copy() if cached is not None else self._compile_here(spec, len(spec.key) + sandbox.run(spec))

    def _compile_here(self, spec: GrammarSpec, num_bytes: int) -> GrammarState:
        begun = time.perf_counter()
        state = run_with_stack(2 * self.limits.stack, lambda: self.start(spec, num_bytes))
        state.lexer.compile_seconds = time.perf_counter() - begun
        self._cache.add(spec, state)
        return state.copy()

    def restart(self, spec: GrammarSpec, failed: SharedLexer) -> GrammarState | None:
        """A start state of `spec` with another lexer than `failed`; None if compiling takes over RECOMPILE_SECONDS."""
        cached = self._cache.find(spec)
        if cached is not None and cached.lexer is not failed:
            return cached
        return self._compile_here(spec, failed.compiled_bytes) if failed.compile_seconds < RECOMPILE_SECONDS else None

    def start(self, spec: GrammarSpec, num_bytes: int = 0) -> GrammarState:
        """Compile `spec` in this thread, without the sandbox. num_bytes: estimated memory of the state. Raises
        UsageError for an invalid constraint or one that no text can satisfy."""
        self.prepare()
        matcher = self._matcher(spec)
        if matcher.is_error():
            raise UsageError(f"the {spec.kind} constraint is not valid: {self._cause(spec, matcher)}")
        masks = self.end_ids, self._with_text, self._ends, self._special_bits
        state = GrammarState(matcher, SharedLexer(num_bytes), *masks, partial(_restart, ref(self), spec.kind, spec.key))
        state.mask()  # sets state.error if no text satisfies the grammar
        if state.error:
            raise UsageError(f"the {spec.kind} constraint cannot be used: {state.error}")
        return state

    def _matcher(self, spec: GrammarSpec) -> LLMatcher:
        limits = LLParserLimits(max_lexer_states=self.limits.lexer_states)
        return LLMatcher(self._library, llguidance_source(spec, self._special), log_level=0, limits=limits)

    def _cause(self, spec: GrammarSpec, failed: LLMatcher) -> str:
        """Why a grammar is not valid; of several tools, with the name of the first that has the fault."""
        for tool in spec.value.tools if spec.kind == "tools" and spec.value.name is None else ():
            alone = self._matcher(GrammarSpec("tools", ToolCalls([tool])))
            if alone.is_error():
                return f"{tool['function']['name']}: {error_cause(spec.kind, alone.get_error())}"
        return error_cause(spec.kind, failed.get_error())

    @cached_property
    def end_ids(self) -> frozenset[int]:
        """End-of-text ids below vocab_size."""
        return frozenset(token for token in self._tokenizer.eos_ids if 0 <= token < self.vocab_size)

    @cached_property
    def _library(self) -> Any:
        vocabulary = LibraryVocabulary(self._tokenizer, self.vocab_size, self.end_ids)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=sorted(self.end_ids) or [self.vocab_size])

    @cached_property
    def _special(self) -> dict[str, int]:
        ids = sorted(self._tokenizer.special_ids)
        return {name: token for token in ids if token < self.vocab_size if (name := self._tokenizer.token_text(token))}

    @cached_property
    def _special_bits(self) -> Mask:
        ids = [token for token in self._tokenizer.special_ids if token < self.vocab_size]
        return token_mask(ids, self.vocab_size) & self._with_text

    @cached_property
    def _with_text(self) -> Mask:
        known = range(min(self.vocab_size, self._tokenizer.vocab_size))
        return token_mask([i for i in known if self._tokenizer.token_bytes(i)], self.vocab_size) & ~self._ends

    @cached_property
    def _ends(self) -> Mask:
        return token_mask(self.end_ids, self.vocab_size)


class _CompiledCache:
    """The most recently used compiled grammars, of at most `max_bytes` together. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._states: OrderedDict[tuple[str, str], GrammarState] = OrderedDict()

    def find(self, spec: GrammarSpec) -> GrammarState | None:
        """The cached state of a spec, or None. A state whose lexer has failed or grown too large is dropped."""
        key = spec.kind, spec.key
        with self._lock:
            state = self._states.pop(key, None)
            if state is None or state.lexer.has_failed or state.lexer.num_bytes > self._max_bytes // 2:
                return None
            self._states[key] = state
            return state

    def add(self, spec: GrammarSpec, state: GrammarState) -> None:
        with self._lock:
            self._states[spec.kind, spec.key] = state
            while self.num_bytes > self._max_bytes:
                self._states.popitem(last=False)

    @property
    def num_bytes(self) -> int:
        return sum(each.lexer.num_bytes for each in self._states.values())


def _restart(compiler: ref[GrammarCompiler], kind: Kind, key: str, failed: SharedLexer) -> GrammarState | None:
    """`GrammarCompiler.restart` through a weak reference, so that states do not keep their compiler alive."""
    alive = compiler()
    return alive.restart(GrammarSpec.of_key(kind, key), failed) if alive is not None else None
