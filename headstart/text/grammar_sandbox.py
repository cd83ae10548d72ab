"""Compiles a constraint in a separate process first, which may run out of stack, memory or time without harm.

llguidance cannot move a compiled grammar between processes. The child process (`_sandbox_process.py`) only reports
whether the limits suffice; then the constraint is compiled again in this process, with twice the stack. The child is
started with the first constraint, holds the vocabulary, forks for each constraint, and ends when its pipe is closed.
"""

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headstart import system
from headstart.errors import UsageError
from headstart.text._child import ChildProcess, ChildQueue
from headstart.text.grammar_limits import GrammarLimits
from headstart.text.grammar_spec import GrammarSpec
from headstart.text.grammar_vocabulary import TokenTable

T = TypeVar("T")

_MODULE = "headstart.text._sandbox_process"
_stack_size = threading.Lock()  # guards threading.stack_size, a setting of the whole process


class TooSlowError(UsageError):
    """Compiling a constraint exceeded the time limit."""


class CompileSandbox(ChildQueue):
    """Compiles constraints over one vocabulary in a process with limits, one at a time."""

    def __init__(self, table: Callable[[], TokenTable], vocab_size: int, limits: GrammarLimits) -> None:
        super().__init__(_MODULE, "compiles constraints", limits.waiting, "constraints wait to be compiled")
        self._table, self._vocab_size, self._limits = table, vocab_size, limits

    def run(self, spec: GrammarSpec) -> int:
        """Compile a constraint in the sandbox; returns the bytes of the compiled constraint. Raises UsageError if it is
        invalid or too expensive, TooSlowError above the time limit, CapacityError if the process does not start."""
        if not system.CAN_FORK:
            what = f"the {spec.kind} constraint may be too complex, and this system cannot limit its compilation"
            raise UsageError(what, "make it simpler")
        return self._ask([spec.kind, spec.key], lambda process: _read_reply(spec, process, self._limits))

    def _prepare(self, process: ChildProcess) -> None:
        process.requests.send((self._table(), self._vocab_size, self._limits))


def _read_reply(spec: GrammarSpec, process: ChildProcess, limits: GrammarLimits) -> int:
    """Bytes of the compiled constraint. Raises UsageError for one that is invalid or beyond the limits."""
    reply = json.loads(process.replies.recv_bytes())
    if message := reply.get("message"):
        raise UsageError(message, reply["hint"])
    if (number := reply.get("signal")) is not None:
        what, hint = f"the {spec.kind} constraint is too complex: compiling it takes", "make it simpler"
        if number in system.TIMEOUT_SIGNALS:
            raise TooSlowError(f"{what} more than {limits.seconds:g} s", hint)
        raise UsageError(f"{what} too much memory or too deep a nesting", hint)
    num_bytes = int(reply["bytes"])
    if num_bytes > limits.compiled_bytes:
        size = f"{num_bytes / 2**20:.0f} MB, and {limits.compiled_bytes / 2**20:.0f} MB are allowed"
        raise UsageError(f"the {spec.kind} constraint is too large: it takes {size} compiled", "make it smaller")
    return num_bytes


def run_with_stack(size: int, work: Callable[[], T]) -> T:
    """Run `work` in a thread with `size` bytes of stack; unused stack takes no memory."""
    with ThreadPoolExecutor(1, "grammar") as pool:
        with _stack_size:  # a setting of all new threads
            before = threading.stack_size(size)
            try:
                done = pool.submit(work)
            finally:
                threading.stack_size(before)
        return done.result()
