"""Long contexts beside llama.cpp: prompt and decode speed and memory behind 1k, 8k and 32k tokens.

    python benchmarks/contexts.py --work WORK --llama-bin LLAMA/build/bin --json contexts.json
    python benchmarks/contexts.py --work WORK --lengths 1024,8192 --rounds 5

The model is a Llama shape of 50 million weights (12 layers of 512, 8 heads over 4 of 64, vocabulary 32,000) with random
values in Q8_0, so that keys and values weigh as much as they ever do; its file is written to WORK. A round is one
prompt of random tokens and exactly `--tokens` tokens after it, greedy: seconds to the first token, then tokens/s from
the first to the last. headstart keeps keys and values as it does by itself and in 8 bits; llama.cpp
(llama-batched-bench, one sequence, which samples nothing) in f16, with and without flash attention. Engines take turns
(the others are stopped) in alternating order; ratios are taken within a round, to the better of llama.cpp's rows.

`of the limit`: bytes of weights and of keys and values that a token reads, over what the machine reads a second
(`headstart doctor`'s measure), as a share of the time a token took. Memory: the most that was resident.
"""

from __future__ import annotations

import argparse
import json
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
from engines.llamacpp.random_files import Kind, Shape, Tensors, block, write
from engines.llamacpp.random_shapes import plain, sizes
from engines.llamacpp.server import LlamaEngine, version
from engines.process import BENCHMARKS, Engine, WorkerEngine
from measure.load import others, verdict
from measure.provenance import provenance
from measure.sections import attempt, say
from measure.tables import Record, ratio, spread

from headstart.config import EngineConfig
from headstart.kernels.backend import open_backend
from headstart.tools.prefilled import readable_bytes

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 12, 512, 1408, 8, 4, 64, 32000
BYTES = {"bfloat16": 2.0, "f16": 2.0, "int8": 1.0 + 4 / DIM}
"""Of a key's number."""
READS = 5


def fields(layers: int) -> dict[str, Any]:
    return {**sizes(layers, HIDDEN, INNER, HEADS, KV_HEADS, DIM), "rope.freq_base": 1e6, "context_length": 40960}


def tensors(layers: int, kind: Kind) -> Tensors:
    yield "token_embd.weight", (VOCAB, HIDDEN), kind
    yield "output_norm.weight", (HIDDEN,), "one"
    for i in range(layers):
        yield from block(i, plain(HIDDEN, INNER, HEADS, KV_HEADS, DIM, kind))


SHAPE = Shape("llama", LAYERS, VOCAB, fields, tensors)


class Headstart(WorkerEngine):
    """A context in the same words as llama.cpp's."""

    def context(self, prompt: Sequence[int], tokens: int) -> Record:
        found = self._ask("decode", prompt=list(prompt), max_tokens=tokens, ignore_eos=True)
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
        sys.executable, BENCHMARKS / "engines/headstart/worker.py", model, "--depth", "0", "--no-enable-prefix-caching",
        "--max-model-len", str(max(args.lengths) + args.tokens + 16), "--max-num-seqs", "1",
        "--threads", str(args.threads),
    ]  # fmt: skip
    rows: list[Any] = [
        Headstart("headstart", "bfloat16", worker, args.work / "headstart.log", None),
        Headstart(
            "headstart, 8-bit KV", "int8", [*worker, "--kv-cache-dtype", "int8"], args.work / "headstart-8.log", None
        ),
    ]
    if args.llama_bin:
        for word in ("off", "on"):
            name, log = f"llama.cpp, flash attention {word}", args.work / f"llama-{word}.log"
            rows.append(Llama(name, args.llama_bin, model, args.threads, log, ("-fa", word), weights="f16"))
    return rows


def read_bandwidth(threads: int) -> float:
    """Bytes a second."""
    backend = open_backend(EngineConfig(threads=threads))
    return backend.read_bandwidth(readable_bytes(backend), READS)


def limit_s(row: Engine, length: int, bandwidth: float) -> float:
    """Seconds that reading a token's weights, keys and values takes at least."""
    weights = LAYERS * (HIDDEN * DIM * (2 * HEADS + 2 * KV_HEADS) + 3 * HIDDEN * INNER) + VOCAB * HIDDEN
    cached = 2 * LAYERS * KV_HEADS * DIM * length * BYTES[row.weights]
    return (weights * 34 / 32 + cached) / bandwidth


def measure(args: argparse.Namespace, engines: list[Any], length: int) -> list[Record]:
    rng = np.random.default_rng(1)
    prompt = rng.integers(300, VOCAB - 1, length).tolist()
    records = []
    for number in range(args.rounds if length < args.once_from else 1):
        for engine in list(engines) if number % 2 == 0 else engines[::-1]:
            found = attempt(engines, engine, lambda each: each.context(prompt, args.tokens))
            if found is not None:
                records.append({"engine": engine.name, "round": number, **found})
        say(f"{length} tokens, round {number + 1}")
    return records


def table(engines: Sequence[Any], records: Sequence[Record], length: int, bandwidth: float) -> list[str]:
    """Markdown of one length."""
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


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="directory for the file and logs")
    add("--llama-bin", type=Path, help="directory of llama.cpp's programs")
    add("--lengths", type=lambda text: [int(word) for word in text.split(",")], default=[1024, 8192, 32768])
    add("--tokens", type=int, default=64, help="written behind each prompt")
    add("--rounds", type=int, default=5)
    add("--once-from", type=int, default=16384, help="lengths from here on get one round: minutes each")
    add("--threads", type=int, default=os.cpu_count(), help="of every engine")
    add("--json", type=Path, help="file for all numbers")
    return parser.parse_args()


def main() -> int:
    args = options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that `finally` ends the engines
    args.work.mkdir(parents=True, exist_ok=True)
    model = args.work / "llama-50m-Q8_0.gguf"
    if not model.exists():
        write(model, SHAPE, "Q8_0", LAYERS)
    with ProcessPoolExecutor(1, get_context("spawn")) as apart:  # its buffer would count as memory of our children
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
    sys.exit(main())
