"""The process behind `grammar_trial.Trial`: holds a vocabulary, and forks for each constraint that it tries.

The fork has limits of time, memory and stack, and dies of them alone. What it says fits one write to the pipe.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import signal
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from headstart import system
from headstart.errors import UsageError
from headstart.text.grammar import GrammarCompiler
from headstart.text.grammar_spec import GrammarSpec
from headstart.text.grammar_state import GrammarState
from headstart.text.grammar_trial import on_stack

PATHS, STEPS = 4, 12
"""A little of what the constraint allows is walked: what fails on every path is refused before it costs a request."""
SHOWN = 2000
"""Characters of a message: a write to a pipe is whole up to 4096 bytes."""


def main() -> None:
    """Answer questions until the pipe is closed."""
    questions, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # nothing else is an answer
    system.be_nice(5)
    compiler = GrammarCompiler(*questions.recv())
    compiler.prepare()
    while True:
        try:
            kind, key = questions.recv()
        except EOFError:
            return
        if ended := system.in_fork(partial(_answer, answers, compiler, kind, key)):
            answers.send_bytes(json.dumps({"signal": ended}).encode())


def _answer(answers: Connection, compiler: GrammarCompiler, kind: Any, key: str) -> None:
    limits = compiler.limits
    system.limit(limits.seconds, limits.wall_seconds, limits.address_space + limits.stack)
    answers.send_bytes(json.dumps(_tried(compiler, kind, key)).encode())


def _tried(compiler: GrammarCompiler, kind: Any, key: str) -> dict[str, Any]:
    try:
        before = _in_use()
        state = on_stack(compiler.limits.stack, lambda: compiler.start(GrammarSpec.of_key(kind, key)))
        num_bytes = _in_use() - before
        reason = on_stack(compiler.limits.walk_stack, lambda: _walk(state))
        if reason:
            raise UsageError(f"the {kind} constraint cannot be used: {reason}")
    except UsageError as error:
        return {"message": error.message[:SHOWN], "hint": error.hint[:SHOWN]}
    except (MemoryError, RecursionError):
        return {"signal": int(signal.SIGSEGV)}
    return {"bytes": max(num_bytes, 0)}


def _walk(start: GrammarState) -> str:
    """Why no path from `start` goes on, if it is so."""
    draw, reasons = random.Random(0), set[str]()
    for _ in range(PATHS):
        state = start.copy()
        for _ in range(STEPS):
            allowed = np.flatnonzero(np.unpackbits(state.mask().view(np.uint8), bitorder="little"))
            if state.done or not state.advance(int(draw.choice(allowed))):
                break
        state.masks(())
        if not state.error:
            return ""
        reasons.add(state.error)
    return reasons.pop()


def _in_use() -> int:
    """Bytes that the C library has handed out; 0 where it does not say."""
    try:
        counts = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return 0
    counts.restype = _Counts
    found = counts()
    return int(found.uordblks + found.hblkhd)


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
    )]  # fmt: skip
