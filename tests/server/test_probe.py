"""`headstart probe` and `headstart launch` against real servers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from process import PROGRAM, Server, running

from headstart import hub, registry
from headstart.cli.main import main
from headstart.core import Report
from headstart.tools import launch

SMALL = ("--threads", "1", "--max-num-seqs", "2", "--max-model-len", "1024", "--kv-blocks", "128")

pytestmark = pytest.mark.skipif(
    hub.cached_trunk() is None, reason="the default model is not in the cache: headstart pull"
)


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
        ("http://127.0.0.1:1", "does not answer"),
        ("http://[", "does not answer"),
        ("127.0.0.1:1/v1", "does not answer"),
    ],
)
def test_probe_without_a_server(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", url]) == 2
    assert message in capsys.readouterr().err


def test_probe_of_a_page_that_is_no_such_server(plain: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", f"{plain.url}/metrics"]) == 2
    assert "and no models" in capsys.readouterr().err


LAUNCHER = '''\
"""headstart itself as an engine to launch."""

from headstart.tools.launchers._launcher import Arguments, Flag, Launcher, Plan, Step


class Itself(Launcher):
    name, title, program, newest = "itself", "headstart", {program!r}, "0.1"
    flags = (Flag("--port", "headstart/cli/serve.py"), Flag("--depth", "headstart/config.py"))

    def plan(self, facts, wanted, version):
        arguments = Arguments(self, version)
        arguments.add("--port", wanted.port)
        arguments.add("--depth", wanted.depth)
        return Plan(serve=[Step((self.program, "serve", *arguments.words, *wanted.extra))])


LAUNCHER = Itself()
'''


@pytest.fixture
def itself(tmp_path: Path) -> Iterator[str]:
    """A launcher is one file."""
    (tmp_path / "itself.py").write_text(LAUNCHER.format(program=str(PROGRAM)))
    with registry.search_path("launchers", tmp_path):
        yield "itself"


def launched(engine: str, depth: int, port: int) -> Report:
    reports: list[Report] = []
    model = str(hub.cached_trunk())
    head = str(Path(hub.__file__).parent / "heads" / hub.DEFAULT_MODEL)
    options = launch.LaunchOptions(engine=engine, model=model, depth=0, gpus="none", port=port, extra=(
        *SMALL, "--depth", str(depth), "--head", head))  # fmt: skip
    launch.run_started(options, lambda done, total, text: None, reports.append, stay=False)
    return reports[0]


@pytest.mark.parametrize(("depth", "alive"), [(3, True), (0, False)])
def test_launch_waits_warms_up_and_reads_metrics(itself: str, depth: int, alive: bool) -> None:
    found = launched(itself, depth, _free_port()).data["check"]
    assert found["alive"] is alive
    assert found["tokens"] > 100
    assert (found["acceptance_length"] or 1) > 1.3 if alive else found["why"] == "its metrics count no drafts"


def _free_port() -> int:
    import socket

    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
