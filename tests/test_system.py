"""headstart.system: locks, pipes, forks, process groups; the package without POSIX-only modules."""

import mmap
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support import PATIENCE
from tiny_models import write_tiny

from headstart import system

ROOT = Path(__file__).parents[1]


def test_lock_is_exclusive(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("w") as first, path.open("w") as second:
        assert system.try_lock(first.fileno())
        assert not system.try_lock(second.fileno())
    with path.open("w") as third:
        assert system.try_lock(third.fileno())


@pytest.mark.parametrize("words", [("-m", "queue"), ("-c", "import queue")])
def test_children_import_no_modules_of_the_working_directory(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "queue.py").write_text("raise SystemExit('the module of the working directory')")
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env=system.child_environment(), timeout=PATIENCE)
    assert done.returncode == 0


def test_pipe_without_a_reader_is_detected() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as stream:
        assert not system.has_no_reader(stream)
        os.close(reading)
        assert system.has_no_reader(stream)


def test_run_in_fork_returns_the_signal() -> None:
    assert system.run_in_fork(lambda: None) == 0
    assert system.run_in_fork(lambda: os.kill(os.getpid(), signal.SIGTERM)) == signal.SIGTERM


def test_fork_limits_time_and_memory() -> None:
    def spin() -> None:
        system.limit_resources(0.05, 600, 1 << 30)
        while True:
            pass

    def fill() -> None:
        system.limit_resources(60.0, 60, 1 << 26)
        try:
            mmap.mmap(-1, 1 << 27)  # not from free heap memory
        except OSError:
            os.kill(os.getpid(), signal.SIGTERM)

    begun = time.monotonic()
    assert system.run_in_fork(spin) in system.TIMEOUT_SIGNALS
    assert time.monotonic() - begun < 300, "limited by wall-clock time, not CPU time"
    assert system.run_in_fork(fill) == signal.SIGTERM


def test_process_group_is_ended() -> None:
    command = ["bash", "-c", "trap '' INT; sleep 100 & echo; wait"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as stream:
        stream.readline()
        assert system.end_process_group(process, kill=True)
        process.wait()
        assert not stream.read(), "sleep still runs and holds the pipe open"


WITHOUT = """
import sys

import asyncio, concurrent.futures, multiprocessing.connection, subprocess, tempfile  # these are the system's own
import gguf, jinja2, llguidance, numpy, prometheus_client, pydantic, rich.progress, safetensors, tokenizers
import uvicorn
import os, signal, types

for name in ("fcntl", "grp", "pwd", "readline", "resource", "termios", "tty", "pty", "uvloop"):
    sys.modules[name] = None
for name in ("fork", "killpg", "nice", "sched_getaffinity", "setsid", "sysconf", "uname", "O_NONBLOCK", "O_NOCTTY"):
    delattr(os, name)
for name in ("SIGHUP", "SIGALRM", "SIGPROF", "SIGXCPU", "SIGKILL", "setitimer", "alarm"):
    delattr(signal, name)
import select
del select.poll

before, sys.platform = sys.platform, "win32"
import headstart.system
sys.platform = before
headstart.system.sys = types.SimpleNamespace(platform="win32", stdin=sys.stdin)

from importlib import import_module
from pathlib import Path

root = Path(headstart.__file__).parent
names = [".".join(("headstart", *path.relative_to(root).with_suffix("").parts)) for path in root.rglob("*.py")]
skipped = ("headstart.kernels.cuda", "headstart.kernels.reference", "headstart.train", "headstart.__main__")
for name in sorted(names):
    if not name.startswith(skipped):  # torch
        import_module(name.removesuffix(".__init__"))

from headstart.cli import app

sys.exit(app.run(["generate", sys.argv[1], "--prompt", "Hi", "--max-tokens", "3"]))
"""


@pytest.mark.slow
def test_package_runs_without_posix_only_modules(tmp_path: Path) -> None:
    folder = write_tiny("llama", tmp_path / "model")
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(folder)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "3 tokens" in done.stderr


def test_process_that_ignores_sigint_is_killed() -> None:
    code = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        system.stop_process_group(process, 0.1)
        assert process.returncode == -signal.SIGKILL


def test_children_that_outlive_their_process_are_killed() -> None:
    child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print(flush=True); time.sleep(600)"
    code = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}]).wait()"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        system.stop_process_group(process)
        assert select.select([process.stdout], [], [], PATIENCE)[0]  # end of file: no child holds the pipe
