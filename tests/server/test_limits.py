"""Limits of connections, headers, bodies, queues and times; API keys, CORS and request ids."""

import gzip
import json
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from inside import ENGINE, LlmServer, read_all, serve_llm
from support import PATIENCE, until

from headstart.api import LLM
from headstart.server import limits
from headstart.server.body_reader import parse_body
from headstart.server.errors import BodyError
from headstart.server.schema import ChatRequest, CompletionRequest

pytestmark = pytest.mark.slow  # a server
TEXT = "/v1/completions"
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = b'{"prompt": "Once", "max_tokens": 2, "seed": 1}'


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[LlmServer]:
    settings = {"api_key": ("one", "two"), "allowed_origins": ("http://page.example",), "max_queue": 40}
    with serve_llm(llm, **settings) as found:
        found.client.headers["Authorization"] = "Bearer one"
        yield found


def error_in(answer: bytes) -> Any:
    return json.loads(answer.partition(b"\r\n\r\n")[2])["error"]


HUGE_BODIES: list[tuple[type, bytes]] = [
    (ChatRequest, b'{"messages": [' + b"1," * 5_000_000 + b"1]}"),
    (ChatRequest, b'{"messages": [' + b"1," * 500_000 + b"1]}"),
    (ChatRequest, b'{"messages": [' + b"{}," * 40_000 + b"{}]}"),
    (ChatRequest, b'{"messages": [{"role": "user", "content": [' + b"1," * 500_000 + b"1]}]}"),
    (CompletionRequest, b'{"prompt": [1' + b',"a"' * 500_000 + b"]}"),
    (CompletionRequest, b'{"prompt": ["a"' + b",1" * 500_000 + b"]}"),
    (CompletionRequest, b'{"prompt": [[1]' + b",[null]" * 40_000 + b"]}"),
    (CompletionRequest, b'{"prompt": "x", "stop": [' + b"1," * 500_000 + b"1]}"),
    (CompletionRequest, b'{"prompt": "x", "stop": [' + b'"a",' * 20_000 + b'"a"]}'),
    (CompletionRequest, b'{"prompt": "x", "stop_token_ids": [' + b"1," * 500_000 + b"1]}"),
    (CompletionRequest, b'{"prompt": "x", "logit_bias": {' + b'"1":1,' * 40_000 + b'"1":"x"}}'),
    (CompletionRequest, b'{"prompt": "x", "logit_bias": {' + b'"1":"x",' * 2_000_000 + b'"1":1}}'),
    (CompletionRequest, b'{"prompt": "x", "guided_json": ' + b"[" * 3_000_000 + b"}"),
    (CompletionRequest, b'{"prompt": "x", "guided_json": ' + b"[" * 900 + b"]" * 900 + b"}"),
    (CompletionRequest, b'{"prompt": "x", "guided_json": ' + b'{"a":' * 200 + b"1" + b"}" * 200 + b"}"),
    (CompletionRequest, b'{"prompt": ' + b"9" * 5000 + b"}"),
    (CompletionRequest, b'{"prompt": "a\\ud800"}'),
    (CompletionRequest, b'{"prompt": "x", "user": "\\udfff"}'),
    (CompletionRequest, b'{"prompt": "x", "metadata": {"\\ud800": 1}}'),
    (CompletionRequest, b'{"prompt": "x", "temperature": NaN}'),
    (CompletionRequest, b'{"prompt": "x", "temperature": -1e999}'),
]


@pytest.mark.parametrize(("model", "data"), HUGE_BODIES, ids=[str(i) for i in range(len(HUGE_BODIES))])
def test_huge_invalid_bodies_are_refused_fast_with_a_short_message(model: type, data: bytes) -> None:
    begun = time.thread_time()
    with pytest.raises(BodyError) as raised:
        parse_body(data, model)
    assert time.thread_time() - begun < 20  # normally under a second
    assert len(str(raised.value)) < 700


def test_large_valid_body_is_parsed() -> None:
    body = {"prompt": [[i % 1000 for i in range(4000)] for _ in range(100)], "user": '[{"' * 60_000}
    assert len(parse_body(json.dumps(body).encode(), CompletionRequest).prompt) == 100  # type: ignore[attr-defined]


def test_incomplete_headers_time_out(server: LlmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "HEADER_SECONDS", 0.3)
    assert server.exchange(b"") == b""
    assert error_in(server.exchange(b"GET /health HTTP/1.1\r\nHost: "))["code"] == 408


@pytest.mark.parametrize("packets", [
    [HEAD + b"X: " + b"y" * 2**20], [HEAD, *[b"X: " + b"y" * 1000 + b"\r\n"] * 100],
    [HEAD + b"X: y\r\n" * 300 + b"\r\n"], [b"GET /" + b"a" * 2**20],
], ids=["long", "many", "small", "path"])  # fmt: skip
def test_header_size_is_limited(server: LlmServer, packets: list[bytes]) -> None:
    with server.connect() as connection:
        try:
            for packet in packets:
                connection.sendall(packet)
            answer = read_all(connection)
        except (BrokenPipeError, ConnectionResetError):
            answer = b""  # refused during sending
    assert not answer or error_in(answer)["code"] == 431


def test_malformed_http_is_refused(server: LlmServer) -> None:
    answer = server.exchange(b"\x16\x03\x01\x02\x00 hello\r\n\r\n")
    assert error_in(answer)["type"] == "invalid_request_error"
    assert b"connection: close" in answer
    chunked = HEAD + b"Authorization: bearer two\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert "chunk" in error_in(server.exchange(chunked, b'5\r\n{"pro\r\n', b"size\r\n"))["message"]
    trailer = b'5\r\n{"pro\r\n0\r\nX: ' + b"a" * limits.HEADER_BYTES + b"\r\n\r\n"
    assert "headers are larger" in error_in(server.exchange(chunked, trailer))["message"]


KEY = b"Authorization: bearer two\r\n"


def test_incomplete_body_times_out(server: LlmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "BODY_PAUSE_SECONDS", 0.3)
    answer = server.exchange(HEAD + KEY + b"Content-Length: 1000\r\n\r\n{")
    assert error_in(answer)["code"] == 408


def test_bodies_in_preparation_share_a_memory_budget(server: LlmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large bodies over the budget are refused. Small ones are answered meanwhile. All memory is released."""
    reader = server.state.body_reader
    monkeypatch.setattr(reader.budgets[1], "limit", 3 * 2**20)
    connections = []
    for _ in range(6):
        connection = server.connect()
        connection.sendall(HEAD + KEY + b"Content-Length: 8000000\r\n\r\n")
        connections.append(connection)
        with suppress(OSError):
            connection.sendall(b'{"prompt": "' + b"x" * 2**20)
    until(lambda: reader.budgets[1].used >= 2 * 2**20)
    assert server.post(TEXT, prompt="Once", max_tokens=2).status_code == 200
    answered = until(lambda: len(found := select.select(connections, [], [], 0)[0]) >= 3 and found)
    assert all(b"503" in connection.recv(4096) for connection in answered)
    for connection in connections:
        connection.close()
    until(lambda: not any(budget.used for budget in reader.budgets))


def test_client_that_does_not_read_is_dropped(server: LlmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "READ_SECONDS", 0.3)
    asked = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 8}
    body, ended = json.dumps(asked), server.metric("vllm:request_success_total")
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(HEAD + KEY + f"Content-Length: {len(body)}\r\n\r\n{body}".encode())
        until(lambda: server.metric("vllm:request_success_total") > ended and not server.served.admission.num_in_flight)


def test_http_1_0_stream_ends_with_the_connection(server: LlmServer) -> None:
    body = json.dumps({"prompt": "Once", "max_tokens": 3, "stream": True}).encode()
    head = HEAD.replace(b"1.1", b"1.0") + KEY + f"Content-Length: {len(body)}\r\n\r\n".encode()
    answer = server.exchange(head + body)
    assert b"transfer-encoding" not in answer.lower()
    assert answer.partition(b"\r\n\r\n")[2].startswith(b"data: {")
    assert answer.endswith(b"data: [DONE]\n\n")


def test_head_requests_and_cors(server: LlmServer) -> None:
    for path in ("/health", "/ping", "/ready", "/version"):
        got, head = server.client.get(path), server.client.head(path)
        assert (got.status_code, head.status_code) == (200, 200)
        assert head.headers["content-length"] == got.headers["content-length"]
    asks = {"Origin": "http://page.example", "Access-Control-Request-Method": "POST"}
    asks["Access-Control-Request-Headers"] = "authorization, content-type"
    allowed = server.client.options(TEXT, headers=asks)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "http://page.example"
    got = server.client.get("/health", headers={"Origin": "http://page.example"})
    for name in ("X-Request-Id", "X-Ignored-Fields", "Retry-After", "x-ratelimit-remaining-tokens"):
        assert name in got.headers["access-control-expose-headers"]
    assert server.client.options(TEXT, headers=asks | {"Origin": "http://other.example"}).status_code == 400


def test_api_keys(server: LlmServer) -> None:
    right, wrong = ("Bearer one", "bearer two", "BEARER  two"), ("Bearer three", "Bearer", "one", "Basic one", "")
    for key, status in [*((key, 200) for key in right), *((key, 401) for key in wrong)]:
        assert server.client.get("/v1/models", headers={"Authorization": key}).status_code == status
    assert server.client.get("/health", headers={"Authorization": ""}).status_code == 200


def test_request_ids_are_echoed_or_generated(server: LlmServer) -> None:
    given = server.client.get("/version", headers={"X-Request-Id": "my-id:1"})
    assert given.headers["X-Request-Id"] == "my-id:1"
    bad = ({"X-Request-Id": name} for name in ("", "a b", "x" * 500))
    made = [server.client.get("/version", headers=each).headers["X-Request-Id"] for each in bad]
    assert len({*made}) == 3
    assert all(len(each) == 32 for each in made)


def test_content_types_and_encodings(server: LlmServer) -> None:
    answer = server.client.post(TEXT, content=BODY, headers={"Content-Type": "text/plain"})
    assert answer.status_code == 415
    assert "Content-Type" in answer.json()["error"]["message"]
    packed = {"Content-Type": "application/json", "Content-Encoding": "gzip"}
    assert "gzip" in server.client.post(TEXT, content=gzip.compress(BODY), headers=packed).json()["error"]["message"]
    assert server.client.post(TEXT, content=BODY, headers={"Content-Type": "application/vnd.x+json"}).status_code == 200


def test_internal_error_closes_the_connection(server: LlmServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server.served.engine, "open", lambda *requests: 1 / 0)
    answer = server.post(TEXT, prompt="Once")
    assert (answer.status_code, answer.headers["connection"]) == (500, "close")
    assert answer.json()["error"]["type"] == "server_error"


def test_preparation_counts_for_queue_and_timeout(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from headstart.server import pipeline

    prepare, late = pipeline.prepare, threading.Event()

    def slow(*args: Any, **more: Any) -> Any:
        late.wait(PATIENCE)
        return prepare(*args, **more)

    with monkeypatch.context() as patch, serve_llm(llm, request_timeout=0.3) as server:
        patch.setattr(pipeline, "prepare", slow)
        answer = server.post(TEXT, prompt="Once", max_tokens=2)
        assert answer.status_code == 504
        assert "0.3 s" in answer.json()["error"]["message"]
        late.set()
        until(lambda: not server.served.admission.num_preparing)
    with serve_llm(llm, max_queue=0) as server:
        with server.served.admission.reserve(8):
            assert server.client.get("/ready").status_code == 503
            refused = server.post(TEXT, prompt="Once")
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "1")
        assert server.client.get("/ready").status_code == 200


def test_docs_list_the_limits() -> None:
    text = (Path(__file__).parents[2] / "docs" / "server.md").read_text("utf-8")
    rows = re.findall(r"\| (\d+) \| `(\w+)` \|", text)
    assert len(rows) > 10
    assert {name: float(value) for value, name in rows} == {name: float(getattr(limits, name)) for _, name in rows}


def test_requests_carry_the_owner_of_the_key_and_a_bounded_priority(
    server: LlmServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner keeps drafts from other requests within one key. The key's priority is a lower bound."""
    orders, engine = [], server.served.llm.engine
    submit = engine.submit

    def noted(request: Any, history: Any) -> Any:
        orders.append((request.owner, request.priority))
        return submit(request, history)

    monkeypatch.setattr(engine, "submit", noted)
    for key, priority in (("one", None), ("two", -5), ("one", 5)):
        body = {**json.loads(BODY), "priority": priority}
        answer = server.client.post(TEXT, json=body, headers={"Authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    (first, second, third), priorities = zip(*orders, strict=True)
    assert first == third != second
    assert priorities == (0, 0, 5)


def test_queue_limit_and_timeout(llm: LLM) -> None:
    llm = LLM(llm.model, replace(ENGINE, max_num_seqs=1))
    long = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True}
    with serve_llm(llm, max_queue=0) as server:
        assert server.post(TEXT, prompt="x", n=2).status_code == 400  # one sequence at most
        with server.client.stream("POST", TEXT, json=long | {"stream": True}) as running_now:
            lines = running_now.iter_lines()  # a reference: httpx disconnects when the iterator is collected
            next(lines)
            refused = server.post(TEXT, prompt="x")
            assert refused.status_code == 503
            assert refused.headers["Retry-After"]
        server.wait_idle()
    with serve_llm(llm, request_timeout=1) as server:
        assert server.post(TEXT, **long).status_code == 504
        server.wait_idle()


def test_slow_reader_receives_the_timeout_error(llm: LLM) -> None:
    asked = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True, "logprobs": 20, "n": 8}
    body = json.dumps(asked).encode()
    with serve_llm(llm, request_timeout=2) as server, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(HEAD.replace(b"1.1", b"1.0") + f"Content-Length: {len(body)}\r\n\r\n".encode() + body)
        time.sleep(2)
        until(lambda: not server.served.admission.num_in_flight)
        *_, last, done = (line for line in read_all(connection).split(b"\n") if line)
    assert done == b"data: [DONE]"
    assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == 504
