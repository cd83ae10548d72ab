"""The first inputs of the fuzzers of grammars and raw HTTP, of which `python -m tests.fuzz server` has more."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from process import Server

from tests.fuzz.monitor import NEIGHBOUR
from tests.fuzz.server import FUZZERS, THREADS, one

pytestmark = pytest.mark.slow  # a server process
COUNT = 40


@pytest.mark.parametrize("name", FUZZERS)
def test_nobody_harms_the_server(server: Server, name: str) -> None:
    """Nor a neighbour, whose text stays the same meanwhile."""
    expected = server.post("/v1/completions", **NEIGHBOUR).json()["choices"]
    with ThreadPoolExecutor(THREADS) as threads:
        tried = [threads.submit(one, name, 0, number, server.url) for number in range(COUNT)]
        while not all(each.done() for each in tried):
            assert server.client.get("/health").status_code == 200
            assert server.post("/v1/completions", **NEIGHBOUR).json()["choices"] == expected
    assert not [(number, each.result()) for number, each in enumerate(tried) if each.result()[1]]
    assert "Traceback" not in server.log.read_text("utf-8")
