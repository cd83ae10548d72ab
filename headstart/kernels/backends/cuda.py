"""One GPU: Triton kernels, bit-exact. Tested in Triton's interpreter on the CPU, not yet on a GPU."""

import importlib.util
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from headstart.config import EngineConfig
from headstart.kernels.backend import BackendKind
from headstart.wording import option

if TYPE_CHECKING:
    from headstart.kernels.cuda.backend import CudaBackend

PACKAGES = ("torch", "triton")
NODES = ("/dev/nvidia0", "/dev/dxg", "/dev/kfd")
"""Device nodes of NVIDIA, WSL and AMD drivers; asking torch would import it."""


def limits(config: EngineConfig) -> tuple[str, str] | None:
    for package in PACKAGES:
        if importlib.util.find_spec(package) is None:
            return f"it needs {package}, which is not installed", f"pip install {package}"
    if config.device == "cpu":
        return "the device is cpu", "use " + option("device", "auto")
    if config.kv_cache_dtype in ("int8", "fp8"):
        hint = "use " + option("kv_cache_dtype", "bfloat16")
        return option("kv_cache_dtype", config.kv_cache_dtype) + " is the native backend's", hint
    return None


def open_cuda(config: EngineConfig, files: tuple[Path, ...]) -> "CudaBackend":
    from headstart.kernels.cuda.backend import CudaBackend  # imports torch

    narrow = config.kv_cache_dtype != "float32"
    return CudaBackend(narrow=narrow, quantization=config.rounding)


def is_present() -> bool:
    """True if there is a driver's device node and packages with GPU support are installed."""
    installed = all(importlib.util.find_spec(package) for package in PACKAGES)
    return any(Path(node).exists() for node in NODES) and installed and not version("torch").endswith("+cpu")


BACKEND = BackendKind(
    rank=50,  # after native until tested on a GPU
    why="Triton's kernels on a GPU, exact to the bit",
    exact=True,
    limits=limits,
    open=open_cuda,
    flags=frozenset({"quantization", "kv_cache_dtype"}),
    packages=PACKAGES,
    is_present=is_present,
)
