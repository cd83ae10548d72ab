"""Where kernels run: a GPU, or Triton's interpreter on the CPU (TRITON_INTERPRET=1), which tests use.

Sizes of tiles over columns differ, as the interpreter pays for every program; no sum goes over columns of outputs, so
bits do not depend on them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch
import triton

from headstart import machine
from headstart.errors import ModelError, UsageError

Made = TypeVar("Made")


@dataclass(frozen=True)
class Device:
    """`columns`: outputs of a product's tile at most; `elements`: of an elementwise program; `wide`: products of
    bfloat16 are taken in float32, as the interpreter has no other; `graphs`: work can be recorded and replayed."""

    place: torch.device
    columns: int
    elements: int
    wide: bool
    graphs: bool = False

    @property
    def is_gpu(self) -> bool:
        return self.place.type == "cuda"

    def free_memory(self) -> int:
        """Bytes that are free where pools lie, those that torch has taken and does not use counted."""
        if not self.is_gpu:
            return machine.memory().available
        kept = torch.cuda.memory_reserved(self.place) - torch.cuda.memory_allocated(self.place)
        return int(torch.cuda.mem_get_info(self.place)[0]) + kept

    def record(self, work: Callable[[], Made]) -> tuple[Made, Callable[[], None]]:
        """What the work makes, and how to make it again in the same places. The work is done once before, so that all
        kernels are compiled and all tables are there."""
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = work()
        return made, graph.replay


def interpreted() -> bool:
    """Was Triton told, before it was imported, to interpret kernels on the CPU?"""
    return bool(triton.knobs.runtime.interpret)


def open_device() -> Device:
    """Raises UsageError where there is no GPU, and no interpreter is asked for."""
    if interpreted():
        from headstart.kernels.cuda.interpreter import make_exact

        make_exact()
        return Device(torch.device("cpu"), columns=4096, elements=1 << 16, wide=True)
    if not torch.cuda.is_available():
        raise UsageError(
            "the backend is cuda, but torch finds no CUDA GPU",
            "use --backend native; or TRITON_INTERPRET=1, which runs its kernels on the CPU, for tests",
        )
    return Device(torch.device("cuda"), columns=64, elements=1024, wide=False, graphs=True)


@contextmanager
def said(what: str) -> Iterator[None]:
    """Raises ModelError for memory that runs out while `what` is made."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = f"{torch.cuda.mem_get_info()[0] / 1e9:.1f} GB free" if torch.cuda.is_available() else "none free"
        hint = "use --quantization int4, a smaller --max-model-len or --kv-blocks, or a smaller model"
        raise ModelError(f"the GPU has no memory left for {what} ({free})", hint) from error
