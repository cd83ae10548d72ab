"""Error responses and last pieces of streams, in the shape of the API that was called (see `_APIS`)."""

import json
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, NamedTuple

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from headstart.errors import BusyError, ContextError, HeadstartError, LimitError, ParameterError, UsageError, status_of
from headstart.params import names_in
from headstart.server import limits

log = logging.getLogger("headstart.server")
CLIENT_GONE = 499  # nginx's status for a closed connection; clients never see it

ERROR_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error",
}  # fmt: skip


class ClientGone(Exception):
    """The client has disconnected."""


class BodyError(UsageError):
    """A field of a request body is wrong, or the whole body is."""

    def __init__(self, message: str, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint)
        self.param = param  # path of the field, such as messages.0.role; None: the whole body

    def renamed(self, param: str) -> "BodyError":
        """The error under the name that the caller of another API gave."""
        return BodyError(self.message.replace(str(self.param), param, 1), param, self.hint)


def error_body(
    message: str, status: int, param: str | None = None, path: str = "", code: str | None = None
) -> dict[str, Any]:
    """The JSON of an error, in the shape of the API at `path`. `code`: OpenAI's name of the error, if it has one."""
    shown = limits.shortened(message, limits.MESSAGE)
    return _format_of(path).document(shown, status, param, code)


def error_piece(document: dict[str, Any], path: str = "") -> str:
    """The piece with which a stream of the API at `path` reports an error. `document`: the error's JSON."""
    return _format_of(path).piece % json.dumps(document)


def _openai(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or status}}


def _anthropic(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    others = {503: "overloaded_error", 504: "timeout_error"}
    kind = ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else others.get(status, "api_error"))
    return {"type": "error", "error": {"type": kind, "message": message}}


def _ollama(message: str, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": message}


class ErrorFormat(NamedTuple):
    """The errors of one API."""

    path: str  # the start of the API's paths
    names: str  # the API in `Parameter.names`
    document: Callable[[str, int, str | None, str | None], dict[str, Any]]  # message, status, field, code -> JSON
    piece: str  # of a stream; %s: the JSON


_EVENT = "event: error\ndata: %s\n\n"
_APIS = (
    ErrorFormat("/v1/messages", "anthropic", _anthropic, _EVENT),
    ErrorFormat("/v1/responses", "responses", _openai, _EVENT),
    ErrorFormat("/api/", "ollama", _ollama, "%s\n"),
    ErrorFormat("", "", _openai, "data: %s\n\n"),
)


def _format_of(path: str) -> ErrorFormat:
    return next(each for each in _APIS if path.startswith(each.path))


def error_response(error: HeadstartError, path: str = "") -> tuple[int, dict[str, Any]]:
    """HTTP status and JSON body of an error, in the shape of the API at `path`."""
    status = status_of(error).http
    names = names_in(_format_of(path).names)
    if isinstance(error, BodyError | ParameterError) and error.param in names:
        error = error.renamed(names[error.param])
    param = error.param if isinstance(error, BodyError | ParameterError) else None
    code = "context_length_exceeded" if isinstance(error, ContextError) else None
    return status, error_body(str(error), status, param, path, code)


def install_handlers(app: FastAPI, paths: Sequence[str]) -> None:
    """Turn every exception of an endpoint into an error response. paths: of the API, for hints."""
    app.add_exception_handler(HeadstartError, _handle_user_error)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, partial(_handle_http_error, paths))
    app.add_exception_handler(ClientGone, lambda request, error: Response(status_code=CLIENT_GONE))
    app.add_exception_handler(Exception, _handle_bug)


async def _handle_user_error(request: Request, error: HeadstartError) -> JSONResponse:
    status, body = error_response(error, request.url.path)
    headers = retry_headers(error) if isinstance(error, BusyError | LimitError) else None
    return JSONResponse(body, status, headers)


def retry_headers(error: BusyError | LimitError) -> dict[str, str]:
    """Retry-After in whole seconds, and the x-ratelimit headers of a LimitError."""
    more = error.headers if isinstance(error, LimitError) else {}
    return {"Retry-After": str(max(1, math.ceil(error.seconds))), **more}


async def _handle_http_error(paths: Sequence[str], request: Request, error: HTTPException) -> JSONResponse:
    body = error_body(_http_message(paths, request, error), error.status_code, path=request.url.path)
    return JSONResponse(body, error.status_code, error.headers)


def _http_message(paths: Sequence[str], request: Request, error: HTTPException) -> str:
    """The message of a framework error. For 404 and 405 the framework only gives the status name: name the path."""
    path = limits.shortened(request.url.path)
    if error.detail == HTTPStatus.NOT_FOUND.phrase:
        wanted = request.url.path  # clients differ in whether the base URL ends with /v1
        like = next((each for each in paths if each.endswith(wanted) or wanted.endswith(each)), None)
        return f"there is nothing at {path} (hint: {f'did you mean {like}?' if like else '/docs lists what there is'})"
    if error.detail == HTTPStatus.METHOD_NOT_ALLOWED.phrase:
        return f"{path} takes {(error.headers or {}).get('Allow', 'other methods')}, not {request.method}"
    return str(error.detail)


async def _handle_bug(request: Request, error: Exception) -> JSONResponse:
    log.exception("a request failed", exc_info=error)
    body = error_body("the server failed on this request", 500, path=request.url.path)
    return JSONResponse(body, 500, {"Connection": "close"})
