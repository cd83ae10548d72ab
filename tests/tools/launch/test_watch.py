"""Processes that are watched: real ones, which are killed. Small HTTP servers stand where engines would."""

import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support import PATIENCE, until

from headstart.errors import CheckFailed, UsageError
from headstart.tools.launch import processes
from headstart.tools.launch.launchers.llamacpp import LAUNCHER
from headstart.tools.launch.processes import ServerGroup, check_port_is_free, start
from headstart.tools.launch.spec import LaunchSpec, LaunchStep

SERVER = """
import http.server, os, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(503 if os.path.exists(sys.argv[2]) else 200)
        self.end_headers()
    def log_message(self, *words):
        pass
if len(sys.argv) > 3:
    sys.exit(f"Error: {sys.argv[3]}")
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


watching: list[threading.Thread] = []


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in sockets]


@contextmanager
def servers(tmp_path: Path, *names: str, fails: str = "") -> Iterator[ServerGroup]:
    """Servers of these names, a router where a name is that; they are ill while `tmp_path/ill-NAME` is there."""
    commands = []
    for name, port in zip(names, free_ports(len(names)), strict=True):
        words = [sys.executable, "-c", SERVER, str(port), str(tmp_path / f"ill-{name}"), *([fails] if fails else [])]
        role = "router" if name == "router" else ""
        commands.append((LaunchStep(tuple(words), server=name, role=role, port=port), words))
    watching.clear()
    with start(LAUNCHER, commands, {}, LaunchSpec(depth=0)) as running:
        try:
            yield running
        finally:
            running.is_ending = True
            for thread in watching:
                thread.join(PATIENCE)


def watched(running: ServerGroup, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[BaseException]]:
    """Watch them in a thread, quickly: what is said, and how it ended."""
    monkeypatch.setattr(processes, "POLL_S", 0.05)
    monkeypatch.setattr(processes, "HEALTH_INTERVAL_S", 0.1)
    monkeypatch.setattr(processes, "HEALTH_TIMEOUT_S", PATIENCE)
    said: list[str] = []
    ended: list[BaseException] = []

    def run() -> None:
        try:
            running.supervise(said.append)
        except CheckFailed as error:
            ended.append(error)

    watching.append(threading.Thread(target=run, daemon=True))
    watching[-1].start()
    return said, ended


def kill(running: ServerGroup, place: int) -> None:
    os.kill(running.processes[place].process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_router_is_started_when_its_servers_answer(tmp_path: Path) -> None:
    with servers(tmp_path, "copy-0", "copy-1", "router") as running:
        assert running.front.process is None
        running.wait(lambda *progress: None)
        assert running.front.process is not None and running.front.is_healthy() and running.log == running.folder
    assert all(each.exit_reason() for each in running.processes)


@pytest.mark.slow
def test_a_server_that_is_alone_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(tmp_path, "server") as running:
        running.wait(lambda *progress: None)
        _, ended = watched(running, monkeypatch)
        kill(running, 0)
        until(lambda: ended)
    assert "the engine ended by SIGKILL" in str(ended[0]) and "its log is" in str(ended[0])


@pytest.mark.slow
def test_one_of_several_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(tmp_path, "copy-0", "copy-1", "router") as running:
        running.wait(lambda *progress: None)
        said, ended = watched(running, monkeypatch)
        for place in (1, 2):  # a copy, and the router
            kill(running, place)
            until(lambda place=place: any(f"{running.processes[place].name} answers again" in text for text in said))
        assert all(each.is_healthy() for each in running.processes) and not ended
    assert "copy-1 ended by SIGKILL" in said[0] and "starting it again (1 of 3)" in said[0]


@pytest.mark.slow
def test_one_that_does_not_stay_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(tmp_path, "copy-0", "copy-1", "router") as running:
        running.wait(lambda *progress: None)
        running.processes[0].words += ["no more memory"]
        said, ended = watched(running, monkeypatch)
        kill(running, 0)
        until(lambda: ended)
    assert len(said) == 3 and "copy-0 ended with code 1, and was started again 3 times" in str(ended[0])
    assert "Error: no more memory" in str(ended[0])


@pytest.mark.slow
def test_a_server_that_is_there_but_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As an engine whose workers are gone: it is ended, and started again."""
    with servers(tmp_path, "copy-0", "copy-1", "router") as running:
        running.wait(lambda *progress: None)
        said, ended = watched(running, monkeypatch)
        (tmp_path / "ill-copy-0").touch()
        until(lambda: said)
        (tmp_path / "ill-copy-0").unlink()
        until(lambda: any("copy-0 answers again" in text for text in said))
        assert not ended
    assert "copy-0 does not answer /health any more" in said[0]


@pytest.mark.slow
def test_one_that_ends_before_it_answers_is_named(tmp_path: Path) -> None:
    wrong = pytest.raises(UsageError, match="copy-0 ended with code 1 before it answered: Error: no such model")
    with wrong, servers(tmp_path, "copy-0", "router", fails="no such model") as running:
        running.wait(lambda *progress: None)


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    wrong = pytest.raises(UsageError, match=r"is in use on 127\.0\.0\.1")
    with socket.create_server(("127.0.0.1", 0)) as taken, wrong:
        check_port_is_free(taken.getsockname()[1], "127.0.0.1")
