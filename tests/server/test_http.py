"""Invalid bodies, disconnects, chat templates, restart and the small endpoints over a socket."""

import json
import time
from collections.abc import Iterator
from http.client import HTTPConnection

import httpx
import pytest
from process import Server, running
from support import PATIENCE

pytestmark = pytest.mark.slow  # a server process
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
STORED = "/v1/responses/resp_1"
UNSERVED = (
    "/v1/responses/compact", "/v1/responses/compact/x", f"{CHAT}/chatcmpl-1", f"{CHAT}/chatcmpl-1/messages",
    "/v1/conversations/conv_1", "/v1/files", "/v1/files/file-1", "/v1/batches/batch_1", "/v1/fine_tuning/jobs",
    "/v1/vector_stores/vs_1", "/v1/messages/batches", "/v1/messages/batches/msgbatch_1", "/v1/audio/speech",
)  # fmt: skip
"""Paths of OpenAI's and Anthropic's APIs that the server lacks."""


@pytest.mark.parametrize(("content", "status"), [
    (b"", 400), (b"{", 400), (b"[1]", 400), (b'"x"', 400), (b'{"prompt": "\xff\xfe"}', 400),
    (b'{"prompt": "x", "temperature": NaN}', 400), (b'{"prompt": "x", "temperature": 1e999}', 400),
    (b"{" * 100_000, 400), (b'{"prompt": "' + b"x" * 20_000_000 + b'"}', 413),
], ids=["empty", "half", "list", "text", "latin", "nan", "infinity", "deep", "large"])  # fmt: skip
def test_invalid_and_too_large_bodies_are_refused(server: Server, content: bytes, status: int) -> None:
    answer = server.client.post(TEXT, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == status
    assert answer.json()["error"]["message"]


def test_large_chunked_body_is_refused(server: Server) -> None:
    def parts() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * 2**20

    answer = server.client.post(TEXT, content=parts(), headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"]["message"]


def test_clients_that_send_the_whole_body_first_receive_the_refusal(server: Server) -> None:
    connection = HTTPConnection(server.client.base_url.host, server.client.base_url.port or 80, timeout=30)
    for size, kind, status in ((17 * 10**6, "json", 413), (40 * 10**6, "json", 413), (15 * 10**6, "pdf", 415)):
        connection.request("POST", TEXT, b"x" * size, {"Content-Type": f"application/{kind}"})
        assert connection.getresponse().status == status
        connection.close()


def test_unknown_paths_and_methods_have_hints(server: Server) -> None:
    assert server.client.get("/v2/chat").status_code == 404
    assert f"{CHAT} takes POST, not GET" in server.client.get(CHAT).text
    assert "nothing at /nowhere (hint: /docs lists" in server.client.get("/nowhere").json()["error"]["message"]
    for path in (CHAT.removeprefix("/v1"), f"/v1{CHAT}", f"/openai{CHAT}"):
        assert f"(hint: did you mean {CHAT}?)" in server.client.post(path, json={}).json()["error"]["message"]
    assert "takes POST, not GET" in server.client.get("/v1/responses/input_tokens").text
    for path in UNSERVED:
        for answer in (server.client.get(path), server.post(path), server.client.delete(path)):
            assert answer.status_code == 404
            assert f"nothing at {path}" in answer.json()["error"]["message"]
    for answer in (server.client.get(STORED), server.client.delete(STORED), server.post(f"{STORED}/cancel")):
        assert answer.status_code == 400
        assert "stored responses are not supported" in answer.json()["error"]["message"]
    assert server.client.get("/v1//models/").status_code == 200
    assert server.client.get("/health").json() == {"status": "ok"}
    assert server.client.get("/version").json()["version"]


def test_disconnect_frees_the_sequence(server: Server) -> None:
    body = {"prompt": "Tell me everything.", "max_tokens": 4000, "ignore_eos": True}
    server.wait_idle()
    with server.client.stream("POST", TEXT, json=body | {"stream": True}) as answer:
        lines = answer.iter_lines()
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
        assert server.metric("vllm:num_requests_running") == 1
    server.wait_idle()
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(TEXT, json=body, timeout=httpx.Timeout(PATIENCE, read=0.5))
    server.wait_idle()


def test_bad_requests_do_not_change_a_concurrent_stream(server: Server) -> None:
    body = {"prompt": "Once upon a time", "max_tokens": 200, "temperature": 0.9, "seed": 11, "ignore_eos": True}
    alone = server.post(TEXT, **body).json()["choices"][0]["text"]
    with server.client.stream("POST", TEXT, json=body | {"stream": True}) as answer:
        lines = (line.removeprefix("data: ") for line in answer.iter_lines() if line)
        text = json.loads(next(lines))["choices"][0]["text"]
        for bad in ({}, {"prompt": ""}, {"prompt": "x" * 200_000}, {"prompt": "x", "n": 200}, {"prompt": 5}) * 3:
            assert server.post(TEXT, **bad).status_code == 400
        text += "".join(json.loads(line)["choices"][0]["text"] for line in lines if line != "[DONE]")
    assert text == alone


TEMPLATE = """{% for m in messages %}{% if m.content == "no" %}{{ raise_exception("I refuse") }}{% endif %}\
{% if m.content == "bug" %}{{ 1 / 0 }}{% endif %}{{ m.content }}{% endfor %}"""


@pytest.fixture(scope="module")
def template_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    path = tmp_path_factory.mktemp("template") / "template.jinja"
    path.write_text(TEMPLATE)
    with running("--threads", "1", "--chat-template", str(path), "--log-format", "json") as found:
        yield found


def test_errors_of_the_chat_template_are_client_errors(template_server: Server) -> None:
    for content, says in (("no", "I refuse"), ("bug", "division")):
        answer = template_server.post(CHAT, messages=[{"role": "user", "content": content}])
        assert answer.status_code == 400
        assert says in answer.json()["error"]["message"]
    fine = {"messages": [{"role": "user", "content": "Secret word: swordfish"}], "max_tokens": 3}
    assert template_server.post(CHAT, **fine).status_code == 200
    assert template_server.post("/tokenize", messages=fine["messages"]).json()["count"] > 3
    lines = [json.loads(line) for line in template_server.log.read_text("utf-8").splitlines()]
    assert {"time", "level", "logger", "message"} <= lines[0].keys()
    assert "swordfish" not in template_server.log.read_text("utf-8")


def test_restart_on_the_same_port_and_graceful_shutdown(template_server: Server) -> None:
    """A killed server restarts on its port. After SIGTERM the running request completes before the server ends."""
    template_server.process.kill()
    template_server.process.wait()
    patient = ("--threads", "1", "--shutdown-timeout", f"{PATIENCE:.0f}")  # a busy machine generates for minutes
    with running(*patient, port=int(template_server.url.rpartition(":")[2])) as server:
        body = {"prompt": "Tell me", "max_tokens": 300, "ignore_eos": True, "stream": True}
        with server.client.stream("POST", TEXT, json=body) as answer:
            lines = (line for line in answer.iter_lines() if line)
            next(lines)
            server.process.terminate()
            rest = list(lines)
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert server.process.wait(timeout=PATIENCE) == 0


def test_cost_metric_grows_with_uptime(server: Server) -> None:
    begun = time.monotonic()
    before = server.metric("headstart:cost_dollars_total")
    time.sleep(0.2)
    after = server.metric("headstart:cost_dollars_total")
    assert 0.01 * 0.2 <= after - before < 0.01 * (time.monotonic() - begun)  # 36 $/h


def test_docs_page_loads_nothing_external(server: Server) -> None:
    answer = server.client.get("/docs")
    assert answer.status_code == 200
    assert not any(word in answer.text for word in ("://", "<script", "<link"))
    assert "POST /v1/chat/completions" in answer.text
    assert all(f"<code>{name}</code>" in answer.text for name in ("messages", "temperature", "response_format"))
