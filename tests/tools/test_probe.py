"""`headstart probe`: verdicts on synthetic traces and on the metrics of each engine."""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any, ClassVar

import pytest

from headstart.tools import engine_metrics
from headstart.tools.client import Server
from headstart.tools.engine_metrics import EngineCounters, advise
from headstart.tools.probe.endpoint import Endpoint
from headstart.tools.probe.timing import DraftingVerdict, Kind, StreamTrace, judge_drafting, pace_by_length, summarize

LENGTHS = (24, 48, 96) * 3


def trace(
    kind: Kind, length: int, *, accepted: float = 0.0, step_s: float = 0.01, first_s: float = 0.2, noise: float = 0.2,
    pieces: str = "step", seed: int = 0,
) -> StreamTrace:  # fmt: skip
    """Trace of an engine that drafts 3 tokens, each accepted with probability `accepted`. `pieces`: stream one piece
    per step or one per token."""
    rng = random.Random(seed * 1000 + length)
    now, out = first_s, 1
    arrivals = [now]
    while out < length:
        now += step_s * (1 + noise * rng.uniform(-1, 1))
        count = 1
        while accepted and count <= 3 and rng.random() < accepted:
            count += 1
        count = min(count, length - out)
        out += count
        arrivals += [now] if pieces == "step" else [now + 1e-5 * place for place in range(count)]
    return StreamTrace(kind=kind, max_tokens=length, tokens=length, arrivals=tuple(arrivals))


def traces(kind: Kind, **settings: float | str) -> list[StreamTrace]:
    return [trace(kind, length, seed=seed, **settings) for seed, length in enumerate(LENGTHS)]


def verdict_of(predictable: Sequence[StreamTrace], unguessable: Sequence[StreamTrace]) -> DraftingVerdict:
    return judge_drafting(None, summarize(predictable), summarize(unguessable))


@pytest.mark.parametrize("pieces", ["step", "token"])
@pytest.mark.parametrize(("predictable", "unguessable"), [(0.9, 0.1), (0.6, 0.3), (0.5, 0.2)])
def test_drafting_shows_in_bursts_and_pace(pieces: str, predictable: float, unguessable: float) -> None:
    taken = traces("predictable", accepted=predictable, pieces=pieces)
    verdict = verdict_of(taken, traces("random", accepted=unguessable, pieces=pieces))
    assert (verdict.answer, verdict.source) == ("on", "timing")
    whole = summarize(traces("predictable", accepted=predictable))
    assert verdict.acceptance_length == pytest.approx(whole.tokens_per_burst)


@pytest.mark.parametrize("noise", [0.0, 0.3, 0.6])
def test_plain_decoding_on_a_noisy_machine_is_off(noise: float) -> None:
    assert verdict_of(traces("predictable", noise=noise), traces("random", noise=noise, step_s=0.0105)).answer == "off"


def test_rejected_drafts_are_found_by_metrics_only() -> None:
    """By timing, a dead head looks like plain decoding."""
    assert verdict_of(traces("predictable"), traces("random")).answer == "off"
    counts = EngineCounters(engine="vllm", known=True, drafts=500, drafted=1500, accepted=3)
    assert judge_drafting(counts, summarize(traces("predictable")), summarize(traces("random"))).answer == "dead"


def test_time_to_first_token_does_not_affect_the_verdict() -> None:
    """Total time per token would depend on it."""
    slow = pace_by_length(traces("predictable", first_s=5.0))
    quick = pace_by_length(traces("predictable", first_s=0.0))
    for length in (24, 96):
        assert slow[length]["ms_per_token"] == pytest.approx(quick[length]["ms_per_token"])
        assert slow[length]["naive_ms_per_token"] > 2 * quick[length]["naive_ms_per_token"]
    assert verdict_of(traces("predictable", first_s=5.0), traces("random", first_s=0.1)).answer == "off"


def test_server_that_batches_stream_pieces_is_not_taken_for_drafting() -> None:
    """The server sends 8 tokens per piece."""
    kinds: tuple[Kind, ...] = ("predictable", "random")
    verdict = verdict_of(*([replace(each, arrivals=each.arrivals[::8]) for each in traces(kind)] for kind in kinds))
    assert verdict.answer != "on" and any("collects" in line for line in verdict.evidence)


def test_answer_in_one_piece_gives_no_verdict() -> None:
    whole = [StreamTrace(kind="predictable", max_tokens=48, tokens=48, arrivals=(0.5,))] * 3
    verdict = verdict_of(whole, whole)
    assert (verdict.answer, verdict.confidence) == ("unknown", 0.5)
    assert judge_drafting(None, None, None).answer == "unknown"


def test_server_without_token_counts_is_judged_by_bursts() -> None:
    def uncounted(kind: Kind, **settings: Any) -> list[StreamTrace]:
        return [replace(each, tokens=None) for each in traces(kind, **settings)]

    drafting = uncounted("predictable", accepted=0.8, pieces="token")
    assert verdict_of(drafting, uncounted("random", accepted=0.2, pieces="token")).answer == "on"
    assert verdict_of(uncounted("predictable"), uncounted("random")).answer == "off"


def test_confidence_grows_with_the_difference() -> None:
    weak = verdict_of(traces("predictable", accepted=0.3), traces("random", accepted=0.2))
    strong = verdict_of(traces("predictable", accepted=0.9), traces("random", accepted=0.1))
    assert strong.confidence > 0.99 > weak.confidence


VLLM = """\
# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 100.0
# TYPE vllm:spec_decode_num_draft_tokens_total counter
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="m"} 300.0
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="m"} 150.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="0"} 80.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="1"} 70.0
"""
RUNNING = '# TYPE {0} gauge\n{0}{{model_name="m"}} 0.0\n'
SGLANG = '# TYPE sglang:spec_accept_length gauge\nsglang:spec_accept_length{{model_name="m"}} {0}\n'
TRTLLM = """\
# TYPE trtllm_spec_decode_num_draft_tokens_total counter
trtllm_spec_decode_num_draft_tokens_total{model_name="m"} 30.0
# TYPE trtllm_spec_decode_acceptance_length gauge
trtllm_spec_decode_acceptance_length{model_name="m"} 2.4
"""
XLLM = """\
# TYPE speculative_num_drafts_total gauge
speculative_num_drafts_total 10
# TYPE speculative_num_accepted_tokens_total gauge
speculative_num_accepted_tokens_total 8
"""


@pytest.mark.parametrize(("text", "engine", "answer", "length"), [
    (VLLM, "vllm", "on", 2.5),
    (VLLM.replace("150.0", "0.0"), "vllm", "dead", 1.0),
    (VLLM + RUNNING.format("headstart:depth"), "headstart", "on", 2.5),
    (VLLM.replace("vllm:", "llamacpp:"), "llamacpp", "on", 2.5),
    (VLLM.replace("vllm:", "llamacpp:").replace("00.0", "0").replace("100", "0"), "llamacpp", "on", None),
    (RUNNING.format("vllm:num_requests_running"), "vllm", "off", None),
    (SGLANG.format("2.1"), "sglang", "on", 2.1),
    (SGLANG.format("0.0"), "sglang", "off", None),
    (SGLANG.format("2.0") + 'sglang:spec_accept_length{model_name="m",dp_rank="1"} 3.0\n', "sglang", "on", 2.5),
    (SGLANG.format("1.0"), "sglang", "dead", 1.0),
    (TRTLLM, "trtllm", "on", 2.4),
    (RUNNING.format("trtllm_kv_cache_hit_rate"), "trtllm", "off", None),
    (XLLM, "xllm", "on", 1.8),
    (XLLM.replace(" 10", " 0").replace(" 8", " 0"), "xllm", "off", None),
])  # fmt: skip
def test_verdict_from_metrics_of_each_engine(text: str, engine: str, answer: str, length: float | None) -> None:
    counts = engine_metrics.read(text)
    assert counts is not None and counts.engine == engine
    verdict = judge_drafting(counts, None, None)
    assert (verdict.answer, verdict.source) == (answer, "metrics")
    if length is not None:
        assert counts.acceptance_length == pytest.approx(length)


def test_counters_are_compared_with_their_start() -> None:
    before = engine_metrics.read(VLLM)
    later = engine_metrics.read(VLLM.replace("100.0", "140.0").replace("150.0", "210.0").replace("80.0", "100.0"))
    new = later.since(before)
    assert (new.drafts, new.accepted, new.per_position) == (40, 60, {0: 20, 1: 0})
    assert new.acceptance_length == 2.5 and judge_drafting(before.since(before), None, None).answer == "off"


@pytest.mark.parametrize("text", ["", "[1, 2]", "{broken", "<html></html>", "# TYPE other counter\nother_total 1\n"])
def test_text_without_known_metrics_is_ignored(text: str) -> None:
    assert engine_metrics.read(text) is None


class ChatOnly(BaseHTTPRequestHandler):
    """A server with chat completions only, without `ignore_eos`, that requires `max_completion_tokens`."""

    asked: ClassVar[list[tuple[str, list[str]]]] = []

    def do_GET(self) -> None:
        self._answer(200, b'{"data": [{"id": "m"}]}' if self.path == "/v1/models" else b"{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append((self.path, sorted(body)))
        if self.path != "/v1/chat/completions":
            self._answer(404, b"{}")
        elif "ignore_eos" in body:
            self._answer(400, b'{"error": "unknown field ignore_eos"}')
        elif "max_tokens" in body:
            self._answer(400, b'{"error": "use max_completion_tokens instead"}')
        else:
            pieces = [{"choices": [{"delta": {"content": "a"}}]}] * 3 + [{"usage": {"completion_tokens": 5}}]
            self._answer(200, b"".join(b"data: " + json.dumps(each).encode() + b"\n\n" for each in pieces))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def endpoint() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), ChatOnly)
    Thread(target=server.serve_forever, daemon=True).start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_client_falls_back_until_a_request_is_accepted(endpoint: str) -> None:
    found = Endpoint(Server.at(endpoint)).stream("predictable", "a a a", 5, 0.0)
    assert (found.tokens, len(found.arrivals)) == (5, 3)
    fields = ["max_completion_tokens", "messages", "model", "seed", "stream", "stream_options", "temperature"]
    assert ChatOnly.asked[-1] == ("/v1/chat/completions", fields) and Endpoint(Server.at(endpoint)).metrics() is None


def counters(drafts: float, accepted: Sequence[float], *, positions: bool = True) -> EngineCounters:
    """Counters of drafts with `len(accepted)` tokens, accepted in these shares."""
    places = {place: share * drafts for place, share in enumerate(accepted)}
    total = drafts * sum(accepted)
    return EngineCounters(engine="vllm", known=True, drafts=drafts, drafted=drafts * len(accepted), accepted=total,
                  per_position=places if positions else {})  # fmt: skip


def test_low_acceptance_gives_advice_to_lower_the_depth() -> None:
    advice = advise(counters(1000, (0.61, 0.31, 0.14)))
    assert "35% of the drafted tokens" in advice and "lower the depth to 1" in advice
    assert "1 + 0.61 + 0.31 + 0.14 = 2.06 tokens a pass, depth 1 1.61, with 2 of 3 drafted rows saved" in advice
    assert "lower the depth to 2" in advise(counters(1000, (0.8, 0.5, 0.1)))
    assert "compare with drafting off" in advise(counters(1000, (0.3,)))
    assert "lower the depth to 1" in advise(counters(1000, (0.6, 0.36, 0.2), positions=False))


@pytest.mark.parametrize(
    "counts", [None, counters(1000, (0.7, 0.5)), counters(20, (0.1, 0.1)), EngineCounters(engine="x", known=True)]
)
def test_good_acceptance_or_few_drafts_give_no_advice(counts: EngineCounters | None) -> None:
    assert advise(counts) == ""
