"""`ResponseRenderer`, which renders a generation as the response of one API, and `dump_json` for large documents."""

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence as Seq
from typing import Any, TypeVar

from headstart.errors import HeadstartError
from headstart.server.errors import error_piece, error_response
from headstart.server.generation import ChoiceStep, Generation, Json

Result = TypeVar("Result")

MAX_ELEMENTS = 64  # list elements per call of json.dumps, which holds the GIL


class ResponseRenderer(ABC):
    """Runs a generation once and renders it as one document (`whole`) or a stream (`stream`). Each API has a subclass.

    A piece is a string that the stream sends: one server-sent event or line."""

    media_type = "text/event-stream"  # of a stream
    end = ""  # last piece of every stream, also after an error
    path = ""  # start of the API's paths, which decides the shape of errors

    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    async def whole(self) -> bytes:
        """Run the generation; the response as one JSON document. Raises HeadstartError."""
        async for _ in self.generation.steps():
            pass
        options = self.generation.options
        return await self._run(options.logprobs or options.prompt_logprobs, lambda: dump_json(self.document()).encode())

    async def stream(self) -> AsyncIterator[str]:
        """Run the generation; the pieces of the stream, without `end`. Raises HeadstartError."""
        for piece in self.start():
            yield piece
        async for step in self.generation.steps():
            for piece in await self._run(self.is_large(step), self.render, step):
                yield piece
        for piece in self.finish():
            yield piece

    async def _run(self, is_large: bool, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function; in a worker thread if `is_large`."""
        return await self.generation.pools.run("answer", function, *arguments) if is_large else function(*arguments)

    def is_large(self, step: ChoiceStep) -> bool:
        """Whether rendering this step takes long, so that it needs a worker thread."""
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

    def error_event(self, error: HeadstartError) -> str:
        """The piece that reports an error after the stream has begun."""
        return error_piece(error_response(error, self.path)[1], self.path)


MakeRenderer = Callable[[Generation], ResponseRenderer]


class RawJson(str):
    """Finished JSON text, which `dump_json` copies as it is."""

    __slots__ = ()


def dump_json(value: Any) -> str:
    """A document as compact JSON text. Other threads get to run while a large document is written."""
    return "".join(_pieces(value))


def _pieces(value: Any) -> Iterator[str]:
    """The JSON text in small pieces: json.dumps holds the GIL while it writes a piece."""
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
