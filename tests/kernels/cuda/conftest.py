"""Backends for tests of the cuda kernels, which run in Triton's interpreter on the CPU unless there is a GPU."""

from typing import Any

import pytest


@pytest.fixture(autouse=True, scope="session")
def triton() -> None:
    """Triton has wheels for Linux only."""
    pytest.importorskip("triton", reason="the cuda backend's kernels are Triton's, and triton is not installed")


@pytest.fixture(scope="session")
def cuda(triton: None) -> Any:
    from headstart.kernels.cuda.backend import CudaBackend

    return CudaBackend(narrow=False)


@pytest.fixture(scope="session")
def narrow(triton: None) -> Any:
    from headstart.kernels.cuda.backend import CudaBackend

    return CudaBackend()
