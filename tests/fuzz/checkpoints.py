"""Mutated checkpoints: no file makes a command fail on its own, hang or fill memory, and no broken head is ALIVE.

A sound checkpoint of every family and every kind of drafter is changed in one place: tensors dropped, renamed, of
another shape or type, files cut, configs with values that nobody would write. Of each mutation it is known whether the
head can still work; `headstart inspect` must agree, and with --tools the other commands that read checkpoints must end
in a result or in one line, too.

python -m tests.fuzz checkpoints --count 2000 [--seed 1] [--number 17] [--tools]
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import signal
import sys
import tempfile
import time
import traceback
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

from headstart.cli.main import main
from headstart.cli.render import finish, print_error
from headstart.errors import HeadstartError, status_of
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions
from tests.fuzz.mutations import SIZES, Mutation, mutation_of, subjects

SECONDS, MEGABYTES = 60, 150
"""What one command may take over a checkpoint of a few kilobytes."""


@dataclass
class Outcome:
    """What a command did."""

    code: int
    seconds: float
    megabytes: float
    out: str
    err: str


class Hung(BaseException):
    """A command that took too long."""


def call(command: Callable[[], int]) -> Outcome:
    """One command, in this process."""
    out, err, begin = io.StringIO(), io.StringIO(), time.monotonic()

    def hung(number: int, frame: FrameType | None) -> None:
        raise Hung

    before = signal.signal(signal.SIGALRM, hung)
    signal.alarm(SECONDS)
    tracemalloc.start()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = command()
        peak = tracemalloc.get_traced_memory()[1]
    except Hung:
        code, peak = -1, 0
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        tracemalloc.stop()
    return Outcome(code, time.monotonic() - begin, peak / 1e6, out.getvalue(), err.getvalue())


def look(path: Path) -> int:
    """`headstart inspect PATH --json` without building the command line's tree of commands each time."""
    try:
        return finish(inspect.run(InspectOptions(model=str(path))), True)
    except HeadstartError as error:
        print_error(error.message, error.hint)
        return status_of(error).exit_code
    except Exception as error:  # noqa: BLE001  # as the process edge
        print(f"{type(error).__name__}: {error}\n{traceback.format_exc()}", file=sys.stderr)
        return 3


def commands(path: Path, out: Path) -> Iterator[list[str]]:
    """The other commands that read a checkpoint and load none."""
    for layout in ("xllm", "vllm-eagle", "speculators", "gguf"):
        yield ["export", str(path), "--to", layout, "-o", str(out / layout)]
    yield ["graft", str(path), "--strip", "-o", str(out / "strip")]
    yield ["plan", str(path), "--gpu", "h100", "--json"]
    yield ["launch", "vllm", str(path), "--gpus", "h100", "--dry-run"]
    target = out / "target"
    target.mkdir(parents=True, exist_ok=True)
    (target / "config.json").write_text(json.dumps({"model_type": "llama", **SIZES}))
    yield ["launch", "sglang", str(target), "--head", str(path), "--gpus", "h100", "--dry-run"]


def wrong(found: Outcome) -> str:
    """Why what a command did is not acceptable; empty where it is."""
    if found.code == -1:
        return f"hung for {SECONDS} s"
    if found.code not in (0, 1, 2):
        return f"exit {found.code}: {found.err.strip().splitlines()[:1]}"
    if found.megabytes > MEGABYTES:
        return f"{found.megabytes:.0f} MB"
    lines = found.err.strip().splitlines()
    return f"says nothing: {lines}" if found.code == 2 and not lines else ""


def try_out(mutation: Mutation, folder: Path, *, tools: bool = False) -> Iterator[str]:
    """What is wrong with what the commands make of it."""
    path = mutation.subject.write(folder / "model")
    if mutation.disturb:
        mutation.disturb(path)
    found = call(partial(look, path))
    if why := wrong(found):
        yield f"inspect: {why}"
    elif found.code != 2:
        verdict = json.loads(found.out, parse_constant=_refuse)["heads"]["verdict"]
        if mutation.breaks and verdict in ("alive", "undeclared"):
            yield f"inspect: {verdict}"
        if mutation.breaks is False and verdict != mutation.subject.verdict:
            yield f"inspect: {verdict}: {json.loads(found.out)['heads']['reason']}"
    elif mutation.breaks is False:
        yield f"inspect: {found.err.strip()}"
    for line in commands(path, folder / "out") if tools else ():
        if why := wrong(call(partial(main, line))):
            yield f"{' '.join(line[:2] + line[3:])}: {why}"


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON")


def failures(seed: int, numbers: range, *, tools: bool = False) -> Iterator[tuple[int, str, str]]:
    """(number, what was done, what is wrong)."""
    for number in numbers:
        mutation = mutation_of(seed, number)
        folder = Path(tempfile.mkdtemp(prefix="headstart-fuzz-"))
        try:
            for why in try_out(mutation, folder, tools=tools):
                yield number, f"{mutation.subject.name}: {mutation.what}", why
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="only this one")
    parser.add_argument("--tools", action="store_true", help="export, graft, plan and launch too")


def run(arguments: argparse.Namespace) -> int:
    """1 where anything failed."""
    numbers = range(arguments.count) if arguments.number is None else range(arguments.number, arguments.number + 1)
    begin, kinds, count = time.monotonic(), Counter[str](), 0
    for number, what, why in failures(arguments.seed, numbers, tools=arguments.tools):
        print(f"{number:>6}  {what}\n        {why}", flush=True)
        kinds[why.partition(":")[0]] += 1
        count += 1
    seconds = time.monotonic() - begin
    print(
        f"{len(numbers)} mutations of {len(subjects())} checkpoints, seed {arguments.seed}, "
        f"{seconds:.0f} s: {count} failures"
    )
    return 1 if count else 0
