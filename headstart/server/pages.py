"""`/` and `/dashboard`: static files of this package, in front of everything else.

They hold no secrets, so they need no key; what they then ask the server for does."""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.datastructures import Headers
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

KINDS = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "txt": "text/plain; charset=utf-8",
}
PLACES = {"/": "index.html", "/dashboard": "dashboard.html"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
"""Nothing from elsewhere, nothing inline, and no string becomes markup or code."""
FIRST = (
    ("script-src", "script", re.compile(r'<script src="web/(theme\.js)"></script>')),
    ("style-src", "style", re.compile(r'<link rel="stylesheet" href="web/(style\.css)">')),
)
"""What a page waits for before it can paint: it comes inside the page, whose policy then names its hash."""
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",  # asked for again each time, and not sent again while the tag is the same
    "Vary": "Accept-Encoding",
}


class Pages:
    """Answers GET of what lies in `headstart/server/web`, and leaves all else to the application."""

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
            answer = page.answer(Headers(scope=scope))
        elif path.endswith("/") and other in PLACES:  # its links are relative
            answer = RedirectResponse(f"../{other.lstrip('/')}")
        await answer(scope, receive, send)


class _Page:
    """One file in memory. `files`: what may become part of a page, by name."""

    def __init__(self, name: str, data: bytes, files: Mapping[str, str]) -> None:
        self._policy = POLICY
        if name.endswith(".html"):
            data, self._policy = _complete(data.decode(), files)
        self._data, self._packed = data, gzip.compress(data, mtime=0)
        self._kind = KINDS[name.rpartition(".")[2]]
        self._tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'

    def answer(self, asked: Headers) -> Response:
        headers = {**HEADERS, "Content-Security-Policy": self._policy, "ETag": self._tag}
        if asked.get("if-none-match") == self._tag:
            return Response(status_code=304, headers=headers)
        if "gzip" not in asked.get("accept-encoding", ""):
            return Response(self._data, media_type=self._kind, headers=headers)
        return Response(self._packed, media_type=self._kind, headers={**headers, "Content-Encoding": "gzip"})


def _complete(page: str, files: Mapping[str, str]) -> tuple[bytes, str]:
    """A page with what it paints first, and its policy."""
    policy = POLICY
    for directive, tag, written in FIRST:
        if found := written.search(page):
            text = files[found[1]]
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            page = page.replace(found[0], f"<{tag}>{text}</{tag}>")
            policy = policy.replace(f"{directive} 'self'", f"{directive} 'self' 'sha256-{digest}'")
    return page.encode(), policy


def _found() -> list[tuple[str, str, bytes]]:
    """Path, name and bytes of every file."""
    root = files("headstart.server") / "web"
    served = [(path, name, (root / name).read_bytes()) for path, name in PLACES.items()]
    return served + [(f"/web/{name}", name, each.read_bytes()) for name, each in _below(root, "")]


def _below(folder: Traversable, prefix: str) -> list[tuple[str, Traversable]]:
    found = []
    for each in folder.iterdir():
        name = prefix + each.name
        if each.is_dir():
            found += _below(each, f"{name}/")
        elif name.rpartition(".")[2] in KINDS:
            found.append((name, each))
    return found
