"""Fetches, inspects, verifies and measures published checkpoints with native heads; prints one table.

    python benchmarks/published.py --json published-here.json                     # all models; continues an earlier run
    python benchmarks/published.py --rows qwen3.5-0.8b --questions question.jsonl
    python benchmarks/published.py --rows qwen3.5-0.8b --gguf qwen3.5-0.8b=FILE.gguf --llama-bench BINARY

Needs a network: models come from the Hugging Face Hub or HF_ENDPOINT. Rows are repositories. A model too large for this
machine is only inspected, by its headers.

inspect     `headstart inspect`: MTP modules that are present and supported.
verify      `headstart verify`: texts that differ from plain decoding.
acceptance  `headstart bench`, depth 3: acceptance length by category of --questions, or of headstart's own workloads.
speed       `headstart bench`, one request at a time: tokens/s without drafts, and the gain of `auto`.
llama       With --gguf: tokens/s of llama.cpp and of headstart without drafts on the same file.

Results are written to --json as they are measured. Failed measurements are repeated. Please attach the file to an
issue.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from families.results_file import ResultsFile, marked, red

REPOSITORIES = {
    "qwen3.5-0.8b": ("Qwen/Qwen3.5-0.8B",),
    "mimo-7b": ("XiaomiMiMo/MiMo-7B-RL",),
    "glm-4.7-flash": ("zai-org/GLM-4.7-Flash",),
    "gemma-4-e2b": ("google/gemma-4-E2B-it", "--head", "google/gemma-4-E2B-it-assistant"),
    "deepseek-v3.2": ("deepseek-ai/DeepSeek-V3.2",),
    "glm-4.5-air": ("zai-org/GLM-4.5-Air",),
}
"""(repository, options of its head)."""
ONLY_INSPECTED = ("deepseek-v3.2", "glm-4.5-air")
OWN_WORKLOADS = "code,prose,json,repetitive"
Texts = dict[str, str]


class StepFailedError(Exception):
    pass


@dataclass(frozen=True)
class Trial:
    """One row: model and settings of the measurements."""

    row: str
    model: tuple[str, ...]  # name and head options
    args: argparse.Namespace

    def headstart(self, *words: str) -> dict[str, Any]:
        """JSON document of a command; progress and errors go to stderr. Raises StepFailedError."""
        command = [sys.executable, "-m", "headstart", *words, "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
        if not done.stdout.strip():
            raise StepFailedError(f"headstart {words[0]} ended with exit code {done.returncode}")
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def inspect(self) -> tuple[Texts, Any]:
        found = self.headstart("inspect", *self.model)
        if head := found["attached_head"]:
            return {"head": marked(f"{head['kind']}, {head['modules']} module(s)", head["fit"]["fits"])}, found
        heads = found["heads"]
        return {"head": marked(f"{heads['verdict']}: {heads['reason']}", heads["verdict"] == "alive")}, found

    def verify(self) -> tuple[Texts, Any]:
        found = self.headstart("verify", *self.model, "--max-tokens", str(self.args.max_tokens))
        return {"differences": marked(f"{found['differences']} of {found['texts']}", found["ok"])}, found

    def acceptance(self) -> tuple[Texts, Any]:
        workload = f"{self.args.questions}:each" if self.args.questions else OWN_WORKLOADS
        found = self._bench(self.model, "3", "--workload", workload, "--pairs", "1")
        lengths = [f"{row['workload'].rpartition(':')[2]} {_number(row, 'acceptance_length')}" for row in found["rows"]]
        return {"acceptance length, depth 3": ", ".join(lengths)}, found

    def speed(self) -> tuple[Texts, Any]:
        found = self._bench(self.model, "off,auto")
        plain, drafted = found["rows"]
        gain = drafted["output_tokens_per_s"] / plain["output_tokens_per_s"]
        return {"tokens/s": _number(plain, "output_tokens_per_s"), "auto": f"{gain:.2f}x"}, found

    def llama(self) -> tuple[Texts, Any]:
        file = dict(self.args.gguf).get(self.row)
        if file is None or self.args.llama_bench is None:
            return {"llama.cpp": "-", "headstart, same file": "-"}, None
        command = [self.args.llama_bench, "-m", file, "-p", "0", "-n", "64", "-o", "json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        theirs = json.loads(done.stdout)[0]["avg_ts"]
        found = self._bench((file,), "off")
        ours = _number(found["rows"][0], "output_tokens_per_s")
        return {"llama.cpp": f"{theirs:.1f}", "headstart, same file": ours}, {"llama": theirs, "headstart": found}

    def _bench(self, model: tuple[str, ...], modes: str, *words: str) -> dict[str, Any]:
        limit = "--output-tokens", str(self.args.max_tokens)
        return self.headstart("bench", *model, "--modes", modes, "--concurrency", "1", *limit, *words)


STEPS: dict[str, Callable[[Trial], tuple[Texts, Any]]] = {
    step.__name__: step for step in (Trial.inspect, Trial.verify, Trial.acceptance, Trial.speed, Trial.llama)
}


def _number(row: dict[str, Any], name: str) -> str:
    return f"{row[name]:.2f}" if row.get(name) is not None else "-"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default=",".join(REPOSITORIES), help="comma-separated")
    parser.add_argument("--questions", type=Path, help="Spec-Bench's question.jsonl")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--gguf", action="append", default=[], metavar="ROW=FILE", type=lambda text: text.split("=", 1))
    parser.add_argument("--llama-bench", type=Path)
    parser.add_argument("--json", type=Path, help="file that keeps the results")
    args = parser.parse_args()
    if unknown := set(args.rows.split(",")) - REPOSITORIES.keys():
        parser.error(f"--rows: {', '.join(sorted(unknown))} is not among {', '.join(REPOSITORIES)}")
    settings = {"max_tokens": args.max_tokens, "questions": str(args.questions), "gguf": args.gguf}
    results = ResultsFile(args.json, dict.fromkeys(STEPS, settings))
    for row in args.rows.split(","):
        for name, step in STEPS.items():
            if results.good(row, name) or (row in ONLY_INSPECTED and name != "inspect"):
                continue
            print(f"{row}: {name}", file=sys.stderr, flush=True)
            begun = time.perf_counter()
            try:
                texts, found = step(Trial(row, REPOSITORIES[row], args))
            except (StepFailedError, OSError, subprocess.CalledProcessError) as error:
                texts, found = {name: marked(str(error), False)}, None
            results.add(row, name, texts, found, time.perf_counter() - begun)
            if red(results.rows[row][name]):
                break
    rows = {
        row: {column: text for step in steps.values() for column, text in step["texts"].items()}
        for row, steps in results.rows.items()
    }
    columns = list(dict.fromkeys(column for texts in rows.values() for column in texts))
    print("| model | " + " | ".join(columns) + " |\n|" + "---|" * (len(columns) + 1))
    for row, texts in rows.items():
        print(f"| {row} | " + " | ".join(texts.get(column, "-") for column in columns) + " |")
    return int(any(red(step) for steps in results.rows.values() for step in steps.values()))


if __name__ == "__main__":
    sys.exit(main())
