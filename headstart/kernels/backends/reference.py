"""Plain torch, on CPU or CUDA and in any precision: the oracle. Rows agree with each other up to rounding only."""

from __future__ import annotations

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
        return "it needs torch, which is not installed", "pip install 'headstart[torch]'"
    return None


def open_reference(config: EngineConfig, files: tuple[Path, ...]) -> ReferenceBackend:
    from headstart.kernels.reference.backend import ReferenceBackend  # torch is imported only when it is used

    threads = config.threads or machine.threads().usable
    return ReferenceBackend(device="cuda" if config.device == "cuda" else "cpu", dtype=config.dtype, threads=threads)


BACKEND = BackendKind(
    rank=90,
    why="plain torch",
    exact=False,
    limits=limits,
    open=open_reference,
    widens=True,
    packages=("torch",),
)
