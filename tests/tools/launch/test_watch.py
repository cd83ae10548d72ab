"""Supervision of server processes: small HTTP servers stand in for engines and are killed."""

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
    """Starts servers with these names; `router` is a router. A server is unhealthy while `tmp_path/ill-NAME` exists."""
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


def supervise(running: ServerGroup, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[BaseException]]:
    """Supervises in a thread with short intervals. Returns the messages and the errors that end the supervision."""
    monkeypatch.setattr(processes, "POLL_S", 0.05)
    monkeypatch.setattr(processes, "HEALTH_INTERVAL_S", 0.1)
    monkeypatch.setattr(processes, "HEALTH_TIMEOUT_S", PATIENCE)
    messages: list[str] = []
    ended: list[BaseException] = []

    def run() -> None:
        try:
            running.supervise(messages.append)
        except CheckFailed as error:
            ended.append(error)

    watching.append(threading.Thread(target=run, daemon=True))
    watching[-1].start()
    return messages, ended


def kill(running: ServerGroup, place: int) -> None:
    os.kill(running.processes[place].process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_router_starts_after_its_servers_answer(tmp_path: Path) -> None:
    with servers(tmp_path, "copy-0", "copy-1", "router") as running:
        assert running.front.process is None
        running.wait(lambda *progress: None)
        assert running.front.process is not None and running.front.is_healthy() and running.log == running.folder
    assert all(each.exit_reason() for each in running.processes)


@pytest.mark.slow
def test_crash_of_a_single_server_ends_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(tmp_path, "server") as running:
        running.wait(lambda *progress: None)
        _, ended = supervise(running, monkeypatch)
        kill(running, 0)
        until(lambda: ended)
    assert "the engine ended by SIGKILL" in str(ended[0]) and "its log is" in str(ended[0])


@pytest.mark.slow
def test_crashed_server_of_several_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(tmp_path, "copy-0", "copy-1", "router") as running:
        running.wait(lambda *progress: None)
        messages, ended = supervise(running, monkeypatch)
        for place in (1, 2):  # a replica and the router
            kill(running, place)
            until(
                lambda place=place: any(f"{running.processes[place].name} answers again" in text for text in messages)
            )
        assert all(each.is_healthy() for each in running.processes) and not ended
    assert "copy-1 ended by SIGKILL" in messages[0] and "starting it again (1 of 3)" in messages[0]


@pytest.mark.slow
def test_repeated_crashes_end_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with servers(tmp_path, "copy-0", "copy-1", "router") as running:
        running.wait(lambda *progress: None)
        running.processes[0].words += ["no more memory"]
        messages, ended = supervise(running, monkeypatch)
        kill(running, 0)
        until(lambda: ended)
    assert len(messages) == 3 and "copy-0 ended with code 1, and was started again 3 times" in str(ended[0])
    assert "Error: no more memory" in str(ended[0])


@pytest.mark.slow
def test_unhealthy_server_is_restarted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A running process that fails /health, as an engine without its workers, is killed and restarted."""
    with servers(tmp_path, "copy-0", "copy-1", "router") as running:
        running.wait(lambda *progress: None)
        messages, ended = supervise(running, monkeypatch)
        (tmp_path / "ill-copy-0").touch()
        until(lambda: messages)
        (tmp_path / "ill-copy-0").unlink()
        until(lambda: any("copy-0 answers again" in text for text in messages))
        assert not ended
    assert "copy-0 does not answer /health any more" in messages[0]


@pytest.mark.slow
def test_server_that_exits_at_start_is_named(tmp_path: Path) -> None:
    wrong = pytest.raises(UsageError, match="copy-0 ended with code 1 before it answered: Error: no such model")
    with wrong, servers(tmp_path, "copy-0", "router", fails="no such model") as running:
        running.wait(lambda *progress: None)


def test_port_in_use_is_refused(tmp_path: Path) -> None:
    wrong = pytest.raises(UsageError, match=r"is in use on 127\.0\.0\.1")
    with socket.create_server(("127.0.0.1", 0)) as taken, wrong:
        check_port_is_free(taken.getsockname()[1], "127.0.0.1")
    check_port_is_free(1, "::1")
    check_port_is_free(1, "no-such-host.invalid")
