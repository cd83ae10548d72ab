"""The device that kernels run on: a GPU, or Triton's interpreter on the CPU (TRITON_INTERPRET=1, for tests).

Tiles over output columns are larger in the interpreter, which pays per program. No sum runs over output columns, so the
bits are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from headstart import machine
from headstart.errors import ModelError, UsageError
from headstart.wording import option

Result = TypeVar("Result")


@dataclass(frozen=True)
class CudaDevice:
    """A device and the tile sizes that suit it."""

    torch_device: torch.device
    columns: int  # output columns of a product's tile, at most
    elements: int  # elements of an elementwise program
    wide: bool  # multiply bfloat16 in float32: the interpreter has no bfloat16 products
    graphs: bool = False  # work can be recorded as a CUDA graph

    def free_memory(self) -> int:
        """Free bytes for pools, including memory that torch has reserved but does not use."""
        if self.torch_device.type != "cuda":
            return machine.memory().available
        unused = torch.cuda.memory_reserved(self.torch_device) - torch.cuda.memory_allocated(self.torch_device)
        return int(torch.cuda.mem_get_info(self.torch_device)[0]) + unused

    def record(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Record work as a CUDA graph: (its result, a function that computes it again into the same buffers).

        The work runs once before, so that all kernels are compiled and all tables exist."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = work()
        return result, graph.replay


def is_interpreted() -> bool:
    """True if Triton interprets kernels on the CPU (TRITON_INTERPRET=1 at import)."""
    return bool(triton.knobs.runtime.interpret)


def open_device() -> CudaDevice:
    """The device. Raises UsageError without a GPU, unless the interpreter is on."""
    if is_interpreted():
        from headstart.kernels.cuda.interpreter import make_exact

        make_exact()
        return CudaDevice(torch.device("cpu"), columns=4096, elements=1 << 16, wide=True)
    if not torch.cuda.is_available():
        raise UsageError(
            "the backend is cuda, but torch finds no CUDA GPU",
            "use " + option("backend", "native") + "; or TRITON_INTERPRET=1: its kernels on the CPU, for tests",
        )
    return CudaDevice(torch.device("cuda"), columns=64, elements=1024, wide=False, graphs=True)


@contextmanager
def explain_out_of_memory(what: str) -> Iterator[None]:
    """Raise ModelError with a hint if the GPU runs out of memory while making `what`."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        free = f"{torch.cuda.mem_get_info()[0] / 1e9:.1f} GB free" if torch.cuda.is_available() else "none free"
        smaller = option("max_model_len") + " or " + option("kv_blocks") + ", or a smaller model"
        hint = "use " + option("quantization", "int4") + ", a smaller " + smaller
        raise ModelError(f"the GPU has no memory left for {what} ({free})", hint) from error


def copy_to_device(array: NDArray[Any], device: torch.device) -> Tensor:
    """Copy without waiting. Unpinned memory is staged at once, so the array may change afterwards."""
    host = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    return host.to(device, non_blocking=True, copy=True)


class HostCopy:
    """Asynchronous copy of a tensor's current values to the host. Work launched later may change the tensor."""

    def __init__(self, x: Tensor) -> None:
        self._event: torch.cuda.Event | None = None
        if x.is_cuda:
            self._host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self._host.copy_(x, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._host = x.clone()

    def numpy(self) -> NDArray[Any]:
        """The values; waits for the copy."""
        if self._event is not None:
            self._event.synchronize()
        return self._host.numpy()
