"""Compiled kernels on the CPU, bit-exact, without torch: the default."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from headstart import machine
from headstart.config import EngineConfig
from headstart.errors import ParameterError
from headstart.kernels.backend import BackendKind
from headstart.wording import LEAVE_OUT, option

if TYPE_CHECKING:
    from headstart.kernels.native.backend import NativeBackend

EXTENSION = "headstart.kernels.native._native"
MAX_THREADS_PER_CORE, MIN_THREAD_LIMIT = 8, 16
"""--threads is refused above MAX_THREADS_PER_CORE per core and above MIN_THREAD_LIMIT."""
MAX_WEIGHTS = 0.7
"""Share of the available memory beyond which packed weights stay in their file, which is mapped."""


def limits(config: EngineConfig) -> tuple[str, str] | None:
    if importlib.util.find_spec(EXTENSION) is None:
        return "headstart was installed without a C++ compiler", "install one, then install headstart again"
    if config.device == "cuda":
        return "the device is cuda", "use " + option("device", "cpu")
    if config.block_size % 16:
        return option("block_size", config.block_size) + " is not a multiple of 16", "use " + option("block_size", 16)
    return None


def open_native(config: EngineConfig, files: tuple[Path, ...]) -> "NativeBackend":
    from headstart.kernels.native.backend import NativeBackend
    from headstart.kernels.native.packing import PackedCache, key_of
    from headstart.kernels.native.placement import choose_placement

    size, available = sum(file.stat().st_size for file in files), machine.memory().available
    in_file = size > MAX_WEIGHTS * available
    cache = PackedCache.open(key_of(files, config.rounding) if files else None, in_file=in_file)
    threads, cores = machine.thread_count(config.threads), machine.threads().cores
    if threads > max(MAX_THREADS_PER_CORE * cores, MIN_THREAD_LIMIT):
        what = f"is {threads}, but this machine has {cores} cores: they would only wait for each other"
        raise ParameterError(option("threads"), what, LEAVE_OUT + ": it is what affinity and quota allow")
    return NativeBackend(
        threads=threads, quantization=config.rounding, kv_dtype=config.kv_cache_dtype,
        portable_bits=config.portable_bits, cache=cache,
        placement=choose_placement(threads, config.numa, machine.nodes(), machine.threads().quota),
    )  # fmt: skip


def paths() -> str:
    from headstart.kernels.native.backend import instruction_paths

    return f"path {instruction_paths()[0]} of {', '.join(instruction_paths())}"


BACKEND = BackendKind(
    rank=10,
    why="compiled kernels, exact to the bit",
    exact=True,
    limits=limits,
    open=open_native,
    flags=frozenset({"quantization", "kv_cache_dtype", "numa", "draft_width", "portable_bits"}),
    detail=paths,
)
