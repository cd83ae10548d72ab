"""`headstart probe` and `headstart launch` against running servers."""

import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from inside import LlmServer, serve_llm
from process import PROGRAM

from headstart import hub, registry
from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.errors import UsageError
from headstart.system import free_port
from headstart.text.chat import ChatTemplate
from headstart.tools import client
from headstart.tools.launch import run as launch
from headstart.tools.launch.prepare import LaunchOptions
from headstart.tools.launch.processes import ServerGroup, ServerProcess
from headstart.tools.launch.run import check_drafting
from headstart.tools.launch.spec import LaunchSpec, LaunchStep

TINY = "qwen3_5-tiny"  # a tiny model with a high acceptance rate
CONFIG = EngineConfig(threads=1, max_num_seqs=4, kv_blocks=512)
pytestmark = pytest.mark.slow  # servers


@pytest.fixture(scope="module")
def drafting() -> Iterator[LlmServer]:
    llm = LLM(TINY, replace(CONFIG, depth=3))
    llm.use_chat_template(ChatTemplate.from_name("chatml"))
    with serve_llm(llm) as server:
        yield server


@pytest.fixture(scope="module")
def plain() -> Iterator[LlmServer]:
    with serve_llm(LLM(TINY, replace(CONFIG, depth=0))) as server:
        yield server


def run_probe(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["probe", *words, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_probe_finds_drafting_on(drafting: LlmServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_probe(capsys, drafting.url)
    assert (code, found["drafting"], found["source"]) == (0, "on", "metrics")
    assert found["acceptance_length"] > 1.3
    _, found = run_probe(capsys, drafting.url, "--no-metrics")
    assert found["source"] == "timing" and found["drafting"] in ("on", "unknown")  # times vary on a busy machine


def test_probe_finds_drafting_off(plain: LlmServer, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run_probe(capsys, f"{plain.url}/v1")
    assert (code, found["drafting"]) == (1, "off")


@pytest.mark.parametrize(("url", "message"), [
    ("http://127.0.0.1:1", "cannot reach"), ("http://[", "not the address"), ("127.0.0.1:1/v1", "cannot reach"),
])  # fmt: skip
def test_probe_reports_unreachable_servers(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", url]) == 2
    assert message in capsys.readouterr().err


def test_probe_exact_finds_headstart_exact(drafting: LlmServer, capsys: pytest.CaptureFixture[str]) -> None:
    """One round of `probe --exact`; requests switch drafting on and off."""
    _, found = run_probe(capsys, drafting.url, "--exact", "--minutes", "0.001", "--max-tokens", "12")
    assert (found["verdict"], found["engine"], found["not_tested"]) == ("exact", "headstart", [])
    conditions = {row["condition"] for row in found["conditions"]}
    assert conditions == {"again", "warm", "streamed", "drafting", "company"}
    assert {form for row in found["conditions"] for form in row["forms"]} == {"short", "long", "schema", "tools"}


def test_probe_refuses_a_url_of_another_page(plain: LlmServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["probe", f"{plain.url}/metrics"]) == 2
    assert "not an OpenAI-compatible server" in capsys.readouterr().err


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
        server.serve(self.program, "serve", {model!r}, *server.words)


LAUNCHER = Itself()
'''


@pytest.fixture
def itself(tmp_path: Path) -> Iterator[str]:
    """A launcher plug-in for headstart itself."""
    (tmp_path / "itself.py").write_text(LAUNCHER.format(program=str(PROGRAM), model=TINY))
    with registry.search_path("launchers", tmp_path):
        yield "itself"


def options_of(itself: str, port: int) -> LaunchOptions:
    words = ("--threads", "1", "--kv-blocks", "128")
    return LaunchOptions(engine=itself, model=str(hub.resolve(TINY)), depth=0, gpus="none", port=port, extra=words)


def test_launch_starts_checks_and_stops_the_engine(itself: str) -> None:
    with launch.started(options_of(itself, free_port())) as engine:
        report = engine.check(lambda done, total, text: None)
        process = engine.servers.front.process
    assert report.ok and report.data["check"]["tokens"] > 100
    assert process is not None and process.poll() is not None


def test_launch_refuses_a_port_that_is_in_use(itself: str, plain: LlmServer) -> None:
    with pytest.raises(UsageError, match="is in use"), launch.started(options_of(itself, plain.port)):
        pass


def run_check(server: LlmServer, folder: Path) -> dict[str, Any]:
    there, running = client.Server.at(server.url), cast("Any", SimpleNamespace(poll=lambda: None))
    process = ServerProcess(LaunchStep(()), [], {}, folder / "log", there, "/health", running, [time.monotonic()])
    servers = ServerGroup([process], folder)
    servers.wait(lambda done, total, text: None)
    return check_drafting(servers, LaunchSpec(depth=3), lambda done, total, text: None)


def test_check_finds_drafting(drafting: LlmServer, tmp_path: Path) -> None:
    found = run_check(drafting, tmp_path)
    assert found["alive"] and found["acceptance_length"] > 1.3 and found["accepted"] > 0


def test_check_finds_missing_drafts(plain: LlmServer, tmp_path: Path) -> None:
    found = run_check(plain, tmp_path)
    assert not found["alive"] and found["why"] == "its metrics count no drafts"
