r"""What a constrained text must be (`GrammarSpec`), written as a grammar that llguidance reads.

Kinds and their values:
  json_object  any JSON object; the value is not used
  json_schema  a JSON schema: a mapping, a bool or JSON text
  regex        a regular expression that the whole text matches (Rust's regex crate, no look-around; \d is 0-9)
  choice       a list of texts, of which the text is one
  grammar      a Lark grammar (rule `start`), or a GBNF/EBNF grammar (rule `root`)
  tools        `ToolCalls`
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from headstart.errors import UsageError
from headstart.text.grammar_limits import check

Kind = Literal["json_object", "json_schema", "regex", "choice", "grammar", "tools"]

JSON_SPACE = r"[ \t\r\n]{0,32}"
"""White space between the tokens of a JSON text. Bounded: small models else write nothing but line breaks."""

_IN_REGEX = {ord(mark): f"\\{mark}" for mark in r"\.+*?()|[]{}^$#&-~/"} | {
    control: f"\\x{{{control:x}}}" for control in (*range(32), *range(127, 160), 0x2028, 0x2029)
}
_QUOTED = re.compile(r"\s*(\d+ \||\^+\s*$)")
_POSITION = re.compile(r"^at \d+\(\d+\): (failed to compile JSON schema: )?")


@dataclass(frozen=True)
class ToolFrame:
    """How a format writes calls. Each call is `prefix {"name": ..., "arguments": {...}} suffix`; all calls stand
    between `begin` and `end`. `separator` stands between calls; None: exactly one call. Names of special tokens in
    these texts mean the tokens."""

    prefix: str = "<tool_call>\n"
    suffix: str = "\n</tool_call>"
    begin: str = ""
    end: str = ""
    separator: str | None = None
    name_key: str = "name"
    arguments_key: str = "arguments"


@dataclass(frozen=True)
class ToolCalls:
    """The text must call some of `tools` (as in OpenAI requests); `name`: only this one."""

    tools: Seq[Mapping[str, Any]]
    name: str | None = None
    frame: ToolFrame = field(default_factory=ToolFrame)


@dataclass(frozen=True)
class GrammarSpec:
    """A kind and its value (see the module). Equal and hashed by content; the order of properties counts, since JSON
    is written in that order. `plain`: the value as JSON; `key`: its text. Raises UsageError for an unknown kind, for
    values that are not JSON, and for those beyond `grammar_limits.LIMITS`."""

    kind: Kind
    value: Any = field(default=None, compare=False)
    plain: Any = field(init=False, repr=False, compare=False)
    key: str = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise UsageError(f"unknown kind of grammar: {self.kind!r}", f"known are {', '.join(get_args(Kind))}")
        value = self.value
        if self.kind == "json_object":
            value = None
        elif self.kind == "tools" and isinstance(value, ToolCalls):
            value = {"tools": list(value.tools), "name": value.name, "frame": asdict(value.frame)}
        check(self.kind, value)
        if self.kind == "json_schema" and isinstance(value, str):
            value = _parsed(value)
            check(self.kind, value)
        object.__setattr__(self, "plain", value)
        object.__setattr__(self, "key", _text_of(self.kind, value))

    @classmethod
    def of_key(cls, kind: Kind, key: str) -> GrammarSpec:
        """The spec whose `key` this is."""
        value = json.loads(key)
        if kind == "tools":
            value = ToolCalls(value["tools"], value["name"], ToolFrame(**value["frame"]))
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
        raise UsageError(f"the {kind} constraint holds {half!a}, half of a pair that no text can hold") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"the value of the {kind} constraint is not JSON: {error}") from error
    return text


def source_of(spec: GrammarSpec, special: Mapping[str, int]) -> str:
    """The grammar of `spec` for llguidance. special: names and ids of special tokens. Raises UsageError for what can
    be seen to be wrong without compiling."""
    if spec.kind == "tools":
        return _tools(spec.value, special)
    return _SOURCES[spec.kind](spec.plain)


def _json_schema(value: Any) -> str:
    return _lark({"start": _inline_schema(value, "the JSON schema")})


def _regex(value: Any) -> str:
    from llguidance import regex_to_lark  # a spec alone need not load the library

    text = _text(value, "the regex")
    if (len(text) - len(text.rstrip("\\"))) % 2:  # the library would drop it
        raise UsageError("the regex ends within an escape", "write a backslash of the text as two")
    return _lark({"start": f"/{regex_to_lark(text, 'd')}/"})


def _choice(value: Any) -> str:
    if isinstance(value, str) or not isinstance(value, Seq) or not all(isinstance(text, str) for text in value):
        raise UsageError("choice must be a list of texts")
    if not value:
        raise UsageError("choice is an empty list", "give at least one text")
    # As one regex: thousands of literals are too many for the library, and each is a state of its own.
    return _lark({"start": f"/(?:{'|'.join(map(_regex_literal, value))})/"})


def _grammar(value: Any) -> str:
    from llguidance import grammar_from

    text = _text(value, "the grammar")
    try:
        return grammar_from("grammar", text)
    except ValueError as error:
        hint = "give a Lark grammar with a rule `start: ...`, or GBNF with a rule `root ::= ...`"
        raise UsageError(f"the grammar is not valid: {one_line(str(error))}", hint) from error


def _tools(value: Any, special: Mapping[str, int]) -> str:
    """A rule for each tool, so that `$ref` in its parameters starts at its own schema."""
    if not isinstance(value, ToolCalls):
        raise UsageError("the value of a tools constraint must be ToolCalls")
    functions = [_function(tool) for tool in value.tools]
    if value.name is not None:
        functions = [function for function in functions if function["name"] == value.name]
    if not functions:
        named = f"no tool is named {value.name!r}" if value.name is not None else "the list of tools is empty"
        raise UsageError(named, "name one of the request's tools")
    frame = value.frame
    body = "call"
    if frame.separator is not None:
        body = f"call ({_frame_text(frame.separator, special)} call)*" if frame.separator else "call+"
    rules = {
        "start": f"{_frame_text(frame.begin, special)} {body} {_frame_text(frame.end, special)}",
        "call": f"{_frame_text(frame.prefix, special)} tool {_frame_text(frame.suffix, special)}",
        "tool": " | ".join(f"tool_{i}" for i in range(len(functions))),
    }
    for i, function in enumerate(functions):
        head = f"{{{json.dumps(frame.name_key)}: {json.dumps(function['name'])}, {json.dumps(frame.arguments_key)}: "
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
        return {"type": "object", "properties": {}, "additionalProperties": False}
    return {"type": "object", **schema} if isinstance(schema, Mapping) else schema


def _inline_schema(schema: Any, where: str) -> str:
    """`schema` as a symbol of a Lark rule."""
    if schema is True:
        schema = {}
    elif schema is False:
        raise UsageError(f"{where} is false, which no text satisfies")
    if not isinstance(schema, Mapping):
        raise UsageError(f"{where} must be a JSON object, but is {type(schema).__name__}")
    options = {"whitespace_pattern": JSON_SPACE, "whitespace_flexible": True}
    return "%json " + json.dumps({**schema, "x-guidance": options})


def _frame_text(text: str, special: Mapping[str, int]) -> str:
    """`text` as symbols of a Lark rule, in which names of special tokens are these tokens."""
    if not special:
        return _literal(text) if text else ""
    names = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts = re.split(f"({names})", text)
    return " ".join(f"<[{special[part]}]>" if part in special else _literal(part) for part in parts if part)


def _literal(text: str) -> str:
    return json.dumps(text).replace("\x7f", "\\u007f")  # the library reads visible characters only


def _regex_literal(text: str) -> str:
    return text.translate(_IN_REGEX)


def _lark(rules: Mapping[str, str]) -> str:
    return "%llguidance {}\n" + "".join(f"{name}: {body}\n" for name, body in rules.items())


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value:
        raise UsageError(f"{what} must be a text that is not empty")
    return value


def one_line(message: str) -> str:
    """A message of llguidance without the source and the state that it quotes, in one line."""
    lines = [line.strip() for line in message.partition("<state>")[0].splitlines() if not _QUOTED.match(line)]
    return " ".join(filter(None, lines))


def what_is_wrong(kind: Kind, message: str) -> str:
    """The cause in a message of llguidance about a spec; its position only if the user wrote that source."""
    text = one_line(message)
    return text if kind == "grammar" else _POSITION.sub("", text)


_SOURCES: Mapping[str, Callable[[Any], str]] = {
    "json_object": lambda _: _json_schema({"type": "object"}),
    "json_schema": _json_schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
}
