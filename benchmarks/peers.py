"""headstart against llama.cpp and vLLM-CPU: the same weights and prompts, each engine timed by its own clock.

    python benchmarks/peers.py --questions question.jsonl --work WORK --llama-bin LLAMA/build/bin \\
        --vllm-python VLLM/bin/python --json peers.json

Engines: llama.cpp (llama-server, llama-bench, llama-batched-bench) on the default model's GGUF file and its Q8_0 and
bf16 copies; vLLM on its bf16 safetensors copy; headstart in the variants below. Copies are made once, in WORK. Peers
that are not given and variants that do not start are left out.

Every engine is a process that loads once and is stopped (SIGSTOP) during the turns of others. Each unit of work goes
through all engines before the next one, in alternating order (A B C, C B A, ...), `--rounds` times. A round gives one
number per engine; tables show medians over rounds (lower to upper quartile), and ratios taken within a round: to
llama.cpp on weights of the same width (int8 against Q8_0), and to vLLM (bf16; the faster row, where several
`--vllm-bind` are given: on two cores "auto" computes on one and leaves the other to vLLM's scheduler).

Run it on an idle machine and not under `nice`: other load slows engines whose threads spin at barriers up to tenfold.
The CPU time of other processes during the turns is printed under each table.

decode   One sequence, greedy, chat template, natural end of text but at most `--max-tokens`; the first `--per-category`
         questions of each category. tokens/s of a round = sum of (tokens - 1) / sum of (first to last token). Clocks:
         headstart `Completion.timing`, llama-server `timings`, vLLM `RequestOutput.metrics`.
prefill  A prompt of `--prefill-tokens` tokens to its first token: headstart and vLLM by the same clocks; llama-bench
         -p, which does not sample and has its own warm-up run.
batch    `--concurrency` requests at once, prompts of `--batch-prompt` tokens, exactly `--batch-tokens` output tokens
         (end of text ignored), submitted together; no prefix cache. "with prompts" = output tokens / seconds from the
         call to the last token; "decode" subtracts the seconds of the same call with one output token, and that token.
         headstart and vLLM write text to prompts cut from the questions; llama-batched-bench feeds random tokens and
         does not sample (its T_PP and T_TG).
start    Wall time from the start of the process to the first token (`headstart generate --prompt Hi --max-tokens 1`;
         llama-server until the first completion, also with --no-warmup). In a separate run, the peak private (clean +
         dirty), anonymous and resident (private and shared) memory while a prompt of about `--prefill-tokens` tokens
         gets `--batch-tokens` tokens; context 4096.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
from pathlib import Path

from engines.headstart_server import headstart_starter
from engines.llama_engine import CONTEXT, LlamaEngine, llama_starter, weights_files
from engines.process import BENCHMARKS, Engine, EngineFailed, Starter, WorkerEngine
from engines.vllm_weights import safetensors_copy
from measure.machine import machine_alone, provenance
from measure.prompts import Prompts
from measure.sections import batch, decode, prefill, say, start
from measure.tables import Record

from headstart import hub

LOADED = {"decode": decode, "prefill": prefill, "batch": batch}
"""Sections with engines that stay loaded."""

SECTIONS = (*LOADED, "start")
VARIANTS = (
    "Q4_1 plain=--depth 0",
    "Q4_1 MTP 3=--drafter mtp --depth 3",
    "int8 plain=--quantization int8 --depth 0",
    "int8 MTP 3=--quantization int8 --drafter mtp --depth 3",
    "bf16 plain={bf16} --depth 0",
    "bf16 MTP 3={bf16} --head {head} --drafter mtp --depth 3",
)


def variants(args: argparse.Namespace, source: Path) -> list[tuple[str, str, list[str]]]:
    """(name, weights, arguments) of each headstart variant."""
    found = []
    for text in args.variant or VARIANTS:
        name, _, words = text.partition("=")
        if "{bf16}" in words:
            words = words.replace("{bf16}", str(safetensors_copy(source, args.work)))
        words = words.replace("{head}", str(hub.HEADS / hub.DEFAULT_MODEL))
        model = [] if "{bf16}" in text or not args.model else [args.model]
        common = ["--max-model-len", str(CONTEXT), *shlex.split(args.headstart_args)]
        threads = [] if "--threads" in common else ["--threads", str(args.threads)]
        found.append((f"headstart {name}", name.split()[0], [*model, *shlex.split(words), *common, *threads]))
    return found


def log_of(args: argparse.Namespace, name: str) -> Path:
    return Path(args.work) / f"{name.replace(' ', '-')}.log"


def make_engines(args: argparse.Namespace, source: Path) -> list[Engine]:
    """All requested engines, not started."""
    python = [sys.executable, BENCHMARKS / "engines/headstart_worker.py"]
    engines: list[Engine] = [
        WorkerEngine(name, weights, [*python, *words, "--no-enable-prefix-caching"], log_of(args, name), None)
        for name, weights, words in variants(args, source)
    ]
    for weights, path in weights_files(args.llama_bin, source, args.work, args.formats).items():
        name, log = f"llama.cpp {weights}", log_of(args, f"llama-{weights}")
        engines.append(LlamaEngine(name, args.llama_bin, path, args.threads, log, weights=weights))
    if args.vllm_python:
        command = [args.vllm_python, BENCHMARKS / "engines/vllm_worker.py", safetensors_copy(source, args.work)]
        for bind in args.vllm_bind or ["auto"]:
            environment = {"VLLM_CPU_OMP_THREADS_BIND": bind, "OMP_NUM_THREADS": str(args.threads)}
            name = f"vLLM bf16 {bind}"
            engines.append(WorkerEngine(name, "bf16", command, log_of(args, name), environment))
    return engines


def make_starters(args: argparse.Namespace, source: Path, prompts: Prompts) -> list[Starter]:
    """Starters for the section `start`."""
    log = log_of(args, "start")
    starters = [headstart_starter(name, words, log) for name, _, words in variants(args, source)]
    for weights, path in weights_files(args.llama_bin, source, args.work, args.formats).items():
        for end, more in (("", ()), (" --no-warmup", ("--no-warmup",))):
            name = f"llama.cpp {weights}{end}"
            starters.append(llama_starter(name, args.llama_bin, path, args.threads, log, prompts.chat, more))
    return starters


def start_all(engines: list[Engine]) -> None:
    """Starts the engines. Failed ones are named on stderr and removed from the list."""
    for engine in list(engines):
        say(f"starting {engine.name}")
        try:
            engine.start()
        except EngineFailed as error:
            say(f"LEFT OUT: {error}")
            engines.remove(engine)
            engine.stop()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--questions", type=Path, required=True, help="Spec-Bench's question.jsonl")
    add("--work", type=Path, required=True, help="directory for copies of the weights, and logs")
    add("--llama-bin", type=Path, help="directory of llama.cpp's programs")
    add("--vllm-python", type=Path, help="Python interpreter of vLLM's environment")
    add("--vllm-bind", action="append", help="VLLM_CPU_OMP_THREADS_BIND: auto (the default), 0-1, nobind; one row each")
    add("--model", help="alias or GGUF file; default: the default model")
    add("--formats", type=lambda text: text.split(","), default=["Q4_1", "Q8_0", "bf16"], help="llama.cpp's weights")
    add(
        "--variant",
        action="append",
        metavar="'WEIGHTS NAME=ARGS'",
        help=f"headstart's variants; default: {list(VARIANTS)}",
    )
    add("--headstart-args", default="", help="engine options for every variant")
    add("--threads", type=int, default=os.cpu_count(), help="threads of every engine")
    add("--sections", type=lambda text: text.split(","), default=list(SECTIONS), help=",".join(SECTIONS))
    add("--rounds", type=int, default=5)
    add("--per-category", type=int, default=1)
    add("--max-prompts", type=int, help="use only the first prompts of decode, for trials")
    add("--max-tokens", type=int, default=128)
    add("--prefill-tokens", type=int, default=512)
    add("--concurrency", type=lambda text: [int(word) for word in text.split(",")], default=[8, 16, 32])
    add("--batch-prompt", type=int, default=128)
    add("--batch-tokens", type=int, default=64)
    add("--json", type=Path, help="file for all numbers")
    args = parser.parse_args()
    if unknown := sorted(set(args.sections) - set(SECTIONS)):
        parser.error(f"unknown section {unknown[0]}")
    return args


def main() -> int:
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs `finally`, which ends the engines
    args.work.mkdir(parents=True, exist_ok=True)
    source = hub.resolve(args.model)
    prompts = Prompts(source, args.questions)
    document: Record = {"provenance": provenance(args.threads)}
    engines: list[Engine] = []
    try:
        if set(args.sections) & set(LOADED):
            engines = make_engines(args, source)
            start_all(engines)
            document["engines"] = {engine.name: engine.about for engine in engines}
        for section in LOADED:
            if section in args.sections:
                say(section)
                lines, document[section] = LOADED[section](args, engines, prompts)
                show(args, lines, document)
    finally:
        for engine in engines:
            engine.stop()
    if "start" in args.sections:  # after the others have ended: pages mapped by two processes are no private memory
        say("start")
        lines, document["start"] = start(args, make_starters(args, source, prompts), prompts)
        show(args, lines, document)
    return 0


def show(args: argparse.Namespace, lines: list[str], document: Record) -> None:
    """Prints the tables of a section and writes all numbers so far to the file."""
    print("\n".join(lines), flush=True)
    if args.json:
        args.json.write_text(json.dumps(document, indent=1))


if __name__ == "__main__":
    with machine_alone():
        sys.exit(main())
