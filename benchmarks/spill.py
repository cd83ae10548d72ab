"""KV blocks on disk that outlive the server (`serve --kv-spill`).

    python benchmarks/spill.py ttft --tokens 4000 --rounds 7
    python benchmarks/spill.py replays --count 300
    python benchmarks/spill.py kill --rounds 10
    python benchmarks/spill.py bound --gb 10

ttft     Time to first token of a prompt of `--tokens` random ids on fresh servers: new prompt (cold), files in the page
         cache (ram), files dropped from the page cache with posix_fadvise (disk), and repeated at the same server
         (pool). Medians over rounds; `trunk rows`: rows computed.
replays  `--count` requests over a few common prefixes, greedy and sampled, with logprobs, on a server without files, on
         one that writes files, and on a third one that reads them. Texts and logprobs must be equal.
kill     kill -9 while requests run and blocks are written. A server on the same folder must then answer all requests as
         a server without files.
bound    Distinct prompts until 1.5 times `--gb` are written; reports the peak size of the folder in pages of 4 KiB.
         10 GB of a model with 23 KB per token take 650,000 prompt tokens and one to two hours.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from engines.headstart_server import HeadstartServer, NotAnsweredError

Body = dict[str, Any]
LEAST_ID, MOST_ID = 100, 30_000
"""Range of token ids of the default model."""


def prompt_of(seed: int, length: int) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(LEAST_ID, MOST_ID) for _ in range(length)]


def server(args: argparse.Namespace, folder: Path | None, *more: str) -> HeadstartServer:
    spill = ["--kv-spill", str(folder), "--kv-spill-gb", str(args.gb)] if folder else []
    return HeadstartServer([*([args.model] if args.model else []), *spill, *args.serve, *more])


def drop_from_memory(folder: Path) -> None:
    """Writes files to the disk and drops them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def ttft(args: argparse.Namespace, folder: Path) -> Body:
    times: dict[str, list[float]] = {"cold": [], "ram": [], "disk": [], "pool": []}
    hits: dict[str, list[float]] = {name: [] for name in times}
    for turn in range(args.rounds):
        prompt = prompt_of(args.seed + turn, args.tokens)
        texts = set()
        for name in ("cold", "ram", "disk"):
            if name == "disk":
                drop_from_memory(folder)
            with server(args, folder) as served:
                served.ask_all([prompt_of(-turn, 64)], 8)  # warm-up
                for again in (name, "pool") if name == "ram" else (name,):
                    before = served.metrics()
                    answer = served.ask_all([prompt], 16)[0]
                    after = served.metrics()
                    times[again].append(answer.first)
                    texts.add(answer.text)
                    tier = f"headstart:kv_hit_tokens_total{{{again}}}"
                    hits[again].append(after.get(tier, 0.0) - before.get(tier, 0.0))  # no tier in the cold run
        if len(texts) != 1:
            sys.exit(f"the texts differ: {texts}")
    rows = {
        name: {"ttft_s": statistics.median(each), "all_s": each, "hit_tokens": hits[name]}
        for name, each in times.items()
    }
    for name, row in rows.items():
        share = rows["cold"]["ttft_s"] / row["ttft_s"]
        found = statistics.median(row["hit_tokens"])
        print(f"{name:5} {row['ttft_s']:8.3f} s  {share:6.1f} x  {found:.0f} tokens found there")
    return {
        "tokens": args.tokens,
        "bytes": sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()),
        **rows,
    }


def requests(count: int) -> list[tuple[list[int], Body]]:
    """Prompts of 40 to 900 tokens over eight prefixes; half of the requests are sampled."""
    drawn, made = random.Random(5), []
    for number in range(count):
        prefix = prompt_of(drawn.randrange(8), drawn.randrange(32, 800))
        more = {"temperature": 0.8, "top_p": 0.95, "seed": number} if number % 2 else {}
        made.append(
            ([*prefix, *prompt_of(1000 + number, drawn.randrange(8, 100))], {"logprobs": 1, "stream": False, **more})
        )
    return made


def answers(served: HeadstartServer, made: list[tuple[list[int], Body]], at_once: int) -> list[str]:
    """Text and logprobs of each request."""
    import asyncio

    async def run() -> list[str]:
        gate = asyncio.Semaphore(at_once)

        async def one(prompt: list[int], more: Body) -> str:
            async with gate:
                answer = await served.ask(prompt, 24, **more, stream_options=None)
            choice = json.loads(answer.body)["choices"][0]
            return json.dumps([choice["text"], choice["logprobs"]])

        return await asyncio.gather(*(one(prompt, more) for prompt, more in made))

    return asyncio.run(run())


def replays(args: argparse.Namespace, folder: Path) -> Body:
    made, found = requests(args.count), {}
    for name, where, at_once in (("without", None, 8), ("writes", folder, 8), ("reads", folder, 3)):
        with server(args, where) as served:
            found[name] = answers(served, made, at_once)
            counts = served.metrics()
    differ = [i for i, each in enumerate(found["without"]) if not each == found["writes"][i] == found["reads"][i]]
    loaded = sum(value for name, value in counts.items() if name.startswith("headstart:kv_loaded_blocks_total"))
    hit = sum(counts[f"headstart:kv_hit_tokens_total{{{tier}}}"] for tier in ("ram", "disk"))
    print(f"{args.count} requests, {len(differ)} differ; {loaded:.0f} blocks loaded, {hit:.0f} tokens found in files")
    return {"count": args.count, "differ": differ, "loaded_blocks": loaded, "hit_tokens": hit}


def kill(args: argparse.Namespace, folder: Path) -> Body:
    made, aside, wrong = requests(40), 0, []
    with server(args, None) as served:
        expected = answers(served, made, 8)
    for turn in range(args.rounds):
        served = server(args, folder)
        threading.Thread(target=_send_until_killed, args=(served, made), daemon=True).start()
        time.sleep(1.0 + 0.137 * turn)
        served.kill()
        aside += len(list(folder.rglob(".new-*")))
    with server(args, folder) as served:
        wrong = [i for i, each in enumerate(answers(served, made, 8)) if each != expected[i]]
        counts = served.metrics()
    hit = sum(counts[f"headstart:kv_hit_tokens_total{{{tier}}}"] for tier in ("ram", "disk"))
    broken = counts["headstart:kv_broken_blocks_total"]
    print(f"{args.rounds} kills, {aside} files cut short, {broken:.0f} broken")
    print(f"then {len(wrong)} of 40 texts differ, {hit:.0f} tokens were found in files")
    return {"kills": args.rounds, "aside": aside, "differ": wrong, "hit_tokens": hit, "broken": broken}


def _send_until_killed(served: HeadstartServer, made: list[tuple[list[int], Body]]) -> None:
    """Sends requests and ignores errors of the killed server."""
    try:
        answers(served, made, 8)
    except (NotAnsweredError, OSError):
        return


def bound(args: argparse.Namespace, folder: Path) -> Body:
    most, turn = 0, 0
    with server(args, folder) as served:
        while (counts := served.metrics())["headstart:kv_spilled_bytes_total"] < 1.5e9 * args.gb:
            served.ask_all([prompt_of(args.seed + 8 * turn + i, 900) for i in range(8)], 1, 8)
            turn += 1
            most = max(most, taken(folder))
    written, evicted = (counts[f"headstart:kv_{name}_total"] for name in ("spilled_bytes", "evicted_blocks"))
    print(f"{written / 1e9:.2f} GB written, at most {most / 1e9:.3f} GB there, the bound is {args.gb} GB")
    return {"bound_bytes": args.gb * 1e9, "most_bytes": most, "written_bytes": written, "evicted": evicted}


def taken(folder: Path) -> int:
    """Bytes of the folder's files, rounded up to pages."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += -(-path.stat().st_size // 4096) * 4096 if path.is_file() else 0
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("ttft", "replays", "kill", "bound"))
    parser.add_argument("--model", help="default: the default model")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--gb", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="folder for blocks, on a disk; default: a temporary folder")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", type=shlex.split, default=[], help="more options of headstart serve, in quotes")
    args = parser.parse_args()
    if args.folder:
        args.folder.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="spill-", dir=args.folder))
    try:
        found = globals()[args.what](args, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
