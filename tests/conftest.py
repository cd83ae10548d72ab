"""Puts `support` on the import path, and keeps the machine quiet: tests use one thread."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "kernels")]  # where `native_ops` is

if not Path("/dev/nvidia0").exists():  # Triton reads it when it is imported, by whoever is first
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What a background job ignores, or one under nohup, the programs that it starts would ignore too.
for ignored, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, handler)

settings.register_profile("headstart", deadline=None, derandomize=True, report_multiple_bugs=False)
settings.load_profile("headstart")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Tiny matrices gain nothing from threads, and waiting for each other costs a lot on a busy machine."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """gc.collect() does not look through what other tests left on the heap, a second each time in a long run."""
    gc.freeze()
    yield
    gc.unfreeze()
