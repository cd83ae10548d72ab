"""`headstart probe --exact`: statistics, and verdicts on servers with one known kind of inexactness each."""

import json
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from headstart.cli.main import main
from headstart.tools.probe.exact import Comparisons, find_difference, overall_verdict, upper_bound
from headstart.tools.probe.exact_requests import FORMS, ProbeResponse, RequestCase, make_prompt

Capture = pytest.CaptureFixture[str]
GREEDY, SAMPLED = RequestCase("short", False), RequestCase("short", True)


@pytest.mark.parametrize(
    ("differences", "trials", "bound"),
    [(0, 10, 0.2589), (0, 100, 0.0295), (1, 10, 0.3942), (5, 50, 0.1991), (3, 3, 1.0)],  # from published tables
)
def test_upper_bound_is_clopper_pearson(differences: int, trials: int, bound: float) -> None:
    assert upper_bound(differences, trials) == pytest.approx(bound, abs=5e-4)


def test_difference_is_located_by_character_and_token() -> None:
    one, other = ProbeResponse("a" * 50 + "bc", (1, 2, 3)), ProbeResponse("a" * 50 + "dc", (1, 2, 4, 5))
    found = find_difference(GREEDY, one, other)
    assert (found.character, found.token) == (50, 2)
    assert (found.one, found.other) == ("a" * 30 + "bc", "a" * 30 + "dc")
    assert find_difference(GREEDY, ProbeResponse("ab"), ProbeResponse("abc")).character == 2


def test_irreproducible_sampling_gives_no_verdict_on_conditions() -> None:
    comparisons = Comparisons()
    comparisons.add("again", GREEDY, ProbeResponse("a"), ProbeResponse("a"))
    comparisons.add("company", GREEDY, ProbeResponse("a"), ProbeResponse("b"))
    comparisons.add("again", SAMPLED, ProbeResponse("a"), ProbeResponse("b"))
    comparisons.add("drafting", SAMPLED, ProbeResponse("a"), ProbeResponse("c"))
    outcomes = {(row["condition"], row["sampling"]): row["outcome"] for row in comparisons.results()}
    assert outcomes["company", "greedy"] == "differs" and outcomes["drafting", "sampled"] == "cannot tell"
    assert overall_verdict(comparisons.results()) == "differences"
    assert overall_verdict([row for row in comparisons.results() if row["sampling"] == "sampled"]) == "not reproducible"


def test_second_server_has_its_own_control() -> None:
    """An irreproducible second server affects the drafting condition only."""
    comparisons = Comparisons()
    comparisons.add("there again", GREEDY, ProbeResponse("b"), ProbeResponse("c"))
    for condition in ("drafting", "company"):
        comparisons.add(condition, GREEDY, ProbeResponse("a"), ProbeResponse("b"))
    assert [row["outcome"] for row in comparisons.results()] == ["differs", "cannot tell", "differs"]


def test_known_answer_is_no_difference_of_company() -> None:
    comparisons = Comparisons()
    warm, cold, other = (ProbeResponse(text) for text in ("warm", "cold", "other"))
    assert comparisons.add("company", GREEDY, warm, cold, known=(cold,))
    assert not comparisons.add("company", GREEDY, warm, other, known=(cold,))


@pytest.mark.parametrize("form", FORMS)
def test_prompts_differ_between_trials_and_share_a_prefix_within_one(form: Any) -> None:
    case = RequestCase(form, False)
    asked, other = make_prompt(case, 1, 2, "asked"), make_prompt(case, 1, 2, "other")
    assert asked == make_prompt(case, 1, 2, "asked") != other and asked[:15] == other[:15]
    assert asked[:15] not in {make_prompt(case, *place, "asked")[:15] for place in ((1, 3), (2, 2))}


@dataclass(eq=False)
class FakeServer:
    """A server whose texts depend on prompt, temperature and seed, and on the condition `fault`. `refuses`: request
    fields answered with status 400."""

    fault: str = ""
    refuses: tuple[str, ...] = ()
    owner: str = "somebody"
    drafts: int = 0
    running: int = 0
    seen: set[str] = field(default_factory=set)
    spoilt: set[str] = field(default_factory=set)  # prompts cached by a batch with company
    lock: threading.Lock = field(default_factory=threading.Lock)
    url: str = ""

    def text(self, body: dict[str, Any]) -> str:
        prompt, greedy = body["messages"][0]["content"], not body["temperature"]
        drawn = random.Random(f"{prompt} {greedy or body.get('seed')}" if greedy or self.fault != "seed" else None)
        words = [drawn.choice(("tree", "stone", "cloud", "fish")) for _ in range(body["max_tokens"])]
        beginning = prompt[:20]
        with self.lock:
            self.running += 1
            known, crowded = beginning in self.seen, self.running > 1
            self.seen.add(beginning)
        if self.fault in ("company", "kept"):
            time.sleep(0.02)  # time for concurrent requests to arrive
        with self.lock:
            crowded |= self.running > 1
            self.running -= 1
        self.spoilt |= {prompt} if crowded else set()
        changed = {"company": crowded, "warm": not known, "kept": prompt in self.spoilt or crowded, "drafting": True,
                   "stream": bool(body.get("stream"))}  # fmt: skip
        if changed.get(self.fault):
            words[len(words) // 2 :] = ["elsewhere"]
        return " ".join(words)


class Handler(BaseHTTPRequestHandler):
    """Serves the model list, chat completions (also streamed) and draft counters."""

    made: FakeServer

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            self._answer(200, json.dumps({"data": [{"id": "m", "owned_by": self.made.owner}]}))
        elif self.path == "/metrics" and self.made.drafts:
            with self.made.lock:
                self.made.drafts += 1
            total = f"vllm:spec_decode_num_drafts_total {self.made.drafts}\n"
            self._answer(200, f"# TYPE vllm:spec_decode_num_drafts_total counter\n{total}")
        else:
            self._answer(404, "{}")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        for name in self.made.refuses:
            if name in body:
                self._answer(400, json.dumps({"error": {"message": f"{name} is not supported"}}))
                return
        text = self.made.text(body)
        if body.get("stream"):
            pieces = [{"choices": [{"delta": {"content": piece}}]} for piece in (text[:9], text[9:])]
            self._answer(200, "".join(f"data: {json.dumps(piece)}\n\n" for piece in pieces))
        else:
            self._answer(200, json.dumps({"choices": [{"message": {"content": text}}]}))

    def _answer(self, status: int, body: str) -> None:
        data = body.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def serve(fault: str = "", **settings: Any) -> Iterator[FakeServer]:
    made = FakeServer(fault, **settings)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"made": made}))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    made.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield made
    finally:
        server.shutdown()
        server.server_close()


def probe(capsys: Capture, url: str, *more: str) -> tuple[int, dict[str, Any]]:
    code = main(["probe", url, "--exact", "--minutes", "0.001", "--max-tokens", "12", "--json", *more])
    return code, json.loads(capsys.readouterr().out)


def differing_conditions(document: dict[str, Any]) -> set[tuple[str, str]]:
    return {(row["condition"], row["sampling"]) for row in document["conditions"] if row["outcome"] == "differs"}


@pytest.mark.slow
def test_exact_server_is_exact(capsys: Capture) -> None:
    with serve() as server:
        code, found = probe(capsys, server.url)
    assert (code, found["verdict"]) == (0, "exact")
    trials = {(row["condition"], row["sampling"]): row["trials"] for row in found["conditions"]}
    names = ("again", "warm", "streamed", "company")
    assert trials == {(name, how): 4 for name in names for how in ("greedy", "sampled")}
    assert [each["what"] for each in found["not_tested"]] == ["drafting"]
    assert found["summary"].startswith("EXACT: none of 32 answers")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "condition"), [("company", "company"), ("kept", "company"), ("warm", "warm"), ("stream", "streamed")]
)
def test_inexact_condition_is_found(fault: str, condition: str, capsys: Capture) -> None:
    with serve(fault) as server:
        code, found = probe(capsys, server.url)
    assert (code, found["verdict"]) == (1, "differences")
    assert differing_conditions(found) == {(condition, "greedy"), (condition, "sampled")}
    place = next(row["first_difference"] for row in found["conditions"] if row["first_difference"])
    assert "elsewhere" in place["one"] + place["other"] and place["character"] > 10


@pytest.mark.slow
def test_drafting_is_compared_with_a_second_server(capsys: Capture) -> None:
    with serve(drafts=1) as server, serve("drafting") as plain, serve() as same:
        code, found = probe(capsys, server.url, "--against", plain.url)
        assert (code, differing_conditions(found)) == (1, {("drafting", "greedy"), ("drafting", "sampled")})
        code, found = probe(capsys, server.url, "--against", same.url)
    assert (code, differing_conditions(found)) == (0, set()) and not found["not_tested"]
    assert any("drafts were made" in note for note in found["notes"])


@pytest.mark.slow
def test_server_that_ignores_seeds_is_not_reproducible(capsys: Capture) -> None:
    with serve("seed", drafts=1) as server, serve("seed") as plain:
        code, found = probe(capsys, server.url, "--against", plain.url)
    assert (code, found["verdict"]) == (1, "not reproducible")
    assert differing_conditions(found) == {("again", "sampled"), ("there again", "sampled")}
    assert "is the seed heeded?" in found["summary"]
    assert {row["outcome"] for row in found["conditions"] if row["sampling"] == "greedy"} == {"equal"}


@pytest.mark.slow
def test_refused_fields_are_listed_as_untested(capsys: Capture) -> None:
    with serve(refuses=("seed", "response_format", "tools", "return_token_ids")) as server:
        code, found = probe(capsys, server.url)
    assert code == 0 and {row["sampling"] for row in found["conditions"]} == {"greedy"}
    untested = {each["what"]: each["why"] for each in found["not_tested"]}
    assert untested.keys() == {"schema", "tools", "sampled", "drafting"}
    assert "seed is not supported" in untested["sampled"]
    assert set(found["conditions"][0]["forms"]) == {"short", "long"}


@pytest.mark.slow
def test_known_faults_of_an_engine_are_printed(capsys: Capture) -> None:
    with serve("company", owner="llamacpp") as server:
        assert main(["probe", server.url, "--exact", "--minutes", "0.001", "--max-tokens", "12"]) == 1
    shown = capsys.readouterr().out
    for words in ("engine: llama.cpp", "known, seen here: several slots", "known: cache_prompt"):
        assert words in shown
    assert shown.strip().splitlines()[-1].startswith("DIFFERENCES: alone and in company (greedy ")


@pytest.mark.parametrize(("words", "message"), [
    ("--exact", "cannot reach"), ("--minutes 3", "--minutes is for --exact"),
    ("--exact --minutes 0", "--minutes is '0'"), ("--exact --max-tokens 0", "--max-tokens is '0'"),
    ("--exact --no-metrics", "--no-metrics"), ("--exact --against http://[", "cannot reach"),
])  # fmt: skip
def test_wrong_usage_is_named(words: str, message: str, capsys: Capture) -> None:
    assert main(["probe", "http://127.0.0.1:1", *words.split()]) == 2 and message in capsys.readouterr().err


@pytest.mark.slow
def test_server_that_refuses_all_requests_is_an_error(capsys: Capture) -> None:
    with serve(refuses=("messages", "prompt")) as server:
        assert main(["probe", server.url, "--exact"]) == 2 and "is not supported" in capsys.readouterr().err
        assert main(["probe", server.url, "--exact", "--model", "other"]) == 2
        assert "has no model 'other'" in capsys.readouterr().err
