"""What the first token waits for: `generate` imports what it needs, and nothing that other commands or models need."""

from __future__ import annotations

import subprocess
import sys

import pytest

from headstart import registry

HEAVY = {
    "torch", "transformers", "pydantic", "gguf", "yaml", "asyncio", "http.client", "ssl", "rich", "llguidance", "httpx",
    "huggingface_hub", "fastapi", "uvicorn", "headstart.server", "headstart.train", "headstart.cache.spill",
    "headstart.api.asynchronous", "headstart.kernels.reference.ops", "headstart.kernels.cuda.backend",
}  # fmt: skip
"""Each is 5 ms to a second of a start."""
MODEL = "qwen3_5-tiny"
PROGRAM = """
import sys
from headstart.cli.main import main
code = main(sys.argv[1:])
print()
print(*sys.modules)
sys.exit(code)
"""


def imported(*words: str) -> set[str]:
    done = subprocess.run([sys.executable, "-c", PROGRAM, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())


@pytest.mark.parametrize("line", ["--version", "generate --help", "doctor --help"])
def test_help_imports_no_engine(line: str) -> None:
    assert not imported(*line.split()) & {*HEAVY, "tokenizers", "jinja2", "headstart.engine", "headstart.api"}


def test_generate_imports_what_it_needs() -> None:
    pytest.importorskip("headstart.kernels.native._native")
    names = imported("generate", MODEL, "--backend", "native", "--prompt", "Hi", "--max-tokens", "1")
    assert not names & HEAVY
    families = {name for name in registry.available("models") if f"headstart.models.{name}" in names}
    assert families <= {"qwen3", "qwen3_5", "qwen3_5_moe"}
    heads = {name for name in registry.available("heads") if f"headstart.heads.{name}" in names}
    assert heads <= {"mtp", "draft_model"}
