"""Base classes for calls that have a pair of tags for each argument, and the conversion of arguments to JSON."""

import ast
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from headstart.text.parsers.stream import EndOfText, Mismatch, Steps, escape_json, is_json_number
from headstart.text.parsers.tools import MarkedToolParser

ANY = "any"  # type of an argument that may be any JSON value
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}
_PYTHON = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}


class TaggedArgumentsParser(MarkedToolParser):
    """Builds the JSON object of a call's arguments. Strings are streamed; other values are converted when complete."""

    writes_json = True
    default_types: frozenset[str]  # JSON Schema types (or ANY) of an argument without a schema

    def _read_member(self, function: str, key: str, ends: tuple[str, ...]) -> Steps[None]:
        """Read the value of argument `key` of `function`, and the one of `ends` that follows it."""
        yield from self._read_typed_member(argument_types(self.tools, function, key) or self.default_types, key, ends)

    def _read_typed_member(self, types: frozenset[str], key: str, ends: tuple[str, ...]) -> Steps[None]:
        """Like _read_member, for a value of these types."""
        self._begin_member(key)
        if types == {"string"}:
            yield from self._read_string(ends)
        else:
            yield from self._read_converted(types, ends)
        self._drop_read_text()

    def _read_string(self, ends: tuple[str, ...]) -> Steps[None]:
        self._arguments('"')
        self._may_drop_text = True
        yield from self._stream_until(ends, lambda text: self._arguments(escape_json(text)))
        self._may_drop_text = False
        self._arguments('"')

    def _read_converted(self, types: frozenset[str], ends: tuple[str, ...]) -> Steps[None]:
        parts: list[str] = []
        try:
            yield from self._stream_until(ends, parts.append)
        except EndOfText:
            self._arguments("".join(parts))
            raise
        self._arguments(convert_to_json("".join(parts), types))


class InvokeParser(TaggedArgumentsParser):
    """`<BLOCK><invoke name="f"><parameter name="k">v</parameter></invoke></BLOCK>`, with newlines between tags."""

    bar: ClassVar[str] = ""  # text before the name of every tag
    blocks: ClassVar[tuple[str, ...]]  # names of the outer tag

    def __init_subclass__(cls) -> None:
        outer, inner = [f"<{cls.bar}{block}>" for block in cls.blocks], f'<{cls.bar}invoke name="'
        cls.opens = (*(block + gap + inner for block in outer for gap in ("\n", "")), inner)
        cls.ends = (f"</{cls.bar}invoke>", *(f"</{cls.bar}{block}>" for block in cls.blocks))

    def _call(self, opened: str) -> Steps[None]:
        name, stop = yield from self._read_until('"', "\n")
        if stop != '"' or not name:
            raise Mismatch
        yield from self._expect(">")
        self._announce(name)
        parameter, end = f'<{self.bar}parameter name="', f"</{self.bar}invoke>"
        while True:
            yield from self._skip_space()
            if (yield from self._expect(parameter, end)) == end:
                break
            key, _ = yield from self._read_until('"')
            yield from self._value(name, key, f"</{self.bar}parameter>")
        self._complete_arguments()
        self._drop_read_text()
        yield from self._ending(*(f"</{self.bar}{block}>" for block in self.blocks))

    def _value(self, function: str, key: str, end: str) -> Steps[None]:
        """Read a parameter. Begins after the closing quote of its name, ends after its end tag."""
        yield from self._expect(">")
        yield from self._read_member(function, key, (end,))


def argument_types(tools: Sequence[Mapping[str, Any]], function: str, argument: str) -> frozenset[str]:
    """JSON Schema types of one argument of a function, by the request's tools; empty without a schema."""
    for tool in tools:
        definition = tool.get("function", {})
        if definition.get("name") == function:
            root = definition.get("parameters") or {}
            properties = root.get("properties")
            return _types(properties.get(argument), root, depth=8) if isinstance(properties, Mapping) else frozenset()
    return frozenset()


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or not depth:
        return frozenset()
    if named := [each for each in _listed(schema.get("type")) if isinstance(each, str)]:
        return frozenset(named)
    if "$ref" in schema:
        return _types(_resolve(schema["$ref"], root), root, depth - 1)
    choices = [part for word in ("anyOf", "oneOf", "allOf") for part in _listed(schema.get(word))]
    if choices:
        return frozenset[str]().union(*(_types(part, root, depth - 1) for part in choices))
    values = _listed(schema.get("enum")) or ([schema["const"]] if "const" in schema else [])
    return frozenset(_PYTHON.get(type(value), "null") for value in values)


def _listed(value: Any) -> list[Any]:
    """The items of a list, or a text alone; schemas of clients may have anything else in their place."""
    return value if isinstance(value, list) else [value] if isinstance(value, str) else []


def _resolve(reference: Any, root: Any) -> Any:
    """The schema at `#/$defs/x`; None for other references."""
    head, *path = str(reference).split("/")
    for key in path:
        root = root.get(key) if isinstance(root, Mapping) else None
    return root if head == "#" else None


def convert_to_json(text: str, types: frozenset[str]) -> str:
    """`text` as JSON: a constant, number, array or object if one of `types` allows it, else a string."""
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
    """`value` as a JSON number, or None: as written if that is valid, `5.0` for an integer as 5."""
    if not types & {"integer", "number"}:
        return None
    if is_json_number(value) and ("number" in types or value.lstrip("-").isdigit()):
        return value
    try:
        number = float(value)
    except ValueError:
        return None
    if number.is_integer():
        return str(int(number))
    return repr(number) if math.isfinite(number) and "number" in types else None


def _structure(value: str, types: frozenset[str]) -> str | None:
    """`value` as a JSON array or object, or None. Converts Python literals, which models copy from chat templates."""
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
