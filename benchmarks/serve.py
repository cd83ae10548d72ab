"""A running `headstart serve` under load.

    headstart serve --port 8000 --no-shared-lookup &
    python benchmarks/serve.py sweep --questions question.jsonl
    python benchmarks/serve.py agent
    python benchmarks/serve.py storm --questions question.jsonl --minutes 5 --clients 64

sweep  `--concurrency` clients, each sending the next question as soon as its last one is answered (first turns of all
       categories in turn, streamed, greedy, up to `--max-tokens`); drafting on and off in alternating blocks through
       the request field `speculation`.
cost   The same requests over HTTP and through `LLM.generate` in this process, as many at once, in alternating order.
agent  A loop as agents run it: `--steps` steps over a growing shared prefix, each answer JSON of 50, 150 or 300 tokens
       under a schema, `--tasks` at once.
storm  Mixed requests (streams, hang-ups, bad bodies, every sampling option) for `--minutes`, then `--replays` of the
       completed ones alone on the idle server: the same bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from measure.questions import in_turns

from headstart.tools.client import Response, Server, post

CHAT = "/v1/chat/completions"
Body = dict[str, Any]


def message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def metric(args: argparse.Namespace, name: str) -> float:
    with urllib.request.urlopen(f"http://{args.host}:{args.port}/metrics") as reply:
        text = reply.read().decode()
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(int(share * len(values)), len(values) - 1)] if values else 0.0


async def closed_loop(args: argparse.Namespace, bodies: list[Body], clients: int) -> tuple[list[Response], float]:
    """All bodies, `clients` at a time; answers and seconds."""
    left, answers = iter(bodies), list[Response]()

    async def client() -> None:
        for body in left:
            answers.append(await post(Server(args.host, args.port), CHAT, body))

    started = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return answers, time.perf_counter() - started


def summarize(answers: list[Response], seconds: float) -> Body:
    """Rates and latencies of one block."""
    bad = [answer for answer in answers if answer.status != 200]
    if bad:
        sys.exit(f"{len(bad)} of {len(answers)} requests failed: {bad[0].status} {bad[0].body[:300]}")
    tokens = sum(answer.usage["completion_tokens"] for answer in answers)
    gaps = [b[0] - a[0] for answer in answers for a, b in zip(answer.pieces, answer.pieces[1:], strict=False)]
    decode = [
        (answer.pieces[-1][0] - answer.first) / max(answer.usage["completion_tokens"] - 1, 1)
        for answer in answers
        if answer.pieces
    ]
    spec = [answer.usage["speculation"] for answer in answers]
    drafts = sum(each["drafts"] for each in spec)
    return {
        "tokens_per_s": tokens / seconds,
        "decode_tokens_per_s": 1 / statistics.mean(decode) if decode else 0.0,
        "ttft_ms": [1000 * percentile([answer.first for answer in answers], share) for share in (0.5, 0.99)],
        "gap_ms": [1000 * percentile(gaps, share) for share in (0.5, 0.99)],
        "acceptance_length": 1 + sum(each["accepted"] for each in spec) / drafts if drafts else 1.0,
    }


def streamed(args: argparse.Namespace, texts: list[str], mode: str) -> list[Body]:
    common = {"temperature": 0, "max_tokens": args.max_tokens, "speculation": {"mode": mode}}
    common |= {"stream": True, "stream_options": {"include_usage": True}}
    return [{"messages": message(text), **common} for text in texts]


def cost(args: argparse.Namespace) -> Body:
    """Tokens/s with and without HTTP, and the median of their ratios."""
    from headstart.api import LLM
    from headstart.config import EngineConfig
    from headstart.core import SamplingParams

    # Each round asks what neither engine has seen: a warm prefix cache would be a fresh server's or ours alone.
    texts, rows = cycle(in_turns(args.questions, args.per_category)), list[Body]()
    params = SamplingParams(max_tokens=args.max_tokens)
    for clients in args.concurrency:
        llm, count = LLM(None, EngineConfig(max_num_seqs=clients, shared_lookup=False)), max(2 * clients, args.requests)
        for turn in range(args.rounds):
            chosen = list(islice(texts, count))
            for mode in ("off", "auto"):
                row: Body = {"clients": clients, "mode": mode}
                for way in ("http", "inside") if turn % 2 else ("inside", "http"):
                    started = time.perf_counter()
                    if way == "http":
                        answers, _ = asyncio.run(closed_loop(args, streamed(args, chosen, mode), clients))
                        tokens = sum(answer.usage["completion_tokens"] for answer in answers)
                    else:
                        done = llm.generate(chosen, params, depth=0 if mode == "off" else None)
                        tokens = sum(len(each.token_ids) for each in done)
                    row[way] = tokens / (time.perf_counter() - started)
                rows.append(row | {"ratio": row["http"] / row["inside"]})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    keys = dict.fromkeys((row["clients"], row["mode"]) for row in rows)
    return {
        "median_ratio": {
            f"{clients} {mode}": statistics.median(
                row["ratio"] for row in rows if (row["clients"], row["mode"]) == (clients, mode)
            )
            for clients, mode in keys
        },
        "rows": rows,
    }


def sweep(args: argparse.Namespace) -> Body:
    """Drafting on and off at each concurrency."""
    texts, found = in_turns(args.questions, args.per_category), list[Body]()
    for clients in args.concurrency:
        count = max(2 * clients, args.requests)
        for turn in range(args.rounds):
            for mode in ("off", "auto") if turn % 2 else ("auto", "off"):
                chosen = list(islice(cycle(texts), turn * count, (turn + 1) * count))
                row = summarize(*asyncio.run(closed_loop(args, streamed(args, chosen, mode), clients)))
                found.append({"clients": clients, "mode": mode, **row})
                print(json.dumps(found[-1]), file=sys.stderr, flush=True)
    return {"rows": found}


def sweep_table(result: Body) -> Iterator[str]:
    yield "| clients | drafting | tok/s | decoding, one client | TTFT p50/p99 ms | gap p50/p99 ms | length |"
    yield "|---|---|---|---|---|---|---|"
    keys = dict.fromkeys((row["clients"], row["mode"]) for row in result["rows"])
    for clients, mode in sorted(keys, key=lambda key: (key[0], key[1] != "off")):
        rows = [row for row in result["rows"] if (row["clients"], row["mode"]) == (clients, mode)]

        def middle(pick: Callable[[Body], float], rows: list[Body] = rows) -> float:
            return statistics.median(map(pick, rows))

        yield (
            f"| {clients} | {mode} | {middle(lambda r: r['tokens_per_s']):.0f} "
            f"| {middle(lambda r: r['decode_tokens_per_s']):.1f} "
            f"| {middle(lambda r: r['ttft_ms'][0]):.0f} / {middle(lambda r: r['ttft_ms'][1]):.0f} "
            f"| {middle(lambda r: r['gap_ms'][0]):.1f} / {middle(lambda r: r['gap_ms'][1]):.1f} "
            f"| {middle(lambda r: r['acceptance_length']):.2f} |"
        )


STEP_TOKENS = (50, 150, 300)
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


async def agent_task(args: argparse.Namespace, number: int, mode: str) -> tuple[float, int]:
    """One task: steps whose messages grow; seconds and tokens."""
    messages = [
        {"role": "system", "content": "You are an agent. Response each step with one JSON object."},
        {"role": "user", "content": f"Task {number}: plan a small garden, step by step."},
    ]
    started, tokens = time.perf_counter(), 0
    for step in range(args.steps):
        body = {
            "messages": messages, "max_tokens": STEP_TOKENS[step % len(STEP_TOKENS)], "temperature": 0.7,
            "seed": 100 * number + step, "speculation": {"mode": mode},
            "response_format": {"type": "json_schema", "json_schema": {"name": "step", "schema": SCHEMA}},
        }  # fmt: skip
        answer = await post(Server(args.host, args.port), CHAT, body)
        if answer.status != 200:
            sys.exit(f"step {step}: {answer.status} {answer.body[:300]}")
        tokens += answer.usage["completion_tokens"]
        messages.append({"role": "assistant", "content": answer.text})
        messages.append({"role": "user", "content": f"Result {step}: done. Next?"})
    return time.perf_counter() - started, tokens


def agent(args: argparse.Namespace) -> Body:
    """Seconds per task, drafting on and off, and what the prefix cache found."""
    rows = []
    for tasks in args.tasks:
        for turn in range(args.rounds):
            for mode in ("off", "auto") if turn % 2 else ("auto", "off"):
                names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")
                before = [metric(args, name) for name in names]
                numbers = range(len(rows) * 100, len(rows) * 100 + tasks)

                async def together(mode: str = mode, numbers: range = numbers) -> list[tuple[float, int]]:
                    return await asyncio.gather(*(agent_task(args, number, mode) for number in numbers))

                done = asyncio.run(together())
                asked, hit = (metric(args, name) - was for name, was in zip(names, before, strict=True))
                rows.append(
                    {"tasks": tasks, "mode": mode, "seconds_per_task": statistics.mean(each[0] for each in done),
                     "tokens_per_task": statistics.mean(each[1] for each in done), "prefix_hits": hit / asked}
                )  # fmt: skip
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    return {"rows": rows}


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
    while time.monotonic() < end:
        kind = rng.random()
        if kind < 0.1:
            answer = await post(Server(args.host, args.port), CHAT, rng.choice(BAD))
            log.append(("bad", None, answer))
        elif kind < 0.2:
            answer = await post(
                Server(args.host, args.port), CHAT, storm_body(texts, rng), leave_after=rng.uniform(0.0, 0.5)
            )
            log.append(("left", None, answer))
        else:
            body = storm_body(texts, rng)
            log.append(("asked", body, await post(Server(args.host, args.port), CHAT, body)))


async def replay(args: argparse.Namespace, log: list[Any]) -> list[Body]:
    """The completed requests again, one at a time: those whose text differs."""
    different = []
    for body, before in log:
        after = await post(Server(args.host, args.port), CHAT, body)
        if after.text != before.text or after.finish_reason != before.finish_reason:
            different.append({"body": body, "before": before.text, "after": after.text})
    return different


def resident(pid: int | None) -> float | None:
    """Megabytes of a process on this machine."""
    if pid is None:
        return None
    found = re.search(r"VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1000 if found else None


def storm(args: argparse.Namespace) -> Body:
    """Counts of everything, what differed in the replay, and what was left behind."""
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
    # choices of n > 1 are interleaved in a stream: their texts are compared one by one elsewhere
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
    parser.add_argument("what", choices=("sweep", "cost", "agent", "storm"))
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--per-category", type=int, default=10)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=13)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tasks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--replays", type=int, default=300)
    parser.add_argument("--pid", type=int, help="storm: the server's process, to see that its memory stays")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    result = {"sweep": sweep, "cost": cost, "agent": agent, "storm": storm}[args.what](args)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))
    if args.what == "sweep":
        print("\n".join(sweep_table(result)))
    else:
        print(json.dumps(result, indent=1))
    return 1 if args.what == "storm" and (result["different"] or any(result["left_behind"].values())) else 0


if __name__ == "__main__":
    sys.exit(main())
