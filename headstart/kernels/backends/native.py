"""Compiled kernels on the CPU, exact to the bit: the default. No torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from headstart import machine
from headstart.config import EngineConfig
from headstart.errors import UsageError
from headstart.kernels.backend import BackendKind

if TYPE_CHECKING:
    from headstart.kernels.native.backend import NativeBackend

EXTENSION = "headstart.kernels.native._native"
MOST_THREADS_PER_CORE, FEW_THREADS = 8, 16
"""More threads than so many for each core, and than these in all, are a mistake."""


def limits(config: EngineConfig) -> tuple[str, str] | None:
    if importlib.util.find_spec(EXTENSION) is None:
        return "headstart was installed without a C++ compiler", "install one, then pip install headstart again"
    if config.device == "cuda":
        return "the device is cuda", "use --device cpu"
    if config.dtype != "float32":
        return f"--dtype {config.dtype} is the reference backend's", "leave --dtype out"
    if config.block_size % 16:
        return f"--block-size {config.block_size} is not a multiple of 16", "use --block-size 16"
    return None


def open_native(config: EngineConfig, files: tuple[Path, ...]) -> NativeBackend:
    from headstart.kernels.native.backend import NativeBackend
    from headstart.kernels.native.packed_cache import PackedCache, key_of
    from headstart.kernels.native.placement import decide

    cache = PackedCache.open(key_of(files, config.quantization) if files else None)
    threads, cores = config.threads or machine.threads().usable, machine.threads().cores
    if threads > max(MOST_THREADS_PER_CORE * cores, FEW_THREADS):
        what = f"--threads is {threads}, but this machine has {cores} cores: they would only wait for each other"
        raise UsageError(what, "leave --threads out: it is what affinity and quota allow")
    return NativeBackend(
        threads=threads,
        quantization=config.quantization,
        kv_dtype=config.kv_cache_dtype,
        cache=cache,
        placement=decide(threads, config.numa, machine.nodes(), machine.threads().quota),
    )


def paths() -> str:
    from headstart.kernels.native.backend import instruction_paths

    return f"path {instruction_paths()[0]} of {', '.join(instruction_paths())}"


BACKEND = BackendKind(
    rank=10,
    why="compiled kernels, exact to the bit",
    exact=True,
    limits=limits,
    open=open_native,
    flags=frozenset({"quantization", "kv_cache_dtype", "numa"}),
    detail=paths,
)
