"""headstart beside llama.cpp on models with random weights: a hybrid and a mixture of experts, each with an MTP module,
and published sizes of models without one, for which a small model drafts (engines/llamacpp/random_shapes.py).

    python benchmarks/families_speed.py --llama-bin LLAMA/build/bin --work WORK --json families.json
    python benchmarks/families_speed.py --llama-bin LLAMA/build/bin --work WORK --sections tokens \\
        --models gemma-4-e2b,lfm2.5-1.2b,gpt-oss-20b,qwen3.5-0.8b,smollm3-3b --types Q4_K_M,MXFP4
    python benchmarks/families_speed.py --sections rounds --work WORK --models moe --types Q4_0

The files (engines/llamacpp/random_files.py) are written to WORK, some GB, and deleted at the end unless `--keep`. No
head is right about random weights, so drafts are accepted at `--rates`: headstart's `--synthetic-acceptance`,
llama.cpp's `--spec-synth-rates`, in both the share of drafts whose first 1, 2, ... tokens are all accepted; as deep as
there are rates. llama.cpp drafts as deep each time, without a threshold.

tokens  One sequence: a prompt of random tokens, then exactly `--tokens` tokens (end of text ignored), greedy. tokens/s
        = (tokens - 1) / (first to last token) by each engine's own clock. One headstart process serves both rows:
        depth 0 and `--rates`; llama.cpp has a server for each. Engines take turns (the others are stopped) in
        alternating order, `--rounds` times; ratios are taken within a round.
passes  A pass by its rows, in ms: headstart `bench step` (rows of one sequence, as in verification, logits for all),
        llama-batched-bench (a row of each of so many sequences, logits for all, no sampling): T_TG / tokens.
rounds  headstart alone: where the time of a round of `--rates` goes, in the drafter, the pass, and the rest (sampling
        and Python), by `--draft-vocab`; medians of rounds in alternating order.

headstart rounds what only drafts to int4 by itself; llama.cpp uses the file's type. Run it on a machine that does
nothing else, and not under `nice`; what other processes used is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from engines.llamacpp import random_files, random_shapes
from engines.llamacpp.random_files import Shape, write
from engines.llamacpp.server import LlamaEngine, version
from engines.process import BENCHMARKS, EngineFailed, WorkerEngine
from measure.load import load_now, others, verdict
from measure.provenance import provenance
from measure.sections import in_turns, say
from measure.tables import Record, rates, ratio, spread

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import SamplingParams

SHAPES = {**random_files.SHAPES, **random_shapes.SHAPES}
TYPES = sorted({kind for shape in SHAPES.values() for kind in shape.types})
GOALS = {"plain": 1.15, "MTP": 2.0, "drafts": 2.0}
"""Ratios to llama.cpp that the project has set itself."""


class Headstart(WorkerEngine):
    """One mode of a process that another one may share."""

    def __init__(self, name: str, depth: int | None, command: Sequence[str | Path], log: Path, cache: Path) -> None:
        super().__init__(name, "", command, log, {"HEADSTART_CACHE": str(cache)})
        self._depth, self._seeds = depth, count()

    def share(self, other: Headstart) -> None:
        """Use the process of one that has started."""
        self._group, self.about = other._group, other.about

    def decode(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """Seeds decide which drafts are accepted: another one each time."""
        return self._ask(
            "decode", prompt=list(prompt), max_tokens=max_tokens,
            ignore_eos=True, depth=self._depth, seed=next(self._seeds),
        )  # fmt: skip


def engines_for(args: argparse.Namespace, model: Path, draft: Path | None) -> list[Any]:
    """headstart plain and with drafts (one process), llama.cpp plain and with drafts; llama.cpp's start with their
    first turn. `draft`: the model that drafts, else an MTP module does."""
    mode = "drafts" if draft else "MTP"
    drafter = ["--drafter", "draft_model", "--head", draft] if draft else ["--drafter", "mtp"]
    depth, logs, cache = len(args.rates.split(",")), args.work / "logs", args.work / "cache"
    worker = [
        sys.executable, BENCHMARKS / "engines/headstart/worker.py", model, *drafter, "--depth", str(depth),
        "--synthetic-acceptance", args.rates, "--threads", str(args.threads), "--no-enable-prefix-caching",
        "--max-model-len", "4096", "--max-num-seqs", "1",
    ]  # fmt: skip
    kind = ["draft-simple", "-md", str(draft)] if draft else ["draft-mtp"]
    deep = ["--spec-draft-n-max", str(depth), "--spec-draft-n-min", str(depth), "--spec-draft-p-min", "0"]
    spec = ["--spec-type", *kind, *deep, "--spec-synth-rates", args.rates]
    ours = Headstart(f"headstart {mode}", None, worker, logs / "headstart.log", cache)
    plain = Headstart("headstart plain", 0, worker, logs / "headstart.log", cache)
    theirs = [
        LlamaEngine(
            f"llama.cpp {name}", args.llama_bin, model, args.threads, logs / f"llama-{name}.log", more, ignore_eos=True
        )
        for name, more in (("plain", []), (mode, spec))
    ]  # fmt: skip
    say(f"starting {ours.name}")
    ours.start()
    plain.share(ours)
    return [plain, ours, *theirs]


def tokens(args: argparse.Namespace, model: Path, vocab: int, draft: Path | None) -> tuple[list[str], Record]:
    """The table and numbers of one file."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(300, vocab - 1, args.prompt_tokens).tolist()  # words, not bytes
    engines = engines_for(args, model, draft)
    about = {engine.name: engine.about for engine in engines}
    try:
        in_turns(engines, [("warm-up", lambda engine: engine.decode(prompt, 8))], 1)
        work = [("decode", lambda engine: engine.decode(prompt, args.tokens))]
        records = in_turns(engines, work, args.rounds)
    finally:
        for engine in engines[1:]:  # the first shares the process of the second
            engine.stop()
    speeds = rates(records, lambda record: record["num_tokens"] - 1, "decode_s")
    lengths = {name: tokens_a_pass(records, name) for name in speeds}
    ratios = {
        mode: [one / other for one, other in zip(speeds[f"headstart {mode}"], speeds[f"llama.cpp {mode}"], strict=True)]
        for mode in GOALS
        if {f"headstart {mode}", f"llama.cpp {mode}"} <= speeds.keys()
    }
    lines = ["", "| tokens/s | headstart | llama.cpp | ratio | goal | tokens a pass |", "|---" * 6 + "|"]
    for mode in ratios:
        pair = [f"{engine} {mode}" for engine in ("headstart", "llama.cpp")]
        cells = [spread(speeds[pair[0]]), spread(speeds[pair[1]]), ratio(*(speeds[each] for each in pair))]
        a_pass = " and ".join(f"{lengths[each]:.2f}" for each in pair)
        lines.append(f"| {mode} | " + " | ".join(cells) + f" | {GOALS[mode]} | {a_pass} |")
    lines += ["", verdict(others(records))]
    found = {"tokens_per_s": speeds, "ratio": {mode: median(values) for mode, values in ratios.items()}}
    return lines, {**found, "tokens_a_pass": lengths, "engines": about, "records": records}


def tokens_a_pass(records: Sequence[Record], name: str) -> float:
    """All that was not accepted is one token of a pass each."""
    mine = [record for record in records if record["engine"] == name]
    total, accepted = (sum(record.get(key, 0) for record in mine) for key in ("num_tokens", "accepted"))
    return float(total / (total - accepted)) if total > accepted else 1.0


def passes(args: argparse.Namespace, model: Path) -> tuple[list[str], Record]:
    """ms by rows of both engines, medians of rounds, in alternating order."""
    measured: dict[str, list[dict[int, float]]] = {"headstart": [], "llama.cpp": []}
    measure = {"headstart": our_passes, "llama.cpp": their_passes}
    before = load_now()
    for number in range(args.pass_rounds):
        for engine in list(measure) if number % 2 == 0 else list(measure)[::-1]:
            say(f"passes, {engine}, round {number + 1}/{args.pass_rounds}")
            measured[engine].append(measure[engine](args, model))
    load = load_now().others_since(before)
    cost = {
        engine: {rows: median(each[rows] for each in found) for rows in args.rows} for engine, found in measured.items()
    }
    header = "| ms by rows | " + " | ".join(map(str, args.rows)) + " |"
    lines = ["", header, "|---" * (len(args.rows) + 1) + "|"]
    for engine, found in cost.items():
        lines.append(f"| {engine} | " + " | ".join(f"{found[rows]:.2f}" for rows in args.rows) + " |")
    return lines, {"ms": cost, "rounds": measured, "others_cores": others([load])}


def our_passes(args: argparse.Namespace, model: Path) -> dict[int, float]:
    command = [
        sys.executable, "-m", "headstart.cli.main", "bench", "step", model, "--rows", ",".join(map(str, args.rows)),
        "--context", args.prompt_tokens, "--threads", args.threads, "--json",
    ]  # fmt: skip
    document = json.loads(run(command, {"HEADSTART_CACHE": str(args.work / "cache")}))
    return {row["rows"]: row["median_ms"] for row in document["passes"]}


def their_passes(args: argparse.Namespace, model: Path) -> dict[int, float]:
    context = max(args.rows) * (args.prompt_tokens + args.pass_tokens)
    command = [
        args.llama_bin / "llama-batched-bench", "-m", model, "-t", args.threads, "-c", context,
        "-npp", args.prompt_tokens, "-ntg", args.pass_tokens, "-npl", ",".join(map(str, args.rows)),
        "--output-format", "jsonl",
    ]  # fmt: skip
    found = [json.loads(line) for line in run(command).splitlines() if line.startswith("{")]
    return {row["pl"]: row["t_tg"] / row["tg"] * 1e3 for row in found}


def rounds(args: argparse.Namespace, model: Path, vocab: int) -> tuple[list[str], Record]:
    """Milliseconds of a round by part, for each draft vocabulary."""
    rng, depth = np.random.default_rng(1), len(args.rates.split(","))
    prompt = rng.integers(300, vocab - 1, args.prompt_tokens).tolist()
    os.environ["HEADSTART_CACHE"] = str(args.work / "cache")  # sketches of random weights are of no use later
    config = EngineConfig(
        drafter="mtp", depth=depth, synthetic_acceptance=args.rates, threads=args.threads, max_model_len=4096,
        max_num_seqs=1, enable_prefix_caching=False,
    )  # fmt: skip
    llms = {word: LLM(str(model), replace(config, draft_vocab=as_draft_vocab(word))) for word in args.draft_vocab}
    measured: dict[str, list[dict[str, float]]] = {word: [] for word in llms}
    for number in range(args.rounds + 1):
        for word in list(llms) if number % 2 == 0 else list(llms)[::-1]:
            llm = llms[word]
            llm.engine.reset_stats()
            llm.generate(
                [prompt], SamplingParams(max_tokens=args.tokens if number else 8, ignore_eos=True, seed=number)
            )
            passes = llm.engine.stats.passes
            if number:
                measured[word].append({part: 1e3 * each / passes for part, each in llm.engine.seconds.items()})
    parts = ("draft", "verify", "host")
    lines = ["", "| draft vocabulary | draft ms | pass ms | host ms | drafting |", "|---" * 5 + "|"]
    cost = {word: {part: median(each[part] for each in found) for part in parts} for word, found in measured.items()}
    for word, found in cost.items():
        share = found["draft"] / sum(found.values())
        lines.append(f"| {word} | " + " | ".join(f"{found[part]:.2f}" for part in parts) + f" | {share:.1%} |")
    return lines, {"ms": cost, "rounds": measured}


def as_draft_vocab(word: str) -> int | str:
    return int(word) if word.isdigit() else word


def run(command: Sequence[Any], environment: dict[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **(environment or {})})
    if done.returncode:
        raise EngineFailed(f"{words[0]} failed: {done.stderr[-800:]}")
    return done.stdout


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument

    def numbers(text: str) -> list[int]:
        return [int(word) for word in text.split(",")]

    add("--llama-bin", type=Path, help="directory of llama.cpp's programs; rounds need none")
    add("--work", type=Path, required=True, help="directory for the files, a cache and logs")
    add("--models", type=lambda text: text.split(","), default=list(SHAPES), help=",".join(SHAPES))
    add(
        "--types",
        type=lambda text: text.split(","),
        default=TYPES,
        help=f"of {','.join(TYPES)}, where a model has them",
    )
    add("--rates", default="0.8,0.6,0.4", help="share of drafts whose first 1, 2, ... tokens are all accepted")
    add("--layers", type=int, help="of every trunk, to try things out; default: as the shape has them")
    add("--threads", type=int, default=os.cpu_count(), help="of every engine")
    add("--sections", type=lambda text: text.split(","), default=["tokens", "passes", "rounds"])
    add("--draft-vocab", type=lambda text: text.split(","), default=["full", "auto"], help="of the section rounds")
    add("--rounds", type=int, default=7)
    add("--prompt-tokens", type=int, default=128)
    add("--tokens", type=int, default=256)
    add("--rows", type=numbers, default=[1, 2, 3, 4, 6, 8])
    add("--pass-rounds", type=int, default=3)
    add("--pass-tokens", type=int, default=32, help="passes that llama-batched-bench takes the mean of")
    add("--keep", action="store_true", help="leave the files for the next run")
    add("--json", type=Path, help="file for all numbers")
    args = parser.parse_args()
    for flag, given, known in (("--models", args.models, SHAPES), ("--types", args.types, TYPES)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{flag}: unknown {unknown[0]}")
    if unknown := sorted(set(args.sections) - {"tokens", "passes", "rounds"}):
        parser.error(f"--sections: unknown {unknown[0]}")
    if args.llama_bin is None and set(args.sections) != {"rounds"}:
        parser.error("--llama-bin is missing: only --sections rounds does without llama.cpp")
    return args


def written(args: argparse.Namespace, name: str, shape: Shape, kind: str, layers: int) -> Path:
    path: Path = args.work / f"{name}-{layers}-{kind}.gguf"
    if not path.exists():
        say(f"writing {path.name}")
        write(path, shape, kind, layers)
    return path


def measure_file(args: argparse.Namespace, name: str, kind: str, document: Record) -> None:
    shape = SHAPES[name]
    layers = args.layers or shape.layers
    path = written(args, name, shape, kind, layers)
    draft = written(args, f"{name}.draft", shape.draft, random_files.MIXED, shape.draft.layers) if shape.draft else None
    found: Record = {"model": name, "type": kind, "layers": layers, "file_bytes": path.stat().st_size}
    document["files"].append(found)
    print(f"\n{name}, {layers} layers, {kind}, {path.stat().st_size / 1e6:.0f} MB", flush=True)
    try:
        if "tokens" in args.sections:
            lines, found["tokens"] = tokens(args, path, shape.vocab, draft)
            print("\n".join(lines), flush=True)
        if "passes" in args.sections:
            lines, found["passes"] = passes(args, path)
            print("\n".join(lines), flush=True)
        if "rounds" in args.sections and draft is None:
            lines, found["rounds"] = rounds(args, path, shape.vocab)
            print("\n".join(lines), flush=True)
    finally:
        if not args.keep:
            for each in (path, draft):
                if each is not None:
                    each.unlink()
            for packed in (args.work / "cache").rglob("*.pack"):
                packed.unlink()
        if args.json:
            args.json.write_text(json.dumps(document, indent=1))


def main() -> int:
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `finally` ends the engines
    (args.work / "logs").mkdir(parents=True, exist_ok=True)
    rates_of = [float(word) for word in args.rates.split(",")]
    document: Record = {
        "provenance": provenance(args.threads),
        "llama.cpp": version(args.llama_bin) if args.llama_bin else None,
        "synthetic_acceptance": rates_of,
        "goals": GOALS,
        "files": [],
    }
    print(f"synthetic acceptance {args.rates} in both: the texts are not the models'")
    for name in args.models:
        for kind in [kind for kind in SHAPES[name].types if kind in args.types]:
            measure_file(args, name, kind, document)
    return 0


if __name__ == "__main__":
    sys.exit(main())
