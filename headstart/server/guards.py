"""Middleware in front of all endpoints: request ids, access log, HEAD, paths, API keys."""

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
from headstart.server.replicas.group import ReplicaId
from headstart.server.replicas.metrics import OWN_HEADER

log = logging.getLogger("headstart.access")
OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/replicas"})
"""Paths that need no API key: health checks send none, and the router forwards none."""
REQUEST_ID = "X-Request-Id"
OWNER = "headstart.owner"  # key in an ASGI scope: name of the account of the request's API key
_ID = re.compile(r"[\x21-\x7e]{1,128}")


class RequestLog:
    """Sets the request id (the client's or a new one) and writes the access log. Requests that the server's shutdown
    cancels get status 503. HEAD runs as GET; the HTTP layer leaves out the body."""

    def __init__(self, app: ASGIApp, access_log: bool) -> None:
        self.app, self.access_log = app, access_log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get(REQUEST_ID, "")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        begun, status, method = time.perf_counter(), 0, scope["method"]
        scope = {**scope, "method": "GET" if method == "HEAD" else method}

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = name
            await send(message)

        try:
            await self.app(scope, receive, send_with_id)
        except asyncio.CancelledError:
            if status:
                raise
            body = errors.error_body("the server has shut down", 503, path=scope["path"])
            await JSONResponse(body, 503)(scope, receive, send_with_id)
        finally:
            if self.access_log:  # private data is not logged: query strings, addresses, prompts
                seconds = time.perf_counter() - begun
                path = "".join(char if char.isprintable() else "?" for char in scope["path"][:200])
                log.info("%s %s %s %d %.3f s", name, method, path, status, seconds)


class NormalizedPaths:
    """Removes empty path parts (//v1/models/ becomes /v1/models), since clients' base URLs may end with a slash."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": "/" + "/".join(filter(None, scope["path"].split("/")))}
        await self.app(scope, receive, send)


def _is_open(scope: Scope) -> bool:
    """Whether a request needs no API key; `ollama` sends none with its `HEAD /`."""
    return scope["path"] in OPEN_PATHS or (scope["path"], scope["method"]) == ("/", "GET")


class ApiKeyGuard:
    """Answers 401 to requests without a valid API key. The key is a bearer token, or in `x-api-key` as Anthropic's
    clients send it. Other replicas of the group may read /metrics with the group's token."""

    def __init__(self, app: ASGIApp, accounts: Accounts, replica: ReplicaId | None = None) -> None:
        self.app, self.accounts = app, accounts
        self._token = replica.token.encode() if replica is not None else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not _is_open(scope) and not self._is_replica(scope):
            account = self.accounts.find(_key_of(dict(scope["headers"])))
            if account is None:
                body = errors.error_body("the API key is missing or wrong", 401, path=scope["path"])
                await JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})(scope, receive, send)
                return
            scope[OWNER] = account.name
        await self.app(scope, receive, send)

    def _is_replica(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(OWN_HEADER.encode(), b"")
        return bool(self._token) and scope["path"] == "/metrics" and hmac.compare_digest(given, self._token)


def _key_of(headers: Mapping[bytes, bytes]) -> bytes:
    """The API key of a request; empty without one."""
    scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"").strip()
