"""Replicas behind a router on this machine: throughput, prefix cache hits, cost of a failure, memory over time.

    python benchmarks/replicas.py speed
    python benchmarks/replicas.py prefixes
    python benchmarks/replicas.py kill
    python benchmarks/replicas.py soak --minutes 60

speed     Tokens/s of `--clients` concurrent clients with one engine of one thread, one behind the router, two behind
          it, and one engine of two threads, in turns.
prefixes  Agent conversations with a common system prompt and `--turns` turns each: share of prompt tokens found in the
          prefix cache, and time to first token, by policy of the router.
kill      Load of `--clients` clients (sampled, with schemas, tools and penalties) while an engine is killed or stopped,
          or all are renewed (`--by`); the next disturbance comes `--every` seconds after all engines answer again.
          Reported: failures, pauses of streams, recovery times, and whether texts, finish reasons and token counts
          equal those of a single engine.
soak      `--requests` short requests through the router over `--minutes`: memory of each process, hanging requests, and
          `--replays` repeated requests compared byte for byte.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any

from engines.headstart_server import HeadstartServer

from headstart.server.replicas.router import Policy, RouterProcess
from headstart.tools.client import Response, Server, get, post

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
POLICIES: tuple[Policy, ...] = ("round_robin", "cache_aware")
Body = dict[str, Any]
TOPICS = ("gardens", "rivers", "bridges", "bread", "maps", "clocks", "wool", "glass", "ships", "letters", "apples")


@contextmanager
def serving(*words: str) -> Iterator[tuple[Server, int]]:
    """Address and process id of `headstart serve WORDS`."""
    with HeadstartServer(words) as served:
        yield served.server, served.process.pid


async def metric(server: Server, *names: str) -> list[float]:
    text = (await get(server, "/metrics")).body
    values = (re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE) for name in names)
    return [sum(map(float, each)) for each in values]


def words_of(number: int, count: int) -> str:
    """Text of `count` words."""
    chance = random.Random(number)
    return " ".join(chance.choice(TOPICS) for _ in range(count))


def question(number: int, tokens: int, *, stream: bool = True) -> Body:
    """A request with a seed, so that its answer is deterministic."""
    text = f"Write about {TOPICS[number % len(TOPICS)]} and the number {number}."
    body: Body = {"messages": [{"role": "user", "content": text}], "max_tokens": tokens, "seed": number}
    body |= {"temperature": (0, 0.5, 1.0)[number % 3], "stream": stream}
    return body | ({"stream_options": {"include_usage": True}} if stream else {})


async def closed_loop(
    server: Server, bodies: list[Body], clients: int, seconds: float | None = None
) -> tuple[list[tuple[Body, Response, float]], float]:
    """Sends all bodies, or as many as fit into the time, `clients` at a time. Returns each with its answer and start
    time."""
    left, done, begun = iter(bodies), list[tuple[Body, Response, float]](), time.perf_counter()

    async def client() -> None:
        for body in left:
            now = time.perf_counter() - begun
            if seconds is not None and now > seconds:
                return
            try:
                answer = await post(server, CHAT, body)
            except OSError as error:
                answer = Response(body=str(error))
            done.append((body, answer, now))

    await asyncio.gather(*(client() for _ in range(clients)))
    return done, time.perf_counter() - begun


SETTINGS = {
    "one engine, 1 thread": ("--threads", "1"),
    "router, one engine, 1 thread": ("--replicas", "1", "--threads", "1"),
    "router, two engines, 1 thread each": ("--replicas", "2", "--threads", "1"),
    "one engine, 2 threads": ("--threads", "2"),
}


def speed(args: argparse.Namespace) -> Body:
    rows: dict[str, list[float]] = {name: [] for name in SETTINGS}
    for turn in range(args.rounds):
        for name, words in SETTINGS.items():
            bodies = [question(1000 * turn + each, args.max_tokens) for each in range(args.count)]
            with serving(*words, "--no-shared-lookup") as (server, _):
                asyncio.run(closed_loop(server, bodies[: 2 * args.clients], args.clients))  # warm-up
                answers, seconds = asyncio.run(closed_loop(server, bodies, args.clients))
            failed = [answer for _, answer, _ in answers if answer.status != 200 or answer.broken]
            if failed:
                sys.exit(f"{name}: {failed[0].status} {failed[0].body[:300]}")
            rows[name].append(sum(answer.usage["completion_tokens"] for _, answer, _ in answers) / seconds)
            print_result({"setting": name, "tokens_per_s": rows[name][-1]})
    return {"clients": args.clients, "tokens_per_s": {name: statistics.median(each) for name, each in rows.items()}}


@asynccontextmanager
async def routed(engines: list[Server], policy: Policy, port: int) -> AsyncIterator[Server]:
    """Runs a router in front of engines."""
    router = RouterProcess("127.0.0.1", port, port + 1, policy=policy)
    await router.start([str(each) for each in engines])
    try:
        yield Server.at(router.url)
    finally:
        assert router.process is not None
        router.process.terminate()
        await router.process.wait()


async def conversation(args: argparse.Namespace, server: Server, number: int, tag: str) -> list[float]:
    """Time to first token of each turn."""
    system = f"{tag}. You are an agent with tools. {words_of(0, args.system)}"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"Task {number}: begin."}]
    first = []
    for turn in range(args.turns):
        body = {"messages": messages, "max_tokens": 24, "temperature": 0, "stream": True, "ignore_eos": True}
        answer = await post(server, CHAT, body)
        if answer.status != 200 or answer.broken:
            sys.exit(f"turn {turn}: {answer.status} {answer.body[:300]}")
        first.append(answer.first)
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"Result {turn}: {words_of(100 * number + turn, args.result)}"},
        ]
    return first


def prefixes(args: argparse.Namespace) -> Body:
    """Each policy with fresh engines, in turns. One engine alone gives the upper bound."""
    rows: dict[str, list[tuple[float, float, float]]] = {}
    names = ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")

    async def measured(engines: list[Server], server: Server, tag: str) -> tuple[float, float, float]:
        begun = time.perf_counter()
        each = (conversation(args, server, number, tag) for number in range(args.conversations))
        first = [seconds for times in await asyncio.gather(*each) for seconds in times]
        passed = time.perf_counter() - begun
        asked, hit = map(sum, zip(*[await metric(engine, *names) for engine in engines], strict=True))
        return hit / asked, statistics.median(first), passed

    async def behind(policy: Policy, engines: list[Server], tag: str) -> tuple[float, float, float]:
        async with routed(engines, policy, args.port) as server:
            return await measured(engines, server, tag)

    for turn in range(args.rounds):
        for policy in POLICIES:
            with serving("--threads", "1") as (one, _), serving("--threads", "1") as (two, _):
                rows.setdefault(policy, []).append(asyncio.run(behind(policy, [one, two], f"{policy} {turn}")))
            print_result({"policy": policy, "found": rows[policy][-1]})
        with serving("--threads", "1") as (one, _):
            rows.setdefault("one engine", []).append(asyncio.run(measured([one], one, f"one {turn}")))
        print_result({"policy": "one engine", "found": rows["one engine"][-1]})
    keys = ("prefix_hit_share", "ttft_s", "seconds")
    middle = {
        name: dict(zip(keys, map(statistics.median, zip(*each, strict=True)), strict=True))
        for name, each in rows.items()
    }
    return {"conversations": args.conversations, "turns": args.turns, "policies": middle}


def outcome(answer: Response) -> str:
    """Outcome of a request in one word."""
    if answer.status == 200:
        return "cut" if answer.broken or not answer.finish_reason else "finished"
    return str(answer.status) if answer.status > 0 else "no answer"


async def replicas_of(server: Server) -> list[Body]:
    try:
        found: list[Body] = json.loads((await get(server, "/replicas")).body)["replicas"]
    except (OSError, ValueError, KeyError):
        return []
    return found


TOOL = {"type": "function", "function": {"name": "note", "parameters": {
    "type": "object", "properties": {"title": {"type": "string", "maxLength": 60}, "pages": {"type": "integer"}},
    "required": ["title", "pages"], "additionalProperties": False,
}}}  # fmt: skip
SCHEMA = {"type": "json_schema", "json_schema": {"name": "note", "schema": TOOL["function"]["parameters"]}}
EXTRAS: tuple[Body, ...] = (
    {}, {"response_format": SCHEMA}, {"tools": [TOOL], "tool_choice": "required"},
    {"repetition_penalty": 1.2, "stop": "zz"},
)  # fmt: skip


def long_question(number: int) -> Body:
    """A sampled request with schemas, tools or penalties; every fifth is not streamed."""
    body = question(number, 16 + 8 * (number % 24), stream=number % 5 > 0) | EXTRAS[number % len(EXTRAS)]
    return body | {"temperature": (0.6, 0.8, 1.0)[number % 3]}


class Disturber:
    """Kills, stops or renews engines for `--seconds`. Before each disturbance it waits until all engines answer, then
    `--every` seconds: faster disturbances would leave no engine."""

    def __init__(self, server: Server, supervisor: int, args: argparse.Namespace) -> None:
        self._server, self._supervisor, self._args = server, supervisor, args
        self.times: list[float] = []  # time.perf_counter() of each disturbance
        self.recoveries: list[float] = []  # seconds from each disturbance until all engines answer

    async def run(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(self._args.seconds):
                for turn in range(10**6):
                    await asyncio.sleep(self._args.every)
                    await self._disturb(turn)

    async def _disturb(self, turn: int) -> None:
        """Disturbs the next engine, or all; returns when all answer. A stopped engine is continued after `--every`
        seconds."""
        pids = [each["pid"] for each in await replicas_of(self._server)]
        pid = pids[turn % len(pids)]
        self.times.append(time.perf_counter())
        match self._args.by:
            case "kill":
                os.kill(pid, signal.SIGKILL)
                await self.wait_until_all_answer({pid})
            case "stop":
                os.kill(pid, signal.SIGSTOP)
                try:
                    await asyncio.sleep(self._args.every)
                finally:
                    with suppress(ProcessLookupError):  # the supervisor has killed it
                        os.kill(pid, signal.SIGCONT)
                await self.wait_until_all_answer(set())
            case "renew":
                os.kill(self._supervisor, signal.SIGHUP)
                await self.wait_until_all_answer(set(pids))
        self.recoveries.append(time.perf_counter() - self.times[-1])
        print_result({"disturbances": len(self.times), "recovered_after_s": round(self.recoveries[-1], 1)})

    async def wait_until_all_answer(self, gone: set[int]) -> None:
        """Waits until all engines answer and none is a process of `gone`."""
        while True:
            found = await replicas_of(self._server)
            states = [(each["state"], each["running"] is None, each["pid"] in gone) for each in found]
            if found and set(states) == {("ready", False, False)}:
                return
            await asyncio.sleep(0.2)


def pauses(streams: list[tuple[float, Response]], times: list[float], count: int) -> list[float]:
    """The `count` longest gaps between two pieces of a stream with a disturbance between them. streams: (start time,
    answer)."""
    found = []
    for begun, answer in streams:
        for disturbed in times:
            before = [begun + when for when, _ in answer.pieces if begun + when <= disturbed]
            after = [begun + when for when, _ in answer.pieces if begun + when > disturbed]
            found += [after[0] - before[-1]] if before and after else []
    return sorted(found)[-count:] if count else []


def percentiles(ordered: list[float]) -> dict[str, float]:
    return {name: ordered[int(share * len(ordered))] for name, share in (("p50", 0.5), ("p99", 0.99)) if ordered}


def text_and_end(answer: Response) -> tuple[str, str, int]:
    return answer.text, answer.finish_reason, answer.usage.get("completion_tokens", -1)


def kill(args: argparse.Namespace) -> Body:
    async def storm(server: Server, supervisor: int) -> Body:
        disturber, begun = Disturber(server, supervisor, args), time.perf_counter()
        disturbing = asyncio.create_task(disturber.run())
        bodies = [long_question(number) for number in range(10**5)]
        answers, _ = await closed_loop(server, bodies, args.clients, args.seconds)
        await disturbing
        await disturber.wait_until_all_answer(set())
        engines = [Server.at(each["url"]) for each in await replicas_of(server)]
        accepted = [await metric(each, "vllm:spec_decode_num_accepted_tokens_total") for each in engines]
        names = [f'headstart:resumed_requests_total{{why="{why}"}}' for why in ("ended", "silent", "renewed")]
        text = (await get(engines[0], "/metrics")).body
        resumed = [float(text.partition(f"{name} ")[2].split()[0]) for name in names]
        streams = [(begun + when, answer) for body, answer, when in answers if body["stream"]]
        times = pauses(streams, disturber.times, int(sum(resumed)))
        failed = [answer.body[:300] or outcome(answer) for _, answer, _ in answers if outcome(answer) != "finished"]
        return {
            "answers": answers, "disturbances": len(disturber.times),
            "resumed": dict(zip(("ended", "silent", "renewed"), resumed, strict=True)),
            "ended": dict(Counter(outcome(answer) for _, answer, _ in answers)), "streams": len(streams),
            "pause_s": percentiles(times), "recovery_s": percentiles(sorted(disturber.recoveries)),
            "failed": dict(Counter(failed)),
            "accepted_drafts": sum(map(sum, accepted)),  # of the engines alive at the end
        }  # fmt: skip

    words = ("--replicas", "2", "--threads", "1", "--no-shared-lookup", "--depth", args.depth)
    with serving(*words) as (server, supervisor):
        found = asyncio.run(storm(server, supervisor))
    finished = [
        (body, text_and_end(answer)) for body, answer, _ in found.pop("answers") if outcome(answer) == "finished"
    ]
    with serving("--threads", "2") as (server, _):
        again, _ = asyncio.run(closed_loop(server, [body for body, _ in finished], args.clients))
    expected = {body["seed"]: text_and_end(answer) for body, answer, _ in again if outcome(answer) == "finished"}
    wrong = [body["seed"] for body, text in finished if expected.get(body["seed"]) != text]
    return {
        "by": args.by,
        "clients": args.clients,
        **found,
        "compared": len(finished),
        "wrong": len(wrong),
        "seeds": wrong[:10],
    }


def resident(pid: int) -> float:
    """Proportional set size of a process in MB; nan if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return float("nan")
    return int(re.findall(r"^Pss:\s+(\d+)", text, re.MULTILINE)[0]) / 1024


def children_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def short(number: int) -> tuple[str, Body]:
    """A request of a few tokens: chat or completion, greedy or sampled."""
    common = {"max_tokens": 1 + number % 4, "seed": number, "temperature": (0, 1.0)[number % 2]}
    text = f"{TOPICS[number % len(TOPICS)]} {number % 997}"
    if number % 4:
        return TEXT, {"prompt": text, **common}
    return CHAT, {"messages": [{"role": "user", "content": text}], **common}


async def paced(server: Server, args: argparse.Namespace, ask: Callable[[int], Any]) -> Body:
    """Sends all requests at equal intervals, or as soon after as a client is free."""
    numbers, begun, pause = iter(range(args.requests)), time.perf_counter(), 60 * args.minutes / args.requests
    ended, kept, times, behind = Counter[str](), dict[int, str](), list[float](), 0.0

    async def client() -> None:
        nonlocal behind
        for number in numbers:
            early = number * pause - (time.perf_counter() - begun)
            await asyncio.sleep(max(early, 0.0))
            behind = max(behind, -early)
            try:
                answer = await ask(number)
            except OSError as error:
                answer = Response(body=str(error))
            ended[outcome(answer)] += 1
            times.append(answer.seconds)
            if number % max(args.requests // args.replays, 1) == 0 and outcome(answer) == "finished":
                kept[number] = answer.text

    async def watch() -> None:
        while True:
            row = {"seconds": round(time.perf_counter() - begun), "ended": dict(ended), "behind_s": round(behind, 2)}
            memory.append(await memory_of(server, args.supervisor))
            print_result(row | {"memory_mb": memory[-1]})
            await asyncio.sleep(60 * args.minutes / 20)

    memory: list[dict[str, float]] = []
    watching = asyncio.create_task(watch())
    await asyncio.gather(*(client() for _ in range(args.clients)))
    seconds = time.perf_counter() - begun
    watching.cancel()
    memory.append(await memory_of(server, args.supervisor))
    times.sort()
    return {
        "requests": sum(ended.values()), "seconds": round(seconds, 1), "behind_s": round(behind, 2),
        "ended": dict(ended), "slowest_s": round(times[-1], 2), "p99_s": round(times[int(0.99 * len(times))], 3),
        "memory_mb": {"start": memory[0], "middle": memory[len(memory) // 2], "end": memory[-1]}, "kept": kept,
    }  # fmt: skip


async def memory_of(server: Server, supervisor: int) -> dict[str, float]:
    """Memory by name of the process; a child that is no engine is the router."""
    engines = {each["pid"]: f"engine {each['number']}" for each in await replicas_of(server)}
    pids = [supervisor, *children_of(supervisor)]
    names = {pid: "supervisor" if pid == supervisor else engines.get(pid, f"router {pid}") for pid in pids}
    return {names[pid]: round(resident(pid), 1) for pid in pids}


def soak(args: argparse.Namespace) -> Body:
    busy = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm_router_running_requests")

    async def run(server: Server) -> Body:
        async def ask(number: int) -> Response:
            path, body = short(number)
            return await post(server, path, body)

        found = await paced(server, args, ask)
        await asyncio.sleep(2)
        engine = Server.at(
            (await replicas_of(server))[0]["url"]
        )  # not through the router, which would count this request
        hanging, kept = sum(await metric(engine, *busy)), found.pop("kept")
        wrong = [number for number, text in kept.items() if (await ask(number)).text != text]
        return found | {"hanging": hanging, "replays": len(kept), "wrong": len(wrong), "numbers": wrong[:10]}

    with serving("--replicas", "2", "--threads", "1") as (server, args.supervisor):
        return asyncio.run(run(server))


def print_result(row: Body) -> None:
    print(json.dumps(row), file=sys.stderr, flush=True)


WAYS: dict[str, Callable[[argparse.Namespace], Body]] = {
    "speed": speed, "prefixes": prefixes, "kill": kill, "soak": soak,
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument("--rounds", type=int, default=3, help="speed, prefixes")
    parser.add_argument("--clients", type=int, help="default: 8 for speed, 64 for kill, 16 for soak")
    parser.add_argument("--count", type=int, default=96, help="speed: requests per round")
    parser.add_argument("--max-tokens", type=int, default=64, help="speed")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--system", type=int, default=200, help="prefixes: words of the common system prompt")
    parser.add_argument("--result", type=int, default=100, help="prefixes: words added by each turn")
    parser.add_argument(
        "--port", type=int, default=18600, help="prefixes: port of the router; the next one is for its metrics"
    )
    parser.add_argument("--seconds", type=float, default=60, help="kill: duration of the load")
    parser.add_argument(
        "--by", choices=("kill", "stop", "renew"), default="kill", help="kill: SIGKILL, SIGSTOP, SIGHUP"
    )
    parser.add_argument("--depth", default="auto", help="kill: tokens drafted per pass")
    parser.add_argument("--every", type=float, default=5, help="kill: seconds between disturbances")
    parser.add_argument("--requests", type=int, default=100_000, help="soak")
    parser.add_argument("--minutes", type=float, default=60, help="soak: duration")
    parser.add_argument("--replays", type=int, default=1000, help="soak")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    args = parser.parse_args()
    args.clients = args.clients or {"speed": 8, "kill": 64, "soak": 16}.get(args.way, 0)
    result = WAYS[args.way](args)
    print(json.dumps(result, indent=1))
    if args.out:
        args.out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
