"""`/docs`: the endpoints and the fields of their requests as one page that needs nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import Any

STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;"
    "border-bottom:1px solid #8884}code{font-size:.95em}h2{margin-top:2rem}"
)


def page(schema: Mapping[str, Any]) -> str:
    """HTML for an OpenAPI document."""
    info = schema["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        f"<style>{STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])} ",
        "The same for programs: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    parts += [f"<h2><code>{escape(name)}</code></h2>\n{text}" for name, text in operations(schema)]
    return "\n".join(parts) + "\n"


def operations(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Each endpoint's method and path, and what it takes as HTML."""
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            parts = [f"<p>{escape(operation.get('description', ''))}</p>"]
            for body in operation.get("requestBody", {}).get("content", {}).values():
                parts.append("<table><tr><th>field<th>type<th>default<th></tr>")
                parts += _rows(schema, _resolved(schema, body["schema"]))
                parts.append("</table>")
            yield f"{method.upper()} {path}", "\n".join(parts)


def _rows(schema: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[str]:
    required = model.get("required", ())
    for name, field in model.get("properties", {}).items():
        default = "<em>required</em>" if name in required else escape(str(field.get("default", "")))
        bounds = [
            f"{word} {_number(each[key])}"
            for each in field.get("anyOf", [field])
            for key, word in BOUNDS.items()
            if key in each
        ]
        text = escape(
            ". ".join(filter(None, (field.get("description", "").rstrip("."), ", ".join(dict.fromkeys(bounds)))))
        )
        yield f"<tr><td><code>{escape(name)}</code><td>{escape(_type(schema, field))}<td>{default}<td>{text}</tr>"


def _number(value: float) -> str:
    return str(int(value) if value == int(value) else value)


BOUNDS = {
    "minimum": "at least",
    "maximum": "at most",
    "exclusiveMinimum": "above",
    "maxItems": "at most",
    "maxLength": "length at most",
}


def _type(schema: Mapping[str, Any], field: Mapping[str, Any]) -> str:
    if "$ref" in field:
        return str(_resolved(schema, field).get("title", "object"))
    if "anyOf" in field:
        kinds = dict.fromkeys(_type(schema, each) for each in field["anyOf"] if each.get("type") != "null")
        return " or ".join(kind for kind in kinds if kind != "integer" or "number" not in kinds)
    if field.get("type") == "array":
        return f"list of {_type(schema, field.get('items', {}))}"
    return " or ".join(map(str, field["enum"])) if "enum" in field else str(field.get("type", "anything"))


def _resolved(schema: Mapping[str, Any], model: Mapping[str, Any]) -> Mapping[str, Any]:
    name = str(model.get("$ref", "")).rpartition("/")[2]
    return schema["components"]["schemas"][name] if name else model
