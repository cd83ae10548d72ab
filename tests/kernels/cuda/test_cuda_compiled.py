"""Triton's compiler on the kernels for a GPU that is not present: types, shapes, memory, and one binary for any number
of rows. `python benchmarks/kernels.py compile` checks all families."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.slow
def test_kernels_compile_to_one_binary_for_any_number_of_rows() -> None:
    """Runs in a separate process, since this one may use the interpreter."""
    command = [sys.executable, str(ROOT / "benchmarks" / "kernels.py"), "compile", "--rows", "qwen3_5"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "TRITON_INTERPRET": "0"})
    assert done.returncode == 0 and "\n0 red" in done.stdout, done.stdout[-3000:] + done.stderr[-3000:]
    kernels = {line.split("|")[1].strip() for line in done.stdout.splitlines() if line.startswith("| ")}
    assert {"product", "attend", "join", "gated_delta", "noisy", "limit", "verify", "advance"} <= kernels
