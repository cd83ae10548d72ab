"""`ResponseRenderer`: renders a generation as the response of one API; and JSON that is written in small pieces."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence as Seq
from typing import Any, TypeVar

from headstart.errors import HeadstartError
from headstart.server.generation import ChoiceStep, Generation, Json

Result = TypeVar("Result")

MAX_ELEMENTS = 64  # elements of a list that are written at once; other threads run in between


class ResponseRenderer(ABC):
    """Runs a generation once, as one document (`whole`) or as a stream (`stream`). A subclass for each API formats."""

    media_type = "text/event-stream"  # of a stream
    end = ""  # last piece of a stream, also after an error

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    async def whole(self) -> bytes:
        """The JSON document."""
        async for _ in self.generation.steps():
            pass
        options = self.generation.options
        return await self._run(options.logprobs or options.prompt_logprobs, lambda: dump_json(self.document()).encode())

    async def stream(self) -> AsyncIterator[str]:
        """The pieces of the stream, without `end`."""
        for piece in self.start():
            yield piece
        async for step in self.generation.steps():
            for piece in await self._run(self.is_large(step), self.render, step):
                yield piece
        for piece in self.finish():
            yield piece

    async def _run(self, is_large: bool, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function, in another thread where it takes long."""
        return await self.generation.pools.run("answer", function, *arguments) if is_large else function(*arguments)

    def is_large(self, step: ChoiceStep) -> bool:
        """Does rendering this step take long?"""
        return False

    @abstractmethod
    def document(self) -> Json:
        """The whole response, after the last step."""

    def start(self) -> Iterable[str]:
        """Pieces before the first step."""
        return ()

    @abstractmethod
    def render(self, step: ChoiceStep) -> Seq[str]:
        """Pieces for one step."""

    def finish(self) -> Iterable[str]:
        """Pieces after the last step."""
        return ()

    @abstractmethod
    def error_event(self, error: HeadstartError) -> str:
        """The piece for an error after the first piece."""


MakeRenderer = Callable[[Generation], ResponseRenderer]


class RawJson(str):
    """JSON text that stands for its value."""

    __slots__ = ()


def dump_json(value: Any) -> str:
    """The text of a JSON document."""
    return "".join(_pieces(value))


def _pieces(value: Any) -> Iterator[str]:
    """Small pieces, since json.dumps lets no other thread run while it writes one."""
    if isinstance(value, RawJson):
        yield value
    elif isinstance(value, dict) and any(isinstance(each, dict | list | RawJson) for each in value.values()):
        for number, (name, each) in enumerate(value.items()):
            yield ("," if number else "{") + compact_json(name) + ":"
            yield from _pieces(each)
        yield "}"
    elif isinstance(value, list) and len(value) > MAX_ELEMENTS:
        for start in range(0, len(value), MAX_ELEMENTS):
            yield ("," if start else "[") + compact_json(value[start : start + MAX_ELEMENTS])[1:-1]
        yield "]"
    elif isinstance(value, list) and any(isinstance(each, dict | list) for each in value):
        for number, each in enumerate(value):
            yield "," if number else "["
            yield from _pieces(each)
        yield "]"
    else:
        yield compact_json(value)


def compact_json(value: Any) -> str:
    """JSON text without white space between tokens."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
