"""Responses in frames, as engines send them to their relay: the response itself, and the record beside it.

A frame: one byte (its kind), four bytes (length of the rest, big-endian), the rest.
"""

import hmac
import json
import struct

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from headstart.server.journal import JOURNAL, Journal

PREFIX = "x-headstart-"  # of headers between relay and engine
TOKEN, ORIGIN, RECORD_SIZE, RESUMED = (PREFIX + name for name in ("relay", "origin", "record", "resumed"))
"""The group's token; the response's origin; bytes of the record before the body; 1: another engine was lost."""
MEDIA_TYPE = "application/x-headstart-frames"
HEADER = struct.Struct(">BI")
HEAD, BODY, RECORD, END = range(4)
"""Status and headers as JSON; one message of the body; lines of the record; the end of the response."""


def frame(kind: int, data: bytes = b"") -> bytes:
    """The bytes of a frame."""
    return HEADER.pack(kind, len(data)) + data


class FramedResponses:
    """Answers the relay, which knows the token, in frames."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self.app, self._token = app, token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(TOKEN, "") if scope["type"] == "http" else ""
        if not hmac.compare_digest(given.encode(), self._token):
            await self.app(scope, receive, send)
            return
        await _FramedExchange(scope, receive, send).run(self.app)


class _FramedExchange:
    """One request of the relay and its response."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._left = b""  # of the body, which came with the end of the record
        self._more_body = True
        self._has_begun = False

    async def run(self, app: ASGIApp) -> None:
        headers = Headers(scope=self._scope)
        size = int(headers[RECORD_SIZE])
        record = await self._read_record(size)
        self._journal = Journal(headers[ORIGIN], record, self._write_record, is_resumed=headers[RESUMED] == "1")
        length = str(int(headers["content-length"]) - size).encode()
        kept = [pair for pair in self._scope["headers"] if not pair[0].startswith(PREFIX.encode())]
        kept = [(name, length if name == b"content-length" else value) for name, value in kept]
        await app({**self._scope, "headers": kept, JOURNAL: self._journal}, self._receive_body, self._send_framed)

    async def _read_record(self, size: int) -> bytes:
        pieces = bytearray()
        while len(pieces) < size and self._more_body:
            message = await self._receive()
            pieces += message.get("body", b"")
            self._more_body = message.get("more_body", False)
        self._left = bytes(pieces[size:])
        return bytes(pieces[:size])

    async def _receive_body(self) -> Message:
        if self._left or not self._more_body:
            left, more, self._left, self._more_body = self._left, self._more_body, b"", True
            return {"type": "http.request", "body": left, "more_body": more}
        return await self._receive()

    async def _send_framed(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
            await self._write(frame(HEAD, json.dumps([message["status"], headers]).encode()))
            return
        more, lines = message.get("more_body", False), self._journal.take()
        data = (frame(RECORD, lines) if lines else b"") + frame(BODY, message.get("body", b""))
        await self._write(data if more else data + frame(END), more=more)

    async def _write_record(self) -> None:
        await self._write(frame(RECORD, self._journal.take()))

    async def _write(self, data: bytes, *, more: bool = True) -> None:
        if not self._has_begun:
            self._has_begun = True
            headers = [(b"content-type", MEDIA_TYPE.encode())]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
