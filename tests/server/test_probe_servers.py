"""`headstart probe` and `headstart launch` against real servers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from process import PROGRAM, Server, free_port, running

from headstart import hub, registry
from headstart.cli.main import main
from headstart.errors import UsageError
from headstart.tools import client
from headstart.tools.launch import run as launch
from headstart.tools.launch.prepare import LaunchOptions
from headstart.tools.launch.processes import ServerGroup, ServerProcess
from headstart.tools.launch.run import check_drafting
from headstart.tools.launch.spec import LaunchSpec, LaunchStep

SMALL = ("--threads", "1", "--max-num-seqs", "2", "--max-model-len", "1024", "--kv-blocks", "128")

pytestmark = [
    pytest.mark.slow,  # server processes
    pytest.mark.skipif(hub.cached_trunk() is None, reason="the default model is not in the cache: headstart pull"),
]


@pytest.fixture(scope="module")
def drafting() -> Iterator[Server]:
    with running(*SMALL, "--depth", "3") as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[Server]:
    with running(*SMALL, "--depth", "0") as server:
        yield server


@pytest.mark.parametrize("flags", [[], ["--no-metrics"]])
def test_probe_finds_drafting_on(drafting: Server, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main(["probe", drafting.url, "--json", *flags]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["drafting"] == "on"
    assert document["source"] == ("timing" if flags else "metrics")
    assert document["acceptance_length"] > 1.3


@pytest.mark.parametrize("flags", [[], ["--no-metrics"]])
def test_probe_finds_drafting_off(plain: Server, capsys: pytest.CaptureFixture[str], flags: list[str]) -> None:
    assert main(["probe", f"{plain.url}/v1", "--json", *flags]) == 1
    assert json.loads(capsys.readouterr().out)["drafting"] == "off"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "cannot reach"),
        ("http://[", "not the address"),
        ("127.0.0.1:1/v1", "cannot reach"),
    ],
)
def test_probe_without_a_server(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", url]) == 2
    assert message in capsys.readouterr().err


def test_this_server_is_exact(drafting: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """One round of `probe --exact`, drafting switched by the requests themselves."""
    assert main(["probe", drafting.url, "--exact", "--minutes", "0.001", "--max-tokens", "12", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["engine"], found["not_tested"]) == ("exact", "headstart", [])
    conditions = {row["condition"] for row in found["conditions"]}
    assert conditions == {"again", "warm", "streamed", "drafting", "company"}
    assert {form for row in found["conditions"] for form in row["forms"]} == {"short", "long", "schema", "tools"}


def test_probe_of_a_page_that_is_no_such_server(plain: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", f"{plain.url}/metrics"]) == 2
    assert "no OpenAI-compatible server" in capsys.readouterr().err


LAUNCHER = '''\
"""headstart itself as an engine to launch."""

from headstart.tools.launch.launcher import EngineLauncher, ServerBuilder
from headstart.tools.launch.launcher import EngineFlag


class Itself(EngineLauncher):
    name, title, program, newest = "itself", "headstart", {program!r}, "0.1"
    flags = (EngineFlag("--port", "headstart/cli/serve.py"),)
    images = {{"cpu": ""}}

    def build(self, server: ServerBuilder) -> None:
        server.add("--port", server.spec.port)
        server.serve(self.program, "serve", *server.words)


LAUNCHER = Itself()
'''


@pytest.fixture
def itself(tmp_path: Path) -> Iterator[str]:
    """A launcher is one file."""
    (tmp_path / "itself.py").write_text(LAUNCHER.format(program=str(PROGRAM)))
    with registry.search_path("launchers", tmp_path):
        yield "itself"


def test_launch_starts_waits_warms_up_and_ends(itself: str, tmp_path: Path) -> None:
    """Its model is the default one, as headstart picks it; the options say nothing of the head."""
    head = str(Path(hub.__file__).parent / "heads" / hub.DEFAULT_MODEL)
    options = LaunchOptions(
        engine=itself, model=str(hub.cached_trunk()), depth=0, gpus="none", port=free_port(),
        extra=(*SMALL, "--head", head),
    )  # fmt: skip
    with launch.started(options) as engine:
        report = engine.check(lambda done, total, text: None)
        process = engine.servers.front.process
    assert report.ok and report.data["check"]["tokens"] > 100
    assert process is not None and process.poll() is not None


def test_launch_refuses_a_port_that_is_in_use(itself: str, plain: Server) -> None:
    port = int(plain.url.rpartition(":")[2])
    options = LaunchOptions(engine=itself, model=str(hub.cached_trunk()), depth=0, gpus="none", port=port)
    with pytest.raises(UsageError, match="is in use"), launch.started(options):
        pass


def checked(server: Server) -> dict[str, Any]:
    there = client.Server.at(server.url)
    process = ServerProcess(LaunchStep(()), [], {}, server.log, there, "/health", server.process, [time.monotonic()])
    servers = ServerGroup([process], server.log.parent)
    servers.wait(lambda done, total, text: None)
    return check_drafting(servers, LaunchSpec(depth=3), lambda done, total, text: None)


def test_check_finds_drafting_alive(drafting: Server) -> None:
    found = checked(drafting)
    assert found["alive"] and found["acceptance_length"] > 1.3 and found["accepted"] > 0


def test_check_finds_that_nothing_is_drafted(plain: Server) -> None:
    found = checked(plain)
    assert not found["alive"] and found["why"] == "its metrics count no drafts"
