"""Import paths, seeds, one torch thread, reruns of flaky tests, clearing of cached models between files."""

import gc
import os
import random
import signal
import socket
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import settings

from headstart.cli.main import GC_THRESHOLD

sys.path[:0] = [str(Path(__file__).parent), *(str(Path(__file__).parent / each) for each in ("kernels", "contract"))]

if not Path("/dev/nvidia0").exists():  # Triton reads it at its first import
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Child processes would inherit ignored signals of a background job or of nohup.
for ignored, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, handler)

os.fsync = lambda _: None  # type: ignore[assignment]  # files of tests need not survive a crash of the machine
gc.set_threshold(GC_THRESHOLD)
settings.register_profile("headstart", deadline=None, derandomize=True, report_multiple_bugs=False)
settings.load_profile("headstart")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fuzz", type=int, default=1, metavar="N", help="N times as many inputs of tests/fuzz")


@pytest.fixture
def fuzz(pytestconfig: pytest.Config) -> int:
    """Factor for the number of random inputs."""
    return int(pytestconfig.getoption("--fuzz"))


FLAKY_FOLDERS = {"server", "cli", "tools", "text", "e2e", "repo"}
"""Folders with tests of processes, sockets and clocks: a failed test runs again, as a loaded machine may disturb it.
Tests of exactness never run again."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Disables Nagle's algorithm for the connection to pytest-rerunfailures, which writes twice before it reads:
    each test that may run again would wait 40 ms."""
    if connection := getattr(session.config.failures_db, "sock", None):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.relative_to(Path(__file__).parent).parts[0] in FLAKY_FOLDERS:
            item.add_marker(pytest.mark.flaky(reruns=1))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seeds the generators, so that tests are independent of each other. Torch has one thread: tiny matrices gain
    nothing from threads, and threads wait for each other on a busy machine."""
    import numpy as np
    import torch

    torch._C.set_num_threads(1)
    torch.set_num_threads = lambda _: None

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish() -> None:
    freeze_objects()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Function, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path != item.path:
        clear_caches(item.module)
        freeze_objects()


def clear_caches(module: ModuleType) -> None:
    """Drops the models in the caches of a test file's functions: each has open files."""
    for function in vars(module).values():
        if getattr(function, "__module__", None) == module.__name__ and hasattr(function, "cache_clear"):
            function.cache_clear()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """With --durations, as in `make test`, writes the seconds of every test to build/test-durations.txt."""
    if terminalreporter.config.option.durations is None:
        return
    reports = [each for group in terminalreporter.stats.values() for each in group if hasattr(each, "duration")]
    reports.sort(key=lambda report: -report.duration)
    path = terminalreporter.config.rootpath / "build/test-durations.txt"
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(f"{each.duration:.2f}s {each.when:8} {each.nodeid}\n" for each in reports), "utf-8")


def freeze_objects() -> None:
    """Freezes all live objects between two files: later collections by `LLM.close` skip them, which saves seconds each
    time in a long run."""
    gc.collect()
    gc.freeze()
