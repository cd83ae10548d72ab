"""Start-up time: commands import only the modules that they need; progress output while loading."""

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from support import PATIENCE, until

from headstart import registry
from headstart.cli import render
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import Progress
from headstart.errors import UsageError

HEAVY = {
    "torch", "transformers", "pydantic", "gguf", "yaml", "asyncio", "http.client", "ssl", "rich", "llguidance", "httpx",
    "huggingface_hub", "fastapi", "uvicorn", "headstart.server", "headstart.train", "headstart.cache.spill",
    "headstart.api.asynchronous", "headstart.kernels.reference.ops", "headstart.kernels.cuda.backend",
}  # fmt: skip
"""Modules that take 5 ms to 1 s to import; the target for --help is 0.4 s."""
MODEL = "qwen3_5-tiny"
PROGRAM = """
import sys
from headstart.cli.main import main
code = main(sys.argv[1:])
print()
print(*sys.modules)
sys.exit(code)
"""


def modules_of(*words: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("line", ["--version", "generate --help", "doctor --help"])
def test_help_imports_no_engine(line: str) -> None:
    assert not modules_of(*line.split()) & {*HEAVY, "tokenizers", "jinja2", "headstart.engine", "headstart.api"}


@pytest.mark.slow
def test_generate_imports_no_unneeded_module() -> None:
    pytest.importorskip("headstart.kernels.native._native")
    names = modules_of("generate", MODEL, "--backend", "native", "--prompt", "Hi", "--max-tokens", "1")
    assert not names & HEAVY
    families = {name for name in registry.available("models") if f"headstart.models.{name}" in names}
    assert families <= {"qwen3", "qwen3_5", "qwen3_5_moe"}
    heads = {name for name in registry.available("heads") if f"headstart.heads.{name}" in names}
    assert heads <= {"mtp", "draft_model"}


def test_serve_logs_loading_before_it_imports_the_engine() -> None:
    code = (
        "import sys\nfrom headstart.cli import main, serve\n"
        "serve.log_loading = lambda model, *_: sys.exit(' '.join([model, *sys.modules]))\n"
        "main.main(['serve', 'a-model'])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    model, *names = done.stderr.split()
    assert model == "a-model"
    assert not set(names) & ({*HEAVY, "numpy", "headstart.engine", "headstart.api"} - {"headstart.server"})


def test_progress_bar_appears_without_reports(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(render, "SLOW_SECONDS", 0.05)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    with render.progress("loading") as report:
        until(lambda: "loading" in capsys.readouterr().err)
        report(1, 2, "weights")
    monkeypatch.setattr(render, "SLOW_SECONDS", PATIENCE)
    with render.progress("short") as report:
        report(1, 1, "")
    assert "short" not in capsys.readouterr().err


def test_progress_lines_in_a_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with render.progress("loading") as report:
        report(0, 2, "weights")
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(render, "LOG_SECONDS", 0)
    with render.progress("loading") as report:
        report(1, 2, "weights")
        report(3, None, "")
    assert capsys.readouterr().err == "weights (1 of 2)\nloading (3)\n"


def test_progress_of_serve_is_in_the_log(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def load(model: str, config: EngineConfig, progress: Progress, **_: Any) -> None:
        progress(1, 2, "weights")
        raise UsageError("enough")

    monkeypatch.setattr(render, "LOG_SECONDS", 0)
    monkeypatch.setattr("headstart.api.LLM", load)
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert main(["serve", "m", "--port", "0", "--log-format", "json"]) == 2
    loading, weights, error = capsys.readouterr().err.splitlines()[:3]
    assert [json.loads(line)["message"] for line in (loading, weights)] == ["loading m", "weights (1 of 2)"]
    assert "enough" in error
