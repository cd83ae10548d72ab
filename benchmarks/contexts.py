"""Long contexts against llama.cpp: prefill and decode speed and memory with contexts of 1k, 8k and 32k tokens.

    python benchmarks/contexts.py --work WORK --llama-bin LLAMA/build/bin --json contexts.json
    python benchmarks/contexts.py --work WORK --lengths 1024,8192 --rounds 5
    python benchmarks/contexts.py --work WORK --accuracy MODEL --texts prompts.jsonl

The model is a Llama shape of 50 million weights (12 layers of 512, 8 heads over 4 of 64, vocabulary 32,000) with random
values in Q8_0, so that the KV cache has a large share of the reads; its file is written to WORK. A round is one prompt
of random tokens and exactly `--tokens` greedy tokens after it: seconds to the first token, then tokens/s from the first
to the last. headstart keeps keys and values in bfloat16, int8 and FP8; llama.cpp
(llama-batched-bench, one sequence, which samples nothing) in f16, with and without flash attention. Engines take turns
in alternating order while the others are stopped; ratios are taken within a round, to the better of llama.cpp's rows.

`--accuracy` scores texts (a JSON string per line) with each KV cache type: divergence of next-token distributions from
those with bfloat16, and log-likelihood of the text.

`of the limit`: the minimum time of a token (bytes of weights and KV over the read bandwidth that `headstart bench
step` measures) as a share of its measured time. Memory: peak resident size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from engines.llama_engine import LlamaEngine, version
from engines.process import BENCHMARKS, Engine, WorkerEngine
from measure.machine import machine_alone, others, provenance, verdict
from measure.random_gguf import LlamaSizes, write_random_gguf
from measure.sections import attempt, say
from measure.tables import Record, ratio, spread

from headstart.config import EngineConfig, KVDtype
from headstart.engine.load import load_model
from headstart.kernels.backend import open_backend
from headstart.tools.pass_timing import readable_bytes
from headstart.tools.verify.numerics import ROWS, RowScores, TeacherForcing, compare

SIZES = LlamaSizes(layers=12, hidden=512, inner=1408, heads=8, kv_heads=4, head_dim=64, vocab=32000, context=40960)
BYTES = {"bfloat16": 2.0, "f16": 2.0, "int8": 1.0 + 4 / SIZES.head_dim, "fp8": 1.0 + 4 / SIZES.head_dim}
"""Bytes per element of the KV cache."""
READS = 5
KV_DTYPES: tuple[KVDtype, ...] = ("bfloat16", "float32", "int8", "fp8")


class Headstart(WorkerEngine):
    """A context measurement with llama.cpp's keys."""

    def context(self, prompt: Sequence[int], tokens: int) -> Record:
        found = self.ask("decode", prompt=list(prompt), max_tokens=tokens, ignore_eos=True)
        return {
            "prompt_s": found["prompt_s"], "decode_tokens": tokens - 1, "decode_s": found["decode_s"],
            "resident_mib": found["resident_mib"],
        }  # fmt: skip


class Llama(LlamaEngine):
    """One sequence of llama-batched-bench."""

    def context(self, prompt: Sequence[int], tokens: int) -> Record:
        found = self.batch([prompt], tokens)
        return {
            "prompt_s": found["seconds"] - found["decode_s"], "decode_tokens": tokens, "decode_s": found["decode_s"],
            "resident_mib": self.resident_mib,
        }  # fmt: skip


def engines_for(args: argparse.Namespace, model: Path) -> list[Any]:
    worker = [
        sys.executable, BENCHMARKS / "engines/headstart_worker.py", model, "--depth", "0", "--no-enable-prefix-caching",
        "--max-model-len", str(max(args.lengths) + args.tokens + 16), "--max-num-seqs", "1",
        "--threads", str(args.threads),
    ]  # fmt: skip
    rows: list[Any] = [
        Headstart(name, kv, [*worker, "--kv-cache-dtype", kv], args.work / f"headstart-{kv}.log", None)
        for name, kv in (("headstart", "bfloat16"), ("headstart, 8-bit KV", "int8"), ("headstart, FP8 KV", "fp8"))
    ]
    if args.llama_bin:
        for word in ("off", "on"):
            name, log = f"llama.cpp, flash attention {word}", args.work / f"llama-{word}.log"
            rows.append(Llama(name, args.llama_bin, model, args.threads, log, ("-fa", word), weights="f16"))
    return rows


def read_bandwidth(threads: int) -> float:
    """Memory read bandwidth in bytes/s."""
    backend = open_backend(EngineConfig(threads=threads))
    return backend.read_bandwidth(readable_bytes(backend), READS)


def limit_s(row: Engine, length: int, bandwidth: float) -> float:
    """Minimum seconds for reading the weights and KV of a token."""
    weights = sum(math.prod(shape) for _, shape in SIZES.tensors() if len(shape) == 2)
    cached = 2 * SIZES.layers * SIZES.kv_heads * SIZES.head_dim * length * BYTES[row.weights]
    return (weights * 34 / 32 + cached) / bandwidth


def measure(args: argparse.Namespace, engines: list[Any], length: int) -> list[Record]:
    rng = np.random.default_rng(1)
    prompt = rng.integers(300, SIZES.vocab - 1, length).tolist()
    records = []
    for number in range(args.rounds if length < args.once_from else 1):
        for engine in list(engines) if number % 2 == 0 else engines[::-1]:
            found = attempt(engines, engine, lambda each: each.context(prompt, args.tokens))
            if found is not None:
                records.append({"engine": engine.name, "round": number, **found})
        say(f"{length} tokens, round {number + 1}")
    return records


def table(engines: Sequence[Any], records: Sequence[Record], length: int, bandwidth: float) -> list[str]:
    """Markdown table for one context length."""
    speed = {
        engine.name: {
            "prompt": [length / each["prompt_s"] for each in records if each["engine"] == engine.name],
            "decode": [each["decode_tokens"] / each["decode_s"] for each in records if each["engine"] == engine.name],
        }
        for engine in engines
    }
    best = {
        part: max((found[part] for name, found in speed.items() if "llama" in name), key=median, default=None)
        for part in ("prompt", "decode")
    }
    lines = [
        "",
        f"| behind {length:,} tokens | prompt tokens/s | / llama.cpp | decode tokens/s | / llama.cpp | of the limit "
        "| MiB |",
        "|---" * 7 + "|",
    ]
    for engine in engines:
        prompt, decode = speed[engine.name]["prompt"], speed[engine.name]["decode"]
        share = limit_s(engine, length, bandwidth) * median(decode)
        memory = max(each["resident_mib"] for each in records if each["engine"] == engine.name)
        cells = [spread(prompt, 0), ratio(prompt, best["prompt"]), spread(decode), ratio(decode, best["decode"])]
        lines.append(f"| {engine.name} | " + " | ".join(cells) + f" | {share:.0%} | {memory:.0f} |")
    return [*lines, "", verdict(others(records))]


def accuracy(model_name: str, texts: Path, threads: int) -> list[str]:
    """Markdown table: each KV cache type against bfloat16, by teacher forcing."""
    configs = {kv: EngineConfig(backend="native", threads=threads, kv_cache_dtype=kv) for kv in KV_DTYPES}
    models = {kv: load_model(model_name, config) for kv, config in configs.items()}
    tokens = [
        models["bfloat16"].tokenizer.encode(json.loads(line), add_special=True)
        for line in texts.read_text().splitlines()
    ]
    readers = {kv: TeacherForcing(models[kv], configs[kv], max(map(len, tokens))) for kv in KV_DTYPES}
    found: dict[str, list[RowScores]] = {kv: [] for kv in KV_DTYPES}
    for text in tokens:
        for number, rows in enumerate(zip(*(readers[kv].logits(text) for kv in KV_DTYPES), strict=True)):
            for kv, logits in zip(KV_DTYPES, rows, strict=True):
                found[kv].append(compare(rows[0], logits, text[1 + number * ROWS :]))
        say(f"{len(text)} tokens read")
    lines = [
        "| KV cache | bytes a token | KL to bfloat16, nats | equal argmax | negative log-likelihood a token |",
        "|---" * 5 + "|",
    ]
    for kv, parts in found.items():
        kl, agrees, surprise = (
            np.concatenate([getattr(each, name) for each in parts]) for name in ("kl", "agrees", "surprise")
        )
        num_bytes = sum(models[kv].backend.kv_bytes(spec) for spec in models[kv].decoder.kv_specs)
        lines.append(f"| {kv} | {num_bytes:,} | {kl.mean():.5f} | {agrees.mean():.2%} | {surprise.mean():.4f} |")
    return [*lines, "", f"{len(kl):,} tokens of {len(tokens)} texts"]


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="directory for the file and logs")
    add("--llama-bin", type=Path, help="directory of llama.cpp's programs")
    add("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=[1024, 8192, 32768])
    add("--tokens", type=int, default=64, help="output tokens after each prompt")
    add("--rounds", type=int, default=5)
    add("--once-from", type=int, default=16384, help="lengths from here on get one round, of some minutes")
    add("--threads", type=int, default=os.cpu_count(), help="threads of every engine")
    add("--json", type=Path, help="file for all numbers")
    add("--accuracy", metavar="MODEL", help="only compare KV cache types on this model")
    add("--texts", type=Path, help="for --accuracy: a JSON string per line")
    return parser.parse_args()


def main() -> int:
    args = options()
    if args.accuracy:
        print("\n".join(accuracy(args.accuracy, args.texts, args.threads)))
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # runs `finally`, which ends the engines
    args.work.mkdir(parents=True, exist_ok=True)
    model = args.work / "llama-50m-Q8_0.gguf"
    if not model.exists():
        write_random_gguf(model, SIZES)
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # its buffer would count as our memory
        bandwidth = apart.submit(read_bandwidth, args.threads).result()
    document: Record = {"provenance": provenance(args.threads), "read_bytes_per_s": bandwidth, "lengths": {}}
    if args.llama_bin:
        document["llama.cpp"] = version(args.llama_bin)
    engines = engines_for(args, model)
    try:
        for engine in engines:
            engine.start()
        for length in args.lengths:
            records = document["lengths"][str(length)] = measure(args, engines, length)
            print("\n".join(table(engines, records, length, bandwidth)), flush=True)
            if args.json:
                args.json.write_text(json.dumps(document, indent=1))
    finally:
        for engine in engines:
            engine.stop()
    return 0


if __name__ == "__main__":
    with machine_alone():
        sys.exit(main())
