"""The Python API: `LLM.generate`, `LLM.chat`, `LLM.stream`, and `AsyncLLM` with the same methods for asyncio."""

from typing import TYPE_CHECKING, Any

from headstart.api.llm import LLM, Prompt
from headstart.api.session import Choice, Completion, Session, TextDelta

if TYPE_CHECKING:
    from headstart.api.asynchronous import AsyncLLM

__all__ = ["LLM", "AsyncLLM", "Choice", "Completion", "Prompt", "Session", "TextDelta"]


def __getattr__(name: str) -> Any:
    """Import AsyncLLM at its first use: importing asyncio takes 20 ms, which most commands do not need."""
    if name != "AsyncLLM":
        raise AttributeError(f"module 'headstart.api' has no attribute {name!r}")
    from headstart.api.asynchronous import AsyncLLM

    return AsyncLLM
