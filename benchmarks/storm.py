"""Mixed load on a running `headstart serve`: streams, disconnects, bad bodies, every sampling option.

    headstart serve --port 8000 --no-shared-lookup &
    python benchmarks/storm.py --questions question.jsonl --minutes 5 --clients 64

Afterwards `--replays` completed requests are repeated one at a time; their texts must be equal byte for byte.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from measure.questions import in_turns

from headstart.tools.client import Response, Server, post

CHAT = "/v1/chat/completions"
Body = dict[str, Any]
SCHEMA = {
    "type": "object",
    "properties": {
        "thought": {"type": "string", "maxLength": 600},
        "action": {"enum": ["search", "read", "write", "finish"]},
        "text": {"type": "string", "maxLength": 600},
    },
    "required": ["thought", "action", "text"],
    "additionalProperties": False,
}


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def metric(args: argparse.Namespace, name: str) -> float:
    with urllib.request.urlopen(f"http://{args.host}:{args.port}/metrics") as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


OPTIONS: list[Callable[[random.Random], Body]] = [
    lambda r: {"temperature": r.choice([0, 0.3, 0.7, 1.0, 1.5])},
    lambda r: {"top_p": r.choice([0.5, 0.9, 1.0])},
    lambda r: {"top_k": r.choice([0, 1, 20, 200])},
    lambda r: {"min_p": r.choice([0, 0.05, 0.2])},
    lambda r: {"presence_penalty": r.uniform(-2, 2), "frequency_penalty": r.uniform(-2, 2)},
    lambda r: {"repetition_penalty": r.uniform(0.8, 1.5)},
    lambda r: {"logit_bias": {str(r.randrange(49152)): r.uniform(-100, 100)}},
    lambda r: {"stop": r.choice(["the", ". ", ["\n", "and"]])},
    lambda r: {"min_tokens": r.randrange(1, 20)},
    lambda r: {"ignore_eos": True},
    lambda r: {"logprobs": True, "top_logprobs": r.randrange(6)},
    lambda r: {"n": r.randrange(1, 4)},
    lambda r: {"speculation": r.choice([{"mode": "off"}, {"depth": r.randrange(8)}])},
    lambda r: {"guided_regex": "[a-z ]{5,40}"},
    lambda r: {"response_format": {"type": "json_object"}},
    lambda r: {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
    lambda r: {"stop_token_ids": [r.randrange(49152)]},
]
BAD: list[Body | bytes] = [
    b"{", b"", b"\xff\xfe", b"[" * 5000, {}, {"messages": []}, {"messages": "x"}, {"messages": message("x"), "n": 0},
    {"messages": message("x"), "temperature": -1}, {"messages": message("x"), "max_tokens": 0},
    {"messages": message("x"), "model": "other"}, {"messages": message("x " * 20000)},
    {"messages": message("x"), "guided_regex": "("}, {"messages": message("x"), "top_logprobs": 99, "logprobs": True},
    b'{"messages": "' + b"x" * 20_000_000 + b'"}',
]  # fmt: skip


def storm_body(texts: list[str], rng: random.Random) -> Body:
    body: Body = {
        "messages": message(rng.choice(texts)),
        "max_tokens": rng.choice([1, 8, 40, 120]),
        "seed": rng.getrandbits(40),
        "stream": rng.random() < 0.5,
    }
    for option in rng.sample(OPTIONS, rng.randrange(4)):
        body |= option(rng)
    if body.get("min_tokens", 0) > body["max_tokens"]:
        del body["min_tokens"]
    if "guided_regex" in body and "response_format" in body:
        del body["guided_regex"]
    return body


async def storm_client(args: argparse.Namespace, texts: list[str], seed: int, end: float, log: list[Any]) -> None:
    rng = random.Random(seed)
    for _ in range(args.requests or sys.maxsize):
        if time.monotonic() > end:
            return
        kind = rng.random()
        if kind < 0.1:
            answer = await post(Server(args.host, args.port), CHAT, rng.choice(BAD))
            log.append(("bad", None, answer))
        elif kind < 0.2:
            body, answer = storm_body(texts, rng), Response(status=-1)
            with suppress(TimeoutError):
                async with asyncio.timeout(rng.uniform(0.0, 0.5)):
                    answer = await post(Server(args.host, args.port), CHAT, body)
            log.append(("left", None, answer))
        else:
            body = storm_body(texts, rng)
            log.append(("asked", body, await post(Server(args.host, args.port), CHAT, body)))


async def replay(args: argparse.Namespace, log: list[Any]) -> list[Body]:
    """Repeats completed requests one at a time. Returns those with another text."""
    different = []
    for body, before in log:
        after = await post(Server(args.host, args.port), CHAT, body)
        if after.text != before.text or after.finish_reason != before.finish_reason:
            different.append({"body": body, "before": before.text, "after": after.text})
    return different


def resident(pid: int | None) -> float | None:
    """Resident memory of a local process in MB."""
    if pid is None:
        return None
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1000 if found else None


def storm(args: argparse.Namespace) -> Body:
    """Counts by status, replays with another text, and gauges that are not back at 0."""
    texts, log = in_turns(args.questions, args.per_category), list[Any]()
    end = time.monotonic() + 60 * args.minutes

    async def together() -> None:
        await asyncio.gather(*(storm_client(args, texts, seed, end, log) for seed in range(args.clients)))

    memory = [resident(args.pid)]
    started = time.perf_counter()
    asyncio.run(together())
    seconds = time.perf_counter() - started
    memory.append(resident(args.pid))
    time.sleep(1)
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    left = {name: metric(args, name) for name in names}
    done = [(body, answer) for kind, body, answer in log if kind == "asked" and answer.status == 200]
    # streams of n > 1 interleave their choices and are not compared here
    singles = [each for each in done if each[0].get("n", 1) == 1]
    chosen = random.Random(0).sample(singles, min(args.replays, len(singles)))
    different = asyncio.run(replay(args, chosen))
    statuses = Counter(f"{kind} {answer.status}" for kind, _, answer in log)
    tokens = sum(answer.usage.get("completion_tokens", 0) for _, answer in done)
    return {
        "seconds": seconds, "requests": len(log), "statuses": dict(statuses), "completed_tokens_seen": tokens,
        "left_behind": left, "resident_mb": memory, "replayed": len(chosen), "different": different,
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--questions", type=Path, required=True, help="Spec-Bench's question.jsonl")
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--requests", type=int, help="limit per client, beside --minutes")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--replays", type=int, default=300)
    parser.add_argument("--pid", type=int, help="process id of the server, to record its memory")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = storm(args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    return int(bool(result["different"] or any(result["left_behind"].values())))


if __name__ == "__main__":
    sys.exit(main())
