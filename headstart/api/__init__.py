"""headstart in process: `LLM.generate`, `LLM.chat`, `LLM.stream`, and `AsyncLLM` with the same for asyncio."""

from headstart.api.asynchronous import AsyncLLM
from headstart.api.completion import Completion, TextDelta
from headstart.api.llm import LLM, Prompt
from headstart.api.session import Choice, Session

__all__ = ["LLM", "AsyncLLM", "Choice", "Completion", "Prompt", "Session", "TextDelta"]
