"""The child process of `grammar_sandbox.CompileSandbox`: holds a vocabulary and forks for each constraint.

Each fork has limits of time, memory and stack. Its reply is small enough for one atomic write to the pipe.
"""

import ctypes
import json
import random
import signal
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from headstart import system
from headstart.errors import UsageError
from headstart.text._child import child_pipes
from headstart.text.grammar import GrammarCompiler
from headstart.text.grammar_sandbox import run_with_stack
from headstart.text.grammar_spec import GrammarSpec
from headstart.text.grammar_state import GrammarState

PATHS, STEPS = 4, 12
"""Number and length (tokens) of random texts that are tried. A constraint that fails on all of them is refused."""
MAX_MESSAGE = 2000  # characters of a message: a write of up to 4096 bytes to a pipe is atomic


def main() -> None:
    """Answer requests until the pipe is closed."""
    requests, replies = child_pipes()
    system.lower_priority()
    compiler = GrammarCompiler(*requests.recv())
    compiler.prepare()
    while True:
        try:
            kind, key = requests.recv()
        except EOFError:
            return
        if ended := system.run_in_fork(partial(_reply, replies, compiler, kind, key)):
            replies.send_bytes(json.dumps({"signal": ended}).encode())


def _reply(replies: Connection, compiler: GrammarCompiler, kind: Any, key: str) -> None:
    limits = compiler.limits
    system.limit_resources(limits.seconds, limits.wall_seconds, limits.address_space + limits.stack)
    replies.send_bytes(json.dumps(_compile(compiler, kind, key)).encode())


def _compile(compiler: GrammarCompiler, kind: Any, key: str) -> dict[str, Any]:
    try:
        before = _in_use()
        state = run_with_stack(compiler.limits.stack, lambda: compiler.start(GrammarSpec.of_key(kind, key)))
        num_bytes = _in_use() - before
        reason = run_with_stack(compiler.limits.walk_stack, lambda: _walk(state))
        if reason:
            raise UsageError(f"the {kind} constraint cannot be used: {reason}")
    except UsageError as error:
        return {"message": error.message[:MAX_MESSAGE], "hint": error.hint[:MAX_MESSAGE]}
    except (MemoryError, RecursionError):
        return {"signal": int(signal.SIGSEGV)}
    return {"bytes": max(num_bytes, 0)}


def _walk(start: GrammarState) -> str:
    """Try PATHS random texts from `start`. Returns an empty string if one has no error, else one of their errors."""
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
    """Bytes that malloc has allocated in this process; 0 without glibc's mallinfo2."""
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
