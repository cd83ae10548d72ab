"""Plain torch on CPU or CUDA in any precision: the reference for tests. Rows may round differently in other batches."""

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from headstart import machine
from headstart.config import EngineConfig
from headstart.kernels.backend import BackendKind

if TYPE_CHECKING:
    from headstart.kernels.reference.backend import ReferenceBackend


def limits(config: EngineConfig) -> tuple[str, str] | None:
    if importlib.util.find_spec("torch") is None:
        return "it needs torch, which is not installed", "pip install torch==2.13.*"
    return None


def open_reference(config: EngineConfig, files: tuple[Path, ...]) -> "ReferenceBackend":
    from headstart.kernels.reference.backend import ReferenceBackend  # imports torch

    threads = machine.thread_count(config.threads)
    return ReferenceBackend(device="cuda" if config.device == "cuda" else "cpu", dtype=config.dtype, threads=threads)


BACKEND = BackendKind(
    rank=90, why="plain torch", exact=False, limits=limits, open=open_reference, uses_dtype=True, packages=("torch",)
)
