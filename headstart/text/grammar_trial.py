"""Compiling a constraint in a process of its own first, which may run out of stack, memory or time and harm nobody.

The library cannot hand a compiled grammar from one process to another. So the other process says only whether it can
be done within the limits; then it is done again here, on twice the stack. The process (`_grammar_process.py`) is
started at the first trial, holds the vocabulary, and forks for each trial; it ends when its pipe is closed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from headstart import system
from headstart.errors import BusyError, CapacityError, UsageError
from headstart.text.grammar_limits import GrammarLimits
from headstart.text.grammar_spec import GrammarSpec
from headstart.text.grammar_vocabulary import Spelling

T = TypeVar("T")

_COMMAND = "from headstart.text._grammar_process import main; main()"
_stack_size = threading.Lock()


class TooSlowError(UsageError):
    """Compiling takes longer than it may."""


class Trial:
    """The process that tries constraints, for one vocabulary. One trial at a time."""

    def __init__(self, spelling: Callable[[], Spelling], vocab_size: int, limits: GrammarLimits) -> None:
        self._spelling, self._vocab_size, self._limits = spelling, vocab_size, limits
        self._turn, self._count = threading.Lock(), threading.Lock()
        self._num_waiting = 0
        self._process: _Process | None = None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait until no other constraint is tried. Raises BusyError when too many wait already."""
        with self._count:
            if self._num_waiting > self._limits.waiting:
                raise BusyError(f"{self._limits.waiting} constraints wait to be compiled", "try again later")
            self._num_waiting += 1
        try:
            with self._turn:
                yield
        finally:
            with self._count:
                self._num_waiting -= 1

    def run(self, spec: GrammarSpec) -> int:
        """Bytes that `spec` holds when compiled. Raises UsageError if it is wrong or costs too much, TooSlowError if
        that is time."""
        if not system.CAN_FORK:
            raise UsageError(
                f"the {spec.kind} constraint may be too complex, and this system has no way to try it first",
                "make it simpler",
            )
        for _ in range(2):  # a process that somebody else has ended is started again
            if self._process is None or self._process.owner != os.getpid():
                self._process = _Process((self._spelling(), self._vocab_size, self._limits))
            with suppress(EOFError, OSError):
                return _judged(spec, self._process.ask([spec.kind, spec.key]), self._limits)
            self._process = None
        raise CapacityError("the process that tries constraints ends at once", "look at this machine's limits")


class _Process:
    """One process and the pipes to it, which end it when nobody holds them any more."""

    def __init__(self, compiler: tuple[Spelling, int, GrammarLimits]) -> None:
        self.owner = os.getpid()  # a fork of this process must not share the pipes
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", _COMMAND],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # what a stack overflow says
                env=environment,
                start_new_session=True,  # Ctrl-C is for this process
            )
        except OSError as error:
            raise CapacityError(f"the process that tries constraints cannot be started: {error}") from error
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._questions = Connection(os.dup(self._popen.stdin.fileno()), readable=False)
        self._answers = Connection(os.dup(self._popen.stdout.fileno()), writable=False)
        self._popen.stdin.close()
        self._popen.stdout.close()
        weakref.finalize(self, _end, self._popen, self.owner)
        with suppress(OSError):  # it has ended: `ask` will find out
            self._questions.send(compiler)

    def ask(self, question: list[str]) -> dict[str, Any]:
        """Raises EOFError or OSError when the process has ended."""
        self._questions.send(question)
        answer: dict[str, Any] = json.loads(self._answers.recv_bytes())
        return answer


def _end(process: subprocess.Popen[bytes], owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.wait()


def _judged(spec: GrammarSpec, answer: dict[str, Any], limits: GrammarLimits) -> int:
    if message := answer.get("message"):
        raise UsageError(message, answer["hint"])
    if (number := answer.get("signal")) is not None:
        what, hint = f"the {spec.kind} constraint is too complex: to compile it takes", "make it simpler"
        if number in system.TIME_IS_UP:
            raise TooSlowError(f"{what} more than {limits.seconds:g} s", hint)
        raise UsageError(f"{what} too much memory or too deep a nesting", hint)
    num_bytes = int(answer["bytes"])
    if num_bytes > limits.compiled_bytes:
        size = f"{num_bytes / 2**20:.0f} MB, and {limits.compiled_bytes / 2**20:.0f} MB are allowed"
        raise UsageError(f"the {spec.kind} constraint is too large: compiled it has {size}", "make it smaller")
    return num_bytes


def on_stack(size: int, work: Callable[[], T]) -> T:
    """Do `work` in a thread with `size` bytes of stack, of which only what is used costs memory."""
    with ThreadPoolExecutor(1, "grammar") as pool:
        with _stack_size:  # a setting of all threads that start
            before = threading.stack_size(size)
            try:
                done = pool.submit(work)
            finally:
                threading.stack_size(before)
        return done.result()
