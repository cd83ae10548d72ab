"""One GPU: Triton's kernels, exact to the bit. Checked in Triton's interpreter on the CPU, not yet on a GPU."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.config import EngineConfig
from headstart.kernels.backend import BackendKind

if TYPE_CHECKING:
    from headstart.kernels.cuda.backend import CudaBackend

PACKAGES = ("torch", "triton")


def limits(config: EngineConfig) -> tuple[str, str] | None:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            return f"it needs {package}, which is not installed", "pip install 'headstart[cuda]'"
    if config.kv_cache_dtype == "int8":
        return "--kv-cache-dtype int8 is the native backend's", "use --kv-cache-dtype bfloat16"
    if config.dtype == "float64":
        return "--dtype float64 is the reference backend's", "use --dtype float32"
    return None


def open_cuda(config: EngineConfig, files: tuple[Path, ...]) -> CudaBackend:
    from headstart.kernels.cuda.backend import CudaBackend  # torch is imported only when it is used

    return CudaBackend(
        narrow=config.dtype == "bfloat16", quantization=config.quantization, kv_dtype=config.kv_cache_dtype
    )


BACKEND = BackendKind(
    rank=95,
    why="Triton's kernels on a GPU, exact to the bit",
    exact=True,
    limits=limits,
    open=open_cuda,
    flags=frozenset({"quantization", "kv_cache_dtype"}),
    packages=PACKAGES,
)
