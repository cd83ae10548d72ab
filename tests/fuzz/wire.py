"""Raw HTTP: partial, slow, pipelined and malformed requests, other versions and methods."""

import json
import random
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

BODY = json.dumps({"prompt": "Once", "max_tokens": 3, "seed": 1}).encode()
STREAM = json.dumps({"prompt": "Once", "max_tokens": 3, "seed": 1, "stream": True}).encode()
PATHS = ("/v1/completions", "/v1/chat/completions", "/health", "/v1/models", "/metrics", "/version", "/tokenize", "/")
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "get", "X" * 40, "G\x00T")
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
WAIT = 300.0
"""Seconds for an answer."""

Made = tuple[list[bytes], bool]
"""Packets, and whether an answer must come."""


def head(method: str, path: str, version: str, headers: dict[str, str]) -> bytes:
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {value}" for name, value in headers.items())]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")


def plain(rng: random.Random) -> Made:
    body = rng.choice((BODY, STREAM))
    headers = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    version = rng.choice(("1.1", "1.0"))
    return [head("POST", "/v1/completions", version, headers) + body], True


def in_pieces(rng: random.Random) -> Made:
    (whole,), _ = plain(rng)
    cuts = sorted(rng.randrange(len(whole)) for _ in range(rng.randrange(1, 30)))
    return [whole[a:b] for a, b in zip([0, *cuts], [*cuts, len(whole)], strict=True)], True


def half(rng: random.Random) -> Made:
    (whole,), _ = plain(rng)
    return [whole[: rng.randrange(len(whole))]], False


def pipelined(rng: random.Random) -> Made:
    one = head("GET", rng.choice(PATHS), "1.1", {"Host": "x"})
    return [one * rng.randrange(2, 50) + head("GET", "/health", "1.1", {"Host": "x", "Connection": "close"})], True


def chunked(rng: random.Random) -> Made:
    headers = {"Host": "x", "Content-Type": "application/json", "Transfer-Encoding": "chunked", "Connection": "close"}
    good = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    size = rng.choice((b"-1", b"ffffffffffffffff", b"zz", b"", b"0x5", b"7fffffffffffffff", b"1" * 5000))
    bad = rng.choice((good[:-5], size + b"\r\n" + BODY + b"\r\n0\r\n\r\n", b"5;" + b"x" * 100_000 + b"\r\nhello\r\n"))
    right = rng.random() < 0.5
    return [head("POST", "/v1/completions", "1.1", headers) + (good if right else bad)], right


def methods(rng: random.Random) -> Made:
    path = rng.choice((*PATHS, "/" + "a" * 70_000, "//", "/%00", "/é", "*", "http://x/health"))
    method, version = rng.choice(METHODS), rng.choice(("1.1", "1.0", "2.0", "9.9", ""))
    return [head(method, path, version, {"Host": "x", "Connection": "close"})], False


def headers(rng: random.Random) -> Made:
    many = {f"X-{i}": "y" * rng.choice((1, 100)) for i in range(rng.choice((10, 99, 5000)))}
    choices = (
        many, {"X": "y" * 10**6}, {"Content-Length": "-1"}, {"Content-Length": "5, 6"}, {"Content-Length": "9" * 30},
        {"Host": "\x00"}, {"": "x"}, {"X y": "z"}, {"Authorization": "Bearer " + "x" * 5000},
        {"Expect": "100-continue"},
        {"Transfer-Encoding": "gzip, chunked"}, {"Transfer-Encoding": "chunked", "Content-Length": "5"},
        {"Content-Type": "text/plain"}, {"Upgrade": "websocket", "Connection": "Upgrade"}, {"Content-Encoding": "gzip"},
        {"Upgrade": "h2c", "Connection": "Upgrade, HTTP2-Settings", "HTTP2-Settings": "x"},
        {"X-Request-Id": "\u202e" * 9},
    )  # fmt: skip
    chosen = {"Host": "x", "Content-Length": str(len(BODY)), "Connection": "close"} | rng.choice(choices)
    return [head("POST", "/v1/completions", "1.1", chosen) + BODY], False


def expecting(rng: random.Random) -> Made:
    size = str(rng.choice((len(BODY), 10**9)))
    fields = {"Host": "x", "Content-Type": "application/json", "Expect": "100-continue", "Content-Length": size,
             "Connection": "close"}  # fmt: skip
    return [head("POST", "/v1/completions", "1.1", fields), BODY], size == str(len(BODY))


def garbage(rng: random.Random) -> Made:
    return [rng.randbytes(rng.choice((1, 50, 5000, 200_000)))], False


def nothing(rng: random.Random) -> Made:
    return [rng.choice((b"", b"\r\n", b"GET", b"\x16\x03\x01\x02\x00"))], False


KINDS: tuple[Callable[[random.Random], Made], ...] = (
    plain, in_pieces, half, pipelined, chunked, methods, headers, expecting, garbage, nothing,
)  # fmt: skip


def exchange(rng: random.Random, url: str) -> tuple[str, str]:
    """Description of the packets sent, and the failure found in the response (empty: none)."""
    kind = rng.choice(KINDS)
    packets, answered = kind(rng)
    host, _, port = urlsplit(url).netloc.partition(":")
    data = b""
    shown = f"{kind.__name__} {len(packets)} packets: {packets[0][:300]!r}"
    try:
        with socket.create_connection((host, int(port)), timeout=WAIT) as connection:
            _send(connection, packets, rng, answered)
            while piece := connection.recv(65536):
                data += piece
    except TimeoutError:
        if answered:
            return shown, f"no end of the answer within {WAIT:.0f} s: {data[-200:]!r}"
    except OSError as error:
        if answered or isinstance(error, ConnectionRefusedError):
            return shown, f"{type(error).__name__}: {error}"
    return shown, _wrong(data.removeprefix(CONTINUE), packets[0], answered)


def _send(connection: socket.socket, packets: list[bytes], rng: random.Random, answered: bool) -> None:
    slow = rng.random() < 0.2
    for packet in packets:
        connection.sendall(packet)
        if slow:
            time.sleep(rng.uniform(0, 0.1))
    if not answered:
        connection.settimeout(rng.choice((0.0001, 0.5, 3)))
        if rng.random() < 0.3:
            connection.shutdown(socket.SHUT_WR)


def _wrong(data: bytes, sent: bytes, answered: bool) -> str:
    if data and not data.startswith(b"HTTP/1."):
        return f"an answer that is not HTTP: {data[:100]!r}"
    if b"HTTP/1.1 500" in data or b"Traceback" in data:
        return f"a fault: {data[:300]!r}"
    if answered and data[9:12] not in (b"200", b"404", b"405", b"429", b"503", b"504"):
        return f"the answer to a right request: {data[:300]!r}"
    if answered and b" HTTP/1.0\r\n" in sent and b"\r\ntransfer-encoding: chunked" in data.lower():
        return "chunks for HTTP/1.0"
    return ""
