"""Correctness checks of the backend on the device: kernels against `reference`, `verify --full`, numerics, and families
with drafts, chunks and batches (verify_families.py --columns cuda)."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from device.clock import Clock, Results, say, table

ROOT = Path(__file__).parents[2]
FAMILIES = "llama,qwen3_5,gpt_oss,mimo+awq,mimo+fp8_blocks,deepseek_v4,granitemoehybrid,gemma3n,lfm2_moe"
"""Families that together use every kernel."""


def commands(backend: str, device: str, model: str) -> dict[str, list[str]]:
    python, where = [sys.executable, "-m"], [model, "--backend", backend, "--device", device]
    return {
        "kernels": [*python, "pytest", "tests/kernels/cuda", "-q", "-p", "no:cacheprovider"],
        "verify": [*python, "headstart", "verify", *where],
        "numerics": [*python, "headstart", "verify", "--numerics", *where],
        "verify --full": [*python, "headstart", "verify", "--full", *where],
        "families": [sys.executable, "benchmarks/verify_families.py", "--columns", "cuda", "--rows", FAMILIES],
    }  # fmt: skip


def run(backend: str, device: str, model: str, clock: Clock, results: Results, out: Path) -> None:
    """Runs each command within the remaining time; its output goes to `out`."""
    rows = []
    out.mkdir(parents=True, exist_ok=True)
    for name, command in commands(backend, device, model).items():
        if clock.left < 10:
            say(f"no time for {name}")
            continue
        if results.done("checks", name=name, backend=backend, rc=0):
            continue
        begun = time.monotonic()
        with (out / "checks.log").open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command[1:])}\n")
            log.flush()
            try:
                limit = None if clock.minutes is None else clock.left
                path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
                environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
                done = subprocess.run(
                    command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, timeout=limit, env=environment
                ).returncode
            except subprocess.TimeoutExpired:
                done = -1
        tail = (out / "checks.log").read_text("utf-8", "replace").rstrip().rsplit("\n", 3)[1:]
        told = {0: "passed", -1: "out of time"}.get(done, "FAILED")
        seconds = time.monotonic() - begun
        results.add("checks", name=name, backend=backend, rc=done, seconds=seconds, tail=tail)
        rows.append((name, told, seconds, tail[-1] if tail else ""))
    table(("check", "result", "seconds", "its last line"), rows)
