"""Compiles every kernel launch for an absent GPU to a binary, without running it.

Triton specializes on the launch arguments as for the GPU: types, alignments, sizes that are 1 or multiples of 16. Must
be imported before Triton.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headstart.kernels.cuda import backend as cuda_backend, kernels
from headstart.kernels.cuda.device import CudaDevice

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SHARED = {"sm_80": 163 << 10, "sm_90": 227 << 10, "sm_100": 227 << 10, "gfx942": 64 << 10}
"""Maximum bytes of shared memory of a program."""
LIKE_A_GPU = CudaDevice(torch.device("cpu"), columns=64, elements=1024, wide=False)
"""The device that open_device returns for a GPU, with tensors on the CPU."""
_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass
class Compiled:
    """One binary: its constants, bytes of shared memory, registers of a thread, and bytes of local memory of a thread
    (stack and spills; -1: unknown)."""

    kernel: str
    about: str
    shared: int
    registers: int = -1
    local: int = -1
    assembly: str = ""


@dataclass
class Pass:
    """Launches of one pass of a program in order: (kernel, hash of its binary)."""

    program: Any
    rows: int
    launches: list[tuple[str, str]] = field(default_factory=list)


class Compiler:
    """Compiles each kernel once per types and constants. `found`: all binaries by hash. Since `begin`: `used`, hashes
    of launched binaries; `failed`, errors of kernels that do not compile; `passes`, the passes run."""

    def __init__(self, target: str) -> None:
        self.name, self.target = target, TARGETS[target]
        self.found: dict[str, Compiled] = {}
        self._caches: dict[int, Any] = {}
        self._before: dict[int, Any] = {}
        self.begin()

    def begin(self) -> None:
        self.used: set[str] = set()
        self.failed: dict[str, str] = {}
        self.passes: list[Pass] = []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Context in which models loaded on `cuda` launch with this compiler."""
        run, opened, known = JITFunction.run, cuda_backend.open_device, driver._active
        fake = SimpleNamespace(
            get_current_device=lambda: 0, get_current_stream=lambda device: 0, get_current_target=lambda: self.target
        )

        def compiled(kernel: Any, *args: Any, grid: Any, warmup: bool, **about: Any) -> None:
            name = kernel.fn.__name__
            try:
                made = run(kernel, *args, grid=grid, warmup=True, **about)
            except Exception as error:  # noqa: BLE001  reported, and the next kernel is compiled
                self.failed.setdefault(name, _error_chain(error))
                return
            self._take(name, made)
            if name == "pick":
                args[4].zero_()  # the sampled id must be a valid token

        JITFunction.run, cuda_backend.open_device = compiled, lambda: LIKE_A_GPU
        driver.set_active(fake)
        for function in _kernels():
            self._before[id(function)] = function.device_caches
            if id(function) not in self._caches:
                self._caches[id(function)] = type(function.device_caches)(function.create_binder)
            function.device_caches = self._caches[id(function)]
        try:
            yield
        finally:
            JITFunction.run, cuda_backend.open_device = run, opened
            driver._active = known
            for function in _kernels():
                function.device_caches = self._before[id(function)]

    def _take(self, name: str, made: Any) -> None:
        self.used.add(made.hash)
        if made.hash not in self.found:
            assembly = made.asm["ptx" if self.target.backend == "cuda" else "amdgcn"]
            names, constants = made.src.fn.arg_names, made.src.constants
            about = " ".join(f"{names[at[0]]}={value}" for at, value in constants.items() if names[at[0]].isupper())
            binary = Compiled(name, about, made.metadata.shared, assembly=assembly)
            if self.target.backend == "cuda":
                binary.registers, binary.local = _thread_memory(made.asm["cubin"])
            self.found[made.hash] = binary
        if self.passes:
            self.passes[-1].launches.append((name, made.hash))

    def watch(self, backend: Any) -> None:
        """Records the passes of this backend's programs separately. Launches between passes belong to none."""
        recorder = backend.recorder
        compute = recorder.compute

        def computed(program: Any, rows: Any, hidden: Any) -> Any:
            self.passes.append(Pass(program, rows.shape.rows))
            made = compute(program, rows, hidden)
            self.passes.append(Pass(None, 0))
            return made

        recorder.compute = computed


def _error_chain(error: BaseException) -> str:
    """Text of an error and its causes; the innermost cause has the details."""
    lines = []
    at: BaseException | None = error
    while at is not None:
        lines.append(f"{type(at).__name__}: {at}")
        at = at.__cause__
    return "\n  because of ".join(lines)


def _kernels() -> list[Any]:
    modules = [import_module(f"{kernels.__name__}.{each.name}") for each in iter_modules(kernels.__path__)]
    return [each for module in modules for each in vars(module).values() if isinstance(each, JITFunction)]


def _thread_memory(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of stack and local memory."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        said = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = (
        max(map(int, re.findall(rf"{word}:(\d+)", said)), default=-1) for word in ("REG", "STACK", "LOCAL")
    )
    return registers, stack + local
