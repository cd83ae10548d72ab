"""An OpenAI-compatible endpoint; requests adapt to the paths and fields that the server accepts."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from headstart.errors import UsageError
from headstart.tools import client
from headstart.tools.client import CHAT, COMPLETIONS, Response, Server
from headstart.tools.engine_metrics import EngineCounters
from headstart.tools.probe.timing import Kind, StreamTrace

NEW_LENGTH = "max_completion_tokens"  # some servers require this instead of max_tokens, and name it in the error
CONTINUE = "Go on with this text, and write nothing else:\n"
STREAM_EXTRAS = {"ignore_eos": True, "seed": 1, "stream_options": {"include_usage": True}}


class EndpointRefused(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"answers {status}: {client.error_message(body)}")
        self.status, self.body = status, body


class EndpointLost(Exception):
    """The server no longer answers."""


@dataclass
class Endpoint:
    server: Server
    model: str | None = None  # None: the first that the server lists
    paths: Sequence[str] = (COMPLETIONS, CHAT)  # in order of preference
    optional: dict[str, Any] = field(default_factory=lambda: dict(STREAM_EXTRAS))  # body fields; dropped if refused
    chat_instruction: str = CONTINUE  # precedes the prompt in a chat
    length_field: str = "max_tokens"

    def __post_init__(self) -> None:
        self.extras = dict(self.optional)
        if self.model is None:
            self.model = str(client.find_model(self.server, None)["id"])

    @property
    def path(self) -> str:
        return self.paths[0]

    def body(self, prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
        chat = {"messages": [{"role": "user", "content": self.chat_instruction + prompt}]}
        asked = chat if self.path == CHAT else {"prompt": prompt}
        return {"model": self.model, **asked, self.length_field: max_tokens, **self.extras, **fields}

    async def post(self, body: dict[str, Any]) -> Response:
        try:
            answer = await client.post(self.server, self.path, body)
        except (OSError, ValueError) as error:
            raise EndpointLost(f"{self.server}{self.path}: {client.error_reason(error)}") from None
        if answer.broken:
            raise EndpointLost(f"{self.server}{self.path} breaks off")
        if answer.status != 200:
            raise EndpointRefused(answer.status, answer.body)
        return answer

    async def ask(self, prompt: str, max_tokens: int, **fields: Any) -> Response:
        """Posts a prompt; if the server refuses the request, changes it and tries again. Raises UsageError if no form
        of the request is accepted, or the server no longer answers."""
        while True:
            try:
                return await self.post(self.body(prompt, max_tokens, **fields))
            except EndpointLost as lost:
                raise UsageError(str(lost), "see the server's log") from None
            except EndpointRefused as refused:
                if not self._adapt(refused):
                    hint = "--model and --api-key?" if refused.status < 500 else "see the server's log"
                    raise UsageError(f"{self.server}{self.path} {refused}", hint) from None

    def _adapt(self, refused: EndpointRefused) -> bool:
        """Changes length field, optional fields or path after a refusal. Returns False if nothing is left to try."""
        if refused.status == 400 and NEW_LENGTH in refused.body and self.length_field != NEW_LENGTH:
            self.length_field = NEW_LENGTH
        elif refused.status in (400, 422) and self.extras:
            for name in [name for name in self.extras if name in refused.body] or list(self.extras):
                del self.extras[name]
        elif refused.status in (400, 404, 405, 422, 500, 501) and len(self.paths) > 1:
            self.paths, self.extras = self.paths[1:], dict(self.optional)
        else:
            return False
        return True

    def metrics(self) -> EngineCounters | None:
        return asyncio.run(client.read_counters(self.server))

    def stream(self, kind: Kind, prompt: str, max_tokens: int, temperature: float) -> StreamTrace:
        """Streams one answer and returns the arrival times of its pieces."""
        answer = asyncio.run(self.ask(prompt, max_tokens, temperature=temperature, stream=True))
        tokens, arrivals = answer.usage.get("completion_tokens"), tuple(when for when, _ in answer.pieces)
        return StreamTrace(kind=kind, max_tokens=max_tokens, tokens=tokens, arrivals=arrivals)
