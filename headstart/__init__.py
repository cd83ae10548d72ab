"""headstart: an LLM engine built around multi-token prediction."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headstart.api import LLM, AsyncLLM, Completion
    from headstart.config import EngineConfig
    from headstart.core import SamplingParams
    from headstart.text.grammar_spec import GrammarSpec

__version__ = "0.1.0"
__all__ = ["LLM", "AsyncLLM", "Completion", "EngineConfig", "GrammarSpec", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "api", "AsyncLLM": "api", "Completion": "api", "EngineConfig": "config", "SamplingParams": "core",
    "GrammarSpec": "text.grammar_spec",
}  # fmt: skip


def __getattr__(name: str) -> Any:
    """Loaded when they are asked for: `headstart --help` needs none of them."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headstart.{_HOMES[name]}"), name)
