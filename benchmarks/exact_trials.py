"""Results of `headstart probe --exact` on headstart, llama.cpp and vLLM, each with and without drafting.

    python benchmarks/exact_trials.py --rounds 6
    python benchmarks/exact_trials.py --llama-bin BUILD/bin --vllm VLLM/bin --mimo EXPORTED --out exact.json

headstart serves its default model; requests disable its drafting. llama.cpp serves the same GGUF file, vLLM the output
of `headstart export --to vllm-mimo`. Both draft by n-grams, vLLM also by its MTP head, and are compared with a second
server without drafting. Servers of one engine run at the same time and get their requests in turn. Cells: differences /
trials, of greedy and of sampled answers.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.vllm_server import vllm_command, vllm_environment
from measure.trials import run_trials, start_servers

from headstart import hub
from headstart.tools.probe import exact
from headstart.tools.probe.exact import CONDITIONS, Condition

START_SECONDS, MINUTES = 3600, 600.0
SHOWN: tuple[Condition, ...] = ("again", "warm", "streamed", "drafting", "company")
MTP = {"method": "mtp", "num_speculative_tokens": 1}
NGRAMS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4}


@dataclass(frozen=True)
class Setting:
    """One run: a server, and a second one without drafting if requests cannot disable it."""

    name: str
    command: tuple[str, ...]
    plain: tuple[str, ...] | None
    environment: dict[str, str]


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    threads = str(options.threads)
    words = ("-m", "headstart.cli.main", "serve", "--port", "{port}", "--threads", threads)
    yield Setting("headstart, auto", (sys.executable, *words), None, {})
    if options.llama_bin:
        served = (str(options.llama_bin / "llama-server"), "--model", str(hub.resolve()), "--port", "{port}")
        plain = (*served, "--metrics", "--ctx-size", "16384", "--parallel", "8", "--threads", threads)
        lengths = ("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "4")
        drafting = ("--spec-type", "ngram-simple", *lengths)
        yield Setting("llama.cpp, n-grams", (*plain, *drafting), plain, {})
        uncached = (*plain, "--no-cache-prompt", "--cache-ram", "0")
        yield Setting("llama.cpp, no cache", (*uncached, *drafting), uncached, {})
    if options.vllm and options.mimo:
        serve = vllm_command(options.vllm / "python", options.mimo)
        size = ("--trust-remote-code", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "16")
        size += ("--enable-prompt-tokens-details", "--enforce-eager")  # compilation takes many minutes on a CPU
        environment = vllm_environment(options.threads)
        for name, drafts in (("vLLM, MTP head", MTP), ("vLLM, n-grams", NGRAMS)):
            drafting = ("--speculative-config", json.dumps(drafts))
            yield Setting(name, (*serve, *size, *drafting), (*serve, *size), environment)


def trial(setting: Setting, options: argparse.Namespace, log: Path) -> dict[str, Any]:
    """JSON document of one run. Raises EngineFailed."""
    commands = [command for command in (setting.command, setting.plain) if command is not None]
    with start_servers(setting.name, commands, log, setting.environment, START_SECONDS) as (url, *others):
        asked = exact.ExactOptions(
            url=url, against=next(iter(others), None), minutes=MINUTES, rounds=options.rounds,
            max_tokens=options.max_tokens, seed=options.seed,
        )  # fmt: skip
        return exact.run(asked).data


def row(setting: Setting, found: dict[str, Any]) -> str:
    untested = {each["what"] for each in found["not_tested"]}
    cells = []
    for condition in SHOWN:
        of = {each["sampling"]: each for each in found["conditions"] if each["condition"] == condition}
        counts = []
        for sampling in ("greedy", "sampled"):
            if (each := of.get(sampling)) is not None:
                mark = "?" if each["outcome"] == "cannot tell" else ""  # a repeated request differs, too
                counts.append(f"{each['trials'] - each['equal']} of {each['trials']}{mark}")
            else:
                counts.append("-")
        cells.append("not tested" if condition in untested and not of else "; ".join(counts))
    return f"| {setting.name} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=6, help="per engine; a round has 8 trials of a condition")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-server")
    parser.add_argument("--vllm", type=Path, help="folder of vLLM's python")
    parser.add_argument("--mimo", type=Path, help="output of headstart export --to vllm-mimo")
    parser.add_argument("--only", help="run only settings with this text in their name")
    parser.add_argument("--out", type=Path, help="JSON with every document")
    options = parser.parse_args()
    print(f"| server | {' | '.join(CONDITIONS[each] for each in SHOWN)} |")
    print("|---|" + "---|" * len(SHOWN))
    chosen = [each for each in settings(options) if (options.only or "") in each.name]
    run_trials(chosen, lambda setting, log: trial(setting, options, log), row, options.out)


if __name__ == "__main__":
    main()
