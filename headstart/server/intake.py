"""Request bodies: received within budgets of bytes and time, then read in worker threads.

Nothing here depends on how a body is meant: what a body may cost is known before it is parsed.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import contextmanager
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

from headstart.errors import BusyError, UsageError
from headstart.server import limits
from headstart.server.errors import BodyError

Result = TypeVar("Result")
Model = TypeVar("Model", bound=BaseModel)
CLOSE = {"Connection": "close"}
OF_BROWSERS = ("origin", "sec-fetch-site", "referer")
"""At least one of these headers stands in whatever a web page sends to elsewhere."""
_MARK = re.compile(rb'[",:\[{]')
_NO_OBJECT = ("model_type", "model_attributes_type", "dict_type")
"""Pydantic's errors that speak of dictionaries and of our classes."""
_STRING = re.compile(rb'(?:[^"\\]++|\\.){1,2048}+', re.DOTALL)
"""A part of a string; other threads run between two of them."""
_COUNTED = (
    ((b",",), limits.VALUES, "values"),
    ((b":",), limits.MEMBERS, "members of objects"),
    ((b"[", b"{"), limits.CONTAINERS, "lists and objects"),
)


class ClientGone(Exception):
    """The client hung up."""


@dataclass
class Budget:
    """Bytes that all requests together may hold."""

    most: int
    used: int = 0


@dataclass
class Incoming:
    """One request on its way in. `arrived`: time of the event loop."""

    intake: Intake
    arrived: float
    size: int = 0

    def hold(self, count: int) -> None:
        """Raises BusyError where that is too much for all of them."""
        before, self.size = self.size, self.size + count
        for budget, share in zip(self.intake.budgets, _shares(self.size), strict=True):
            budget.used += share
        for budget, share in zip(self.intake.budgets, _shares(before), strict=True):
            budget.used -= share
        if any(budget.used > budget.most for budget in self.intake.budgets):
            raise BusyError("too many bytes of other requests are being read", "try again later")

    def release(self) -> None:
        """It is prepared, or has failed; may be called again."""
        for budget, share in zip(self.intake.budgets, _shares(self.size), strict=True):
            budget.used -= share
        self.size = 0


def _shares(size: int) -> tuple[int, int]:
    small = min(size, limits.LARGE_BODY)
    return small, size - small


def trim_function() -> Callable[[int], int] | None:
    """glibc keeps what threads have freed; this gives it back."""
    return getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None


class Lanes:
    """Worker threads by what they do, so that who asks for much waits for his like."""

    def __init__(self) -> None:
        self._limiters = {
            "small": anyio.CapacityLimiter(limits.SMALL_THREADS),
            "large": anyio.CapacityLimiter(limits.LARGE_THREADS),
            "grammar": anyio.CapacityLimiter(limits.GRAMMAR_THREADS),
            "answer": anyio.CapacityLimiter(limits.ANSWER_THREADS),
        }
        self._trim, self._trimmed = trim_function(), 0.0

    def trim(self) -> None:
        """After something large; at most every now and then."""
        loop = asyncio.get_running_loop()
        if self._trim is not None and loop.time() - self._trimmed > limits.TRIM_SECONDS:
            self._trimmed = loop.time() + 1
            loop.call_later(1, loop.run_in_executor, None, self._trim, 0)

    async def run(self, lane: str, function: Callable[..., Result], *arguments: Any) -> Result:
        """In a thread of that lane; who gives up waiting leaves the thread to its end."""
        return await run_sync(function, *arguments, abandon_on_cancel=True, limiter=self._limiters[lane])


@dataclass
class Intake:
    """What all connections share on the way in."""

    lanes: Lanes = field(default_factory=Lanes)
    budgets: tuple[Budget, Budget] = field(
        default_factory=lambda: (Budget(limits.SMALL_BUDGET), Budget(limits.LARGE_BUDGET))
    )

    @contextmanager
    def incoming(self) -> Iterator[Incoming]:
        """One request; what it holds is given back at the end at the latest."""
        found = Incoming(self, asyncio.get_running_loop().time())
        try:
            yield found
        finally:
            found.release()

    async def body(self, request: Request, incoming: Incoming) -> bytes:
        """All of a body. Raises HTTPException (413, 408), BusyError, ClientGone."""
        declared = request.headers.get("content-length", "0")
        if declared.isdigit() and len(declared) < 20 and int(declared) > limits.BODY_BYTES:
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
                raise _too_large()
            incoming.hold(len(piece))
            pieces.append(piece)
            if not message.get("more_body", False):
                return b"".join(pieces)


def _too_large() -> HTTPException:
    return HTTPException(413, f"the body is larger than {limits.BODY_BYTES} bytes", CLOSE)


class CheckedRoute(APIRoute):
    """Reads bodies as this module does, and calls the endpoint with the result. FastAPI describes them in OpenAPI."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        if not self.dependant.body_params:
            return super().get_route_handler()
        model: type[BaseModel] = self.dependant.body_params[0].field_info.annotation  # type: ignore[assignment]
        endpoint: Callable[..., Coroutine[Any, Any, Response]] = self.endpoint

        async def handler(request: Request) -> Response:
            intake: Intake = request.app.state.headstart.intake
            _check_type(request)
            with intake.incoming() as incoming:
                try:
                    data = await intake.body(request, incoming)
                except ClientGone:
                    return Response(status_code=499)
                request.state.incoming = incoming
                async with _deadline(request, incoming):
                    body = await intake.lanes.run(lane_of(incoming), parsed, data, model)
                del data
                try:
                    return await endpoint(body=body, request=request)
                finally:
                    intake.lanes.trim()

        return handler


def _deadline(request: Request, incoming: Incoming) -> asyncio.Timeout:
    return request.app.state.headstart.deadline(incoming)  # type: ignore[no-any-return]


def lane_of(incoming: Incoming) -> str:
    return "large" if incoming.size > limits.LARGE_BODY else "small"


def _check_type(request: Request) -> None:
    """Other types than JSON are what a web page may send to any server without asking. Ollama's clients often name
    none, or curl's: there it is enough that no browser sends the request."""
    if (packed := request.headers.get("content-encoding", "identity").lower()) != "identity":
        raise HTTPException(
            415, f"the body is {limits.shortened(packed)}, which is not read here: send it plain", CLOSE
        )
    if request.url.path.startswith("/api/") and not any(name in request.headers for name in OF_BROWSERS):
        return
    given = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if given != "application/json" and not (given.startswith("application/") and given.endswith("+json")):
        raise HTTPException(415, "the body must be JSON: send the header Content-Type: application/json", CLOSE)


def parsed(data: bytes, model: type[Model]) -> Model:
    """A body as its model. Raises BodyError with the first thing that is wrong."""
    return checked(read_json(data), model)


def checked(document: Any, model: type[Model]) -> Model:
    """A document as a model. Raises BodyError with the first thing that is wrong."""
    try:
        return model.model_validate(document)
    except ValidationError as error:
        # Unions complain once for every member: the deepest says most, and of those whose type it is.
        found = [(_place(each, document), each) for each in error.errors(include_url=False, include_input=False)]
        deepest, worst = max(found, key=lambda each: (len(each[0]), not each[1]["type"].endswith("_type")))
        place = limits.shortened(".".join(deepest), 200)
        said = (
            "Input should be an object" if worst["type"] in _NO_OBJECT else worst["msg"].removeprefix("Value error, ")
        )
        raise BodyError(f"{place or 'the body'}: {limits.shortened(said, 300)}", place or None) from None


def _place(error: ErrorDetails, document: Any) -> list[str]:
    """A place in the document; pydantic names the members of unions, too."""
    place, location = [], error["loc"]
    for number, part in enumerate(location, 1):
        inside = (isinstance(document, dict) and part in document) or (
            isinstance(document, list) and isinstance(part, int) and part < len(document)
        )
        if inside:
            document = document[part]
        if inside or (number == len(location) and error["type"] == "missing"):
            place.append(str(part))
    return place


def read_json(data: bytes) -> Any:
    """The document of a body. Raises BodyError for what is no JSON, or would cost more than it may."""
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
    raise ValueError(f"{name} is no JSON number")


def _check_size(data: bytes) -> None:
    """Values and containers, counted without making them. Marks inside strings count only where there are many."""
    if all(sum(map(data.count, marks)) <= most for marks, most, _ in _COUNTED):
        return
    counts, place, looks = Counter[bytes](), 0, 0
    while found := _MARK.search(data, place):
        counts[found[0]] += 1
        place, looks = found.end(), looks + 1
        if found[0] == b'"':
            while part := _STRING.match(data, place):
                place = part.end()
            place += 1
        if looks % 4096 == 0:
            _check_counts(counts)
    _check_counts(counts)


def _check_counts(counts: Mapping[bytes, int]) -> None:
    for marks, most, what in _COUNTED:
        if sum(counts.get(mark, 0) for mark in marks) > most:
            raise BodyError(f"the body has more than {most} {what}")


def check_values(document: Any, what: str = "the body") -> None:
    """Raises BodyError for nesting, halves of surrogate pairs, and numbers that are none."""
    level, depth = [document], 0
    while level:
        if depth > limits.DEPTH:
            raise BodyError(f"{what} is nested deeper than {limits.DEPTH}")
        below: list[Any] = []
        for value in level:
            kind = type(value)
            if kind is dict:
                below += value
                below += value.values()
            elif kind is list:
                below += value
            elif kind is str and not value.isascii():
                _check_text(value, what)
            elif kind is float and not math.isfinite(value):
                raise BodyError(f"{what} holds a number that is too large")
        level, depth = below, depth + 1


def _check_text(text: str, what: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BodyError(f"{what} holds half of a surrogate pair, which is no text") from None


def json_of_text(text: str, what: str) -> Any:
    """JSON inside a body's text. Raises UsageError."""
    try:
        document = json.loads(text)
    except RecursionError:
        raise UsageError(f"{what}: nested too deeply") from None
    except ValueError as error:
        raise UsageError(f"{what}: no JSON: {limits.shortened(str(error), 200)}") from error
    check_values(document, what)
    return document
