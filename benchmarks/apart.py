"""One server against separate prefill and decode servers (`serve --role`), under streams and long prompts.

    python benchmarks/apart.py --streams 4 --prompts 12 --tokens 2000

`--streams` clients stream continuously (short prompts, 200 tokens each). Meanwhile a prompt of `--tokens` random ids
with an answer of 16 tokens arrives every `--every` seconds. Set-ups, in turn, `--rounds` times: `one`, a server on all
`--cpus`; `apart`, one CPU for the prefill server and the others for the decode server, which share a folder; `http`,
the same with two folders. Reported: milliseconds per token and gaps between pieces of the streams, time to first token
of the prompts. Decoding is greedy, and all set-ups must write the same texts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from engines.headstart_server import HeadstartServer

Row = dict[str, Any]
WAYS = ("one", "apart", "http")


def prompt_of(seed: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(100, 30_000) for _ in range(length)]


@contextmanager
def start_servers(
    args: argparse.Namespace, way: str, folder: Path
) -> Iterator[tuple[HeadstartServer, HeadstartServer | None]]:
    """The server that gets the requests, and its prefill server."""
    model, cpus = [args.model] if args.model else [], args.cpus.split(",")
    with ExitStack() as stack:
        if way == "one":
            words = [*model, "--threads", str(len(cpus)), *args.serve]
            yield stack.enter_context(HeadstartServer(words, args.cpus)), None
            return
        kept = ["--kv-spill", str(folder / "prefill"), "--kv-spill-gb", "8"]
        words = [*model, "--threads", "1", *args.serve, "--role", "prefill", *kept]
        prefill = stack.enter_context(HeadstartServer(words, cpus[0]))
        kept[1] = str(folder / ("prefill" if way == "apart" else "decode"))
        words = [*model, "--threads", str(len(cpus) - 1), *args.serve, "--prefill", prefill.url, *kept]
        yield stack.enter_context(HeadstartServer(words, ",".join(cpus[1:]))), prefill


async def load(args: argparse.Namespace, served: HeadstartServer, seed: int) -> Row:
    """Runs streams and prompts concurrently until all prompts are answered."""
    first, gaps, paces, texts = list[float](), list[float](), list[float](), dict[str, str]()
    done = asyncio.Event()
    more = {"speculation": {"mode": "off"}} if args.plain else {}

    async def stream(number: int) -> None:
        turn = 0
        while not done.is_set():
            answer = await served.ask(prompt_of(10_000 + 100 * number + turn, 32), 200, **more)
            times = [at for at, _ in answer.pieces]
            paces.append((times[-1] - times[0]) / (answer.usage["completion_tokens"] - 1))
            gaps.extend(b - a for a, b in pairwise(times))
            texts[f"stream {number} {turn}"] = answer.text
            turn += 1

    async def long(number: int) -> None:
        answer = await served.ask(prompt_of(seed + number, args.tokens), 16, **more)
        first.append(answer.first)
        texts[f"prompt {number}"] = answer.text

    streams = [asyncio.create_task(stream(number)) for number in range(args.streams)]
    await asyncio.sleep(args.every)
    prompts = []
    for number in range(args.prompts):
        prompts.append(asyncio.create_task(long(number)))
        await asyncio.sleep(args.every)
    await asyncio.gather(*prompts)
    done.set()
    await asyncio.gather(*streams)
    return {"first": first, "gaps": gaps, "paces": paces, "texts": texts}


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="default: headstart's")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--streams", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--every", type=float, default=3.0, help="seconds between prompts")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--cpus", default="0,1")
    parser.add_argument("--plain", action="store_true", help="without drafts")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=shlex.split, default=[], help="more options of headstart serve, in quotes")
    args = parser.parse_args()
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    rows: dict[str, list[Row]] = {way: [] for way in args.ways}
    for turn in range(args.rounds):
        texts: dict[str, str] = {}
        for way in args.ways if turn % 2 == 0 else args.ways[::-1]:
            folder = Path(tempfile.mkdtemp(prefix="apart-", dir=args.folder))
            try:
                with start_servers(args, way, folder) as (served, prefill):
                    served.ask_all([prompt_of(-1, 300)], 8)
                    begun = time.perf_counter()
                    row = asyncio.run(load(args, served, 1000 * (turn + 1)))
                    row["seconds"] = time.perf_counter() - begun
                    row["elsewhere"] = served.metrics().get("headstart:prefill_prompts_total", 0) if prefill else 0
            finally:
                shutil.rmtree(folder, ignore_errors=True)
            if wrong := [name for name, text in row["texts"].items() if texts.setdefault(name, text) != text]:
                sys.exit(f"{way}: other texts: {wrong}")
            rows[way].append(row)
    found = {way: summary(each) for way, each in rows.items()}
    for way, row in found.items():
        print(f"{way:6} TTFT p50 {row['ttft_s'][0]:.3f} p95 {row['ttft_s'][1]:.3f} s; "
              f"TPOT p50 {row['tpot_ms'][0]:.1f} p95 {row['tpot_ms'][1]:.1f} ms; gaps p50 {row['gap_ms'][0]:.1f} "
              f"p95 {row['gap_ms'][1]:.1f} p99 {row['gap_ms'][2]:.1f} ms; {row['pieces_per_s']:.1f} pieces/s; "
              f"{row['elsewhere']:.0f} prompts computed elsewhere")  # fmt: skip
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


def summary(rows: list[Row]) -> Row:
    first = [each for row in rows for each in row["first"]]
    gaps = [each for row in rows for each in row["gaps"]]
    paces = [each for row in rows for each in row["paces"]]
    return {
        "ttft_s": [percentile(first, share) for share in (0.5, 0.95)],
        "tpot_ms": [1000 * percentile(paces, share) for share in (0.5, 0.95)],
        "gap_ms": [1000 * percentile(gaps, share) for share in (0.5, 0.95, 0.99)],
        "pieces_per_s": len(gaps) / sum(row["seconds"] for row in rows),
        "elsewhere": sum(row["elsewhere"] for row in rows),
        "prompts": len(first),
    }


if __name__ == "__main__":
    main()
