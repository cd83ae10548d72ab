"""`headstart ps` and `headstart stop`: models in the memory of a running server, through Ollama's API."""

import json
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

from headstart.core import Report
from headstart.errors import UsageError
from headstart.tools.client import Response, Server, ask, get, get_object, post

MAX_DAYS = 10 * 365  # a model that expires later than that stays loaded


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
    replicas = get_object(server, "/replicas").get("replicas", [])  # empty for a server without a router
    return Report(True, {"url": str(server), "models": models, "replicas": replicas})


def stop(name: str, url: str, api_key: str | None) -> Report:
    """Unloads a model. `ok`: the model is unloaded; else its requests are still running. Raises UsageError."""
    server = Server.at(url, api_key)
    answer = _request(server, post(server, "/api/generate", {"model": name, "keep_alive": 0, "stream": False}))
    gone = answer.get("done_reason") == "unload"
    line = f"{name} is unloaded" if gone else f"{name} still has requests, and is unloaded after them unless more come"
    return Report(gone, {"model": name, "unloaded": gone}, [line])


def until(expires_at: str) -> str:
    """Returns the time until a model is unloaded, as text such as "in 90 s" or "stays"."""
    left = datetime.fromisoformat(expires_at) - datetime.now(UTC)
    return "stays" if left.days > MAX_DAYS else f"in {max(int(left.total_seconds()), 0)} s"


def _request(server: Server, request: Coroutine[Any, Any, Response]) -> dict[str, Any]:
    """Returns the JSON object of a response. Raises UsageError as `client.ask`, and for an error status."""
    answer = ask(server, request)
    try:
        document = json.loads(answer.body)
    except ValueError:
        document = {}
    if answer.status != 200 or not isinstance(document, dict):
        said = document.get("error") if isinstance(document, dict) else None
        said, _, hint = str(said or "not a headstart server").partition(" (hint: ")
        raise UsageError(f"{server} answers {answer.status}: {said}", hint.removesuffix(")") or "see the server's log")
    return document
