"""Processes of this package that work on untrusted input (`ChildProcess`), one caller at a time (`ChildQueue`)."""

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import TypeVar

from headstart.errors import BusyError, CapacityError
from headstart.system import child_environment

T = TypeVar("T")


class ChildProcess:
    """Runs `main()` of a module of this package; it ends when its pipes are closed. Raises CapacityError if it cannot
    be started. `task`: for that error, as in "compiles constraints"."""

    def __init__(self, module: str, task: str) -> None:
        self.owner = os.getpid()  # a fork of this process must not share the pipes
        environment = {**child_environment(), "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-c", f"from {module} import main; main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,  # messages of stack overflows
                env=environment,
                start_new_session=True,  # Ctrl-C must not end the child
            )
        except OSError as error:
            raise CapacityError(f"the process that {task} cannot be started: {error}") from error
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self.requests = Connection(os.dup(self._popen.stdin.fileno()), readable=False)
        self.replies = Connection(os.dup(self._popen.stdout.fileno()), writable=False)
        self._popen.stdin.close()
        self._popen.stdout.close()
        self._end = weakref.finalize(self, _end, self._popen, self.owner)

    def end(self) -> int:
        """Kill the process if it runs; returns its exit code."""
        self._end()
        return self._popen.wait()


class ChildQueue:
    """A child process that one caller at a time uses. It starts with the first request."""

    def __init__(self, module: str, task: str, max_waiting: int, waiting: str) -> None:
        """module, task: see ChildProcess. waiting: for the error above `max_waiting` callers, as in "constraints wait
        to be compiled"."""
        self._module, self._task = module, task
        self._max_waiting, self._waiting = max_waiting, waiting
        self._busy, self._count = threading.Lock(), threading.Lock()
        self._num_waiting = 0
        self._process: ChildProcess | None = None

    @contextmanager
    def reserve(self) -> Iterator[None]:
        """Wait for exclusive use. Raises BusyError if too many callers wait already."""
        with self._count:
            if self._num_waiting > self._max_waiting:
                raise BusyError(f"{self._max_waiting} {self._waiting}", "try again later")
            self._num_waiting += 1
        try:
            with self._busy:
                yield
        finally:
            with self._count:
                self._num_waiting -= 1

    def _ask(self, request: object, read_reply: Callable[[ChildProcess], T]) -> T:
        """Sends a request; returns the result of `read_reply`, which reads the child's reply. A child that has ended is
        started again once. Raises CapacityError if it ends again."""
        for _ in range(2):
            if self._process is None or self._process.owner != os.getpid():  # a fork starts a child of its own
                self._process = ChildProcess(self._module, self._task)
                with suppress(OSError):  # it has ended: the next line notices
                    self._prepare(self._process)
            process = self._process
            with suppress(EOFError, OSError):
                process.requests.send(request)
                return read_reply(process)
            self._process = None
            self._check_exit(process.end())
        raise CapacityError(f"the process that {self._task} ends at once", "check this machine's limits")

    def _prepare(self, process: ChildProcess) -> None:
        """Sends a new child the data that all requests share."""

    def _check_exit(self, code: int) -> None:
        """Raises an error if the exit code of an ended child means that the request exceeds a limit."""


def child_pipes() -> tuple[Connection, Connection]:
    """In the child: the pipes of requests and replies. Its stdout goes to stderr from then on."""
    requests, replies = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    return requests, replies


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.wait()
