"""Confusion matrix of `headstart probe` by timing alone, over engines with drafting on and off.

    python benchmarks/probe_trials.py --trials 20 --threads 2
    python benchmarks/probe_trials.py --llama-bin BUILD/bin --vllm VLLM/bin --mimo EXPORTED --out trials.json

headstart serves its default model. llama.cpp serves the same GGUF file, also as draft model. vLLM serves EXPORTED, the
output of `headstart export --to vllm-mimo`. One server runs at a time; each trial streams other texts. The truth is
read from the server's metrics, which the tested probe does not use: "on" requires an acceptance length of at least 1.3.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measure.trials import run_trials, start_servers

from headstart import hub
from headstart.tools.client import Server as Address
from headstart.tools.launch.prepare import LaunchOptions, prepare
from headstart.tools.probe import run as probe
from headstart.tools.probe.endpoint import Endpoint

START_SECONDS = 600
LEAST_LENGTH = 1.3
ANSWERS = ("on", "dead", "off", "unknown")


@dataclass(frozen=True)
class Setting:
    """One server: an engine with a draft depth (0: no drafting)."""

    engine: str
    depth: int
    command: tuple[str, ...]  # {port} is replaced by the port
    environment: dict[str, str]

    @property
    def name(self) -> str:
        return f"{self.engine} {'on' if self.depth else 'off'}"


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    for depth in (options.depth, 0):
        words = ("-m", "headstart.cli.main", "serve", "--port", "{port}", "--threads", str(options.threads))
        yield Setting("headstart", depth, (sys.executable, *words, "--depth", str(depth)), {})
    if options.llama_bin:
        file = str(hub.resolve())
        draft = ("--spec-type", "draft-simple", "--spec-draft-model", file, "--spec-draft-n-max", str(options.depth))
        common = (str(options.llama_bin / "llama-server"), "--model", file, "--port", "{port}", "--metrics")
        size = ("--ctx-size", "4096", "--parallel", "1", "--threads", str(options.threads))
        yield Setting("llama.cpp", options.depth, (*common, *size, *draft), {})
        yield Setting("llama.cpp", 0, (*common, *size), {})
    if options.vllm and options.mimo:
        for depth in (options.depth, 0):
            launch = LaunchOptions(
                engine="vllm", model=str(options.mimo), program=str(options.vllm), depth=depth, gpus="none",
                settings={"max_model_len": 2048, "max_num_seqs": 4}, extra=("--trust-remote-code",),  # own export
            )  # fmt: skip
            step, words = prepare(launch).commands()[0]
            placed = tuple("{port}" if word == str(launch.port) else word for word in words)
            yield Setting("vllm", depth, placed, {**step.environment, "HF_HUB_OFFLINE": "1"})


def trial(url: str, seed: int) -> dict[str, Any]:
    """The probe's verdict by timing, and the counters of the same time."""
    endpoint = Endpoint(Address.at(url))
    before = endpoint.metrics()
    started = time.perf_counter()
    found = probe.run(probe.ProbeOptions(url=url, use_metrics=False, seed=seed)).data
    seconds = time.perf_counter() - started
    now = endpoint.metrics()
    counts = now.since(before) if now and before else None
    return {
        "answer": found["drafting"],
        "confidence": found["confidence"],
        "acceptance_length": found["acceptance_length"],
        "true_acceptance_length": counts.acceptance_length if counts else None,
        "seconds": seconds,
        "timing": found["timing"],
    }


def trials(setting: Setting, log: Path, count: int) -> list[dict[str, Any]]:
    """All trials of one server. Raises EngineFailed."""
    with start_servers(setting.name, [setting.command], log, setting.environment, START_SECONDS) as (url,):
        return [trial(url, seed) for seed in range(count)]


def row(setting: Setting, trials: list[dict[str, Any]]) -> str:
    answers = Counter(each["answer"] for each in trials)
    lengths = [each["true_acceptance_length"] for each in trials if each["true_acceptance_length"]]
    truth = f"{statistics.median(lengths):.2f}" if lengths else "1"
    if setting.depth and (not lengths or statistics.median(lengths) < LEAST_LENGTH):
        truth += " (too low to count)"
    counted = " | ".join(str(answers[answer]) for answer in ANSWERS)
    sure = statistics.median(each["confidence"] for each in trials)
    seconds = statistics.median(each["seconds"] for each in trials)
    return f"| {setting.name} | {truth} | {counted} | {sure:.2f} | {seconds:.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-server")
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's python")
    parser.add_argument("--mimo", type=Path, help="output of headstart export --to vllm-mimo")
    parser.add_argument("--out", type=Path, help="JSON with every trial")
    options = parser.parse_args()
    servers = list(settings(options))  # finds wrong paths before measurements start
    print(f"| server | acceptance length | {' | '.join(ANSWERS)} | confidence | seconds |")
    print("|---|---|" + "---|" * (len(ANSWERS) + 2))
    run_trials(servers, lambda setting, log: trials(setting, log, options.trials), row, options.out)


if __name__ == "__main__":
    main()
