"""What only some operating systems have: locks of files, affinity, signals, terminals, forks with limits. Nobody else
asks which system this is. Where something is missing, what stands here does without it, and says so.

Linux is what it runs on; macOS and Windows are checked by types and by hiding what they lack, and were never tried.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    import asyncio
    import subprocess

WINDOWS = sys.platform == "win32"
CAN_FORK = not WINDOWS
RENAMES_OPEN_FILES = not WINDOWS

if sys.platform == "win32":
    HANG_UP: signal.Signals | None = None
    TIME_IS_UP: frozenset[int] = frozenset()
    """Signals that end who has used up its time."""
else:
    HANG_UP = signal.SIGHUP
    TIME_IS_UP = frozenset({signal.SIGPROF, signal.SIGXCPU, signal.SIGALRM})

ENDING = tuple(each for each in (signal.SIGINT, signal.SIGTERM, HANG_UP) if each is not None)
"""Signals that ask a command to end."""
_STATM = Path("/proc/self/statm")


def lock(handle: int) -> bool:
    """Lock an open file; True once it is ours. False when another process has it, and where there are no locks."""
    if sys.platform == "win32":
        return False
    import fcntl

    with suppress(OSError):  # a file system without them
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def taken(handle: int) -> bool:
    """Has another process locked an open file? If not, it is ours from now on, where there are locks."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without them
        return False
    return False


@contextmanager
def alone(handle: int) -> Iterator[None]:
    """While no other process has an open file so; where there are no locks, with whoever else comes."""
    if sys.platform == "win32":
        yield
        return
    import fcntl

    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(handle, fcntl.LOCK_UN)


def open_folder(path: Path) -> int | None:
    """A handle to lock a folder by; None on Windows, which opens none."""
    return None if WINDOWS else os.open(path, os.O_RDONLY)


def sync() -> None:
    """Have what was written reach the disk, where a system can be asked for that."""
    if sys.platform != "win32":
        os.sync()


def cpus() -> frozenset[int]:
    """CPUs that this process may run on; all where the system does not tell."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def keep_to(cpus: Iterable[int]) -> None:
    """Run on these CPUs alone, and so what is started from here; where a system knows no such thing, anywhere."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cpus)


def end_with_parent() -> None:
    """Have SIGTERM come when the process that has started this one is gone, however it ended. Linux alone."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # gone meanwhile
            os.kill(os.getpid(), signal.SIGTERM)


def has_terminal() -> bool:
    """Does this process belong to one?"""
    if sys.platform == "win32":
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def has_no_reader(stream: TextIO) -> bool:
    """Has the other end of a pipe been closed? False where nobody knows."""
    if sys.platform != "win32":
        with suppress(OSError, AttributeError):  # no file behind it
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def input_follows(seconds: float) -> bool:
    """Does stdin, a terminal, have more within that time? False on Windows, which waits for sockets only."""
    return not WINDOWS and bool(select.select([sys.stdin], [], [], seconds)[0])


@contextmanager
def edited_lines(history: Path, most: int) -> Iterator[None]:
    """Have `input` edit lines, where Python was built with readline; and know where a paste ends. `history`: a file of
    the user's own that keeps so many lines, for the arrow keys of the next time; where it cannot be written, none."""
    try:
        import readline
    except ImportError:
        yield
        return
    if sys.platform != "win32":
        readline.parse_and_bind("set enable-bracketed-paste on")
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(most)
    try:
        yield
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.write_history_file(history)


def on_signal(loop: asyncio.AbstractEventLoop, number: int, work: Callable[[], None]) -> None:
    """Have a signal do `work` on the loop."""
    try:
        loop.add_signal_handler(number, work)
    except NotImplementedError:  # Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(work))


def end_group(process: subprocess.Popen[bytes], *, kill: bool) -> bool:
    """Ask a process that has a session of its own, and those that it has started, to end, or kill them; False when
    there are none. On Windows the process alone."""
    try:
        if sys.platform == "win32":
            process.kill() if kill else process.terminate()
        else:
            os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGINT)
    except ProcessLookupError:
        return False
    return True


def reads_escapes(stream: TextIO) -> bool:
    """Is it a terminal that knows escape sequences? Of those on Windows the newer ones do."""
    known = "WT_SESSION" in os.environ if sys.platform == "win32" else os.environ.get("TERM", "dumb") != "dumb"
    return stream.isatty() and known


def be_nice(by: int) -> None:
    """Let others go first."""
    if sys.platform != "win32":
        os.nice(by)


def in_fork(work: Callable[[], None]) -> int:
    """Do `work` in a fork of this process; the signal that ended it, or 0. Only where CAN_FORK."""
    if sys.platform == "win32":
        raise NotImplementedError("Windows has no fork")
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return os.WTERMSIG(status)
    return signal.SIGABRT if status else 0


def limit(seconds: float, wall_seconds: int, more_bytes: int) -> None:
    """End this process after so much time of a processor, or of a clock; no core dumps, and no more than `more_bytes`
    of address space beyond what it has. Only where CAN_FORK."""
    if sys.platform == "win32":
        raise NotImplementedError("Windows has no such limits")
    import math
    import resource

    used = int(_STATM.read_text().split()[0]) * resource.getpagesize() if _STATM.exists() else 0
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, math.ceil(seconds) + 1)]
    if used:  # macOS does not tell how much it has
        limits.append((resource.RLIMIT_AS, used + more_bytes))
    for kind, most in limits:
        hard = resource.getrlimit(kind)[1]
        with suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(wall_seconds)
