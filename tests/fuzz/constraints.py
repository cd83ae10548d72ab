"""Compiles what tests/fuzz/grammars.py makes and walks it, without a server: in forked workers, so that a crash has a
number. Checked: only user errors; whatever a mask allows is taken; going back leads to the same masks; a look ahead
changes nothing; what is called light is; time and memory."""

from __future__ import annotations

import argparse
import multiprocessing
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from headstart.errors import HeadstartError
from headstart.text.grammar import GrammarCompiler, GrammarSpec, GrammarState, ToolCalls
from headstart.text.grammar_limits import LIMITS, is_light
from tests.fuzz import grammars
from tests.fuzz.monitor import resident_mb

STEPS = 24
SLOW_STEP, SLOW_LIGHT = 1.0, 0.5
"""Seconds of processor time: of one mask or step, and of compiling what is called light."""
MORE_MB = 700
"""What a worker may grow by: what is kept, a compile's own memory, and the grammar at hand."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--number", type=int, help="this one alone")
    parser.add_argument("--tokenizer", choices=("tiny", "default"), default="default")


def run(arguments: argparse.Namespace) -> int:
    end = time.monotonic() + 60 * arguments.minutes
    number, failed, counts = arguments.number or 0, 0, Counter[str]()
    while time.monotonic() < end:
        ours, theirs = multiprocessing.get_context("spawn").Pipe()
        worker = multiprocessing.get_context("spawn").Process(
            target=_work, args=(theirs, arguments.tokenizer, arguments.seed, number, arguments.number, end), daemon=True
        )
        worker.start()
        theirs.close()
        for found in _received(ours):
            number = found[0] + 1
            counts[found[1]] += 1
            if found[2]:
                failed += 1
                print(f"{found[0]}: {found[2]}\n    {found[3]}", file=sys.stderr, flush=True)
        worker.join()
        if worker.exitcode:
            failed += 1
            print(f"{number}: the worker ended with {worker.exitcode}", file=sys.stderr, flush=True)
            number += 1
        if arguments.number is not None:
            break
    print(f"{sum(counts.values())} constraints: {dict(counts)}; {failed} failed")
    return 1 if failed else 0


def _received(pipe: Connection) -> Iterator[tuple[int, str, str, str]]:
    while True:
        try:
            yield pipe.recv()
        except EOFError:
            return


def _work(pipe: Connection, tokenizer: str, seed: int, start: int, only: int | None, end: float) -> None:
    compiler, before = compiler_of(tokenizer), 0.0
    number = start
    while time.monotonic() < end:
        rng = random.Random(f"{seed} constraints {number}")
        kind, value = grammars.constraint(rng)
        outcome, wrong = tried(compiler, kind, value, rng)
        before = before or resident_mb(_own())
        grown = resident_mb(_own()) - before
        if grown > MORE_MB and not wrong:
            wrong = f"{grown:.0f} MB more than at the start"
        pipe.send((number, outcome, wrong, f"{kind} {value!r}"[:400]))
        number += 1
        if only is not None or grown > MORE_MB:
            return


def _own() -> int:
    import os

    return os.getpid()


def compiler_of(tokenizer: str) -> GrammarCompiler:
    if tokenizer == "default":
        from headstart.formats import open_checkpoint
        from headstart.hub import cached_trunk

        path = cached_trunk()
        assert path is not None, "the default model is not in the cache"
        made = open_checkpoint(path).load_tokenizer()
    else:
        from headstart.text.tokenizer import Tokenizer
        from headstart.tools.tiny import tiny_tokenizer

        made = Tokenizer(tiny_tokenizer(300), eos_ids=[0, 2], bos_id=1)
    compiler = GrammarCompiler(made, made.vocab_size + 45, replace(LIMITS, seconds=3.0))
    compiler.prepare()
    return compiler


def tried(compiler: GrammarCompiler, kind: Any, value: Any, rng: random.Random) -> tuple[str, str]:
    """What became of it, and what is wrong with that (empty: nothing)."""
    try:
        spec = GrammarSpec(kind, ToolCalls(value) if kind == "tools" else value)
        light = is_light(kind, spec.plain, len(spec.key))
        begun = time.process_time()
        state = compiler.compile(spec)
        took = time.process_time() - begun
        if light and took > SLOW_LIGHT:
            return "slow", f"called light, but took {took:.2f} s"
        return "walked", walk(state, rng)
    except HeadstartError as error:
        text = str(error)
        wrong = f"an error of {len(text)} characters" if len(text) > 3000 else ""
        wrong = wrong or ("a panic: " + text if "panic" in text else "")
        return type(error).__name__, wrong
    except Exception as error:  # noqa: BLE001  what it is looking for
        return "failed", f"{type(error).__name__}: {str(error)[:500]}"


def walk(state: GrammarState, rng: random.Random) -> str:
    """Some steps, with looks ahead and going back. Returns what is wrong."""
    masks: list[np.ndarray[Any, Any]] = []
    begun = time.process_time()
    for step in range(STEPS):
        mask = state.mask().copy()
        masks.append(mask)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        if not len(allowed):
            return "" if state.error or state.accepting else f"step {step}: an empty mask without an error"
        if state.done:
            break
        for token in rng.sample(allowed.tolist(), min(2, len(allowed))):
            copy = state.copy()
            if not copy.advance(token) and not copy.error:
                return f"step {step}: allows token {token}, but does not take it"
        draft = [int(rng.choice(allowed)), rng.randrange(32 * len(mask))]
        if not (state.masks(draft)[0] == mask).all() or state.fitting(draft) > 2 or len(state.forced()) > 16:
            return f"step {step}: looking ahead changed it"
        if state.error or not state.advance(draft[0]):
            return "" if state.error else f"step {step}: does not take token {draft[0]} after looking ahead"
        took, begun = time.process_time() - begun, time.process_time()
        if took > SLOW_STEP:
            return f"step {step} took {took:.2f} s"
    back = rng.randrange(len(state) + 1)
    state.rollback(back)
    if len(state) < len(masks) and not (state.mask() == masks[len(state)]).all():
        return f"another mask {back} tokens back"
    return ""
