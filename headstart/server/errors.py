"""Every error in OpenAI's shape."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from headstart.errors import BusyError, HeadstartError, status_of

log = logging.getLogger("headstart.server")

KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}
RETRY_SECONDS = 1


def document(message: str, status: int, param: str | None = None) -> dict[str, Any]:
    """The body of an error."""
    kind = KINDS.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_of(error: HeadstartError) -> tuple[int, dict[str, Any]]:
    """HTTP status and body."""
    status = status_of(error).http
    return status, document(str(error), status)


def install(app: FastAPI) -> None:
    """Handlers for all that an endpoint may raise."""
    app.add_exception_handler(HeadstartError, _ours)  # type: ignore[arg-type]
    app.add_exception_handler(RequestValidationError, _invalid)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http)  # type: ignore[arg-type]
    app.add_exception_handler(Exception, _bug)


async def _ours(request: Request, error: HeadstartError) -> JSONResponse:
    status, body = error_of(error)
    headers = {"Retry-After": str(RETRY_SECONDS)} if isinstance(error, BusyError) else None
    return JSONResponse(body, status, headers)


async def _invalid(request: Request, error: RequestValidationError) -> JSONResponse:
    """The deepest of pydantic's complaints: unions complain once for every member."""
    worst: Mapping[str, Any] = max(error.errors(), key=lambda each: len(each["loc"]))
    place = ".".join(str(part) for part in worst["loc"] if part != "body")
    if worst["type"] == "json_invalid":
        return JSONResponse(document(f"the body is not valid JSON: {worst.get('ctx', {}).get('error')}", 400), 400)
    return JSONResponse(document(f"{place or 'the body'}: {worst['msg']}", 400, place or None), 400)


async def _http(request: Request, error: HTTPException) -> JSONResponse:
    return JSONResponse(document(str(error.detail), error.status_code), error.status_code, error.headers)


async def _bug(request: Request, error: Exception) -> JSONResponse:
    log.exception("a request failed", exc_info=error)
    return JSONResponse(document("the server failed on this request", 500), 500)
