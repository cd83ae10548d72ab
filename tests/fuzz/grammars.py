"""Constraints of all kinds, ordinary and hostile: schemas, regexes, Lark and GBNF grammars, choices, tools. A hostile
constraint has a shape (a chain, a cycle, doubling, many parts, an extreme number) and a size."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
Json = dict[str, Any]
Made = tuple[str, Any]
"""Kind (as of GrammarSpec; "tools": the list of tools) and value."""

WORDS = ("a", "b", "ab", "city", "name", "x_1", "é", "日本", "🎉", "", " ", "\n", '"', "\\", "/", "\x00", "\x7f",
         "\u200b", "pattern", "$ref", "%", "#", "<|im_end|>", "start", "root", "a b", "{", "}", "[", "]", "0",
         "-1")  # fmt: skip
NUMBERS = (0, 1, 2, 7, 10, 64, 97, 1000, 12345, 99991, 123457, 10**6 + 3, 2**31, 2**53, 2**64, 10**18, 10**40, -1, -7,
           -(2**53), 0.5, 0.1, 1.5, -0.25, 1e-5, 1e-9, 3.14159265, 1e15, 1e22, 1e300, -1e300, 5e-324)  # fmt: skip
COUNTS = (0, 1, 2, 3, 9, 50, 99, 100, 999, 1000, 5000, 10**5, 10**7, 2**31, 2**32, 2**63, 10**20, -1)
FORMATS = ("date", "date-time", "time", "email", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration", "regex", "nope")
TYPES = ("string", "number", "integer", "boolean", "null", "object", "array")
PIECES = ("a", "b", ".", r"\d", r"\w", r"\s", r"\S", r"\D", r"\p{L}", r"\p{Greek}", "[a-z]", "[^a]", "[^\\s\\S]", "[]",
          "é", "日", "(?i)ab", "^", "$", r"\b", r"\A", r"\z", "(?=a)", r"\1", "\\", "(", ")", "[", "/", "\n", " ", "#",
          "(?s).", "[\\]", r"\x41", r"\u0041", r"\x{1F389}", r"\ud800", "&&", "[a&&b]", "~", "&", "-", "🎉", "\x00",
          "(?P<n>a)")  # fmt: skip


NOTES = ("title", "description", "default", "$id", "$schema", "$comment", "nonsense", "x-guidance")
REFS = ("#", "#/$defs/d0", "#/$defs/d1", "#/$defs/none", "http://x/y", "#d0", "", "#/")


def requests(rng: random.Random) -> Iterator[tuple[str, Any]]:
    """An endless iterator of (path, body)."""
    while True:
        yield request(rng, *constraint(rng))


def request(rng: random.Random, kind: str, value: Any) -> tuple[str, Json]:
    """A request body with this constraint, in one of its spellings."""
    path = CHAT if kind == "tools" or rng.random() < 0.5 else TEXT
    body: Json = {"messages": [{"role": "user", "content": "Go."}]} if path == CHAT else {"prompt": "Go: "}
    body |= {"max_tokens": rng.choice((1, 4, 12, 40)), "temperature": rng.choice((0, 1, 3)), "seed": 1}
    body |= {"stream": True} if rng.random() < 0.3 else {"n": 3} if rng.random() < 0.1 else {}
    if kind == "tools":
        named = {"type": "function", "function": {"name": _name_of(value)}}
        return path, body | {"tools": value, "tool_choice": rng.choice(("required", named))}
    if kind == "json_object":
        return path, body | {"response_format": {"type": "json_object"}}
    if kind == "json_schema" and rng.random() < 0.4:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": value, "strict": True}}
        return path, body | {"response_format": form}
    short = kind.removeprefix("json_") if kind != "json_schema" else "json"
    return path, body | ({f"guided_{short}": value} if rng.random() < 0.6 else {"structured_outputs": {short: value}})


def constraint(rng: random.Random) -> Made:
    """A constraint of any kind; about half of them are ordinary."""
    if rng.random() < 0.03:
        return "json_object", None
    make = rng.choice(HOSTILE if rng.random() < 0.45 else ORDINARY)
    kind, value = make(rng)
    if isinstance(value, str) and rng.random() < 0.15:
        value = damaged(rng, value)
    if kind == "json_schema" and rng.random() < 0.1:
        value = json.dumps(value)
    return kind, value


def damaged(rng: random.Random, text: str) -> str:
    at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    return rng.choice((text[:at] + text[to:], text[:at] + rng.choice(WORDS) + text[at:], text + text[at:to],
                       text[::-1]))  # fmt: skip


def size(rng: random.Random, most: int) -> int:
    return int(10 ** rng.uniform(0, len(str(most)) - 1 + 0.3))


# Ordinary constraints.


def schema(rng: random.Random, depth: int = 0) -> Any:
    """A JSON schema whose keywords mostly fit each other."""
    if depth > 4 or rng.random() < 0.05:
        return rng.choice(({}, True, {"type": "string"}, {"type": "integer"}, False, {"$ref": "#"}))
    kind = rng.choice((*TYPES, "any", "enum", "const", "ref", "list", "wrong"))
    made = _schema_of(rng, kind, depth)
    if depth == 0:
        made["$defs"] = {name: schema(rng, 2) for name in ("d0", "d1") if rng.random() < 0.5}
    if rng.random() < 0.1:
        made[rng.choice(NOTES)] = rng.choice((*WORDS, *NUMBERS, {}, []))
    return made


def _schema_of(rng: random.Random, kind: str, depth: int) -> Json:  # noqa: C901  a table
    inner: Callable[[], Any] = lambda: schema(rng, depth + 1)  # noqa: E731
    some: Callable[[Json], Json] = lambda made: {key: value for key, value in made.items() if rng.random() < 0.4}  # noqa: E731
    match kind:
        case "string":
            made = {"minLength": rng.choice(COUNTS), "maxLength": rng.choice(COUNTS), "pattern": pattern(rng),
                    "format": rng.choice(FORMATS), "contentEncoding": "base64"}  # fmt: skip
        case "number" | "integer":
            keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
            made = {key: rng.choice(NUMBERS) for key in keys}
        case "object":
            names = rng.sample(WORDS, rng.randrange(5))
            made = {"properties": {name: inner() for name in names}, "required": rng.sample(names, len(names) // 2),
                    "additionalProperties": inner(), "minProperties": rng.choice(COUNTS),
                    "maxProperties": rng.choice(COUNTS), "patternProperties": {pattern(rng): inner()},
                    "propertyNames": inner()}  # fmt: skip
            return {"type": kind, **{key: made[key] for key in ("properties", "required")}, **some(made)}
        case "array":
            made = {"items": inner(), "prefixItems": [inner()], "minItems": rng.choice(COUNTS), "uniqueItems": True,
                    "maxItems": rng.choice(COUNTS), "contains": inner()}  # fmt: skip
        case "enum":
            return {"enum": [rng.choice((*WORDS, *NUMBERS, None, [], {"a": 1})) for _ in range(rng.randrange(5))]}
        case "const":
            return {"const": rng.choice((*WORDS, *NUMBERS, None, True, {"a": ["b", {}]}))}
        case "ref":
            return {"$ref": rng.choice(REFS)}
        case "list":
            return {rng.choice(("anyOf", "oneOf", "allOf")): [inner() for _ in range(rng.randrange(4))]}
        case "any":
            made = {"type": rng.sample(TYPES, rng.randrange(4)), "not": inner(), "if": inner(), "then": inner()}
        case "wrong":
            return some({"type": rng.choice(("text", 7, None, [])), "items": [1], "properties": [], "required": "a",
                         "enum": 3})  # fmt: skip
        case _:
            return {"type": kind}
    return {"type": kind, **some(made)} if kind != "any" else some(made)


def pattern(rng: random.Random, depth: int = 0) -> str:
    made = ""
    for _ in range(rng.randrange(1, 5)):
        piece = rng.choice(PIECES[:11] if rng.random() < 0.8 else PIECES)
        if depth < 3 and rng.random() < 0.35:
            piece = f"({'?:' if rng.random() < 0.3 else ''}{pattern(rng, depth + 1)}{rng.choice(('', '|' + piece))})"
        low, high = sorted(rng.choice(COUNTS[:9]) for _ in range(2))
        made += piece + rng.choice(("", "", "", "*", "+", "?", "*?", f"{{{low}}}", f"{{{low},{high}}}", f"{{{low},}}"))
    return made


def lark(rng: random.Random) -> str:
    """A few rules and terminals that may refer to each other."""
    rules = ["start", *(f"r{i}" for i in range(rng.randrange(4)))]
    terminals = [f"T{i}" for i in range(rng.randrange(4))]
    special = ("<[0]>", "<[0-5]>", "<[*]>", "<[^1]>", "<|im_end|>", "<|none|>", "<[99999999]>", "<[7,9-11]>")

    def part(depth: int) -> str:
        quoted = json.dumps(rng.choice(WORDS), ensure_ascii=rng.random() < 0.5)
        regex = "/" + pattern(rng).replace("/", "\\/").replace("\n", "\\n") + "/" + rng.choice(("", "", "i", "s", "x"))
        plain = [quoted, quoted, regex, rng.choice(rules), rng.choice(terminals or rules), rng.choice(special)]
        plain += ["%json " + json.dumps(schema(rng, 3)), '%regex {"substring_chars": "abcabc"}', '%lark { start: "a" }']
        found = rng.choice(plain if rng.random() < 0.2 else plain[:5])
        if depth < 3 and rng.random() < 0.4:
            found = f"({rng.choice((' ', ' | ', ' & ')).join(part(depth + 1) for _ in range(rng.randrange(1, 4)))})"
        complement = rng.choice(("", "", "~", "")) * (rng.random() < 0.1)
        return complement + found + rng.choice(("", "", "*", "+", "?", "{2,3}", "{5}"))

    def attributes() -> str:
        kinds = ("lazy", 'stop="a"', "max_tokens=3", 'suffix="b"', "capture", "temperature=0.5", "stop=/a+/", "nope=1")
        return f"[{rng.choice(kinds)}]" if rng.random() < 0.12 else ""

    options = ('{"no_forcing": true}', '{"allow_invalid_utf8": true}', '{"allow_initial_skip": true}', "{}", '{"x": 1}')
    lines = [f"%llguidance {rng.choice(options)}"] if rng.random() < 0.15 else []
    lines += [f"%ignore {rng.choice(('/ +/', *terminals, 'nope'))}"] if rng.random() < 0.15 else []
    lines += ["%import common.INT"] if rng.random() < 0.05 else []
    lines += [f"{name}{attributes()}: {' | '.join(part(0) for _ in range(rng.randrange(1, 4)))}" for name in rules]
    lines += [f"{name}{attributes()}: {part(1)}" for name in terminals]
    return "\n".join(lines) + "\n"


def gbnf(rng: random.Random) -> str:
    rules = ["root", *(f"r-{i}" for i in range(rng.randrange(4)))]

    def part(depth: int) -> str:
        found = rng.choice((json.dumps(rng.choice(WORDS)), "[a-z]", "[^x]", "[\\]]", rng.choice(rules), '"\\x41"', "."))
        if depth < 3 and rng.random() < 0.4:
            found = f"({rng.choice((' ', ' | ')).join(part(depth + 1) for _ in range(rng.randrange(1, 4)))})"
        return found + rng.choice(("", "", "*", "+", "?", "{2}", "{1,3}", "{2,}"))

    return "".join(f"{name} ::= {' '.join(part(0) for _ in range(rng.randrange(1, 4)))}\n" for name in rules)


def choice(rng: random.Random) -> list[str]:
    return ["".join(rng.choices(WORDS, k=rng.randrange(4))) for _ in range(rng.randrange(1, 8))]


def tools(rng: random.Random) -> list[Json]:
    names = rng.sample((*WORDS[:6], "get_weather", "a" * 64, "a-b.c"), rng.randrange(1, 4))
    return [{"type": "function", "function": {"name": name, "parameters": schema(rng)}} for name in names]


def _name_of(value: Any) -> str:
    return str(value[0]["function"]["name"]) if value else "none"


# Hostile shapes.


def rule_shape(rng: random.Random) -> str:
    """Rules or terminals that refer to the next one: a chain, a doubling, a cycle, or many alternatives."""
    name, count = rng.choice("rR"), size(rng, 9000)
    body = rng.choice(("{n}", "{n} {n}", '{n} | "{i}"', '"a" {n} "b"', "{n}?", "{n}*", "({n} | {n})", '"" | {n} {n}',
                       "{n}+ {n}"))  # fmt: skip
    last = rng.choice(('"x"', "/[a-z]+/", f"{name}0", "start", '""', "nothing"))
    hidden = rng.choice(("", '"b" ', '("b" | "c") '))
    steps = "".join(f"{name}{i}: {body.format(n=f'{name}{i + 1}', i=i)}\n" for i in range(count))
    return f"start: {hidden}{name}0\n{steps}{name}{count}: {last}\n"


def wide_rule(rng: random.Random) -> str:
    kinds = ('"{i}"', '"{i}"*', "/{i}[ab]*/", "/[^{i}]*/", '"a"', "r{i}")
    parts = [rng.choice(kinds).format(i=i) for i in range(size(rng, 20000))]
    return f'start: ({rng.choice((" ", " | ", " & ")).join(parts)}){rng.choice(("", "*", "+", "{3}"))}\nr0: "x"\n'


def nested_text(rng: random.Random) -> Made:
    depth, core = size(rng, 30000), rng.choice(("a", "a|b", ".", "[ab]"))
    opening, closing = rng.choice((("(", ")"), ("(", ")*"), ("(", "){2}"), ("(?:a|", ")"), ("(", "|b)+"), ("[", "]")))
    if rng.random() < 0.5:
        return "regex", opening * depth + core + closing * depth
    return "grammar", f'{rng.choice(("start: ", "root ::= "))}{opening[0] * depth}"a"{closing * depth}'


def repeats(rng: random.Random) -> Made:
    inner = rng.choice(("a", "[ab]", ".", "(ab?)", r"\w", r"\p{L}", "(a|b|cd)", "(.*a.{9})", "a*", "a?", ""))
    for _ in range(rng.randrange(1, 5)):
        low, high = sorted(abs(rng.choice(COUNTS)) for _ in range(2))
        inner = f"({inner}){rng.choice((f'{{{low}}}', f'{{{low},{high}}}', f'{{{low},}}', '*', '+', '?'))}"
    hidden = rng.choice(("", "[xy]", "(x|y)"))
    return rng.choice((("regex", hidden + inner), ("grammar", f"start: /{hidden}{inner}/"),
                       ("json_schema", {"type": "string", "pattern": hidden + inner})))  # fmt: skip


def mass_regex(rng: random.Random) -> str:
    pieces = ("a", "a?", "a*", "(a|b)", "{i}|", "[ab]*{i}|", "(?i)x{i}|", r"\w", ".*", "a{{1,9}}", ".*{i}.*|")
    piece = rng.choice(pieces)
    return "".join(piece.format(i=i) for i in range(size(rng, 60000))).removesuffix("|")


def chained_schema(rng: random.Random) -> Any:
    """Definitions that refer to the next or to the first one."""
    count, names = size(rng, 5000), rng.choice(("$defs", "definitions"))
    shapes: tuple[Callable[[Json], Any], ...] = (
        lambda n: n, lambda n: {"type": "object", "properties": {"a": n}, "required": ["a"]}, lambda n: {"items": n},
        lambda n: {"anyOf": [n, n]}, lambda n: {"allOf": [n, n]}, lambda n: {"oneOf": [n, {"type": "null"}]},
        lambda n: {"properties": {"a": n, "b": n}}, lambda n: {"allOf": [n, {"properties": {"k": n}}]},
        lambda n: {"not": n}, lambda n: {"additionalProperties": n}, lambda n: {"prefixItems": [n, n], "minItems": 2},
        lambda n: {"anyOf": [n, {"properties": {"a": n}}]},
    )  # fmt: skip
    shape = rng.choice(shapes)
    made = {f"d{i}": shape({"$ref": f"#/{names}/d{i + 1}"}) for i in range(count)}
    made[f"d{count}"] = rng.choice(({"type": "string"}, {"$ref": f"#/{names}/d0"}, {}, {"$ref": "#"}))
    return {"$ref": f"#/{names}/d0", names: made}


def nested_schema(rng: random.Random) -> Any:
    depth = size(rng, 3000)
    opening, closing = rng.choice((
        ('{"items":', "}"), ('{"anyOf":[', "]}"), ('{"properties":{"a":', "}}"), ('{"not":', "}"), ("[", "]"),
        ('{"enum":[', "]}"), ('{"const":{"a":', "}}"), ('{"allOf":[{},', "]}"), ('{"additionalProperties":', "}"),
    ))  # fmt: skip
    return opening * depth + "{}" + closing * depth


def wide_schema(rng: random.Random) -> Any:
    count, leaf = size(rng, 20000), schema(rng, 4)
    names = [f"p{i}" for i in range(count)]
    makers: tuple[Callable[[], Any], ...] = (
        lambda: {"anyOf": [{"type": "object", "properties": {name: leaf}, "required": [name]} for name in names]},
        lambda: {"type": "object", "properties": dict.fromkeys(names, leaf)},
        lambda: {"type": "object", "properties": {name: {} for name in names}, "required": names},
        lambda: {"enum": [f"value {i * 7919 % 100_003}" for i in range(count)]},
        lambda: {"enum": list(range(count))},
        lambda: {"allOf": [{"pattern": f"{i}"} for i in range(min(count, 300))], "type": "string"},
        lambda: {"oneOf": [{"const": i} for i in range(count)]},
        lambda: {"prefixItems": [leaf] * count, "minItems": count},
        lambda: {"patternProperties": {f"^a{i}": leaf for i in range(min(count, 2000))}},
        lambda: {"const": "x" * count * 10},
        lambda: {"allOf": [{"multipleOf": i + 2} for i in range(min(count, 30))], "type": "integer"},
        lambda: {"type": "object", "required": [f"q{i}" for i in range(count)], "minProperties": count},
    )  # fmt: skip
    return rng.choice(makers)()


def extreme_schema(rng: random.Random) -> Any:
    keys = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    counts = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
    made: Json = {"type": rng.choice(TYPES)}
    made |= {key: rng.choice(NUMBERS) for key in rng.sample(keys, rng.randrange(4))}
    made |= {key: rng.choice(COUNTS) for key in rng.sample(counts, rng.randrange(4))}
    return rng.choice((made, {"anyOf": [made, made]}, {"properties": {"a": made}, "required": ["a"]}, {"items": made}))


def mass_choice(rng: random.Random) -> list[str]:
    count = size(rng, 100_000)
    pieces = ("choice {i}", "{i}", "a" * 50 + "{i}", "{i} is one of many texts", "a", "", "日本{i}", "\x7f{i}")
    piece = rng.choice(pieces)
    if rng.random() < 0.2:
        return [rng.choice(("the quick fox ", "a", "é", "\n", "0123")) * count, "b"]
    return [piece.format(i=i * 7919 % 100_003) for i in range(count)]


def mass_tools(rng: random.Random) -> list[Json]:
    leaf = schema(rng)
    return [{"type": "function", "function": {"name": f"f{i}", "parameters": leaf}} for i in range(size(rng, 2000))]


def _of_kind(kind: str, make: Callable[[random.Random], Any]) -> Callable[[random.Random], Made]:
    return lambda rng: (kind, make(rng))


PLAIN = (("json_schema", schema), ("json_schema", schema), ("regex", pattern), ("grammar", lark), ("grammar", lark),
         ("grammar", gbnf), ("choice", choice), ("tools", tools))  # fmt: skip
MASSES = (("grammar", rule_shape), ("grammar", wide_rule), ("regex", mass_regex), ("json_schema", chained_schema),
          ("json_schema", nested_schema), ("json_schema", wide_schema), ("json_schema", extreme_schema),
          ("choice", mass_choice), ("tools", mass_tools))  # fmt: skip
ORDINARY = tuple(_of_kind(*each) for each in PLAIN)
HOSTILE = (nested_text, repeats, *(_of_kind(*each) for each in MASSES))
