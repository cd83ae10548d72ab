"""Receives request bodies within budgets of bytes and time, and parses them in worker threads.

The cost of every body is bounded before it is parsed.
"""

import asyncio
import ctypes
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import anyio
from anyio.to_thread import run_sync
from fastapi import Request
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails
from starlette.exceptions import HTTPException
from starlette.types import Receive

from headstart.errors import BusyError
from headstart.server import limits
from headstart.server.errors import BodyError, ClientGone

Result = TypeVar("Result")
Model = TypeVar("Model", bound=BaseModel)
CLOSE = {"Connection": "close"}
BROWSER_HEADERS = ("origin", "sec-fetch-site", "referer")
"""A cross-origin request of a web page has at least one of these headers."""
_MARK = re.compile(rb'[",:\[{]')  # JSON punctuation that _check_size counts, and the quote that begins a string
_TYPES = {
    "string_type": "a text", "int_type": "a whole number", "int_from_float": "a whole number", "float_type": "a number",
    "bool_type": "true or false", "list_type": "a list", "model_type": "an object",
    "model_attributes_type": "an object", "dict_type": "an object",
}  # fmt: skip
"""Pydantic's error types for values of a wrong type -> the type that is wanted."""
_BOUNDS = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}
"""Pydantic's error types for numbers out of range -> member of the context, and words for the bound."""
_LENGTHS = {"too_long": "elements", "string_too_long": "characters"}
"""Pydantic's error types for values that are too long -> what is counted."""
_STRING = re.compile(rb'(?:[^"\\]++|\\.){1,2048}+', re.DOTALL)
"""Up to 2048 characters of a string. Matching in parts lets other threads run in between."""
_COUNTED = (
    ((b",",), limits.VALUES, "values"),
    ((b":",), limits.MEMBERS, "members of objects"),
    ((b"[", b"{"), limits.CONTAINERS, "lists and objects"),
)  # marks, maximum number of them, and the words for the error


@dataclass
class ByteBudget:
    """Bytes that all requests together may hold."""

    limit: int
    used: int = 0


@dataclass
class IncomingBody:
    """A request body's arrival time and its charge to the byte budgets, while it is received and prepared."""

    reader: "BodyReader"
    arrived: float  # by the event loop's clock
    size: int = 0  # bytes that count against the budgets

    def hold(self, count: int) -> None:
        """Charge `count` more bytes to the budgets. Raises BusyError if a budget is exceeded."""
        self._charge(self.size + count)
        if any(budget.used > budget.limit for budget in self.reader.budgets):
            raise BusyError("too many bytes of other requests are being read", "try again later")

    def release(self) -> None:
        """Return all bytes to the budgets, once the request is prepared or has failed. May be called again."""
        self._charge(0)

    def _charge(self, size: int) -> None:
        """Bytes up to LARGE_BODY count against the small budget, the rest against the large budget."""
        small, large = self.reader.budgets
        small.used += min(size, limits.LARGE_BODY) - min(self.size, limits.LARGE_BODY)
        large.used += max(size - limits.LARGE_BODY, 0) - max(self.size - limits.LARGE_BODY, 0)
        self.size = size


def trim_function() -> Callable[[int], int] | None:
    """glibc's malloc_trim, which returns freed memory to the system; None elsewhere."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class WorkerPools:
    """Limits of worker threads by kind of work, so that large requests delay only large requests."""

    def __init__(self) -> None:
        self._limiters = {
            "small": anyio.CapacityLimiter(limits.SMALL_THREADS),
            "large": anyio.CapacityLimiter(limits.LARGE_THREADS),
            "grammar": anyio.CapacityLimiter(limits.GRAMMAR_THREADS),
            "answer": anyio.CapacityLimiter(limits.ANSWER_THREADS),
        }
        self._trim, self._trimmed = trim_function(), 0.0

    def trim(self) -> None:
        """Return freed memory to the system one second from now, at most every TRIM_SECONDS."""
        loop = asyncio.get_running_loop()
        if self._trim is not None and loop.time() - self._trimmed > limits.TRIM_SECONDS:
            self._trimmed = loop.time() + 1
            loop.call_later(1, loop.run_in_executor, None, self._trim, 0)

    async def run(self, pool: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """Call a function in a thread of a pool. A cancelled caller leaves the thread running."""
        return await run_sync(function, *arguments, abandon_on_cancel=True, limiter=self._limiters[pool])


@dataclass
class BodyReader:
    """Reads the bodies of all connections."""

    pools: WorkerPools = field(default_factory=WorkerPools)
    budgets: tuple[ByteBudget, ...] = field(
        default_factory=lambda: (ByteBudget(limits.SMALL_BUDGET), ByteBudget(limits.LARGE_BUDGET))
    )

    @contextmanager
    def incoming(self) -> Iterator[IncomingBody]:
        """A context for one body; on exit its bytes return to the budgets."""
        found = IncomingBody(self, asyncio.get_running_loop().time())
        try:
            yield found
        finally:
            found.release()

    async def body(self, request: Request, incoming: IncomingBody) -> bytes:
        """Receive the whole body. Raises HTTPException (413 too large, 408 too slow), BusyError and ClientGone."""
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and len(declared) < 20 and int(declared) > limits.BODY_BYTES:
            if "expect" not in request.headers:  # curl sends large bodies only once it is told to continue
                await _discard(request)
            raise _too_large()
        pieces: list[bytes] = []
        loop = asyncio.get_running_loop()
        end = loop.time() + limits.BODY_SECONDS
        while True:
            try:
                async with asyncio.timeout_at(min(end, loop.time() + limits.BODY_PAUSE_SECONDS)):
                    message = await request.receive()
            except TimeoutError:
                raise HTTPException(408, "the body did not come in time", CLOSE) from None
            if message["type"] == "http.disconnect":
                raise ClientGone
            piece = message.get("body", b"")
            if incoming.size + len(piece) > limits.BODY_BYTES:
                pieces.clear()
                await _discard(request)
                raise _too_large()
            incoming.hold(len(piece))
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)


async def _discard(request: Request) -> None:
    """Receive the rest of a body for a short time. A connection that is closed before is reset for clients that send
    the whole body first (urllib, requests), and they do not get the response."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limits.DISCARD_SECONDS):
            while (await request.receive()).get("more_body", False):
                pass


async def cancel_on_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`. If the client disconnects first, cancels `work` and raises ClientGone."""
    task, gone = asyncio.create_task(work), asyncio.create_task(_disconnected(receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return await task
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body is larger than {limits.BODY_BYTES} bytes", CLOSE)


class CheckedRoute(APIRoute):
    """A route that reads and validates its body with BodyReader instead of FastAPI's own parsing."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """The handler of this route; FastAPI's own for endpoints without a body."""
        if not self.dependant.body_params:
            return super().get_route_handler()
        model: type[BaseModel] = self.dependant.body_params[0].field_info.annotation  # type: ignore[assignment]
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint

        async def handler(request: Request) -> Response:
            state = request.app.state.headstart  # pipeline.ServerState
            reader: BodyReader = state.body_reader
            _check_type(request)
            with reader.incoming() as incoming:
                data = await reader.body(request, incoming)
                request.state.incoming = incoming
                async with state.deadline(incoming):
                    body = await reader.pools.run(pool_of(incoming), parse_body, data, model)
                del data
                try:
                    return await endpoint(body=body, request=request)
                finally:
                    reader.pools.trim()

        return handler


def pool_of(incoming: IncomingBody) -> str:
    """The worker pool for a body of this size."""
    return "large" if incoming.size > limits.LARGE_BODY else "small"


def _check_type(request: Request) -> None:
    """Raise HTTPException 415 for a compressed body or one that is not declared as JSON. Browsers send other types to
    any server without a CORS preflight. Ollama's clients often declare no type or curl's default, so its paths accept
    any type if the request has no browser header."""
    if (packed := request.headers.get("content-encoding", "identity").lower()) != "identity":
        what = f"Content-Encoding {limits.shortened(packed)} is not supported: send the body uncompressed"
        raise HTTPException(415, what)
    if request.url.path.startswith("/api/") and not any(name in request.headers for name in BROWSER_HEADERS):
        return
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json" and not (given.startswith("application/") and given.endswith("+json")):
        raise HTTPException(415, "the body must be JSON: send the header Content-Type: application/json")


def parse_body(data: bytes, model: type[Model]) -> Model:
    """Parse JSON bytes and validate them. Raises BodyError, which names the most specific fault."""
    return validate(read_json(data), model)


def validate(document: Any, model: type[Model]) -> Model:
    """The JSON document as a model. Raises BodyError, which names the most specific fault."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        # unions have an error for every member: prefer the deepest, and among those one that is not about the type
        found = [(*_place(each, document), each) for each in error.errors(include_url=False, include_input=False)]
        deepest, value, worst = max(found, key=lambda each: (len(each[0]), each[2]["type"] not in _TYPES))
        place = limits.shortened(".".join(deepest), 200)
        types = [_TYPES[each["type"]] for at, _, each in found if at == deepest and each["type"] in _TYPES]
        raise BodyError(f"{place or 'the body'}{_problem(worst, types, value)}", place or None) from None


def _problem(error: ErrorDetails, types: Sequence[str], value: Any) -> str:
    """The end of a message that begins with the place of an error. `types`: of the members of a union."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "missing":
        return " is missing"
    if kind in ("too_short", "string_too_short"):  # all minimum lengths are 1
        return " is empty"
    if kind in _LENGTHS:
        return f" has {len(value)} {_LENGTHS[kind]}, but may have at most {context['max_length']}"
    if kind in _TYPES:
        wanted = [each for each in dict.fromkeys(types) if each != "a whole number" or "a number" not in types]
        return f" is {_shown(value)}, but must be {' or '.join(wanted)}"
    if kind == "literal_error":
        return f" is {_shown(value)}, but must be {context['expected']}"
    if kind in _BOUNDS:
        member, words = _BOUNDS[kind]
        return f" is {_shown(value)}, but must be {words} {context[member]}"
    return f": {limits.shortened(error['msg'].removeprefix('Value error, '), 300)}"


def _shown(value: Any) -> str:
    """A value of a body as an error names it."""
    if isinstance(value, str):
        return repr(limits.shortened(value))
    return "an object" if isinstance(value, dict) else "a list" if isinstance(value, list) else json.dumps(value)


def _place(error: ErrorDetails, document: Any) -> tuple[list[str], Any]:
    """The path of an error in the document, without the union members that Pydantic's own path contains, and the value
    there."""
    place, location = [], error["loc"]
    for number, part in enumerate(location, 1):
        inside = isinstance(document, dict) and part in document
        if isinstance(document, list):
            inside = isinstance(part, int) and part < len(document)
        if inside:
            document = document[part]
        if inside or (number == len(location) and error["type"] == "missing"):
            place.append(str(part))
    return place, document


def read_json(data: bytes) -> Any:
    """The JSON document of a body. Raises BodyError for invalid JSON, and for documents beyond the limits."""
    _check_size(data)
    try:
        document = json.loads(data.decode("utf-8-sig"), parse_constant=_no_constant)
    except RecursionError:
        raise BodyError(f"the body is nested deeper than {limits.DEPTH}") from None
    except ValueError as error:
        raise BodyError(f"the body is not valid JSON: {limits.shortened(str(error), 200)}") from None
    check_values(document)
    return document


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _check_size(data: bytes) -> None:
    """Raise BodyError for too many values or containers, without parsing. A first count includes marks inside strings;
    only bodies that exceed a limit by it are scanned again with strings skipped."""
    if all(sum(map(data.count, marks)) <= most for marks, most, _ in _COUNTED):
        return
    counts, place, num_found = Counter[bytes](), 0, 0
    while found := _MARK.search(data, place):
        counts[found[0]] += 1
        place, num_found = found.end(), num_found + 1
        if found[0] == b'"':
            while part := _STRING.match(data, place):
                place = part.end()
            place += 1
        if num_found % 4096 == 0:
            _check_counts(counts)
    _check_counts(counts)


def _check_counts(counts: Mapping[bytes, int]) -> None:
    for marks, most, what in _COUNTED:
        if sum(counts.get(mark, 0) for mark in marks) > most:
            raise BodyError(f"the body has more than {most} {what}")


def check_values(document: Any) -> None:
    """Raise BodyError for deep nesting, lone surrogates, and numbers that are not finite."""
    level, depth = [document], 0
    while level:
        if depth > limits.DEPTH:
            raise BodyError(f"the body is nested deeper than {limits.DEPTH}")
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                below += value
                below += value.values()
            elif kind is list:
                below += value
            elif kind is str and not value.isascii():
                _check_text(value)
            elif kind is float and not math.isfinite(value):
                raise BodyError("the body holds a number that is too large for a 64-bit float")
        level, depth = below, depth + 1


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BodyError("the body holds half of a surrogate pair, which is not valid Unicode text") from None


def call_arguments(text: str) -> dict[str, Any]:
    """The arguments of a tool call. Text that is not a JSON object is returned under the key `INVALID_JSON`."""
    try:
        document = json.loads(text.strip() or "{}")
        check_values(document)
    except (ValueError, RecursionError, BodyError):
        document = text
    return document if isinstance(document, dict) else {} if document is None else {"INVALID_JSON": text}
