"""Texts of any OpenAI-compatible endpoint, asked for in the way that it understands."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from headstart.errors import UsageError
from headstart.tools.client import Response, Server, counts, message, models, post, reason
from headstart.tools.engine_metrics import Counts
from headstart.tools.probe.traces import Kind, Trace

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EXTRAS = {"ignore_eos": True, "seed": 1, "stream_options": {"include_usage": True}}
"""Fields that not every server knows; left out for one that refuses them."""
NEW_LENGTH = "max_completion_tokens"
"""What some servers want instead of max_tokens, and say so."""


@dataclass
class Endpoint:
    """A server, and how to ask it. Without a name of a model the first that it lists; raises UsageError then."""

    server: Server
    model: str | None = None
    _path: str = COMPLETIONS
    _extras: dict[str, Any] = field(default_factory=lambda: dict(EXTRAS))
    _length: str = "max_tokens"

    def __post_init__(self) -> None:
        if self.model is None:
            self.model = str(models(self.server)[0]["id"])

    def metrics(self) -> Counts | None:
        return asyncio.run(counts(self.server))

    def stream(self, kind: Kind, prompt: str, max_tokens: int, temperature: float) -> Trace:
        """One streamed answer. Text completions, or chat where there are none; unknown fields are left out."""
        while True:
            try:
                answer = asyncio.run(post(self.server, self._path, self._body(prompt, max_tokens, temperature)))
            except (OSError, ValueError) as error:
                raise UsageError(f"{self.server}{self._path}: {reason(error)}", "see the server's log") from None
            if answer.status == 200 and not answer.broken:
                tokens = answer.usage.get("completion_tokens")
                arrivals = tuple(when for when, _ in answer.pieces)
                return Trace(kind=kind, max_tokens=max_tokens, tokens=tokens, arrivals=arrivals)
            self._try_another(answer)

    def _try_another(self, answer: Response) -> None:
        """Ask in another way the next time. Raises UsageError when there is none left."""
        status, said = answer.status, answer.body
        if status == 400 and NEW_LENGTH in said and self._length != NEW_LENGTH:
            self._length = NEW_LENGTH
        elif status in (400, 422) and self._extras:
            named = [name for name in self._extras if name in said]
            for name in named or list(self._extras):
                del self._extras[name]
        elif status in (400, 404, 405, 422, 501) and self._path == COMPLETIONS:
            self._path, self._extras = CHAT, dict(EXTRAS)
        else:
            what = "breaks off" if answer.broken else f"answers {status}: {message(said)}"
            raise UsageError(f"{self.server}{self._path} {what}", "--model and --api-key?")

    def _body(self, prompt: str, max_tokens: int, temperature: float) -> dict[str, Any]:
        chat = {"messages": [{"role": "user", "content": f"Go on with this text, and write nothing else:\n{prompt}"}]}
        asked: dict[str, Any] = chat if self._path == CHAT else {"prompt": prompt}
        own = {"model": self.model, self._length: max_tokens, "temperature": temperature, "stream": True}
        return {**asked, **own, **self._extras}
