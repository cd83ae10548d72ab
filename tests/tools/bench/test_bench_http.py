"""`headstart bench --url` against fake servers: plain, refusing and crashing ones."""

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from headstart.cli.main import main
from headstart.errors import UsageError
from headstart.tools.bench.document import BenchDocument
from headstart.tools.bench.http import HttpTarget
from headstart.tools.bench.measure import RequestLoad, measure
from headstart.tools.bench.workloads import Task, Workload, synthetic
from headstart.tools.client import Server, get, post

Capture = pytest.CaptureFixture[str]
WORDS = ("The ", "sky ", "is ", "blue", ".")
TASKS = Workload("sky", lambda index: Task(turns=("Why?",), max_tokens=5))


@dataclass
class FakeServer:
    """A chat server. `cuts`: bytes of a chunk of the response body. `dies_after`: number of complete answers; the next
    answer breaks off in the middle, and the server closes."""

    owner: str = "someone"
    metrics: bool = False
    usage: bool = True
    counts: bool = False
    cuts: int = 10_000
    refuses: Callable[[int], int] = lambda number: 200
    dies_after: int | None = None
    delay: float = 0.001
    chat_requests: list[dict[str, Any]] = field(default_factory=list)
    num_active: Counter[str] = field(default_factory=Counter)
    port: int = 0
    server: Any = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split(" ", 2)
        length = int(head.lower().partition("content-length:")[2].partition("\r\n")[0])
        body = json.loads(await reader.readexactly(length)) if length else {}
        if path == "/v1/models":
            self._answer(writer, 200, json.dumps({"data": [{"id": "m", "owned_by": self.owner}]}))
        elif path == "/metrics" and self.metrics:
            self._answer(writer, 200, self._metrics())
        elif path == "/tokenize" and self.counts:
            self._answer(writer, 200, json.dumps({"count": len(body["prompt"].split())}))
        elif path == "/v1/chat/completions":
            await self._chat(writer, body)
        else:
            self._answer(writer, 404, json.dumps({"error": {"message": f"{method} {path}?"}}))
        writer.close()

    def _answer(self, writer: asyncio.StreamWriter, status: int, text: str) -> None:
        fields = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text.encode())}\r\n\r\n"
        writer.write(fields.encode() + text.encode())

    def _metrics(self) -> str:
        tasks = len(self.chat_requests)
        counts = {"drafts_total": 10, "draft_tokens_total": 20, "accepted_tokens_total": 10,
                  'accepted_tokens_per_pos_total{position="0"}': 7, 'accepted_tokens_per_pos_total{position="1"}': 3,
                  "drafts_created": 17_000}  # fmt: skip
        lines = (f"vllm:spec_decode_num_{name} {count * tasks}.0\n" for name, count in counts.items())
        return "# TYPE vllm:spec_decode_num_drafts_total counter\n" + "".join(lines)

    async def _chat(self, writer: asyncio.StreamWriter, body: dict[str, Any]) -> None:
        self.chat_requests.append(body)
        number = len(self.chat_requests)
        if (status := self.refuses(number)) != 200:
            self._answer(writer, status, json.dumps({"error": {"message": "no room\nhere"}}))
            return
        self.num_active["now"] += 1
        self.num_active["most"] = max(self.num_active["most"], self.num_active["now"])
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
        for index, word in enumerate(WORDS[: body["max_tokens"]]):
            await asyncio.sleep(self.delay)
            if self.dies_after is not None and number > self.dies_after and index == 2:
                self.server.close()
                writer.transport.abort()
                return
            self._event(writer, {"choices": [{"index": 0, "delta": {"content": word}}]})
        if self.usage:
            counts = {"prompt_tokens": 7, "completion_tokens": min(len(WORDS), body["max_tokens"])}
            self._event(writer, {"choices": [], "usage": counts})
        self._data(writer, b"data: [DONE]\r\n\r\n")
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        self.num_active["now"] -= 1

    def _event(self, writer: asyncio.StreamWriter, document: dict[str, Any]) -> None:
        self._data(writer, f"data: {json.dumps(document)}\n\n".encode())

    def _data(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        """Writes chunks of `cuts` bytes, which may end inside an event or a character."""
        for start in range(0, len(data), self.cuts):
            part = data[start : start + self.cuts]
            writer.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")


@contextmanager
def running(fake: FakeServer) -> Iterator[FakeServer]:
    """Runs the server in a thread."""
    loop, ready = asyncio.new_event_loop(), threading.Event()

    async def start() -> None:
        fake.server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
        fake.port = fake.server.sockets[0].getsockname()[1]
        ready.set()

    async def stop() -> None:
        fake.server.close()
        await asyncio.sleep(0.02)  # time for closed connections to end

    def work() -> None:
        asyncio.set_event_loop(loop)
        loop.run_until_complete(start())
        loop.run_forever()

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait()
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def target_of(fake: FakeServer) -> HttpTarget:
    return HttpTarget(Server.at(fake.url))


@pytest.mark.parametrize("cuts", [10_000, 7, 1])
def test_chunk_boundaries_do_not_change_the_answer(cuts: int) -> None:
    with running(FakeServer(cuts=cuts)) as fake:
        answer = asyncio.run(post(Server.at(fake.url), "/v1/chat/completions", {"max_tokens": 5}))
    assert (answer.status, answer.text, answer.broken) == (200, "The sky is blue.", False)
    assert (len(answer.pieces), answer.usage["completion_tokens"]) == (5, 5) and 0 < answer.first < answer.seconds


def test_measure_counts_requests_and_tokens() -> None:
    with running(FakeServer()) as fake:
        found = measure(target_of(fake), TASKS, "server", RequestLoad(concurrency=2), num_requests=6)
    assert (found.complete, found.requests, found.failed) == (True, 6, 0)
    assert (found.prompt_tokens, found.output_tokens) == (42, 30) and found.latency.itl.count == 24
    assert (found.speculation, found.cached_tokens, found.chunked_prefill) == (None, None, None)


def test_concurrency_and_request_rate_are_kept() -> None:
    with running(FakeServer(delay=0.003)) as fake:
        target_of(fake).run(TASKS.tasks(9), "server", RequestLoad(concurrency=3), lambda: None)
        assert fake.num_active["most"] == 3
    load = RequestLoad(rate=100.0)
    with running(FakeServer()) as fake:
        found = measure(target_of(fake), TASKS, "server", load, num_requests=5)
    assert found.seconds >= list(load.arrivals(5))[-1] and found.requests == 5


def test_pieces_count_as_tokens_without_usage() -> None:
    with running(FakeServer(usage=False)) as fake:
        assert measure(target_of(fake), TASKS, "server", RequestLoad(concurrency=1), num_requests=2).output_tokens == 10


def test_draft_counts_come_from_vllm_metrics() -> None:
    with running(FakeServer(metrics=True)) as fake:
        found = measure(target_of(fake), TASKS, "server", RequestLoad(concurrency=1), num_requests=4).speculation
    assert (found.drafts, found.drafted, found.accepted, found.per_position) == (40, 80, 40, (28, 12))
    assert found.acceptance_at == [0.7, 0.3]


def test_next_turn_includes_the_answer() -> None:
    task = Task(turns=("one", "two"), system="Count.", max_tokens=5, schema={"type": "object"}, ignore_eos=True)
    with running(FakeServer()) as fake:
        target_of(fake).run([task], "server", RequestLoad(concurrency=1), lambda: None)
        last = fake.chat_requests[-1]
    assert [each["role"] for each in last["messages"]] == ["system", "user", "assistant", "user"]
    assert last["messages"][2]["content"] == "The sky is blue."
    assert (last["ignore_eos"], last["response_format"]["type"], last["model"]) == (True, "json_schema", "m")


@pytest.mark.parametrize(
    ("mode", "field_"), [("off", {"mode": "off"}), ("auto", {"mode": "auto"}), ("3", {"mode": "auto", "depth": 3})]
)
def test_modes_set_the_speculation_field_of_headstart(mode: str, field_: dict[str, Any]) -> None:
    with running(FakeServer(owner="headstart")) as fake:
        measure(target_of(fake), TASKS, mode, RequestLoad(concurrency=1), num_requests=1)
        assert fake.chat_requests[-1]["speculation"] == field_


@pytest.mark.parametrize("mode", ["0", "\u00b2", "deep"])
def test_wrong_modes_of_headstart_are_refused(mode: str) -> None:
    with running(FakeServer(owner="headstart")) as fake, pytest.raises(UsageError, match="--modes has"):
        measure(target_of(fake), TASKS, mode, RequestLoad(concurrency=1), num_requests=1)


def test_mode_off_uses_the_second_server() -> None:
    with running(FakeServer()) as fake, running(FakeServer()) as plain:
        with pytest.raises(UsageError, match="is not headstart's"):
            measure(target_of(fake), TASKS, "off", RequestLoad(concurrency=1), num_requests=1)
        runner = HttpTarget(Server.at(fake.url), Server.at(plain.url))
        assert runner.modes == ("off", "server")
        measure(runner, TASKS, "off", RequestLoad(concurrency=1), num_requests=2)
        assert (len(fake.chat_requests), len(plain.chat_requests)) == (0, 4)  # each prompt is sent once as warm-up


def test_refused_requests_are_counted() -> None:
    with running(FakeServer()) as fake:
        runner = target_of(fake)
        fake.refuses = lambda number: 503 if number % 4 == 0 else 200
        found = measure(runner, TASKS, "server", RequestLoad(concurrency=1), num_requests=4)
    assert (found.complete, found.requests, found.failed) == (True, 4, 1)
    assert found.errors == ("HTTP 503: no room here",) and found.output_tokens == 15


def test_run_ends_when_all_requests_are_refused(tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "a.json"
    with running(FakeServer(refuses=lambda number: 400)) as fake:
        assert main(["bench", "--url", fake.url, "--concurrency", "1,2", "--out", str(out)]) == 1
    assert "all 8 requests of a run failed: HTTP 400: no room here" in capsys.readouterr().out
    assert len(BenchDocument.read(out).cells) == 1


def test_finished_cells_are_kept_when_the_server_dies(tmp_path: Path, capsys: Capture) -> None:
    """Each run has 2 requests, after 2 warm-up requests of one token. The server dies in the third run."""
    out, page = tmp_path / "a.json", tmp_path / "a.html"
    arguments = ["--concurrency", "2", "--requests", "2", "--workload", "prose", "--output-tokens", "5"]
    with running(FakeServer(dies_after=4 + 4 + 4 + 2)) as fake:
        assert main(["bench", "--url", fake.url, *arguments, "--out", str(out), "--report", str(page)]) == 1
    assert "INCOMPLETE: the server died" in capsys.readouterr().out
    document = BenchDocument.read(out)
    assert [each.complete for each in document.cells] == [True, True, False]
    assert (document.complete, len(document.rows), document.rows[0].cells) == (False, 1, 2)
    assert "Incomplete:" in page.read_text("utf-8")


def test_lost_connection_ends_a_run_early() -> None:
    with running(FakeServer(dies_after=3)) as fake:
        runner = target_of(fake)
        outcome = runner.run(TASKS.tasks(50), "server", RequestLoad(concurrency=1), lambda: None)
    assert "hung up" in outcome.lost and [bool(each.error) for each in outcome.samples] == [False, False, False, True]
    assert not runner.is_alive()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "http://no-such-host.invalid", f"http://{'x' * 70}.invalid"])
def test_unreachable_server_is_reported(url: str, capsys: Capture) -> None:
    assert main(["bench", "--url", url]) == 2
    shown = capsys.readouterr().err
    assert f"cannot reach {url}" in shown and "is the server running" in shown


def test_server_addresses_are_parsed() -> None:
    for url in ("http://[", "ftp://x", "http://", "http://x:port"):
        with pytest.raises(UsageError, match="not the address of a server"):
            Server.at(url)
    assert str(Server.at("https://host/api/v1/")) == "https://host:443/api"
    assert str(Server.at("127.0.0.1:8000/v1")) == "http://127.0.0.1:8000"
    assert str(Server.at("http://[::1]:80")) == "http://[::1]:80"
    assert "secret" not in repr(replace(Server.at("http://x"), api_key="secret"))


def test_server_without_the_openai_api_is_refused() -> None:
    with running(FakeServer()) as fake:
        server = replace(Server.at(fake.url), prefix="/nothing")
        assert asyncio.run(get(server, "/v1/models")).status == 404
        with pytest.raises(UsageError, match="not an OpenAI-compatible server: /v1/models answers 404"):
            HttpTarget(server)


def test_unknown_models_and_local_options_are_refused_over_http(capsys: Capture) -> None:
    with running(FakeServer()) as fake:
        assert main(["bench", "other", "--url", fake.url]) == 2
    shown = capsys.readouterr().err
    assert "has no model 'other'" in shown and "it has m" in shown
    assert main(["bench", "--url", "http://127.0.0.1:1", "--threads", "2"]) == 2
    assert "--threads has no meaning for a server" in capsys.readouterr().err


def test_prompt_length_uses_tokenize_or_an_estimate() -> None:
    with running(FakeServer(counts=True)) as fake, running(FakeServer()) as other:
        runner = target_of(fake)
        (counted,) = synthetic(30, runner.count_tokens).tasks(1)
        (guessed,) = synthetic(30, target_of(other).count_tokens).tasks(1)
    assert len(counted.turns[0].split()) == 30 and len(guessed.turns[0]) == pytest.approx(120, abs=8)
    with pytest.raises(UsageError, match="no longer counts tokens"):
        runner.count_tokens("gone")
