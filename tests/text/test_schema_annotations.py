"""JSON schemas of libraries: annotations are accepted, unsupported constraints are named."""

from functools import cache
from typing import Any

import pytest
from tiny_models import tiny_tokenizer

from headstart.errors import UsageError
from headstart.text.grammar import GrammarCompiler, GrammarSpec, ToolCalls
from headstart.text.tokenizer import Tokenizer

TEXT = {"type": "string"}
FORMATS = [
    "path", "file-path", "directory-path", "password", "binary", "byte", "base64", "base64url", "int32", "int64",
    "float", "double", "idn-email", "idn-hostname", "uri-reference", "iri", "uri-template", "json-pointer", "regex",
    "uuid4", "json-string", "multi-host-uri", "ipv4network", "ipvanyaddress", "color", "decimal", "cuid", "nanoid",
    "x-mine", "", "date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri",
]  # fmt: skip
ANNOTATIONS: dict[str, Any] = {
    "title": "t", "description": "d", "examples": [1], "example": {"format": "x"}, "default": {"format": "x"},
    "$comment": "c", "readOnly": True, "writeOnly": True, "deprecated": True, "x-order": 3, "x-foo": {"not": {}},
    "discriminator": {"propertyName": "t"}, "xml": {"name": "n"}, "externalDocs": {"url": "u"}, "nullable": False,
    "contentEncoding": "base64", "contentMediaType": "image/png", "contentSchema": {}, "propertyOrdering": ["a"],
    "$schema": "https://spec.openapis.org/oas/3.1/dialect/base", "$anchor": "a", "$id": "https://x.example/y",
    "~standard": {"vendor": "zod"}, "errorMessage": "e", "markdownDescription": "m", "enumDescriptions": ["x"],
}  # fmt: skip
UNSUPPORTED: dict[str, Any] = {
    "not": {}, "if": {}, "uniqueItems": True, "propertyNames": {"minLength": 1}, "contains": {},
    "dependentRequired": {"a": ["b"]}, "unevaluatedProperties": False,
}  # fmt: skip
ZOD_EMAIL = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
CORPUS: dict[str, Any] = {
    "pydantic": {
        "$defs": {"Kind": {"enum": ["a", "b"], "title": "Kind", "type": "string"}},
        "properties": {
            "path": {"format": "path", "title": "Path", "type": "string"},
            "secret": {"format": "password", "title": "Secret", "type": "string", "writeOnly": True},
            "raw": {"anyOf": [{"format": "base64url", "type": "string"}, {"type": "null"}], "default": None},
            "kind": {"$ref": "#/$defs/Kind", "default": "a", "description": "d"},
            "money": {"anyOf": [{"type": "number"}, {"pattern": r"^(?:\d+)$", "type": "string"}]},
            "format": {"title": "Format", "type": "string"},
        },
        "required": ["path", "secret", "format"],
        "title": "Model",
        "type": "object",
    },
    "zod": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "properties": {
            "email": {"type": "string", "format": "email", "pattern": ZOD_EMAIL},
            "id": {"type": "string", "format": "cuid", "pattern": "^[cC][0-9a-z]{6,}$"},
            "age": {"type": "integer", "minimum": -9007199254740991, "maximum": 9007199254740991},
            "when": {"type": "string", "format": "date-time"},
        },
        "required": ["email"],
        "additionalProperties": False,
    },
    "msgspec": {
        "$ref": "#/$defs/Node",
        "$defs": {
            "Node": {
                "title": "Node",
                "type": "object",
                "properties": {
                    "data": {"type": "string", "contentEncoding": "base64"},
                    "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/Node"}], "default": None},
                    "number": {"type": "string", "format": "decimal"},
                },
                "required": ["data"],
            }
        },
    },
    "openapi": {
        "type": "object",
        "properties": {
            "id": {"type": "integer", "format": "int64", "example": 10, "readOnly": True},
            "note": {"type": "string", "nullable": True, "xml": {"attribute": True}},
            "photo": {"type": "string", "format": "binary"},
        },
        "x-swagger-router-model": "Pet",
        "discriminator": {"propertyName": "id"},
    },
}


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer(300), eos_ids=[0, 2], bos_id=1)


@cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(tokenizer(), tokenizer().vocab_size)


def compile_both(schema: dict[str, Any]) -> None:
    """Compiles a schema as a response format and as parameters of a tool."""
    compiler().compile(GrammarSpec("json_schema", schema))
    whole = {"type": "object", "properties": {"a": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": whole}}
    compiler().compile(GrammarSpec("tools", ToolCalls([tool])))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_any_format_is_accepted(name: str) -> None:
    compile_both({"type": "string", "format": name})
    compile_both({"type": "object", "properties": {"a": {"anyOf": [{"type": "integer", "format": name}, TEXT]}}})


@pytest.mark.slow
@pytest.mark.parametrize("name", ANNOTATIONS)
def test_annotations_are_accepted(name: str) -> None:
    compile_both({"type": "object", "properties": {"a": {**TEXT, name: ANNOTATIONS[name]}}})
    whole = {"type": "object", "properties": {"a": TEXT}, name: ANNOTATIONS[name]}
    compiler().compile(GrammarSpec("json_schema", whole))


@pytest.mark.parametrize("name", CORPUS)
def test_schemas_of_libraries_compile(name: str) -> None:
    compiler().compile(GrammarSpec("json_schema", CORPUS[name]))


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_constraints_are_named(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        schema = {"type": "object", "properties": {"a": TEXT}, name: UNSUPPORTED[name]}
        compiler().compile(GrammarSpec("json_schema", schema))


def accepts(schema: dict[str, Any], text: str) -> bool:
    state = compiler().compile(GrammarSpec("json_schema", schema))
    return all(state.advance(token) for token in tokenizer().encode(text)) and state.accepting


def test_supported_formats_and_nullable_constrain() -> None:
    assert accepts({"type": "string", "format": "date"}, '"2024-01-31"')
    assert not accepts({"type": "string", "format": "date"}, '"soon"')
    assert accepts({"type": "string", "format": "path", "maxLength": 3}, '"a/b"')
    assert not accepts({"type": "string", "format": "path", "maxLength": 3}, '"a/b/c"')
    assert accepts({"type": "string", "nullable": True}, "null")
    assert not accepts({"type": "string"}, "null")


@pytest.mark.parametrize(("names", "good", "bad"), [
    ({"type": "string"}, '{"x":1}', '{"x":"1"}'), ({"enum": ["a", "b"]}, '{"a":1,"b":2}', '{"c":1}'),
    ({"type": "string", "const": "a"}, '{"a":1}', '{"b":1}'), ({"pattern": "^[xy]+$"}, '{"xy":1}', '{"z":1}'),
])  # fmt: skip
def test_names_of_dictionaries_as_pydantic_and_zod_write_them(names: dict[str, Any], good: str, bad: str) -> None:
    schema = {"type": "object", "propertyNames": names, "additionalProperties": {"type": "integer"}}
    assert accepts(schema, good) and not accepts(schema, bad)
    with pytest.raises(UsageError, match="propertyNames"):
        accepts({**schema, "properties": {"a": {}}, "propertyNames": {"minLength": 1}}, good)


def test_properties_may_have_the_names_of_annotations() -> None:
    names = ("format", "nullable", "$schema", "pattern", "default", "properties")
    compiler().compile(GrammarSpec("json_schema", {"type": "object", "properties": dict.fromkeys(names, TEXT)}))
