"""Random constraints and raw HTTP (tests/fuzz): answers are valid or client errors; other requests are unaffected."""

import json
import random
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from process import Server
from support import PATIENCE

from tests.fuzz import grammars, wire

pytestmark = pytest.mark.slow  # a server process
COUNT, HEALTH_S = 25, 30.0
NEIGHBOUR: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 8, "temperature": 0.8, "seed": 7}
BUSY = frozenset({429, 503, 504})
"""Statuses of a loaded server for valid requests."""


def ask(name: str, number: int, url: str) -> tuple[str, str]:
    """Sends input `number`, the same in every run. Returns its beginning and the problem of the answer, or ""."""
    rng = random.Random(f"0 {name} {number}")
    if name == "wire":
        return wire.exchange(rng, url)
    path, body = next(grammars.requests(rng))
    data = json.dumps(body)
    answer = httpx.post(url + path, content=data, headers={"Content-Type": "application/json"}, timeout=PATIENCE)
    return f"{path} {len(data)} bytes: {data[:400]}", problem(answer)


def problem(answer: httpx.Response) -> str:
    status, text = answer.status_code, answer.text
    if status >= 500 and status not in BUSY:
        return f"{status}: {text[:300]}"
    if status < 400:
        return problem_of_events(text) if answer.headers["content-type"].startswith("text/event-stream") else ""
    error = answer.json()["error"]
    if set(error) != {"message", "type", "param", "code"} or not error["message"]:
        return f"an error without its parts: {text[:200]}"
    if status in (429, 503) and "retry-after" not in answer.headers:
        return f"{status} without Retry-After"
    return f"an error of {len(text)} characters" if len(text) > 4000 else ""


def problem_of_events(text: str) -> str:
    *events, last = [line.removeprefix("data: ") for line in text.split("\n") if line]
    codes = [error["code"] for event in events if (error := json.loads(event).get("error"))]
    faults = [code for code in codes if code >= 500 and code not in BUSY]
    return f"faults in a stream: {faults}" if faults else "" if last == "[DONE]" else "a stream without an end"


@pytest.mark.parametrize("name", ["grammars", "wire"])
def test_random_inputs_leave_the_server_and_other_requests_unaffected(server: Server, name: str, fuzz: int) -> None:
    """The text of a concurrent request stays the same."""
    expected = server.post("/v1/completions", **NEIGHBOUR).json()["choices"]
    with ThreadPoolExecutor(4) as threads:
        tried = [threads.submit(ask, name, number, server.url) for number in range(COUNT * fuzz)]
        while not all(each.done() for each in tried):
            assert server.client.get("/health", timeout=HEALTH_S).status_code == 200
            assert server.post("/v1/completions", **NEIGHBOUR).json()["choices"] == expected
    assert not [(number, *each.result()) for number, each in enumerate(tried) if each.result()[1]]
    assert "Traceback" not in server.log.read_text("utf-8")
