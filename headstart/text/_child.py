"""`ChildProcess`: a process of this package that works on untrusted input, and the pipes to it."""

import os
import subprocess
import sys
import weakref
from multiprocessing.connection import Connection

from headstart.errors import CapacityError


class ChildProcess:
    """Runs `main()` of a module of this package; it ends when its pipes are closed. Raises CapacityError if it cannot
    be started. `task`: for that error, as in "compiles constraints"."""

    def __init__(self, module: str, task: str) -> None:
        self.owner = os.getpid()  # a fork of this process must not share the pipes
        path = os.pathsep.join(filter(None, sys.path))
        environment = {**os.environ, "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
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


def child_pipes() -> tuple[Connection, Connection]:
    """In the child: the pipes of requests and replies. Its stdout goes to stderr from then on."""
    requests, replies = Connection(os.dup(0), writable=False), Connection(os.dup(1), readable=False)
    os.dup2(2, 1)
    return requests, replies


def _end(process: "subprocess.Popen[bytes]", owner: int) -> None:
    if owner == os.getpid():
        process.kill()
        process.wait()
