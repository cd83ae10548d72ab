"""Grammar constraints: random walks over the masks, rollback, masks of drafts, forced tokens, errors."""

import json
import re
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from pydantic import BaseModel, ConfigDict, Field
from support import PATIENCE
from tiny_models import tiny_tokenizer
from toy_tokenizers import sentencepiece

from headstart.errors import UsageError
from headstart.formats import open_checkpoint
from headstart.hub import cached_trunk
from headstart.text import grammar_spec
from headstart.text.grammar import GrammarCompiler, GrammarSpec, GrammarState, Mask, ToolCalls
from headstart.text.grammar_limits import LIMITS
from headstart.text.tokenizer import Tokenizer

PADDING = 45  # logits beyond the tokenizer's vocabulary


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["cat", "dög"]
    legs: int = Field(ge=0, le=8)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    name: str = Field(min_length=1, max_length=12)
    married: bool | None
    pets: list[Pet] = Field(max_length=3)


WEATHER = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city"], "additionalProperties": False, "$defs": {"city": {"enum": ["Ulm", "Köln"]}},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "weather_now"}},
]
CHOICES = ["yes", "no", 'not "really"\n', "vielleicht, ähm/€"]
DATE = r"\d{4}-(0[1-9]|1[0-2])-[0-3]\d(T/[a-zö日]{1,4})?"
GBNF = 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"\n'
SPECS = [
    GrammarSpec("json_object"), GrammarSpec("json_schema", Person.model_json_schema()), GrammarSpec("regex", DATE),
    GrammarSpec("choice", CHOICES), GrammarSpec("grammar", GBNF), GrammarSpec("tools", ToolCalls(TOOLS)),
    GrammarSpec("tools", ToolCalls(TOOLS, may_repeat=True)),
]  # fmt: skip


def tiny() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(300), eos_ids=[0, 2], bos_id=1)


@cache
def compiler(name: str) -> GrammarCompiler:
    if name == "default":
        path = cached_trunk()
        if path is None:
            pytest.skip("the default model is not in the cache")
        tokenizer = open_checkpoint(path).load_tokenizer()
    else:
        tokenizer = tiny() if name == "tiny" else Tokenizer.from_gguf(sentencepiece())
    patient = replace(LIMITS, seconds=PATIENCE, quick_seconds=PATIENCE, wall_seconds=int(PATIENCE))
    return GrammarCompiler(tokenizer, tokenizer.vocab_size + PADDING, patient)


def start(spec: GrammarSpec, name: str = "tiny") -> GrammarState:
    return compiler(name).compile(spec)


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (r"[\u03b1-\u03c9]+", "αω"), (r'"\u00e9\u0022\u005c\u0041\u0000"', 'é"\\A\0'), (r"[\u005b-\u005d]", "]"),
        (r"[\U0001F600-\U0001F64F]", "😀"), (r'"\\u00e9"', r"\u00e9"), (r'"\U00000041\n"', "A\n"),
    ],
)  # fmt: skip
def test_escapes_of_gbnf(rule: str, text: str) -> None:
    state = start(GrammarSpec("grammar", f"root ::= {rule}"))
    assert all(state.advance(token) for token in tiny().encode(text)) and state.accepting


@cache
def closing_ids(name: str) -> frozenset[int]:
    tokenizer = compiler(name)._tokenizer
    return frozenset(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i)[:1] in (b'"', b"}", b"]", b")"))


def ids(mask: Mask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def walk(state: GrammarState, name: str, seed: int, steps: int = 600) -> list[int]:
    """Random allowed tokens until the end. Closing tokens become more likely, so that walks end."""
    random, tokens = np.random.default_rng(seed), list[int]()
    ends, closers = compiler(name).end_ids, closing_ids(name)
    while not state.done:
        allowed = ids(state.mask())
        assert allowed, "no token is allowed before the end"
        assert max(allowed) < compiler(name)._tokenizer.vocab_size
        assert (state.accepting and ends <= set(allowed)) or (not state.accepting and not ends & set(allowed))
        if state.accepting and random.random() < 0.5:
            break
        closing = sorted(closers.intersection(allowed))
        few = closing if closing and random.random() < min(0.9, len(tokens) / 100) else allowed
        tokens.append(int(random.choice(few)))
        assert state.advance(tokens[-1])
        assert len(tokens) < steps
    assert state.accepting and not state.error
    return [token for token in tokens if token not in ends]


def check(spec: GrammarSpec, text: str) -> None:
    match spec.kind:
        case "json_object":
            assert isinstance(json.loads(text), dict)
        case "json_schema":
            Person.model_validate_json(text)
        case "regex":
            assert re.fullmatch(DATE, text)
        case "choice":
            assert text in CHOICES
        case "grammar":
            assert re.fullmatch(r"[0-9+()]+", text) and text.count("(") == text.count(")")
        case "tools":
            check_calls(text, may_repeat=spec.value.may_repeat)


def check_calls(text: str, *, may_repeat: bool) -> None:
    assert text.startswith("<tool_call>\n") and text.endswith("\n</tool_call>")
    parts = text.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>").split("\n</tool_call>\n<tool_call>\n")
    assert may_repeat or len(parts) == 1
    calls = [json.loads(part) for part in parts]
    for call in calls:
        assert list(call) == ["name", "arguments"]
        if call["name"] == "weather_now":
            assert call["arguments"] == {}
        else:
            assert call["name"] == "weather" and call["arguments"]["city"] in ("Ulm", "Köln")
            assert set(call["arguments"]) <= {"city", "days"} and 1 <= call["arguments"].get("days", 1) <= 9


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny", "default"])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_random_walks_satisfy_the_constraint(spec: GrammarSpec, name: str) -> None:
    for seed in range(12):
        tokens = walk(start(spec, name), name, seed)
        data = b"".join(map(compiler(name)._tokenizer.token_bytes, tokens))
        check(spec, data.decode())


def test_sentencepiece_with_two_ids_for_one_byte() -> None:
    name = "sentencepiece"
    state = start(GrammarSpec("choice", ["hello world", "hé"]), name)
    tokenizer = compiler(name)._tokenizer
    allowed = {tokenizer.vocabulary()["h"], tokenizer.vocabulary()["<0x68>"], tokenizer.vocabulary()["he"]}
    assert set(ids(state.mask())) == allowed
    forced = start(GrammarSpec("choice", ["hello world"]), name).forced()
    assert b"".join(map(tokenizer.token_bytes, forced)) == b"hello world"
    for seed in range(5):
        data = b"".join(map(tokenizer.token_bytes, walk(state.copy(), name, seed)))
        assert data.decode() in ("hello world", "hé")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SPECS), st.integers(0, 2**32), st.integers(0, 40), st.integers(0, 40))
def test_rollback_and_copies_keep_the_masks(spec: GrammarSpec, seed: int, ahead: int, back: int) -> None:
    state, random = start(spec), np.random.default_rng(seed)
    seen, tokens = [state.mask()], list[int]()
    for _ in range(ahead):
        tokens.append(int(random.choice(ids(seen[-1]))))
        assert state.advance(tokens[-1])
        seen.append(state.mask())
    twin, back = state.copy(), min(back, ahead)
    state.rollback(back)
    assert len(state) == ahead - back
    np.testing.assert_array_equal(state.mask(), seen[ahead - back])
    np.testing.assert_array_equal(twin.mask(), seen[ahead])
    for token, mask in zip(tokens[ahead - back :], seen[ahead - back :], strict=False):
        np.testing.assert_array_equal(state.mask(), mask)
        assert state.advance(token)
    np.testing.assert_array_equal(state.mask(), twin.mask())
    twin.rollback(ahead)
    np.testing.assert_array_equal(twin.mask(), seen[0])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SPECS), st.integers(0, 2**32), st.integers(1, 12), st.integers(1, 12))
def test_text_that_leaves_a_look_ahead_has_masks_of_its_own(
    spec: GrammarSpec, seed: int, ahead: int, length: int
) -> None:
    state, random = start(spec), np.random.default_rng(seed)
    for _ in range(ahead):
        assert state.advance(int(random.choice(ids(state.mask()))))
    state.rollback(ahead)
    fresh = start(spec)
    for _ in range(length):
        np.testing.assert_array_equal(state.mask(), fresh.mask())
        token = int(random.choice(ids(fresh.mask())))
        assert state.advance(token) and fresh.advance(token)
    np.testing.assert_array_equal(state.mask(), fresh.mask())


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SPECS), st.integers(0, 2**32), st.integers(0, 30), st.lists(st.integers(0, 299), max_size=3))
def test_masks_of_a_draft_equal_those_of_steps(spec: GrammarSpec, seed: int, ahead: int, rest: list[int]) -> None:
    state, random = start(spec), np.random.default_rng(seed)
    for _ in range(ahead):
        assert state.advance(int(random.choice(ids(state.mask()))))
    expected, draft, twin = [state.mask()], list[int](), state.copy()
    for _ in range(4):
        draft.append(int(random.choice(ids(expected[-1]))))
        assert twin.advance(draft[-1])
        expected.append(twin.mask())
    for i, token in enumerate(rest):
        draft.append(token)
        if not twin.advance(token):
            draft += rest[i + 1 :]
            break
        expected.append(twin.mask())
    rows = state.masks(draft)
    assert rows.shape == (len(draft) + 1, -(-compiler("tiny").vocab_size // 32)) and rows.dtype == np.uint32
    np.testing.assert_array_equal(rows[: len(expected)], expected)
    assert (rows[len(expected) :] == 0xFFFFFFFF).all()
    for count in (1, len(draft)):
        np.testing.assert_array_equal(state.masks(draft, count), rows[-count:])
    assert len(state) == ahead
    kept, twin = state.fitting(draft), state.copy()
    assert all(not twin.done and twin.advance(token) for token in draft[:kept])
    assert kept == len(draft) or twin.done or not twin.advance(draft[kept])
    np.testing.assert_array_equal(state.mask(), expected[0])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SPECS), st.integers(0, 2**32), st.integers(0, 30), st.integers(1, 16))
def test_forced_tokens_are_the_only_allowed_ones(spec: GrammarSpec, seed: int, ahead: int, limit: int) -> None:
    state, random = start(spec), np.random.default_rng(seed)
    for _ in range(ahead):
        assert state.advance(int(random.choice(ids(state.mask()))))
    tokens = state.forced(limit)
    assert len(tokens) <= limit and len(state) == ahead
    for token in tokens:
        assert ids(state.mask()) == [token]
        assert state.advance(token)
    if len(tokens) < limit:
        assert len(ids(state.mask())) > 1 or state.done


def test_forced_text_has_the_tokenizers_ids() -> None:
    spec = GrammarSpec("choice", ["in the other thing"])
    assert start(spec).forced() == tiny().encode("in the other thing")


def test_special_tokens_in_the_prefix_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_spec, "CALL_PREFIX", "<|im_start|>call ")
    state = start(GrammarSpec("tools", ToolCalls(TOOLS, name="weather_now")))
    assert state.forced()[:6] == [1, *tiny().encode("call ")]
    assert not start(GrammarSpec("regex", "(.|\n)*")).advance(1)  # text cannot contain a special token


def test_end_of_text_where_the_constraint_accepts() -> None:
    state = start(GrammarSpec("regex", "a|ab"))
    assert not state.advance(2) and not state.accepting
    (a, b) = tiny().encode("ab")
    assert state.advance(a) and state.accepting and not state.done
    assert ids(state.mask()) == [0, 2, b]
    assert state.advance(2) and state.done
    assert ids(state.mask()) == [0, 2] and state.advance(0) and not state.advance(b)
    state.rollback(2)
    assert ids(state.mask()) == [0, 2, b]
    assert state.advance(b) and state.done and ids(state.mask()) == [0, 2]
    assert state.advance(2)
    state.rollback(3)
    assert ids(state.mask()) == [a]
    with pytest.raises(ValueError, match="cannot undo 1 of 0"):
        state.rollback(1)


@pytest.mark.parametrize("grammar", ['start: ("a" <[0]> "b") | "x"', 'start: "a" <[0-2]>', 'start: "x" | "a" <[2]>'])
def test_end_of_text_ids_in_a_grammar(grammar: str) -> None:
    """End-of-text ids are allowed only where the text may end. `advance` accepts every allowed token."""
    state = start(GrammarSpec("grammar", grammar))
    assert state.advance(*tiny().encode("a"))
    for token in ids(state.mask()):
        assert state.copy().advance(token)
    assert not {0, 2} & set(ids(state.mask())) and not state.advance(0)
    assert state.accepting or state.done == bool(state.error)
    state.rollback(1)
    assert not state.error and state.mask().any()


def test_special_tokens_allowed_by_the_mask_are_accepted() -> None:
    """llguidance encodes special tokens in marker bytes. A complement matches these bytes; its steps refuse them."""
    state, draw = (
        start(GrammarSpec("grammar", 'start: /[a-z]*/+ | ~("x"+ & "y"+)\nr1: <[*]>\n')),
        np.random.default_rng(0),
    )
    while len(state) < 8 and not state.done:
        allowed = ids(state.mask())
        assert all(state.copy().advance(token) for token in allowed)
        state.advance(int(draw.choice(allowed)))
    assert len(state) > 3
    assert start(GrammarSpec("grammar", "start: <[1]>")).advance(1)


def test_invalid_ids_are_refused() -> None:
    state = start(GrammarSpec("regex", "(.|\n)*"))
    for token in (-1, 1, tiny().vocab_size, tiny().vocab_size + PADDING - 1, 10**6):
        assert not state.advance(token)
    allowed = ids(state.mask())
    assert max(allowed) < tiny().vocab_size and 1 not in allowed
    assert {0, 2, *tiny().encode("the x")} <= set(allowed)
    assert tiny().encode("ü")[1] not in allowed  # a continuation byte cannot begin a character


def test_dead_end_is_an_error_until_rollback() -> None:
    """The tokenizer lacks bytes of a character, so that no token can follow "x"."""
    small = GrammarCompiler(Tokenizer(tiny_tokenizer(131), eos_ids=[2]), 131)
    state = small.compile(GrammarSpec("choice", ["abc", "x日", "y"]))
    before, (dead,) = state.mask(), tiny().encode("x")
    rows = state.masks([dead, 5])
    assert not rows[1].any()
    np.testing.assert_array_equal(rows[0], before)
    np.testing.assert_array_equal(state.mask(), before)
    assert state.advance(dead)
    assert not state.masks([]).any() and state.done and not state.accepting and "vocabulary" in state.error
    state.rollback(1)
    assert not state.error and state.advance(*tiny().encode("y")) and state.accepting


def test_tokenizer_without_end_of_text_ids() -> None:
    compiled = GrammarCompiler(Tokenizer(tiny_tokenizer(300)), 320)
    state = compiled.compile(GrammarSpec("choice", ["ab"]))
    for token in state.forced():
        assert state.advance(token)
    assert state.done and state.accepting and not state.mask().any()


def test_fewer_logits_than_token_ids() -> None:
    compiled = GrammarCompiler(tiny(), 100)
    assert max(ids(compiled.compile(GrammarSpec("regex", ".*")).mask())) < 100
    with pytest.raises(UsageError, match="no text of this vocabulary"):
        compiled.compile(GrammarSpec("choice", ["日本"]))


def test_unicode_in_strings() -> None:
    text = '{"name":"Zoë 日本 🎉","married":null,"pets":[]}'
    state = start(GrammarSpec("json_schema", json.dumps(Person.model_json_schema())))
    assert all(map(state.advance, tiny().encode(text))) and state.accepting


def test_equal_specs_share_one_compiled_grammar() -> None:
    compiled = GrammarCompiler(tiny(), 300)
    schema = Person.model_json_schema()
    first, second = (compiled.compile(GrammarSpec("json_schema", json.loads(json.dumps(schema)))) for _ in range(2))
    assert first.lexer is second.lexer
    assert first.advance(first.forced()[0])
    assert (len(first), len(second)) == (1, 0)


@pytest.mark.parametrize(("kind", "value", "message"), [
    ("xml", None, "unknown kind"),
    ("json_schema", {"type": "objekt"}, "Invalid type: objekt$"),
    ("json_schema", "{", "not valid JSON"),
    ("json_schema", [1], "must be a JSON object, but is list"),
    ("json_schema", {"const": b"x"}, "not JSON"),
    ("json_schema", {"$ref": "#/$defs/x"}, "does not exist"),
    ("json_schema", {"type": "string", "minLength": 2, "maxLength": 1}, "minLength"),
    ("json_schema", {"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf .* take anyOf$"),
    ("json_schema", False, "no text satisfies"), ("regex", "(a", "unclosed group$"), ("regex", "(?=a)b", "look-around"),
    ("regex", "", "not empty"), ("regex", "a\\", "ends within an escape"), ("regex", "\\\\\\", "ends within an escape"),
    ("regex", "\ud800", "half of a surrogate pair"), ("choice", ["a", "\udfff"], "half of a surrogate pair"),
    ("json_schema", {"properties": {"\ud800": {}}}, "half of a surrogate pair"),
    ("json_schema", '{"const": "\\ud800"}', "half of a surrogate pair"),
    ("json_schema", '{"items":' * 9000 + "{}" + "}" * 9000, "not valid JSON"),
    ("grammar", 'start: <[0]> "a"', "end-of-text token where the text cannot end"),
    ("regex", r"[^\s\S]", "no text of this vocabulary"), ("choice", [], "empty list"),
    ("choice", "yes", "list of texts"),
    ("grammar", "start: foo", r"at 1\(8\): unknown name: \"foo\"$"),
    ("grammar", "root ::= foo", "'foo' not found"), ("grammar", "what is this", "Expected ::="),
    ("tools", {"tools": TOOLS}, "must be ToolCalls"), ("tools", ToolCalls([]), "list of tools is empty"),
    ("tools", ToolCalls(TOOLS, name="f"), "no tool is named 'f'"),
    ("tools", ToolCalls([{"type": "function"}]), "no function with a name"),
    ("tools", ToolCalls([{"function": {"name": "f", "parameters": {"type": 3}}}]), "tools constraint is not valid"),
    ("tools", ToolCalls([{"function": {"name": "f", "parameters": 3}}]), "parameters of tool 'f' must be"),
    ("tools", ToolCalls([*TOOLS, {"function": {"name": "f", "parameters": {"not": {}}}}]), "not valid: f: .*not"),
    ("tools", ToolCalls([{"function": {"name": "f", "parameters": {"type": "array"}}}]), "'f' have type 'array'"),
])  # fmt: skip
def test_invalid_constraints_have_a_one_line_error(kind: Any, value: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        start(GrammarSpec(kind, value))
    assert "\n" not in caught.value.message
