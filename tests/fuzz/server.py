"""Fuzzes a real server process with all that anybody can send, and watches it from beside.

A fuzzer is a module of this folder with `requests(random) -> Iterator[(path, body)]`, or with `exchange(random, url)`,
which does what it likes to the server and returns (what it was, status, what is wrong). Every input is made from the
seed and its number alone: --only NAME --seed S --number N sends that one again.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tests.fuzz import monitor
from tests.fuzz.client import Answer, encoded, problem, send

FUZZERS = ("grammars", "wire")
THREADS = 4
SLOW_SECONDS = 60
SPAN_SECONDS = 0.1
SHOWN_BYTES = 400
SERVER = (
    "--threads", "1", "--max-num-seqs", "16", "--kv-blocks", "1024", "--max-model-len", "2048",
    "--request-timeout", "20",
)  # fmt: skip


@dataclass
class Tally:
    """Of one fuzzer. `failures`: number, what is wrong, the input's beginning."""

    statuses: Counter[str] = field(default_factory=Counter)
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    slowest: tuple[float, int] = (0.0, -1)
    spans: list[tuple[float, float, int]] = field(default_factory=list)  # begin, end and number of what took a while
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, number: int, status: str, wrong: str, shown: str, seconds: float) -> None:
        with self.lock:
            self.statuses[status] += 1
            self.slowest = max(self.slowest, (seconds, number))
            if seconds > SPAN_SECONDS:
                now = time.monotonic()
                self.spans.append((now - seconds, now, number))
            if not wrong and seconds > SLOW_SECONDS:
                wrong = f"took {seconds:.0f} s"
            if wrong:
                self.failures.append((number, wrong, shown))
                print(f"{number}: {wrong}\n    {shown}", file=sys.stderr, flush=True)


def one(name: str, seed: int, number: int, url: str) -> tuple[str, str, str, float]:
    """Send input `number`: status, what is wrong, the input's beginning, seconds."""
    module = importlib.import_module(f"tests.fuzz.{name}")
    rng = random.Random(f"{seed} {name} {number}")
    started = time.monotonic()
    if hasattr(module, "exchange"):
        shown, status, wrong = module.exchange(rng, url)
        return status, wrong, f"{name} {shown}", time.monotonic() - started
    path, body = next(iter(module.requests(rng)))
    data = encoded(body)
    answer: Answer = send(url, path, data)
    told = getattr(module, "problem", problem)(answer)
    shown = f"{name} {path} {len(data)} bytes: {data[:SHOWN_BYTES]!r}"
    return str(answer.status), told, shown, answer.seconds


def fuzz(name: str, seed: int, url: str, seconds: float, pipe: Connection) -> None:
    """The process of one fuzzer: some threads until the time is over; the tally goes back."""
    tally, numbers = Tally(), iter(range(10**9))
    end = time.monotonic() + seconds

    def client() -> None:
        while time.monotonic() < end:
            with tally.lock:
                number = next(numbers)
            status, wrong, shown, took = one(name, seed, number, url)
            tally.add(number, status, wrong, shown, took)
            if status == "0" and "refused" in wrong:
                return  # the server is gone

    threads = [threading.Thread(target=client) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send((dict(tally.statuses), tally.failures, tally.slowest, tally.spans))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--only", choices=FUZZERS, action="append", help="may be repeated")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="this input alone (with --only)")
    parser.add_argument("--url", help="a server that runs already; its memory is not watched")
    parser.add_argument("--json", action="store_true", help="the summary as one document")
    parser.add_argument("serve", nargs="*", help="other options for `headstart serve`, after --")


def run(arguments: argparse.Namespace) -> int:
    from process import running

    if arguments.url:
        return _with_server(arguments, arguments.url, 0, lambda: None)
    with running(*(arguments.serve or SERVER)) as server:
        code = _with_server(arguments, server.url, server.process.pid, server.process.poll)
        log = server.log.read_text("utf-8", "replace")
        if "Traceback" in log:
            print("the server's log has a traceback:\n" + log[log.index("Traceback") :][:4000], file=sys.stderr)
            code = 1
        return code


def _during(spans: list[tuple[float, float, int]], begin: float, end: float) -> list[int]:
    """Numbers of inputs that ended in or soon after that time: what the server was busy with."""
    return [number for started, ended, number in spans if started < end and begin < ended < end + 1]


def _with_server(arguments: argparse.Namespace, url: str, pid: int, poll: Callable[[], int | None]) -> int:
    names = tuple(arguments.only or FUZZERS)
    if arguments.number is not None:
        status, wrong, shown, seconds = one(names[0], arguments.seed, arguments.number, url)
        print(json.dumps({"input": shown, "status": status, "wrong": wrong, "seconds": round(seconds, 2)}, indent=1))
        return 1 if wrong else 0
    spawn = multiprocessing.get_context("spawn")  # the fuzzers must not hold the monitor's lock
    looking, eye = spawn.Pipe()
    watcher = spawn.Process(target=monitor.watch, args=(url, pid, eye), daemon=True)
    watcher.start()
    time.sleep(1)  # memory and latency before
    pipes = {}
    for name in names:
        pipes[name], end = spawn.Pipe()
        seconds = 60 * arguments.minutes
        spawn.Process(target=fuzz, args=(name, arguments.seed, url, seconds, end), daemon=True).start()
    tallies = {name: pipe.recv() for name, pipe in pipes.items()}
    time.sleep(3)  # what can be freed is freed
    looking.send("end")
    raw = looking.recv()
    found = monitor.summary(raw)
    found["slow"] = [
        {what: round(seconds, 2), **{name: _during(tally[3], end - seconds, end) for name, tally in tallies.items()}}
        for what, seconds, end in sorted(raw["slow"], key=lambda each: -float(each[1]))[:8]
    ]
    result: dict[str, Any] = {"seed": arguments.seed, "minutes": arguments.minutes, "alive": poll() is None}
    result["requests"] = sum(sum(tally[0].values()) for tally in tallies.values())
    result["fuzzers"] = {
        name: {"statuses": statuses, "failed": len(failures), "slowest_s_number": slowest}
        for name, (statuses, failures, slowest, _) in tallies.items()
    }
    result["monitor"] = found
    print(json.dumps(result, indent=None if arguments.json else 1))
    failed = any(each["failed"] for each in result["fuzzers"].values())
    return 1 if failed or found["num_wrong"] or not result["alive"] else 0
