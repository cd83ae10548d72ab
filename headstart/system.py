"""Differences between operating systems: file locks, CPU affinity, signals, terminals, forks with limits.

No other module asks for the operating system. The docstring of a function says what happens where its feature is
missing. headstart runs on Linux. Support of macOS and Windows is checked by types, and by tests that hide the features
that these systems lack; it was never tried there.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
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
    HANGUP: signal.Signals | None = None
    TIMEOUT_SIGNALS: frozenset[int] = frozenset()  # signals that end a process whose time limit is over
else:
    HANGUP = signal.SIGHUP
    TIMEOUT_SIGNALS = frozenset({signal.SIGPROF, signal.SIGXCPU, signal.SIGALRM})

TERMINATION_SIGNALS = tuple(each for each in (signal.SIGINT, signal.SIGTERM, HANGUP) if each is not None)
"""Signals that ask a command to end."""


class Terminated(KeyboardInterrupt):
    """A signal other than Ctrl-C has asked the command to end."""


_STATM = Path("/proc/self/statm")


def try_lock(handle: int) -> bool | None:
    """Lock an open file. False if another process has locked it, None if there are no locks."""
    if sys.platform == "win32":
        return None
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return None
    return True


@contextmanager
def exclusive_lock(handle: int) -> Iterator[None]:
    """Hold the lock of an open file, after waiting for it. Does nothing if there are no locks."""
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


def sync_disks() -> None:
    """Flush written files to disk. Does nothing on Windows."""
    if sys.platform != "win32":
        os.sync()


def cpus() -> frozenset[int]:
    """CPUs that this process may run on; all CPUs if the system does not report them."""
    if sys.platform == "linux":
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def set_affinity(cpus: Iterable[int]) -> None:
    """Bind this process and its children to these CPUs. Does nothing outside Linux."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, cpus)


def child_environment() -> dict[str, str]:
    """The environment of a Python child that imports modules from the places of this process. Else `python -m` and
    `python -c` would import those of the working directory first."""
    path = os.pathsep.join(each or str(Path.cwd()) for each in sys.path)
    return {**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def end_with_parent() -> None:
    """Send SIGTERM to this process when its parent ends. Does nothing outside Linux."""
    if sys.platform == "linux":
        import ctypes

        parent = os.getppid()
        ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:  # the parent ended before the call
            os.kill(os.getpid(), signal.SIGTERM)


def has_terminal() -> bool:
    """True if this process has a controlling terminal. False on Windows."""
    if sys.platform == "win32":
        return False
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def has_no_reader(stream: TextIO) -> bool:
    """True if the reader of a pipe has closed it. False if the system does not report it."""
    if sys.platform != "win32":
        with suppress(OSError, AttributeError):  # no file behind it
            poll = select.poll()
            poll.register(stream.fileno(), 0)
            return any(event & select.POLLERR for _, event in poll.poll(0))
    return False


def has_input(seconds: float) -> bool:
    """Waits for input on stdin, a terminal; True if some came in time. False on Windows, which cannot wait for it."""
    return not WINDOWS and bool(select.select([sys.stdin], [], [], seconds)[0])


@contextmanager
def line_editing(history: Path, max_lines: int) -> Iterator[None]:
    """Let `input` edit lines and recognize pasted text, if Python was built with readline. `history`: a private file
    that keeps `max_lines` lines for the arrow keys; errors of reading and writing it are ignored."""
    try:
        import readline
    except ImportError:
        yield
        return
    if sys.platform != "win32":
        readline.parse_and_bind("set enable-bracketed-paste on")
    with suppress(OSError):
        readline.read_history_file(history)
    readline.set_history_length(max_lines)
    try:
        with _signals_end_wait_for_key():
            yield
    finally:
        with suppress(OSError):
            history.parent.mkdir(parents=True, exist_ok=True)
            history.touch(mode=0o600)
            readline.write_history_file(history)


@contextmanager
def _signals_end_wait_for_key() -> Iterator[None]:
    """Run signal handlers while readline waits for a key. readline runs them only if a signal interrupts its wait. A
    signal just before the wait, or on another thread, does not interrupt it. A helper thread interrupts the wait after
    each signal. Does nothing on Windows."""
    if sys.platform == "win32":
        yield
        return
    (reader, writer), main = os.pipe(), threading.get_ident()
    os.set_blocking(writer, False)
    is_handled = True

    def interrupt() -> None:
        nonlocal is_handled
        while number := os.read(reader, 1):
            is_handled = is_handled and number[0] == signal.SIGURG
            while not is_handled:
                signal.pthread_kill(main, signal.SIGURG)
                time.sleep(0.02)

    def set_handled(number: int, frame: object) -> None:
        nonlocal is_handled
        is_handled = True

    # Python runs the handlers of all pending signals together: after SIGURG's handler none is pending
    handler_before = signal.signal(signal.SIGURG, set_handled)
    fd_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=interrupt, name="headstart-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd_before)
        os.close(writer)
        thread.join()
        signal.signal(signal.SIGURG, handler_before)
        os.close(reader)


def handle_signals(loop: "asyncio.AbstractEventLoop", end: Callable[[], None], renew: Callable[[], None]) -> None:
    """Of a server: SIGINT, SIGTERM and a closed terminal end it, any other SIGHUP renews it."""
    attached = HANGUP is not None and has_terminal() and signal.getsignal(HANGUP) is not signal.SIG_IGN
    for number in (signal.SIGINT, signal.SIGTERM):
        _add_signal_handler(loop, number, end)
    if HANGUP is not None:
        _add_signal_handler(loop, HANGUP, lambda: end() if attached and not has_terminal() else renew())


def _add_signal_handler(loop: "asyncio.AbstractEventLoop", number: int, work: Callable[[], None]) -> None:
    """Run `work` on the event loop when a signal comes."""
    try:
        loop.add_signal_handler(number, work)
    except NotImplementedError:  # Windows
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(work))


STOP_SECONDS = 20.0  # between an interrupt and the end of a process group


def end_process_group(process: "subprocess.Popen[bytes]", *, kill: bool) -> bool:
    """Interrupt or kill a process with a session of its own, and its children. False if there are none. On Windows
    only the process itself."""
    try:
        if sys.platform == "win32":
            process.kill() if kill else process.terminate()
        else:
            os.killpg(process.pid, signal.SIGKILL if kill else signal.SIGINT)
    except ProcessLookupError:
        return False
    return True


def free_port() -> int:
    """A TCP port of the loopback interface that no process has at the moment."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def describe_exit(code: int) -> str:
    """An exit code in words, after "ended"; negative: the signal."""
    if code >= 0:
        return f"with code {code}"
    with suppress(ValueError):
        return f"by {signal.Signals(-code).name}"
    return f"by signal {-code}"


def stop_process_group(process: "subprocess.Popen[bytes]", seconds: float = STOP_SECONDS) -> None:
    """Interrupt a process with a session of its own, and its children. Kill them after `seconds`, and children that are
    left when the process has ended."""
    import subprocess  # slow to import

    for kill in (False, True):
        if not end_process_group(process, kill=kill):
            break
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
    process.wait()


def supports_escapes(stream: TextIO) -> bool:
    """True if the stream is a terminal that interprets escape sequences. On Windows only newer terminals do."""
    known = "WT_SESSION" in os.environ if sys.platform == "win32" else os.environ.get("TERM", "dumb") != "dumb"
    return stream.isatty() and known


def lower_priority() -> None:
    """Lower the priority of this process. Does nothing on Windows."""
    if sys.platform != "win32":
        os.nice(5)


def run_in_fork(work: Callable[[], None]) -> int:
    """Run `work` in a fork of this process; returns the signal that ended it, or 0. Needs CAN_FORK."""
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


def limit_resources(seconds: float, wall_seconds: int, more_bytes: int) -> None:
    """Limit this process to `seconds` of CPU time, `wall_seconds` of time and `more_bytes` of additional address space,
    with no core dumps. Needs CAN_FORK."""
    if sys.platform == "win32":
        raise NotImplementedError("Windows has no such limits")
    import math
    import resource

    used = int(_STATM.read_text().split()[0]) * resource.getpagesize() if _STATM.exists() else 0
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_CPU, math.ceil(seconds) + 1)]
    if used:  # macOS does not report it
        limits.append((resource.RLIMIT_AS, used + more_bytes))
    for kind, value in limits:
        hard = resource.getrlimit(kind)[1]
        with suppress(ValueError, OSError):  # not every system has every limit
            resource.setrlimit(kind, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
    signal.setitimer(signal.ITIMER_PROF, seconds)
    signal.alarm(wall_seconds)


def memory_limits() -> Iterator[tuple[int, int]]:
    """(limit, use) in bytes of this process's address space and data, where `ulimit -v` or `-d` limits them."""
    if sys.platform == "win32" or not _STATM.exists():
        return
    import resource

    pages = _STATM.read_text().split()
    for kind, used in ((resource.RLIMIT_AS, pages[0]), (resource.RLIMIT_DATA, pages[5])):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            yield limit, int(used) * resource.getpagesize()
