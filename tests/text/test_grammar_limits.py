"""Limits of constraints: the compiler process, time and memory, cache, light constraints."""

import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from llguidance import LLMatcher
from support import PATIENCE, until
from test_grammar import compiler, ids, tiny

from headstart.errors import BusyError, HeadstartError, UsageError
from headstart.text import grammar_spec, grammar_vocabulary
from headstart.text.grammar import GrammarCompiler, GrammarSpec, GrammarState, ToolCalls
from headstart.text.grammar_limits import LIMITS, is_light
from headstart.text.grammar_state import SharedLexer
from headstart.text.grammar_vocabulary import LibraryVocabulary
from tests.fuzz import grammars

HEAVY = GrammarSpec("regex", "a{100,200}")
SMALL = replace(LIMITS, seconds=1, address_space=96 * 2**20, stack=2 * 2**20)


@cache
def bounded() -> GrammarCompiler:
    return GrammarCompiler(tiny(), 300, SMALL)


def process_of(compiled: GrammarCompiler) -> subprocess.Popen[bytes]:
    compiled.compile(HEAVY)
    assert compiled._quick._process is not None
    return compiled._quick._process._popen


def chained_rules(count: int) -> str:
    return "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(count)) + f'r{count}: "x"\n'


def chained_definitions(count: int, step: dict[str, Any]) -> dict[str, Any]:
    """A chain of definitions: NEXT in `step` is replaced by a reference to the next one."""

    def put(node: Any, ref: str) -> Any:
        if node == "NEXT":
            return {"$ref": ref}
        if isinstance(node, dict):
            return {key: put(value, ref) for key, value in node.items()}
        return [put(value, ref) for value in node] if isinstance(node, list) else node

    named = {f"d{i}": put(step, f"#/$defs/d{i + 1}") for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**named, f"d{count}": {"type": "string"}}}


STEPS: list[dict[str, Any]] = [
    {"type": "object", "properties": {"a": "NEXT"}, "required": ["a"]},
    {"type": "array", "items": "NEXT"}, {"allOf": ["NEXT"]}, {"anyOf": ["NEXT", {"type": "null"}]},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "value"),
    [("grammar", chained_rules(3000))] + [("json_schema", chained_definitions(900, step)) for step in STEPS],
)
def test_long_chains_compile_or_are_refused(kind: Any, value: Any) -> None:
    """With a stack of 2 MB each chain overflows in the compiler process; with the usual stack it compiles."""
    spec = GrammarSpec(kind, value)
    with pytest.raises(UsageError, match="too complex: compiling it takes too much memory or too deep"):
        bounded().compile(spec)
    compiler("tiny").compile(spec)
    bounded().compile(GrammarSpec("regex", "still"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", {"type": "integer", "multipleOf": 1_234_567}, "more than 1 s|too much memory"),
        ("grammar", "start: " + " ".join(f'"{i}"*' for i in range(60_000)), "."),
        ("choice", [f"{i} of many choices" for i in range(100_000)], "too complex"),
        (
            "json_schema",
            {"anyOf": [{"required": [str(i)], "properties": {str(i): {}}} for i in range(3000)]},
            "complex",
        ),
        ("grammar", chained_rules(6000), "6,002 rules, but may have at most 5,000"),
        ("json_schema", chained_definitions(4000, STEPS[0]), "4,001 definitions"),
        ("json_schema", '{"items":' * 130 + "{}" + "}" * 130, "levels of nesting"),
        ("json_schema", {"enum": list(range(100_001))}, "values"),
        ("json_schema", {"const": "x" * 2**21 + "x"}, "characters"),
        ("choice", ["x"] * 100_001, "choices"),
        ("choice", ["x" * 16_385], "in one choice"),
        ("regex", "x" * 300_000, "characters"),
    ],
)
def test_too_expensive_constraints_are_refused(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        bounded().compile(GrammarSpec(kind, value))
    assert len(caught.value.message) < 500
    assert bounded().compile(HEAVY).mask().any()


@pytest.mark.slow
def test_anyof_of_thousands_is_refused_with_the_reason() -> None:
    schema = {"anyOf": [{"type": "object", "properties": {f"p{i}": {}}, "required": [f"p{i}"]} for i in range(3000)]}
    with pytest.raises(UsageError, match=r"cannot be used: it is too complex, or too long: .*3000 items; max is 2000"):
        compiler("tiny").compile(GrammarSpec("json_schema", schema))


@pytest.mark.slow
def test_many_choices_compile() -> None:
    texts = [f"choice number {i * 7919 % 100_003}" for i in range(20_000)]
    state = compiler("tiny").compile(GrammarSpec("choice", texts))
    assert all(map(state.advance, tiny().encode(texts[-1]))) and state.accepting
    assert 2**20 < state.lexer.compiled_bytes < 2**24  # measured by the compiler process


TRICKY = st.text(alphabet=st.sampled_from('abAB \n\t"\\/.*+?()[]{}|^$#&-~<>_%@!\x00\x1b\x7f\x85é日🎉\u200b\u2028'))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(TRICKY, min_size=1, max_size=6), st.randoms(use_true_random=False))
def test_choices_equal_an_alternation_of_literals(texts: list[str], draw: random.Random) -> None:
    texts += [text + "b" for text in texts[:2]]
    made = compiler("tiny")
    literals = grammar_spec._lark({"start": " | ".join(map(grammar_spec._literal, texts))})
    masks = made.end_ids, made._with_text, made._ends, made._special_bits
    other = GrammarState(LLMatcher(made._library, literals), SharedLexer(0), *masks)
    state = made.compile(GrammarSpec("choice", texts))
    while not state.done:
        allowed = ids(state.mask())
        assert allowed == ids(other.mask()) and state.accepting == other.accepting
        token = draw.choice(allowed)
        assert state.advance(token) == other.advance(token)
    assert other.done and state.accepting == other.accepting


def test_beginning_of_a_forced_text_has_the_ids_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "the other thing is there, and 1234 of them: " * 100
    for name in ("tiny", "sentencepiece"):
        vocabulary = LibraryVocabulary(tokenizer := compiler(name)._tokenizer, tokenizer.vocab_size, ())
        beginning = vocabulary(text)
        with monkeypatch.context() as patched:
            patched.setattr(grammar_vocabulary, "FORCED_WINDOW", len(text))
            whole = vocabulary(text)
        assert 100 < len(beginning) < len(whole) and whole[: len(beginning)] == beginning


@pytest.mark.slow
def test_cache_is_bounded_and_excludes_failures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headstart.text.grammar_state.LEXER_GROWTH", 0)  # the growth estimate depends on time
    compiled = GrammarCompiler(tiny(), 300, replace(LIMITS, cached_bytes=2**20))
    for number in range(24):
        compiled.compile(GrammarSpec("choice", [f"{number} {i}" for i in range(200)]))
        assert compiled._cache.num_bytes <= 2**20
    assert 1 < len(compiled._cache._states) < 24
    kept = list(compiled._cache._states)
    for value in ("(a", "a{200}b)"):
        with pytest.raises(UsageError):
            compiled.compile(GrammarSpec("regex", value))
    assert list(compiled._cache._states) == kept


def test_full_lexer_of_one_text_does_not_end_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """All texts of a grammar share a lexer. When it fails for one text, other texts and look-ahead use a new one."""
    monkeypatch.setattr("headstart.text.grammar_state.RESTART_SECONDS", PATIENCE)
    compiled = GrammarCompiler(tiny(), 300, replace(LIMITS, lexer_states=300))
    spec = GrammarSpec("regex", "(.*a.{40})+")
    full, other, draw = compiled.compile(spec), compiled.compile(spec), random.Random(1)
    for token in (tokens := tiny().encode("banana")):
        assert other.advance(token)
    before = other.mask()
    while allowed := ids(full.mask()):
        full.advance(draw.choice(allowed))
    assert "too many states" in full.error and full.lexer.has_failed
    for token in tokens:
        assert (other.masks(tokens)[0] == before).all()
        assert other.advance(token)
        before = other.mask()
    assert not other.error and other.lexer is not full.lexer
    other.rollback(len(other))
    assert (other.mask() == compiled.compile(spec).mask()).all()


@pytest.mark.slow
def test_compiler_process_inherits_no_sockets_and_is_restarted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.set_inheritable(True)
        compiled = GrammarCompiler(tiny(), 300)
        process = process_of(compiled)
        links = {str(link.readlink()) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
    assert len(links) == 3 and not [link for link in links if link.startswith("socket")]
    os.kill(process.pid, signal.SIGKILL)
    assert compiled.compile(GrammarSpec("regex", "a{100,300}")).mask().any()
    last = process_of(compiled)
    assert last.pid != process.pid
    del compiled
    assert last.poll() is not None  # ended with its last user


def test_light_constraints_start_no_process() -> None:
    compiled = GrammarCompiler(tiny(), 300)
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "[a-z]{2,9}"}}, "required": ["a"]}
    for spec in (GrammarSpec("json_schema", schema), GrammarSpec("choice", ["a", "b"]), GrammarSpec("regex", "a+b")):
        compiled.compile(spec)
    assert compiled._quick._process is None


OWNER = """
import os, sys, time
from headstart.text.grammar import GrammarCompiler, GrammarSpec
from headstart.text.tokenizer import Tokenizer
from tiny_models import tiny_tokenizer
compiled = GrammarCompiler(Tokenizer(tiny_tokenizer(300), eos_ids=[0]), 300)
compiled.compile(GrammarSpec("regex", "a{100,200}"))
print(compiled._quick._process._popen.pid, flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_compiler_process_ends_with_its_owner() -> None:
    tests = Path(__file__).parents[1]
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True, cwd=tests) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        owner.kill()
    until(lambda: not (status := Path(f"/proc/{pid}/stat")).exists() or status.read_text().split()[2] == "Z")


def test_too_many_waiting_constraints_are_refused() -> None:
    compiled = GrammarCompiler(tiny(), 300, replace(LIMITS, waiting=1))
    waits = threading.Thread(target=lambda: compiled.compile(HEAVY))
    with compiled._quick.reserve():
        waits.start()
        until(lambda: compiled._quick._num_waiting == 2)
        with pytest.raises(BusyError, match="wait to be compiled"):
            compiled.compile(GrammarSpec("regex", "b{100,200}"))
        compiled.compile(GrammarSpec("regex", "light ones do not wait"))
    waits.join()
    assert compiled.compile(HEAVY).mask().any()


@pytest.mark.parametrize(("kind", "value", "light"), [
    ("json_schema", {"properties": {"pattern": {"type": "string"}, "multipleOf": {"maximum": 7}}}, True),
    ("json_schema", {"type": "integer", "multipleOf": 123_457}, False),
    ("json_schema", {"items": {"allOf": [{}]}}, False),
    ("json_schema", {"type": "string", "maxLength": 10**6}, False),
    ("json_schema", {"type": "number", "maximum": 1e300}, False),
    ("regex", "[a-z]{3,8}", True), ("regex", "(a{9}){9}", False), ("regex", "a{1000}", False),
    ("grammar", 'start: "a" | "b"', True), ("grammar", "start: %json {}", False),
])  # fmt: skip
def test_light_constraints(kind: Any, value: Any, light: bool) -> None:
    spec = GrammarSpec(kind, value)
    assert is_light(kind, spec.plain, len(spec.key)) == light


STEPS = 24
SLOW_STEP = SLOW_LIGHT = 20.0
"""Maximal seconds on a slow processor for one step, and for compiling a light constraint."""


def try_one(made: GrammarCompiler, kind: Any, value: Any, rng: random.Random) -> str:
    """Compiles and walks a constraint. Returns the problem, or ""."""
    try:
        spec = GrammarSpec(kind, ToolCalls(value) if kind == "tools" else value)
        light = is_light(kind, spec.plain, len(spec.key))
        begun = time.process_time()
        state = made.compile(spec)
        took = time.process_time() - begun
        if light and took > SLOW_LIGHT:
            return f"called light, but took {took:.2f} s"
        return walk(state, rng)
    except HeadstartError as error:
        return str(error) if len(str(error)) > 3000 or "panic" in str(error) else ""


def walk(state: GrammarState, rng: random.Random) -> str:
    """Walks some steps with look-ahead and rollback. Returns the problem, or ""."""
    masks: list[np.ndarray[Any, Any]] = []
    begun = time.process_time()
    for step in range(STEPS):
        mask = state.mask().copy()
        masks.append(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return "" if state.error or state.accepting else f"step {step}: an empty mask without an error"
        if state.done:
            break
        for token in rng.sample(allowed.tolist(), min(2, len(allowed))):
            copy = state.copy()
            if not copy.advance(token) and not copy.error:
                return f"step {step}: allows token {token}, but does not take it"
        draft = [int(rng.choice(allowed)), rng.randrange(32 * len(mask))]
        if not (state.masks(draft)[0] == mask).all() or state.fitting(draft) > 2 or len(state.forced()) > 16:
            return f"step {step}: looking ahead changed it"
        if state.error or not state.advance(draft[0]):
            return "" if state.error else f"step {step}: does not take token {draft[0]} after looking ahead"
        took, begun = time.process_time() - begun, time.process_time()
        if took > SLOW_STEP:
            return f"step {step} took {took:.2f} s"
    back = rng.randrange(len(state) + 1)
    state.rollback(back)
    if len(state) < len(masks) and not (state.mask() == masks[len(state)]).all():
        return f"another mask {back} tokens back"
    return ""


@pytest.mark.slow
def test_random_constraints_are_walked_or_refused(fuzz: int) -> None:
    """Allowed tokens are accepted. Rollback restores the masks. Look-ahead changes nothing."""
    for number in range(120 * fuzz):
        draw = random.Random(number)
        kind, value = draw.choice(grammars.ORDINARY)(draw)
        assert not (wrong := try_one(compiler("tiny"), kind, value, draw)), f"{number} ({kind} {value!r:.200}): {wrong}"
