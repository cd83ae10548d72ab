"""Depth `auto` on mixtures of experts: tokens/s of plain decoding, fixed depths and `auto` at imposed acceptance rates.

    python benchmarks/expert_drafts.py --work WORK --models qwen3-30b --rates 0.9,0.7,0.5

Files with random weights (measure/random_experts.py) are written to WORK and kept. Texts are sampled at T = 1, so that
routers see varied tokens. With `--kinds` every second text is greedy and repeats its tokens and experts; `auto by kind`
then has separate costs for each kind, an upper bound for costs by experts. A synthetic drafter proposes each token of
the plain text with the given rate, else another token. A drafted token takes `--draft-share` of a plain pass, as a
one-layer module would. All variants run in one process, in alternating turns; texts must equal those of plain decoding.

`--passes`: milliseconds and distinct experts of passes by number of rows, relative to one row.

`--share 1,0.5`: shares of the weights that fit in memory, by a memory cgroup (needs root). The kernel drops the rest
and reads it from the disk again. With `--llama-bin LLAMA/build/bin` llama-bench runs on the same file, mapped, under
its own limit.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import numpy as np
from measure.machine import load_now, machine_alone, others, verdict
from measure.memory_group import UNLIMITED, MemoryGroup, anonymous_bytes, drop_page_cache
from measure.random_experts import SHAPES, write_random_experts

from headstart.api import LLM
from headstart.config import AUTO, Depth, EngineConfig
from headstart.core import Draft, SamplingParams
from headstart.drafters.base import Drafter, DraftRequest
from headstart.engine.calibrate import calibrate
from headstart.engine.depth import AutoDepth
from headstart.kernels.backends import native

PLAIN = "plain"
LEARN = 4  # turns in which `auto` learns acceptance and costs


class SyntheticDrafter(Drafter):
    """Drafts tokens of the known plain text (by seed) with the given acceptance rate."""

    method, max_depth = "synthetic", 8

    def __init__(self, vocab: int) -> None:
        self.vocab, self.rate, self.step_s = vocab, 0.5, 0.0
        self.texts: dict[int, list[int]] = {}

    def propose(self, requests: Sequence[DraftRequest]) -> None:
        for request in requests:
            if request.should_start:
                self._draft(request)

    def _draft(self, request: DraftRequest) -> None:
        sequence, until = request.sequence, time.perf_counter()
        text, place = self.texts.get(sequence.request.seed, []), sequence.num_output
        draft = sequence.draft = Draft(method=self.method)
        while len(draft.tokens) < request.depth:
            at = place + len(draft.tokens)
            rng = np.random.default_rng([sequence.request.seed, at])
            right = rng.random() < self.rate and at < len(text)
            draft.tokens.append(text[at] if right else int(rng.integers(self.vocab)))
            draft.scores.append(self.rate)
            until += self.step_s
            while time.perf_counter() < until:
                pass
            if request.gate is not None and not request.gate.should_continue(draft):
                break


@dataclass
class Variant:
    name: str
    depth: Depth
    autos: tuple[AutoDepth, ...]  # for even and for odd texts
    rates: list[float] = field(default_factory=list)


class Bench:
    """An engine with a synthetic drafter."""

    def __init__(self, path: Path, args: argparse.Namespace) -> None:
        self.args = args
        blocks = args.streams * (args.prompt + args.tokens + 64) // 16 + 64
        config = EngineConfig(
            drafter="none", depth=0, threads=args.threads, max_num_seqs=args.streams, max_model_len=2048,
            kv_blocks=max(blocks, 160), enable_prefix_caching=False, shared_lookup=False, seed=0,
        )  # fmt: skip
        self.llm = LLM(str(path), config)
        self.engine, self.drafter = self.llm.engine, SyntheticDrafter(self.llm.model.config.vocab_size)
        self.engine.drafting.drafter = self.drafter
        if args.no_read_ahead:
            self.engine.runner.trunk.programs["forward"].reads_ahead = False
        self.prompts = np.random.default_rng(2).integers(300, self.drafter.vocab - 1, (64, args.prompt)).tolist()

    def calibrated(self, rate: float) -> AutoDepth:
        auto = AutoDepth(self.drafter.method)
        self.drafter.rate = rate
        auto.costs = calibrate(self.engine)
        return auto

    def run(self, variant: Variant, number: int) -> float:
        """Tokens/s of one turn. Checks the texts."""
        drafting, args = self.engine.drafting, self.args
        drafting.depth, drafting.auto = variant.depth, variant.autos[number % len(variant.autos)]
        seeds = range(number * args.streams, (number + 1) * args.streams)
        done: dict[str, list[int]] = defaultdict(list)
        for seed in seeds:
            kind = 1.0 if not args.kinds or number % 2 == 0 else 0.0
            params = SamplingParams(max_tokens=args.tokens, ignore_eos=True, temperature=kind, seed=seed)
            request = self.llm.request(self.prompts[seed % len(self.prompts)], params)
            self.engine.submit(replace(request, request_id=str(seed)))
        first = None
        while self.engine.has_work:
            self.engine.step(lambda deltas: [done[each.request_id].extend(each.tokens) for each in deltas])
            if first is None and len(done) == args.streams:
                first = time.perf_counter(), sum(map(len, done.values()))
        assert first is not None
        speed = (sum(map(len, done.values())) - first[1]) / (time.perf_counter() - first[0])
        for seed in seeds:
            if self.drafter.texts.setdefault(seed, done[str(seed)]) != done[str(seed)]:
                raise SystemExit(f"the text of seed {seed} with {variant.name} differs from plain decoding")
        return speed


@contextmanager
def record_passes(bench: Bench) -> Iterator[dict[int, list[tuple[int, float]]]]:
    """Distinct experts and seconds of trunk passes, by number of rows."""
    found: dict[int, list[tuple[int, float]]] = defaultdict(list)
    runner, forward = bench.engine.runner, bench.engine.runner.forward

    def timed(spans):
        begin = time.perf_counter()
        output = forward(spans)
        seconds = time.perf_counter() - begin
        handle = runner.trunk.programs["forward"]
        found[sum(span.num_rows for span in spans)].append((handle.num_experts_read, seconds))
        return output

    runner.forward = timed
    try:
        yield found
    finally:
        runner.forward = forward


def passes(bench: Bench, depths: Sequence[int]) -> None:
    """Prints seconds and experts of passes by rows, and seconds per expert among passes of equal rows."""
    auto = AutoDepth(bench.drafter.method)
    bench.drafter.rate = 0.7
    with record_passes(bench) as found:
        for number, depth in enumerate(depths):
            bench.run(Variant(f"depth {depth}", depth, (auto,)), number)
    one = median(experts for experts, _ in found[bench.args.streams])
    print("| rows | passes | experts | spread of experts | ms | ms per expert within equal rows |\n|" + "---|" * 6)
    for rows, each in sorted(found.items()):
        if len(each) < 8:
            continue
        experts, seconds = np.array(each).T
        kept = seconds < 1.5 * np.median(seconds)
        experts, seconds = experts[kept], seconds[kept]
        slope = np.polyfit(experts, seconds, 1)[0] if experts.std() else 0.0
        print(
            f"| {rows} | {len(each)} | {np.median(experts) / one:.2f} | {experts.std() / one:.2f} "
            f"| {1e3 * np.median(seconds):.2f} | {1e3 * slope:.4f} |"
        )


def compare(bench: Bench, name: str) -> None:
    """Prints a table of all variants at each rate."""
    args, before = bench.args, load_now()
    print(f"\n{name}, {args.streams} at a time\n\n| acceptance | variant | tokens/s | to plain |\n|" + "---|" * 4)
    unused = AutoDepth(bench.drafter.method)
    bench.drafter.step_s = 0.0
    plain_s = args.streams / bench.run(Variant(PLAIN, 0, (unused,)), 0)
    bench.drafter.step_s = args.draft_share * plain_s
    for rate in args.rates:
        variants = [Variant(PLAIN, 0, (unused,))]
        variants += [Variant(f"depth {depth}", depth, (unused,)) for depth in args.depths]
        variants += [Variant("auto", AUTO, (bench.calibrated(rate),))]
        if args.kinds:
            variants += [Variant("auto by kind", AUTO, (bench.calibrated(rate), bench.calibrated(rate)))]
        for number in range(args.rounds + LEARN):
            for variant in variants if number % 2 == 0 else [variants[0], *variants[:0:-1]]:
                if number >= LEARN or variant.depth == AUTO:
                    if number * args.streams not in bench.drafter.texts:
                        bench.run(variants[0], number)
                    speed = bench.run(variant, number)
                    if number >= LEARN:
                        variant.rates.append(speed)
        for variant in variants:
            ratios = [own / plain for own, plain in zip(variant.rates, variants[0].rates, strict=True)]
            low, high = np.quantile(ratios, (0.25, 0.75))
            cells = f"{median(variant.rates):.1f} | {median(ratios):.2f} ({low:.2f} to {high:.2f})"
            print(f"| {rate} | {variant.name} | {cells} |", flush=True)
    io = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    texts = hashlib.sha256(repr(sorted(bench.drafter.texts.items())).encode()).hexdigest()[:12]
    print(f"texts {texts}; {int(io['read_bytes']) / 1e9:.1f} GB read from disk, {faults} major page faults")
    print(verdict(others([load_now().others_since(before)])))


def weights_in_memory(bench: Bench, group: MemoryGroup, share: float) -> None:
    """Limits this process to its own memory and a share of the packed weights."""
    mapped = bench.llm.model.backend._cache._mapped
    assert mapped is not None, "the weights are mapped"
    group.limit(anonymous_bytes(os.getpid()) + int(share * mapped.data.nbytes))


def llama_bench(args: argparse.Namespace, path: Path, share: float | None = None, own: int = 0) -> tuple[str, int]:
    """llama-bench on the mapped file: tokens/s of single-token decoding, and its peak anonymous memory in bytes.

    share: part of the file that fits in memory, beside `own` bytes; None: no limit. Weights are not repacked, as the
    copy would be anonymous memory.
    """
    command = [args.llama_bin / "llama-bench", "-m", path, "-p", "0", "-n", str(args.tokens), "-r", str(args.rounds)]
    command += ["-t", str(args.threads or os.cpu_count()), "-lm", "mmap", "--repack", "0", "-o", "json"]
    group = MemoryGroup("headstart-llama")
    group.limit(UNLIMITED if share is None else own + int(share * path.stat().st_size))
    drop_page_cache()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=lambda: group.add(os.getpid()),
    )  # fmt: skip
    while process.poll() is None:
        with suppress(OSError, IndexError):
            own = max(own, anonymous_bytes(process.pid))
        time.sleep(0.1)
    assert process.stdout is not None
    found = json.loads(process.stdout.read())[0]
    return f"{found['avg_ts']:.1f} (sd {found['stddev_ts']:.1f})", own


def by_memory(args: argparse.Namespace, path: Path, name: str) -> None:
    """Plain decoding, drafting and llama.cpp at each share of weights in memory."""
    group = MemoryGroup("headstart-bench")
    group.limit()
    native.MAX_WEIGHTS = 0.0  # treat the weights as larger than memory
    drop_page_cache()
    group.add(os.getpid())
    try:
        bench = Bench(path, args)
        own = llama_bench(args, path)[1] if args.llama_bin else 0
        for share in args.share:
            weights_in_memory(bench, group, share)
            compare(bench, f"{name}, {share:.0%} of the weights in memory")
            if args.llama_bin:
                speed, _ = llama_bench(args, path, share, own)
                print(f"llama.cpp, {share:.0%} of its file in memory: {speed} tokens/s")
    finally:
        group.limit()
        group.leave()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(SHAPES))
    parser.add_argument("--rates", type=lambda text: [float(each) for each in text.split(",")], default=[0.9, 0.7, 0.5])
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--prompt", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--depths", type=lambda text: [int(each) for each in text.split(",")], default=[1, 2, 3, 5])
    parser.add_argument("--draft-share", type=float, default=0.03)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--share", type=lambda text: [float(each) for each in text.split(",")], default=[])
    parser.add_argument("--llama-bin", type=Path, help="folder of llama-bench, for --share")
    parser.add_argument("--no-read-ahead", action="store_true")
    parser.add_argument("--kinds", action="store_true", help="every second text is greedy and repetitive")
    parser.add_argument("--passes", action="store_true", help="only measure seconds and experts of passes")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        path = args.work / f"{name}.gguf"
        if not path.exists():
            write_random_experts(path, SHAPES[name])
        if args.share:
            by_memory(args, path, name)
            continue
        bench = Bench(path, args)
        if args.passes:
            passes(bench, [0, *args.depths, 7])
        else:
            compare(bench, name)
        del bench
    return 0


if __name__ == "__main__":
    with machine_alone():
        sys.exit(main())
