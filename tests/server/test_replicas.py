"""Replica processes behind vllm-router: equal texts, restarts, lost processes, joining."""

import importlib.util
import json
import os
import re
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
from process import Server, running
from support import PATIENCE, until

from headstart.machine import threads

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm_router") is None, reason="pip install vllm-router"),
    pytest.mark.skipif(threads().usable < 2, reason="two replicas need two cores"),
]
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def replicas(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Two replicas, in a working directory with another package of this name, as in a checkout."""
    folder = tmp_path_factory.mktemp("checkout")
    (folder / "headstart").mkdir()
    (folder / "headstart" / "__init__.py").write_text("raise SystemExit('the package of the working directory')")
    patient = ("--shutdown-timeout", f"{PATIENCE:.0f}")  # a busy machine generates for minutes
    common = ("--threads", "1", "--kv-blocks", "1024", "--api-key", "secret", *patient)
    with running("--replicas", "2", *common, folder=folder) as found:
        found.client.headers["authorization"] = "Bearer secret"
        yield found


@contextmanager
def direct_engine(server: Server, number: int) -> Iterator[Server]:
    """One engine without the router. The router passes API keys to completions only."""
    url = list_replicas(server)[number]["url"]
    with httpx.Client(base_url=url, headers=server.client.headers, timeout=PATIENCE) as client:
        yield Server(server.process, server.log, url, client)


def list_replicas(server: Server) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.client.get("/replicas").json()["replicas"]
    return found


def wait_for(server: Server, condition: Callable[[list[dict[str, Any]]], bool]) -> None:
    def holds() -> bool:
        with suppress(httpx.TransportError):
            return condition(list_replicas(server))
        return False

    until(holds, lambda: server.log.read_text("utf-8"))


def ask(server: Server, seed: int, **more: Any) -> str:
    body = {"messages": [{"role": "user", "content": f"Say {seed % 5}."}], "seed": seed % 5, "max_tokens": 16}
    answer = server.post(CHAT, **body | more, temperature=0.8)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_replicas_give_equal_texts_and_report_metrics_of_all(replicas: Server) -> None:
    texts = {}
    for number in (0, 1):
        with direct_engine(replicas, number) as engine:
            texts[number] = [ask(engine, seed) for seed in range(5)]
    assert texts[0] == texts[1] == [ask(replicas, seed) for seed in range(5)]
    wait_for(replicas, lambda found: all(each["running"] is not None for each in found))
    wanted = ["vllm_router_active_workers 2.0"]
    for number in (0, 1):
        wanted += [f'headstart:replica_up{{engine="{number}"}} 1.0', f'vllm:request_success_total{{engine="{number}"']
    with direct_engine(replicas, 1) as engine:
        until(lambda: [line for line in wanted if line not in engine.client.get("/metrics").text] == [])


def test_router_sends_prefixes_to_the_same_replica(replicas: Server) -> None:
    for turns in range(1, 5):
        ask_with = [{"role": "user", "content": "An apple. " * 60 * turns}]
        assert replicas.post(CHAT, messages=ask_with, max_tokens=1).status_code == 200
    with direct_engine(replicas, 0) as engine:
        assert 'outcome="prefix_hit"' in engine.client.get("/metrics").text


def test_other_origins_are_not_allowed(replicas: Server) -> None:
    answer = replicas.client.get("/v1/models", headers={"origin": "http://elsewhere.example"})
    assert answer.headers.get("access-control-allow-origin") not in ("*", "http://elsewhere.example")


def test_api_keys_are_checked(replicas: Server) -> None:
    answer = replicas.client.post(CHAT, json={"messages": []}, headers={"authorization": "Bearer wrong"})
    assert answer.status_code == 401
    with direct_engine(replicas, 0) as engine:
        assert engine.client.get("/metrics", headers={"authorization": "", "x-headstart-own": "1"}).status_code == 401


Texts = dict[int, str]


def stream_texts(server: Server, tokens: int, watch: Callable[[int, Texts], bool]) -> Texts:
    """Texts of a stream up to its end, or until `watch(number of events, texts)` is true."""
    body = {"messages": [{"role": "user", "content": "Tell a story."}], "seed": 5, "max_tokens": tokens}
    texts, num_events, is_done = {0: "", 1: ""}, 0, False
    with server.client.stream("POST", CHAT, json=body | {"ignore_eos": True, "stream": True, "n": 2}) as answer:
        for line in answer.iter_lines():
            is_done |= line == "data: [DONE]"
            if line.startswith("data: {"):
                for each in json.loads(line[6:])["choices"]:
                    texts[each["index"]] += each["delta"].get("content") or ""
                num_events += 1
                if watch(num_events, texts):
                    return texts
    assert is_done
    return texts


def num_resumed(server: Server, why: str) -> float:
    with direct_engine(server, 0) as engine:
        return float(re.findall(rf'resumed_requests_total{{why="{why}"}} (\S+)', engine.client.get("/metrics").text)[0])


@pytest.fixture(scope="module")
def expected(replicas: Server) -> Texts:
    return stream_texts(replicas, 300, lambda *_: False)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_stream_survives_a_lost_engine(replicas: Server, expected: Texts, number: signal.Signals) -> None:
    wait_for(replicas, lambda found: all(each["state"] == "ready" for each in found))
    victims: list[int] = []

    def disturb(num_events: int, texts: Texts) -> bool:
        if num_events == 20:
            victims.extend(each["pid"] for each in list_replicas(replicas) if each["running"])
            os.kill(victims[0], number)
        return False

    assert stream_texts(replicas, 300, disturb) == expected
    if number == signal.SIGSTOP:
        os.kill(victims[0], signal.SIGCONT)
    wait_for(replicas, lambda found: all(each["state"] == "ready" and each["running"] is not None for each in found))
    assert num_resumed(replicas, "ended" if number == signal.SIGKILL else "silent") >= 1


def test_stream_survives_a_rolling_restart(replicas: Server) -> None:
    """The stream is read until another engine has resumed it, and 40 events more."""
    before, more = num_resumed(replicas, "renewed"), 0

    def disturb(num_events: int, texts: Texts) -> bool:
        nonlocal more
        if num_events == 20:
            replicas.process.send_signal(signal.SIGHUP)
        if num_events % 20 == 0 and not more and num_resumed(replicas, "renewed") > before:
            more = num_events
        return bool(more) and num_events > more + 40

    texts = stream_texts(replicas, 6000, disturb)
    wait_for(replicas, lambda found: all(each["state"] == "ready" and each["running"] is not None for each in found))
    longer = stream_texts(replicas, 6000, lambda _, known: all(len(known[each]) >= len(texts[each]) for each in texts))
    assert {each: text[: len(texts[each])] for each, text in longer.items()} == texts


def test_rolling_restart_loses_no_request(replicas: Server) -> None:
    before = {each["pid"] for each in list_replicas(replicas)}
    with ThreadPoolExecutor(4) as pool:
        replicas.process.send_signal(signal.SIGHUP)
        texts = []
        while not before.isdisjoint(each["pid"] for each in list_replicas(replicas)):
            texts += list(pool.map(lambda seed: ask(replicas, seed), range(5)))
    assert texts and all(texts[:5] == texts[start : start + 5] for start in range(0, len(texts), 5))
    wait_for(replicas, lambda found: all(each["state"] == "ready" for each in found))


def test_killed_replica_is_restarted_while_others_answer(replicas: Server) -> None:
    victim, expected = list_replicas(replicas)[0], [ask(replicas, seed) for seed in range(5)]
    os.kill(victim["pid"], signal.SIGKILL)
    assert [ask(replicas, seed) for seed in range(5)] == expected
    wait_for(replicas, lambda found: found[0]["state"] == "ready" and found[0]["starts"] == victim["starts"] + 1)


def children(server: Server) -> set[int]:
    """Process ids of engines and router."""
    pid = server.process.pid
    return {int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_killed_router_is_restarted(replicas: Server) -> None:
    expected = ask(replicas, 1)
    (router,) = children(replicas) - {each["pid"] for each in list_replicas(replicas)}
    os.kill(router, signal.SIGKILL)
    until(lambda: router not in children(replicas))
    wait_for(replicas, lambda found: all(each["state"] == "ready" for each in found))
    assert ask(replicas, 1) == expected


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nobody tells them")
def test_children_end_with_a_killed_supervisor() -> None:
    with running("--replicas", "1", "--threads", "1", "--kv-blocks", "512") as server:
        left, port = children(server), int(server.url.rpartition(":")[2])
        assert len(left) == 2
        server.process.kill()
        server.process.wait()
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in left))
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_server_joins_and_leaves_the_router(replicas: Server) -> None:
    with running("--join", replicas.url, "--threads", "1", "--kv-blocks", "1024", "--api-key", "secret") as joining:
        known = lambda: joining.url in replicas.client.get("/list_workers").json()["urls"]  # noqa: E731
        until(known, lambda: joining.log.read_text("utf-8"))
        assert joining.stop() == 0
    assert joining.url not in replicas.client.get("/list_workers").json()["urls"]


def test_shutdown_waits_for_running_requests(replicas: Server) -> None:
    """Last test with these replicas: it stops the server."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, replicas, 1, max_tokens=200, ignore_eos=True)
        wait_for(replicas, lambda found: any(each["running"] for each in found))
        pids = [each["pid"] for each in list_replicas(replicas)]
        assert replicas.stop() == 0
        assert answer.result()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
