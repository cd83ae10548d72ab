"""The process behind `grammar_trial.Trial`: holds a vocabulary, and forks for each constraint that it tries.

The fork has limits of time, memory and stack, and dies of them alone. What it says fits one write to the pipe.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import random
import resource
import signal
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from headstart.errors import UsageError
from headstart.text.grammar import GrammarCompiler
from headstart.text.grammar_limits import GrammarLimits
from headstart.text.grammar_spec import GrammarSpec
from headstart.text.grammar_state import GrammarState
from headstart.text.grammar_trial import on_stack

PATHS, STEPS = 4, 12
"""A little of what the constraint allows is walked: what fails on every path is refused before it costs a request."""
SHOWN = 2000
"""Characters of a message: a write to a pipe is whole up to 4096 bytes."""
STATM = Path("/proc/self/statm")


def main() -> None:
    """Answer questions until the pipe is closed."""
    questions, answers = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)  # nothing else is an answer
    os.nice(5)
    compiler = GrammarCompiler(*questions.recv())
    compiler.prepare()
    while True:
        try:
            kind, key = questions.recv()
        except EOFError:
            return
        child = os.fork()
        if child == 0:
            _limit(compiler.limits)
            answers.send_bytes(json.dumps(_tried(compiler, kind, key)).encode())
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            ended = os.WTERMSIG(status) if os.WIFSIGNALED(status) else signal.SIGABRT
            answers.send_bytes(json.dumps({"signal": int(ended)}).encode())


def _limit(limits: GrammarLimits) -> None:
    used = int(STATM.read_text().split()[0]) * resource.getpagesize() if STATM.exists() else 0
    for kind, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, math.ceil(limits.seconds) + 1),
        (resource.RLIMIT_AS, used + limits.address_space + limits.stack),
    ):
        hard = resource.getrlimit(kind)[1]
        with suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, limits.seconds)
    signal.alarm(limits.wall_seconds)


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
