"""headstart: an LLM engine built around multi-token prediction."""

from headstart.version import __version__ as __version__

TYPE_CHECKING = False  # importing typing takes longer than the start of --version
if TYPE_CHECKING:
    from typing import Any

    from headstart.api import LLM, AsyncLLM, Completion
    from headstart.config import EngineConfig
    from headstart.core import SamplingParams
    from headstart.text.grammar_spec import GrammarSpec

__all__ = ["LLM", "AsyncLLM", "Completion", "EngineConfig", "GrammarSpec", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "api", "AsyncLLM": "api", "Completion": "api", "EngineConfig": "config", "SamplingParams": "core",
    "GrammarSpec": "text.grammar_spec",
}  # fmt: skip


def __getattr__(name: str) -> "Any":
    """Import a public name at its first use: `headstart --help` needs none."""
    if name not in _HOMES:
        raise AttributeError(f"module 'headstart' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"headstart.{_HOMES[name]}"), name)
