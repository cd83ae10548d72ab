r"""`GrammarSpec`: the constraint of a text. `llguidance_source` translates it into a grammar for llguidance.

Kinds and their values:
  json_object  any JSON object; the value is ignored
  json_schema  a JSON schema: a mapping, a bool or JSON text
  regex        a regular expression that the whole text matches (Rust's regex crate, no look-around; \d is 0-9)
  choice       a list of texts, one of which the text must be
  grammar      a Lark grammar (rule `start`), or a GBNF/EBNF grammar (rule `root`)
  tools        `ToolCalls`
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from headstart.errors import UsageError
from headstart.text.grammar_limits import check

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tools"]

CALL_PREFIX, CALL_SUFFIX = "<tool_call>\n", "\n</tool_call>"
"""Texts around a forced call, in Hermes' format. Names of special tokens in them become these tokens."""
NEWLINE = "\n"  # between two forced calls
NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
JSON_SPACE = r"[ \t\r\n]{0,32}"
"""White space between the tokens of a JSON text. Bounded, since small models may write line breaks without end."""

_FORMATS = frozenset({
    "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown",
})  # fmt: skip
"""Values of `format` that are enforced; other values are ignored, as annotations."""
_NAMED_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_SCHEMAS = frozenset({
    "items", "prefixItems", "additionalItems", "unevaluatedItems", "contains", "additionalProperties",
    "unevaluatedProperties", "propertyNames", "anyOf", "oneOf", "allOf", "not", "if", "then", "else",
})  # fmt: skip
_DIALECT = "json-schema.org/"
_LOOK_AROUND = re.compile(r"\(\?<?[=!]")
_IN_REGEX = {ord(mark): f"\\{mark}" for mark in r"\.+*?()|[]{}^$#&-~/"} | {
    control: f"\\x{{{control:x}}}" for control in (*range(32), *range(127, 160), 0x2028, 0x2029)
}
_GBNF_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8}))")
_QUOTED = re.compile(r"\s*(\d+ \||\^+\s*$)")
_POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")
_ONE_OF = (
    "supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf",
    "supported where branches may overlap: take anyOf",
)
"""llguidance's advice, which names an option of its own library, and ours."""


@dataclass(frozen=True)
class ToolCalls:
    """A constraint that the text is a tool call: `CALL_PREFIX {"name": ..., "arguments": {...}} CALL_SUFFIX`."""

    tools: Seq[Mapping[str, Any]]  # as in OpenAI requests
    name: str | None = None  # the only tool that may be called
    may_repeat: bool = False  # more calls may follow, each on a new line


@dataclass(frozen=True)
class GrammarSpec:
    """A kind of constraint and its value (see the module). Specs are compared by their JSON text, in which the order of
    properties counts, since generated JSON follows it. Raises UsageError for an unknown kind, a value that is not JSON,
    and a value beyond `grammar_limits.LIMITS`."""

    kind: Kind
    value: Any = field(default=None, compare=False)
    plain: Any = field(init=False, repr=False, compare=False)  # the value as a JSON document
    key: str = field(init=False, repr=False)  # `plain` as JSON text

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"unknown kind of grammar: {self.kind!r}", f"known are {', '.join(get_args(Kind))}")
        value = self.value
        if self.kind == "json_object":
            value = None
        elif self.kind == "tools" and isinstance(value, ToolCalls):
            value = vars(value) | {"tools": list(value.tools)}
        check(self.kind, value)
        if self.kind == "json_schema" and isinstance(value, str):
            value = _parsed(value)
            check(self.kind, value)
        object.__setattr__(self, "plain", value)
        object.__setattr__(self, "key", _text_of(self.kind, value))

    @classmethod
    def of_key(cls, kind: Kind, key: str) -> "GrammarSpec":
        """The spec with this `key`."""
        value = json.loads(key)
        if kind == "tools":
            value = ToolCalls(**value)
        return cls(kind, value)


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not valid JSON: {error}") from error


def _text_of(kind: Kind, value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:
        half = error.object[error.start : error.start + 1]
        raise UsageError(f"the {kind} constraint holds {half!a}, half of a surrogate pair") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the value of the {kind} constraint is not JSON: {error}") from error
    return text


def llguidance_source(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """The grammar of `spec` in llguidance's Lark syntax. special: text -> id of special tokens. Raises UsageError."""
    if spec.kind == "tools":
        return _tools(spec.value, special)
    return _SOURCES[spec.kind](spec.plain)


def _json_schema(value: Any) -> str:
    return _lark({"start": _inline_schema(value, "the JSON schema")})


def _regex(value: Any) -> str:
    from llguidance import regex_to_lark  # only compilation loads the library

    text = _text(value, "the regex")
    if (len(text) - len(text.rstrip("\\"))) % 2:  # the library would ignore it
        raise UsageError("the regex ends within an escape", "write a backslash of the text as two")
    return _lark({"start": f"/{regex_to_lark(text, 'd')}/"})


def _choice(value: Any) -> str:
    if isinstance(value, str) or not isinstance(value, Seq) or not all(isinstance(text, str) for text in value):
        raise UsageError("choice must be a list of texts")
    if not value:
        raise UsageError("choice is an empty list", "give at least one text")
    # one regex: thousands of literals are too many for the library
    return _lark({"start": f"/(?:{'|'.join(text.translate(_IN_REGEX) for text in value)})/"})


def _grammar(value: Any) -> str:
    from llguidance import grammar_from

    text = _text(value, "the grammar")
    try:
        return grammar_from("grammar", _GBNF_ESCAPE.sub(_plain_escape, text) if "::=" in text else text)
    except ValueError as error:
        hint = "give a Lark grammar with a rule `start: ...`, or GBNF with a rule `root ::= ...`"
        raise UsageError(f"the grammar is not valid: {one_line(str(error))}", hint) from error


def _plain_escape(escape: re.Match[str]) -> str:
    r"""The character of a GBNF escape \uXXXX or \UXXXXXXXX, of which llguidance's conversion drops leading zeros."""
    number = int(escape[2] or escape[3], 16)
    if 0xD800 <= number < 0xE000 or number > sys.maxunicode:
        raise UsageError(f"the grammar holds {escape[0]}, which is no character")
    return escape[1] + (f"\\x{number:02x}" if number < 0xA0 else chr(number))


def _tools(value: Any, special: Mapping[str, int]) -> str:
    """A grammar with a rule for each tool, so that `$ref` in its parameters refers to its own schema."""
    if not isinstance(value, ToolCalls):
        raise UsageError("the value of a tools constraint must be ToolCalls")
    functions = [_function(tool) for tool in value.tools]
    if value.name is not None:
        functions = [function for function in functions if function["name"] == value.name]
    if not functions:
        named = f"no tool is named {value.name!r}" if value.name is not None else "the list of tools is empty"
        raise UsageError(named, "name one of the request's tools")
    rules = {
        "start": f"call ({_frame_text(NEWLINE, special)} call)*" if value.may_repeat else "call",
        "call": f"{_frame_text(CALL_PREFIX, special)} tool {_frame_text(CALL_SUFFIX, special)}",
        "tool": " | ".join(f"tool_{i}" for i in range(len(functions))),
    }
    for i, function in enumerate(functions):
        head = f'{{"name": {json.dumps(function["name"])}, "arguments": '
        schema = _inline_schema(_parameters(function), f"the parameters of tool {function['name']!r}")
        rules[f"tool_{i}"] = f'{_literal(head)} {schema} "}}"'
    return _lark(rules)


def _function(tool: Any) -> Mapping[str, Any]:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise UsageError("a tool has no function with a name", 'write {"type": "function", "function": {"name": ...}}')
    return function


def _parameters(function: Mapping[str, Any]) -> Any:
    schema = function.get("parameters")
    if schema is None:
        return NO_PARAMETERS
    if not isinstance(schema, Mapping):
        return schema
    if isinstance(kind := schema.get("type"), str) and kind != "object":
        what = f"the parameters of tool {function['name']!r} have type {kind!r}, but arguments are an object"
        raise UsageError(what, "give type object")
    return {"type": "object", **schema}


def _inline_schema(schema: Any, where: str) -> str:
    """`schema` as llguidance's %json symbol for a Lark rule. `where`: name of the schema for errors."""
    if schema is True:
        schema = {}
    elif schema is False:
        raise UsageError(f"{where} is false, which no text satisfies")
    if not isinstance(schema, Mapping):
        raise UsageError(f"{where} must be a JSON object, but is {type(schema).__name__}")
    options = {"whitespace_pattern": JSON_SPACE, "whitespace_flexible": True}
    return "%json " + json.dumps({**_without_annotations(schema), "x-guidance": options})


def with_subschemas(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A JSON schema in which each direct subschema is `change(subschema)`; other members stay as they are."""
    found: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _NAMED_SCHEMAS and isinstance(value, Mapping):
            found[key] = {name: change(each) for name, each in value.items()}
        elif key in _SCHEMAS:
            found[key] = [change(each) for each in value] if isinstance(value, list) else change(value)
        else:
            found[key] = value
    return found


def _without_annotations(schema: Any) -> Any:
    """A schema without the annotations that llguidance refuses, and with OpenAPI's `nullable` as a union with null. A
    pattern with look-around beside an enforced format, as zod writes it, is dropped: the format suffices."""
    if not isinstance(schema, Mapping):
        return schema
    schema = _with_named_members(schema)
    kept: dict[str, Any] = {}
    kind = schema.get("format")
    for key, value in schema.items():
        if key == "format" and isinstance(value, str) and value not in _FORMATS:
            continue
        if key == "$schema" and _DIALECT not in str(value):
            continue
        if key == "pattern" and kind in _FORMATS and _LOOK_AROUND.search(str(value)):
            continue
        if key != "nullable":
            kept[key] = value
    found = with_subschemas(kept, _without_annotations)
    if schema.get("nullable") is True:
        return {"anyOf": [found, {"type": "null"}]}
    return found


def _with_named_members(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """A schema with the members that `propertyNames` allows, which llguidance lacks, as pydantic and zod write it for
    dictionaries: any text, a list of names, or a pattern. Beside `properties` only the first is known."""
    names = schema.get("propertyNames")
    if not isinstance(names, Mapping):
        return schema
    rest = {key: value for key, value in schema.items() if key != "propertyNames"}
    value = rest.get("additionalProperties", True)
    limits = {key: each for key, each in names.items() if (key, each) != ("type", "string")}
    if not limits:
        return rest
    if len(limits) > 1 or rest.keys() & {"properties", "patternProperties"}:
        return schema
    [(kind, limit)] = limits.items()
    if kind == "pattern" and isinstance(limit, str):
        members = {"patternProperties": {limit: value}}
    elif kind in ("enum", "const"):
        listed = limit if isinstance(limit, list) else [limit]
        members = {"properties": {name: value for name in listed if isinstance(name, str)}}
    else:
        return schema
    return {**rest, **members, "additionalProperties": False}


def _frame_text(text: str, special: Mapping[str, int]) -> str:
    """`text` as symbols of a Lark rule, in which names of special tokens become these tokens."""
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)"
    parts = re.split(f"({names})", text)
    return " ".join(f"<[{special[part]}]>" if part in special else _literal(part) for part in parts if part)


def _literal(text: str) -> str:
    return json.dumps(text).replace("\x7f", "\\u007f")  # the library accepts visible characters only


def _lark(rules: Mapping[str, str]) -> str:
    return "%llguidance {}\n" + "".join(f"{name}: {body}\n" for name, body in rules.items())


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{what} must be a text that is not empty")
    return value


def one_line(message: str) -> str:
    """An error message of llguidance as one line, without quoted source lines and parser state."""
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines() if not _QUOTED.match(line)]
    return " ".join(filter(None, lines))


def error_cause(kind: Kind, message: str) -> str:
    """The cause in an error message of llguidance; with its position only in a grammar, which the user has written."""
    text = one_line(message).replace(*_ONE_OF)
    return text if kind == "grammar" else _POSITION.sub("", text)


_SOURCES: Mapping[str, Callable[[Any], str]] = {
    "json_object": lambda _: _json_schema({"type": "object"}),
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
