"""uvicorn's HTTP protocol with limits of header size and time, and with streamed responses for HTTP/1.0 clients."""

import asyncio
import json
from typing import Any

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from headstart.server import limits
from headstart.server.errors import error_body


class HttpProtocol(HttpToolsProtocol):
    """One connection. Enforces limits that uvicorn has no settings for."""

    _num_header_bytes = 0
    _in_headers = True
    _refusal = (400, "invalid HTTP/1.1: the request line or a header cannot be parsed")  # status and message
    _header_timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _is_ending = False  # the server shuts down

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._header_timer, self._write_timer):
            if timer is not None:
                timer.cancel()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.parser is None or self.transport.is_closing():
            return
        super().data_received(data)
        if self._in_headers:  # the parser calls on_header only for complete headers: count unfinished ones here
            self._num_header_bytes += len(data)
            if self._num_header_bytes > 2 * limits.HEADER_BYTES and not self.transport.is_closing():
                self._refusal = (431, f"the headers are larger than {limits.HEADER_BYTES} bytes")
                self.send_400_response("")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_header_bytes, self._in_headers = 0, True
        if self._header_timer is None:
            self._wait_for_headers()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > limits.NUM_HEADERS:
            self._refuse(431, f"there are more than {limits.NUM_HEADERS} headers")

    def on_headers_complete(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
        self._in_headers = False
        super().on_headers_complete()
        if self.scope.get("http_version") == "1.0" and self.cycle is not None:
            self.cycle.__class__ = UnchunkedCycle

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(limits.READ_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def shutdown(self) -> None:
        super().shutdown()
        self._is_ending = True
        self._abort_once_sent()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_ending:
            self._abort_once_sent()

    def _unsupported_upgrade_warning(self) -> None:
        """No warning: clients that ask for another protocol (curl --http2) get their response in HTTP/1.1."""

    def send_400_response(self, msg: str) -> None:
        """Send `_refusal` in OpenAI's shape and close. uvicorn calls this for requests that its parser rejects."""
        if self.transport.is_closing():
            return
        cycle, (status, text) = self.cycle, self._refusal
        busy = cycle is not None and not cycle.response_complete
        if cycle is not None and cycle.more_body and not cycle.response_started and not self.pipeline:
            busy = False
            if self._refusal is HttpProtocol._refusal:  # else its headers or trailers were refused
                text = "invalid HTTP/1.1: the chunks of the body cannot be parsed"
            cycle.disconnected = True  # for the application, which waits for the body
            cycle.message_event.set()
        if not busy:  # else it would be sent inside another response
            body = json.dumps(error_body(text, status)).encode()
            lines = [STATUS_LINE[status], b"content-type: application/json\r\n", b"connection: close\r\n"]
            lines.append(b"content-length: %d\r\n\r\n" % len(body))
            self.transport.write(b"".join(lines) + body)
        self.transport.close()

    def _abort_once_sent(self) -> None:
        """Abort a closing connection CLOSE_SECONDS after its last byte. With TLS, asyncio waits 30 s for the client's
        close_notify, which an idle connection of a client's pool does not send."""
        if self.transport.is_closing():
            is_sent = not self.transport.get_write_buffer_size()
            self.loop.call_later(limits.CLOSE_SECONDS, self.transport.abort if is_sent else self._abort_once_sent)

    def _count(self, size: int) -> None:
        self._num_header_bytes += size
        if self._num_header_bytes > limits.HEADER_BYTES:
            self._refuse(431, f"the headers are larger than {limits.HEADER_BYTES} bytes")

    def _refuse(self, status: int, text: str) -> None:
        """Refuse the request: the exception stops the parser, whose caller then calls send_400_response."""
        self._refusal = (status, text)
        raise ValueError(text)

    def _wait_for_headers(self) -> None:
        self._header_timer = self.loop.call_later(limits.HEADER_SECONDS, self._too_slow)

    def _too_slow(self) -> None:
        self._header_timer = None
        if self._num_header_bytes and not self.transport.is_closing():
            self._refusal = (408, f"the headers did not come within {limits.HEADER_SECONDS:g} s")
            self.send_400_response("")
        else:
            self.transport.close()


class UnchunkedCycle(RequestResponseCycle):
    """A response to an HTTP/1.0 client. A response without content-length ends when the connection closes."""

    _has_length = True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)
