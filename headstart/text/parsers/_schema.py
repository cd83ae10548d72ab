"""Types of arguments in a request's tools, and text to JSON values of such types."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

ANY = "any"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_PYTHON = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


def types_of(tools: Sequence[Mapping[str, Any]], function: str, argument: str) -> frozenset[str]:
    """JSON Schema's types of one argument; empty when the tools say nothing of it."""
    for tool in tools:
        definition = tool.get("function", {})
        if definition.get("name") == function:
            root = definition.get("parameters") or {}
            return _types((root.get("properties") or {}).get(argument), root, depth=8)
    return frozenset()


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if "type" in schema:
        named = schema["type"]
        return frozenset([named] if isinstance(named, str) else named)
    if "$ref" in schema:
        return _types(_resolve(schema["$ref"], root), root, depth - 1)
    choices = [part for word in ("anyOf", "oneOf", "allOf") for part in schema.get(word, ())]
    if choices:
        return frozenset[str]().union(*(_types(part, root, depth - 1) for part in choices))
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return frozenset(_PYTHON.get(type(value), "null") for value in values)


def _resolve(reference: Any, root: Any) -> Any:
    """What `#/$defs/x` stands for; None for other kinds of references."""
    head, *path = str(reference).split("/")
    for key in path:
        root = root.get(key) if isinstance(root, Mapping) else None
    return root if head == "#" else None


def as_json(text: str, types: frozenset[str]) -> str:
    """`text` as the JSON text of the first of `types` that it can be; a string when it can be none."""
    value = text.strip()
    word = _WORDS.get(value.lower())
    if word is not None and ("null" if word == "null" else "boolean") in types:
        return word
    for written in (_number(value, types), _structure(value, types)):
        if written is not None:
            return written
    if ANY in types and _is_json(value):
        return value
    return json.dumps(text, ensure_ascii=False)


def _number(value: str, types: frozenset[str]) -> str | None:
    """A number as written where JSON can have it so; `5.0` for an integer is 5."""
    if not types & {"integer", "number"}:
        return None
    if _NUMBER.fullmatch(value) and ("number" in types or value.lstrip("-").isdigit()):
        return value
    try:
        number = float(value)
    except ValueError:
        return None
    if number.is_integer():
        return str(int(number))
    return repr(number) if math.isfinite(number) and "number" in types else None


def _structure(value: str, types: frozenset[str]) -> str | None:
    """An array or object, written in JSON or, as templates that print values make models do, in Python."""
    wanted = tuple(kind for kind, name in ((list, "array"), (dict, "object")) if name in types)
    if not wanted or not value.startswith(("[", "{")):
        return None
    if _is_json(value):
        return value
    try:
        parsed = ast.literal_eval(value)
        return json.dumps(parsed, ensure_ascii=False, allow_nan=False) if isinstance(parsed, wanted) else None
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def _is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")
