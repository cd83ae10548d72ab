"""How far the simulation behind `headstart plan --fleet` is from real servers on this machine.

    python benchmarks/fleet_error.py --replicas 1,2 --threads 1 --rates 1,2,3
    python benchmarks/fleet_error.py --depth 2 --json fleet.json

For each number of replicas, `headstart serve` processes of `--threads` threads each; requests arrive at `--rates` a
second and replica (Poisson), prompts of random tokens and answers of a fixed length each (end of text ignored), and go
to the replica with the fewest. The simulation gets the same arrivals and the rates that `plan --gpu here` measures with
so many threads: alone, and for several replicas in as many processes at once, as replicas of one machine slow each
other down. Drafts at `--depth` are accepted as `--synthetic-acceptance` says, in both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from engines.process import free_port
from measure.provenance import provenance

from headstart import hub
from headstart.config import EngineConfig
from headstart.engine.load import load_model
from headstart.formats import open_checkpoint
from headstart.tools.client import Response, Server, post
from headstart.tools.plan.acceptance import expected_tokens
from headstart.tools.plan.here import calibrated, measure
from headstart.tools.plan.measure import BATCHES, PASSES_BUDGET_S, WORKS, Passes
from headstart.tools.plan.predict import Drafting
from headstart.tools.plan.simulate import WARM_UP, Arrivals, Served, arrivals, simulate
from headstart.tools.plan.sizing import Steps
from headstart.tools.plan.sources import find_shape

GOAL = 0.15
FIRST_WORD = 300
"""Token ids below may be bytes and special tokens."""


def started(args: argparse.Namespace, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server, and where it will listen."""
    port = free_port()
    command = [
        sys.executable, "-m", "headstart.cli.main", "serve", "--port", port, "--threads", args.threads,
        "--no-enable-prefix-caching", "--no-shared-lookup", "--drafter", "mtp" if args.depth else "none",
        "--depth", args.depth, *(["--synthetic-acceptance", args.rates_of_drafts] if args.depth else []),
    ]  # fmt: skip
    with log.open("wb") as file:
        return subprocess.Popen(list(map(str, command)), stdout=file, stderr=file), f"http://127.0.0.1:{port}"


def wait_ready(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(600):
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    sys.exit(f"a server did not start:\n{log.read_text('utf-8')[-2000:]}")


async def sent(urls: Sequence[str], asked: Arrivals, vocab: int) -> list[Response]:
    """Every request at its time, to the server with the fewest."""
    rng, servers = np.random.default_rng(1), [Server.at(url) for url in urls]
    outstanding, begin = [0] * len(servers), time.perf_counter()

    async def one(number: int) -> Response:
        prompt = rng.integers(FIRST_WORD, vocab, int(asked.prompts[number])).tolist()
        body = {"prompt": prompt, "max_tokens": int(asked.outputs[number]), "ignore_eos": True, "stream": True}
        content = json.dumps({**body, "temperature": 0}).encode()
        await asyncio.sleep(begin + float(asked.times[number]) - time.perf_counter())
        chosen = min(range(len(servers)), key=outstanding.__getitem__)
        outstanding[chosen] += 1
        try:
            return await post(servers[chosen], "/v1/completions", content)
        finally:
            outstanding[chosen] -= 1

    return list(await asyncio.gather(*(one(number) for number in range(len(asked.times)))))


def measured(args: argparse.Namespace, replicas: int, asked: Arrivals, vocab: int) -> Served:
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder) / f"{number}.log" for number in range(replicas)]
        servers = [started(args, log) for log in logs]
        for process, _ in servers:
            stack.callback(process.wait)
            stack.callback(process.terminate)
        for (process, url), log in zip(servers, logs, strict=True):
            wait_ready(url, process, log)
        urls = [url for _, url in servers]
        warm = arrivals(4, args.prompt, 16, 4 * replicas, seed=9)
        asyncio.run(sent(urls, warm, vocab))
        answers = asyncio.run(sent(urls, asked, vocab))
    if failed := [each for each in answers if each.status != 200]:
        sys.exit(f"{len(failed)} requests failed: {failed[0].body[:300]}")
    first = np.array([each.first for each in answers])
    last = np.array([each.seconds for each in answers])
    counted = slice(int(WARM_UP * len(answers)), None)
    total = float((asked.times + last).max())
    return Served(
        ttft_s=first[counted], tpot_s=((last - first) / np.maximum(asked.outputs - 1, 1))[counted], busy=0.0,
        batch=0.0, tokens_per_s=float(asked.outputs.sum()) / (replicas * total),
    )  # fmt: skip


def measure_one(args: argparse.Namespace) -> None:
    """What `plan --gpu here` measures, once a line comes; then go on working until somebody ends this process."""
    config = EngineConfig(threads=args.threads)
    passes = Passes(load_model(None, config), config, WORKS, silent)
    print("ready", flush=True)
    sys.stdin.readline()
    print(json.dumps(measure(passes, passes.time(WORKS, PASSES_BUDGET_S, silent), silent)), flush=True)
    while True:
        passes.engine_seconds(max(BATCHES), 0)


def silent(done: int, total: int, text: str) -> None:
    """No progress."""


def measured_at_once(args: argparse.Namespace, processes: int) -> dict[str, Any]:
    """Means of what so many processes measure at the same time."""
    command = [sys.executable, __file__, "--measure-one", "--threads", str(args.threads)]
    with ExitStack() as stack:
        pipe = subprocess.PIPE
        others = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(processes)]
        for each in others:
            stack.callback(each.wait)
            stack.callback(each.kill)
            assert each.stdout and each.stdout.readline()
        for each in others:
            assert each.stdin
            each.stdin.write("\n")
            each.stdin.flush()
        found = [json.loads(each.stdout.readline()) for each in others if each.stdout]
    mean = dict(found[0])
    for place, work in enumerate(mean["passes"]):
        work["seconds"] = statistics.mean(each["passes"][place]["seconds"] for each in found)
    for name in ("engine", "draft_step"):
        pairs = zip(*(each[name] for each in found), strict=True)
        mean[name] = [(same[0][0], statistics.mean(seconds for _, seconds in same)) for same in pairs]
    return mean


def steps_of(args: argparse.Namespace, replicas: int) -> list[Steps]:
    """Steps beside 0, 1, ... other replicas that step too."""
    shares = [float(word) for word in args.rates_of_drafts.split(",")]
    conditional = tuple(share / before for share, before in zip(shares, (1.0, *shares), strict=False))
    found = []
    for processes in range(1, replicas + 1):
        model, machine = calibrated(find_shape(None), measured_at_once(args, processes))
        print(f"<!-- {processes} at once: {machine.assumptions[0]} -->", flush=True)
        drafting = Drafting(model, conditional, "")
        found.append(Steps(drafting, machine, args.prompt + args.output / 2, depths=(args.depth,)))
    return found


def simulated(steps: Sequence[Steps], replicas: int, asked: Arrivals) -> Served:
    engine = EngineConfig()
    slots, rows = engine.max_num_seqs, engine.max_num_batched_tokens
    return simulate(steps[0], asked, engines=replicas, slots=slots, rows=rows, beside=steps[1:replicas])


def figures(served: Served) -> dict[str, float]:
    found = {"tokens/s a replica": served.tokens_per_s}
    for name, values in (("TTFT", served.ttft_s), ("TPOT", served.tpot_s)):
        found |= {
            f"{name} p50 ms": float(np.median(values)) * 1e3,
            f"{name} p95 ms": float(np.percentile(values, 95)) * 1e3,
        }
    return found


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--replicas", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    add("--threads", type=int, default=1, help="of each replica; default: 1")
    add("--rates", type=lambda text: [float(word) for word in text.split(",")], default=[0.5, 1.0, 1.5])
    add("--prompt", type=int, default=400, help="mean tokens of a prompt")
    add("--output", type=int, default=100, help="mean tokens of an answer")
    add("--seconds", type=float, default=40, help="of arrivals, for each row")
    add("--depth", type=int, default=0)
    add("--rates-of-drafts", default="0.8,0.6,0.4", help="share of drafts whose first 1, 2, ... tokens are accepted")
    add("--measure-one", action="store_true", help="what it starts itself with, to measure this machine")
    add("--json", type=Path, help="also write every number here")
    return parser.parse_args()


def main() -> int:
    args = options()
    if args.measure_one:
        measure_one(args)
    steps = steps_of(args, max(args.replicas))
    vocab = open_checkpoint(hub.resolve(None)).config["vocab_size"]
    document: dict[str, Any] = {"provenance": provenance(args.threads), "depth": args.depth, "rows": []}
    if args.depth:
        document["tokens_a_step"] = expected_tokens([float(w) for w in args.rates_of_drafts.split(",")], args.depth)
    print("| replicas | req/s each | figure | measured | simulated | error |\n|---|---|---|---|---|---|")
    errors = []
    for replicas in args.replicas:
        for rate in args.rates:
            count = max(20, round(rate * replicas * args.seconds))
            asked = arrivals(rate * replicas, args.prompt, args.output, count)
            predicted, found = (
                figures(simulated(steps, replicas, asked)),
                figures(measured(args, replicas, asked, vocab)),
            )
            for name, value in found.items():
                error = predicted[name] / value - 1
                errors.append(abs(error))
                print(
                    f"| {replicas} | {rate:g} | {name} | {value:.1f} | {predicted[name]:.1f} | {error:+.0%} |",
                    flush=True,
                )
                row = {"replicas": replicas, "rate": rate, "figure": name, "measured": value}
                document["rows"].append({**row, "simulated": predicted[name]})
    close = sum(error <= GOAL for error in errors)
    print(f"\nmedian error {statistics.median(errors):.0%}, {close} of {len(errors)} within {GOAL:.0%}")
    if args.json:
        args.json.write_text(json.dumps(document, indent=1))
    return 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
