"""What stands in front of every endpoint: request ids and the access log, slashes of paths, HEAD, API keys, and the end
of the server."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import time
import uuid
from collections.abc import Mapping

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.server import errors
from headstart.server.accounts import Accounts
from headstart.server.replicas.siblings import OWN
from headstart.server.replicas.state import Member

log = logging.getLogger("headstart.access")
OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/replicas"})
"""What needs no API key: whoever restarts a server has none, and a router passes none on."""
REQUEST_ID = "X-Request-Id"
OWNER = "headstart.owner"
"""Of a scope: the account of the API key that a request came with."""
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class Traced:
    """Gives each request the id that it brings, or a new one; logs it, if asked; and answers what the end of the server
    cancels."""

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self.app, self.access_log = app, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        begun, status = time.perf_counter(), 0

        async def answer(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        try:
            await self.app(scope, receive, answer)
        except asyncio.CancelledError:
            if status:
                raise
            body = errors.document("the server has shut down", 503, path=scope["path"])
            await JSONResponse(body, 503)(scope, receive, answer)
        finally:
            if self.access_log:  # paths without queries: who calls, and with what, is the user's business
                seconds = time.perf_counter() - begun
                log.info("%s %s %s %d %.3f s", name, scope["method"], _shown(scope["path"]), status, seconds)


def _shown(path: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in path[:200])


class HeadAsGet:
    """HEAD is what GET would say, without saying it: the connection leaves the body out."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self.app(scope, receive, send)


class PlainPaths:
    """//v1/models/ is /v1/models: base URLs are written with a slash at their end, or without."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": "/" + "/".join(filter(None, scope["path"].split("/")))}
        await self.app(scope, receive, send)


class ApiKeys:
    """401 without one of the keys, as a bearer token or, as Anthropic's clients send it, in `x-api-key`. `member`: its
    siblings have none."""

    def __init__(self, app: ASGIApp, accounts: Accounts, member: Member | None = None) -> None:
        self.app, self.accounts = app, accounts
        self._token = member.token.encode() if member is not None else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS and not self._is_sibling(scope):
            account = self.accounts.find(_key_of(dict(scope["headers"])))
            if account is None:
                body = errors.document("the API key is missing or wrong", 401, path=scope["path"])
                await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope[OWNER] = account.name
        await self.app(scope, receive, send)

    def _is_sibling(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(OWN.encode(), b"")
        return bool(self._token) and scope["path"] == "/metrics" and hmac.compare_digest(given, self._token)


def _key_of(headers: Mapping[bytes, bytes]) -> bytes:
    """Empty, which is no key, where there is none."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
