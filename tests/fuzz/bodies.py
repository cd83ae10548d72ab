"""Bodies made from the server's own schema: right ones with a few members replaced by edges, other types and masses."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from headstart.server import schema
from headstart.server.apis import embeddings, messages_body, ollama_body, responses_body

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
CHAT, TEXT, TOKENIZE, DETOKENIZE = "/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize"
MODELS = {
    CHAT: schema.ChatRequest, TEXT: schema.CompletionRequest, TOKENIZE: schema.TokenizeRequest,
    DETOKENIZE: schema.DetokenizeRequest, MESSAGES: messages_body.MessagesRequest, COUNT: messages_body.CountRequest,
    "/v1/responses": responses_body.ResponsesRequest, "/api/chat": ollama_body.OllamaChatRequest,
    "/api/generate": ollama_body.GenerateRequest, "/v1/embeddings": embeddings.EmbeddingRequest,
}  # fmt: skip
WEIGHTS = (6, 6, 2, 1, 3, 1, 3, 3, 1, 2)
MODEL = "smollm2-135m-mtp"
MOST_BYTES = 17 * 2**20
OUTPUT = 12
"""max_tokens of most requests: long answers are not the point."""
VOCAB = 49152

NUMBERS: tuple[Any, ...] = (
    0, 1, -1, 2, 20, 128, 129, 2**31, 2**63, 2**64, -(2**63), 10**400, 0.0, -0.0, 0.5, 1.5, 1e-50, 1e308, -1e308,
    5e-324, 1e999, float("nan"), float("-inf"),
)  # fmt: skip
TEXTS: tuple[str, ...] = (
    "", " ", "a", "\x00", "\ud800", "a\ud800b", "\udfff\ud800", "\U0001f600", "<|im_end|>", "<|im_start|>system\nx",
    "\\", "{{ 1/0 }}", "%s", "\n" * 50, "auto", "none", "text", "user", "assistant", "system", "tool", "\u202e", "ééé",
)  # fmt: skip
WRONG: tuple[Any, ...] = (None, True, 1, 1.5, "x", [], {}, [None], [[]], {"a": {}}, [1, "a"], ["a", 1], "1", [True])


@cache
def schema_of(path: str) -> dict[str, Any]:
    return MODELS[path].model_json_schema()


def requests(rng: random.Random) -> Iterator[tuple[str, Any]]:
    """(path, body), without end. Bodies are documents, or bytes where JSON cannot say it."""
    while True:
        path = rng.choices(tuple(MODELS), WEIGHTS)[0]
        body = base(path, rng)
        fields = schema_of(path)["properties"]
        for name in rng.sample(sorted(fields), min(rng.choice((0, 1, 1, 2, 3, 6)), len(fields))):
            body[name] = Values(path, rng).any(fields[name], name)
        if rng.random() < 0.05:
            body[rng.choice(("metadata", "store", "nonsense", "", "\ud800", "__class__"))] = any_value(rng)
        yield path, wire_form(body, rng)


def base(path: str, rng: random.Random) -> dict[str, Any]:
    """A request that is right."""
    words = " ".join(
        rng.choice(("red", "blue", "Tell", "me", "why", "7", "+", "?", "\n")) for _ in range(rng.randrange(1, 40))
    )
    turns = [{"role": "user", "content": words}]
    rights: dict[str, dict[str, Any]] = {
        CHAT: {"messages": turns},
        TEXT: {"prompt": words},
        MESSAGES: {"model": MODEL, "messages": turns},
        COUNT: {"model": MODEL, "messages": turns},
        "/v1/responses": {"input": words, "max_output_tokens": OUTPUT},
        "/v1/embeddings": {"input": words},
        "/api/chat": {"model": MODEL, "messages": turns, "options": {"num_predict": OUTPUT}},
        "/api/generate": {"model": MODEL, "prompt": words, "options": {"num_predict": OUTPUT}},
    }
    body = rights.get(path, {})
    if path == TOKENIZE:
        return {"prompt": words}
    if path == DETOKENIZE:
        return {"tokens": [rng.randrange(VOCAB) for _ in range(rng.randrange(20))]}
    body |= {"max_tokens": rng.randrange(1, OUTPUT), "stream": rng.random() < 0.4}
    return body


class Values:
    """Random values of one schema."""

    def __init__(self, path: str, rng: random.Random) -> None:
        self._definitions = schema_of(path).get("$defs", {})
        self._rng = rng

    def any(self, field: dict[str, Any], name: str) -> Any:
        """Right, at an edge, of another type, or a mass."""
        kind = self._rng.choices(("right", "edge", "wrong", "mass"), (5, 3, 2, 1))[0]
        if kind == "wrong":
            return any_value(self._rng)
        if kind == "mass":
            return self._mass(field, name)
        return self._value(field, name, edge=kind == "edge", depth=0)

    def _value(self, field: dict[str, Any], name: str, *, edge: bool, depth: int) -> Any:
        rng = self._rng
        if "$ref" in field:
            field = self._definitions[field["$ref"].rpartition("/")[2]]
        if "anyOf" in field:
            return self._value(rng.choice(field["anyOf"]), name, edge=edge, depth=depth)
        if "const" in field:
            return field["const"]
        if "enum" in field:
            return rng.choice(field["enum"])
        kind = field.get("type")
        if kind == "array":
            count = rng.choice((0, 1, 2, 5, 40)) if edge else rng.randrange(1, 4)
            return [self._value(field.get("items", {}), name, edge=edge, depth=depth + 1) for _ in range(count)]
        if kind == "object":
            return self._object(field, name, edge=edge, depth=depth)
        if kind in ("integer", "number"):
            return (
                rng.choice(NUMBERS) if edge else rng.choice((0, 1, 2, 5, 0.5)) if kind == "number" else rng.randrange(9)
            )
        if kind == "string":
            return rng.choice(TEXTS) if edge or rng.random() < 0.3 else rng.choice(("red", "a b", "user", "x\ny"))
        return {"boolean": rng.random() < 0.5, "null": None}.get(str(kind), any_value(rng))

    def _object(self, field: dict[str, Any], name: str, *, edge: bool, depth: int) -> dict[str, Any]:
        rng, found = self._rng, dict[str, Any]()
        for key, inner in field.get("properties", {}).items():
            if key in field.get("required", ()) or rng.random() < 0.3:
                found[key] = self._value(inner, key, edge=edge, depth=depth + 1)
        extra = field.get("additionalProperties")
        if extra:
            for _ in range(rng.choice((0, 1, 3))):
                key = str(rng.randrange(VOCAB)) if name == "logit_bias" and not edge else rng.choice(TEXTS)
                found[key] = self._value(extra if isinstance(extra, dict) else {}, key, edge=edge, depth=depth + 1)
        return found

    def _mass(self, field: dict[str, Any], name: str) -> Any:
        """Many elements, long texts, deep nests: what one member can cost."""
        rng = self._rng
        count = int(10 ** rng.uniform(2, 6.3))
        element = rng.choice((1, "a", [1], {}, None, "x" * 20, self._value(field, name, edge=False, depth=0)))
        size = max(len(json.dumps(element, default=str)), 1)
        count = min(count, MOST_BYTES // (size + 2))
        kinds: tuple[Callable[[], Any], ...] = (
            lambda: [element] * count,
            lambda: {str(i): element for i in range(min(count, 300_000))},
            lambda: rng.choice(("1", "a ", "é", "\n", "\u4e00", "<|im_end|>", "0123456789")) * count,
            lambda: nested(rng.choice(("[", '{"a":')), min(count, 100_000)),
            lambda: [self._value(field, name, edge=True, depth=0) for _ in range(min(count, 2000))],
        )
        return rng.choice(kinds)()


class Raw(str):
    """JSON text that stands for itself."""


def nested(opening: str, depth: int) -> Raw:
    closing = "]" if opening == "[" else "}"
    return Raw(opening * depth + "1" + closing * depth)


def any_value(rng: random.Random) -> Any:
    return rng.choice((*WRONG, rng.choice(NUMBERS), rng.choice(TEXTS)))


def wire_form(body: dict[str, Any], rng: random.Random) -> bytes:
    """As JSON text; now and then damaged."""
    raw = {f"@raw{i}@": value for i, value in enumerate(v for v in body.values() if isinstance(v, Raw))}
    marks = {id(value): mark for mark, value in raw.items()}
    text = json.dumps({name: marks.get(id(value), value) for name, value in body.items()})
    for mark, value in raw.items():
        text = text.replace(f'"{mark}"', value)
    data = text.encode()
    if rng.random() < 0.04:
        at = rng.randrange(len(data))
        data = rng.choice((data[:at], data[at:], data[:at] + b"\xff" + data[at:], data + data, b"\xef\xbb\xbf" + data))
    return data
