"""`headstart ps` and `headstart stop`: models in the memory of a running server, through Ollama's API."""

import asyncio
import json
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

from headstart.core import Report
from headstart.errors import UsageError
from headstart.tools.client import Response, Server, get, get_object, post, unreachable

MAX_DAYS = 10 * 365  # a model that leaves later than that stays


def ps(url: str, api_key: str | None) -> Report:
    server = Server.at(url, api_key)
    models = [
        {
            "name": each["name"].removesuffix(":latest"),
            "bytes": each["size"],
            "context": each["context_length"],
            "expires_at": each["expires_at"],
        }
        for each in _request(server, get(server, "/api/ps"))["models"]
    ]
    replicas = get_object(server, "/replicas").get("replicas", [])  # of a server with several behind its router
    return Report(True, {"url": str(server), "models": models, "replicas": replicas})


def stop(name: str, url: str, api_key: str | None) -> Report:
    """Unloads a model; `ok`: it is out of memory. Raises UsageError."""
    server = Server.at(url, api_key)
    answer = _request(server, post(server, "/api/generate", {"model": name, "keep_alive": 0, "stream": False}))
    gone = answer.get("done_reason") == "unload"
    line = f"{name} is out of memory" if gone else f"{name} leaves when its requests have ended, if it may"
    return Report(gone, {"model": name, "unloaded": gone}, [line])


def until(expires_at: str) -> str:
    """Returns when a model leaves, for people."""
    left = datetime.fromisoformat(expires_at) - datetime.now(UTC)
    return "stays" if left.days > MAX_DAYS else f"in {max(int(left.total_seconds()), 0)} s"


def _request(server: Server, request: Coroutine[Any, Any, Response]) -> dict[str, Any]:
    """Returns the JSON object of an answer. Raises UsageError."""
    try:
        answer = asyncio.run(request)
    except (OSError, ValueError) as error:  # ValueError: a name that cannot be looked up
        raise unreachable(server, error) from None
    try:
        document = json.loads(answer.body)
    except ValueError:
        document = {}
    if answer.status != 200 or not isinstance(document, dict):
        said = document.get("error") if isinstance(document, dict) else None
        raise UsageError(f"{server} says {answer.status}: {said or 'no headstart server'}", "look at the server's log")
    return document
