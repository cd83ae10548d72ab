"""Limits of constraints: of their values and of their compilation (grammar_sandbox.py). `is_light` finds constraints
that are surely cheap and are compiled without the sandbox."""

import re
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from headstart.errors import UsageError


@dataclass(frozen=True)
class GrammarLimits:
    """Limits of one constraint, far above those written by hand."""

    value_bytes: int = 2 * 2**20  # a schema, all choices together, or the tools
    text_bytes: int = 256 * 2**10  # a regex, Lark or GBNF grammar (slow Python code rewrites GBNF)
    choices: int = 100_000
    choice_bytes: int = 16 * 2**10  # one choice
    nodes: int = 100_000  # values within a schema
    definitions: int = 3_000  # entries of $defs
    rules: int = 5_000  # rules of a grammar
    depth: int = 120  # nesting of JSON; llguidance's own limit is 128
    # compilation in the sandbox; the compilation in this process that follows does the same work
    seconds: float = 3.0  # processor time
    quick_seconds: float = 0.5  # processor time of a first attempt, so that cheap constraints do not wait for slow ones
    wall_seconds: int = 60
    address_space: int = 384 * 2**20  # bytes beyond those of the sandbox process at its start
    stack: int = 32 * 2**20  # bytes for compiling in the sandbox; this process uses twice that
    walk_stack: int = 512 * 2**10  # bytes for computing masks in the sandbox; threads of this process have 8 MB
    waiting: int = 20  # callers that may wait per sandbox; fewer than server.limits.GRAMMAR_THREADS
    compiled_bytes: int = 64 * 2**20  # memory of one compiled constraint
    cached_bytes: int = 128 * 2**20  # memory of all cached constraints
    lexer_states: int = 50_000  # of one constraint during generation, a fifth of llguidance's default


LIMITS = GrammarLimits()
LIGHT_BYTES = 32 * 2**10
LIGHT_NODES = 1_000
LIGHT_TEXT = 512
LIGHT_COUNT = 1_000
LIGHT_NUMBER = 2**53
"""Limits of light constraints: bytes of JSON, subschemas, characters of a regex or grammar, minLength and the like, and
bounds. Within them, and with only the keywords below, compiling takes milliseconds (tests/text/test_grammar_limits.py).
"""

_NAMES_OF_SCHEMAS = frozenset({"properties", "$defs", "definitions"})
_SCHEMAS = frozenset({"items", "additionalProperties"})
_LISTS_OF_SCHEMAS = frozenset({"anyOf"})
_COUNTS = frozenset({"minLength", "maxLength", "minItems", "maxItems"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_PLAIN = frozenset(
    {"type", "required", "enum", "const", "format", "$ref", "title", "description", "default", "examples"}
)
_RULE = re.compile(r"^\s*[?!]?[\w-]+(\.-?\d+)?\s*(\[[^\]\n]*\]\s*)?(::=|:)", re.MULTILINE)
_LARGE_REPEAT = re.compile(r"\{\s*\d*\s*,?\s*\d{3,}|\{[^}]*\}[^{}]*\{|~")
"""A repetition by a hundred or more, or two counted repetitions (they may be nested)."""


def check(kind: str, value: Any) -> None:
    """Raise UsageError for a constraint's value beyond LIMITS. Stops at the first excess."""
    if kind in ("regex", "grammar") and isinstance(value, str):
        _check_count(len(value), LIMITS.text_bytes, kind, "characters")
        if kind == "grammar":
            _check_count(sum(1 for _ in _RULE.finditer(value)), LIMITS.rules, kind, "rules")
    elif isinstance(value, str):
        _check_count(len(value), LIMITS.value_bytes, kind, "characters")
    elif kind == "choice" and isinstance(value, Seq):
        _check_count(len(value), LIMITS.choices, kind, "choices")
        texts = [text for text in value if isinstance(text, str)]
        _check_count(max(map(len, texts), default=0), LIMITS.choice_bytes, kind, "characters in one choice")
        _check_count(sum(map(len, texts)), LIMITS.value_bytes, kind, "characters")
    else:
        _check_tree(kind, value)


def _check_tree(kind: str, value: Any) -> None:
    nodes = size = definitions = 0
    todo: list[tuple[Any, int]] = [(value, 1)]
    while todo:
        each, depth = todo.pop()
        _check_count(depth, LIMITS.depth, kind, "levels of nesting")
        if isinstance(each, Mapping):
            size += sum(len(key) for key in each if isinstance(key, str))
            definitions += sum(len(each[k]) for k in ("$defs", "definitions") if isinstance(each.get(k), Mapping))
            parts: Any = each.values()
        elif isinstance(each, list | tuple):
            parts = each
        else:
            size += len(each) if isinstance(each, str) else 8
            continue
        nodes += len(parts)
        _check_count(nodes, LIMITS.nodes, kind, "values")
        _check_count(size, LIMITS.value_bytes, kind, "characters")
        _check_count(definitions, LIMITS.definitions, kind, "definitions")
        todo += [(part, depth + 1) for part in parts]
    _check_count(size, LIMITS.value_bytes, kind, "characters")


def _check_count(count: int, limit: int, kind: str, what: str) -> None:
    if count > limit:
        what = f"the {kind} constraint has {count:,} {what}, but may have at most {limit:,}"
        raise UsageError(what, "make it smaller")


def is_light(kind: str, value: Any, size: int) -> bool:
    """Whether a constraint surely compiles in milliseconds. `value`: GrammarSpec.plain; `size`: length of its key."""
    match kind:
        case "json_object":
            return True
        case "choice":
            return size <= LIGHT_BYTES
        case "regex":
            return _is_light_text(value)
        case "grammar":
            return _is_light_text(value) and "%" not in value
        case "json_schema":
            return size <= LIGHT_BYTES and _are_light_schemas([value])
        case _:
            tools = [tool.get("function") for tool in value["tools"] if isinstance(tool, Mapping)]
            schemas = [each.get("parameters") or {} for each in tools if isinstance(each, Mapping)]
            return size <= LIGHT_BYTES and _are_light_schemas(schemas)


def _is_light_text(text: Any) -> bool:
    return isinstance(text, str) and len(text) <= LIGHT_TEXT and not _LARGE_REPEAT.search(text)


def _are_light_schemas(todo: list[Any]) -> bool:
    seen = 0
    while todo:
        schema = todo.pop()
        seen += 1
        if isinstance(schema, bool):
            continue
        if not isinstance(schema, Mapping) or seen > LIGHT_NODES:
            return False
        for key, value in schema.items():
            if key in _NAMES_OF_SCHEMAS and isinstance(value, Mapping):
                todo += value.values()
            elif key in _LISTS_OF_SCHEMAS and isinstance(value, list):
                todo += value
            elif key in _SCHEMAS:
                todo.append(value)
            elif not _is_light_keyword(key, value):
                return False
    return True


def _is_light_keyword(key: str, value: Any) -> bool:
    if key in _COUNTS:
        return isinstance(value, int) and 0 <= value <= LIGHT_COUNT
    if key in _BOUNDS:
        return isinstance(value, int | float) and abs(value) <= LIGHT_NUMBER and len(repr(value)) <= 17
    if key == "pattern":
        return _is_light_text(value)
    return key in _PLAIN
