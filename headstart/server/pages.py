"""Web pages: the static files of `/` and `/dashboard`, and `/docs` made from OpenAPI.

The static files contain no secrets and need no API key. The requests that their scripts send need one."""

import base64
import gzip
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from importlib.resources.abc import Traversable
from typing import Any

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from headstart.hub import DEFAULT_MODEL
from headstart.params import parameters

TEXTS = {"html": "text/html", "css": "text/css", "js": "text/javascript", "txt": "text/plain"}
KINDS = {"svg": "image/svg+xml"} | {ending: f"{kind}; charset=utf-8" for ending, kind in TEXTS.items()}  # Content-Type
PLACES = {"/": "index.html", "/dashboard": "dashboard.html"}  # URL path -> file
PARAMETERS = "parameters.js"  # generated script, see _controls
SAFE_INTEGER = 2**53  # JavaScript's numbers are exact up to here
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Content-Security-Policy: nothing from other hosts, no inline scripts or styles, no markup or code from strings."""
INLINED = (
    ("script-src", "script", re.compile(r'<script src="web/(theme\.js)"></script>')),
    ("style-src", "style", re.compile(r'<link rel="stylesheet" href="web/(style\.css)">')),
)
"""Files to inline, as a page needs them before its first paint: CSP directive, tag, and the reference to replace."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # browsers revalidate each use with the ETag
    "Vary": "Accept-Encoding",
}


class Pages:
    """Answers GET for the files of `headstart/server/web`; passes all other requests to the application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        found = _found()
        files = {name: data.decode() for _, name, data in found if name.endswith((".css", ".js"))}
        self._pages = {path: _Page(name, data, files) for path, name, data in found}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_get = scope["type"] == "http" and scope["method"] == "GET"
        path = scope["path"] if is_get else ""
        page, other = self._pages.get(path), path.rstrip("/")
        answer: ASGIApp = self.app
        if page is not None:
            answer = page.response(Headers(scope=scope))
        elif path.endswith("/") and other in PLACES:  # the page's relative links would break under a trailing slash
            answer = RedirectResponse(f"../{other.lstrip('/')}")
        await answer(scope, receive, send)


class _Page:
    """One file in memory, plain and gzipped. `files`: name -> text of the files that may be inlined into it."""

    def __init__(self, name: str, data: bytes, files: Mapping[str, str]) -> None:
        self._policy = POLICY
        if name.endswith(".html"):
            data, self._policy = _inline(data.decode(), files)
        self._data, self._packed = data, gzip.compress(data, mtime=0)
        self._kind = KINDS[name.rpartition(".")[2]]
        self._tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'

    def response(self, headers_in: Headers) -> Response:
        headers = {**HEADERS, "Content-Security-Policy": self._policy, "ETag": self._tag}
        if headers_in.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in headers_in.get("accept-encoding", ""):
            return Response(self._data, media_type=self._kind, headers=headers)
        return Response(self._packed, media_type=self._kind, headers={**headers, "Content-Encoding": "gzip"})


def _inline(page: str, files: Mapping[str, str]) -> tuple[bytes, str]:
    """The page with its files inlined, and its Content-Security-Policy."""
    policy = POLICY
    for directive, tag, written in INLINED:
        if found := written.search(page):
            text = files[found[1]]
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            page = page.replace(found[0], f"<{tag}>{text}</{tag}>")
            policy = policy.replace(f"{directive} 'self'", f"{directive} 'self' 'sha256-{digest}'")
    return page.encode(), policy


def _found() -> list[tuple[str, str, bytes]]:
    """URL path, name and bytes of every static file."""
    root = files("headstart.server") / "web"
    served = [(path, name, (root / name).read_bytes()) for path, name in PLACES.items()]
    served += [(f"/web/{name}", name, each.read_bytes()) for name, each in _below(root, "")]
    return [*served, (f"/web/{PARAMETERS}", PARAMETERS, _controls())]


def _controls() -> bytes:
    """JavaScript that exports the sampling parameters of the settings panel and the demo model's name."""
    shown = []
    for row in parameters().values():
        if (control := row.control) is None:
            continue
        low, high = row.low if control.low is None else control.low, row.high if control.high is None else control.high
        default = row.default if row.http_default is None else row.http_default
        shown.append({
            "name": row.name, "label": control.label, "step": control.step, "initial": control.initial,
            "low": low, "high": high if high <= SAFE_INTEGER else None, "is_integer": row.kind == "integer",
            "is_main": control.is_main, "fallback": control.fallback,
            "empty": f"{default:g}" if control.empty is None else control.empty,
        })  # fmt: skip
    names = f"export const DEMO_MODEL = {json.dumps(DEFAULT_MODEL)};\n"
    return f"export const PARAMETERS = {json.dumps(shown)};\n{names}".encode()


def _below(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = []
    for each in folder.iterdir():
        name = prefix + each.name
        if each.is_dir():
            found += _below(each, f"{name}/")
        elif name.rpartition(".")[2] in KINDS:
            found.append((name, each))
    return found


DOCS_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "table{border-collapse:collapse;width:100%}td,th{text-align:left;vertical-align:top;padding:.2rem .8rem .2rem 0;"
    "border-bottom:1px solid #8884}code{font-size:.95em}h2{margin-top:2rem}"
)


def docs_page(schema: Mapping[str, Any]) -> str:
    """An OpenAPI document as HTML: endpoints and request fields. The page loads no other files."""
    info = schema["info"]
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(info['title'])}</title>",
        f"<style>{DOCS_STYLE}</style>",
        f"<h1>{escape(info['title'])} {escape(info['version'])}</h1><p>{escape(info['description'])} ",
        "Machine-readable: <a href=openapi.json>openapi.json</a>.</p>",
    ]
    parts += [f"<h2><code>{escape(name)}</code></h2>\n{text}" for name, text in operations(schema)]
    return "\n".join(parts) + "\n"


def operations(schema: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Method and path of each endpoint, and its request fields as HTML."""
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
        bounds: list[str] = []
        for each in field.get("anyOf", [field]):
            bounds += [f"{word} {_number(each[key])}" for key, word in BOUNDS.items() if key in each]
        sentences = (field.get("description", "").rstrip("."), ", ".join(dict.fromkeys(bounds)))
        text = escape(". ".join(filter(None, sentences)))
        yield f"<tr><td><code>{escape(name)}</code><td>{escape(_type(schema, field))}<td>{default}<td>{text}</tr>"


def _number(value: float) -> str:
    return str(int(value) if value == int(value) else value)


BOUNDS = {
    "minimum": "at least", "maximum": "at most", "exclusiveMinimum": "above", "maxItems": "at most",
    "maxLength": "length at most",
}  # fmt: skip


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
