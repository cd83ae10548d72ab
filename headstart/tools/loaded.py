"""`headstart ps` and `headstart stop`: models in the memory of a server that runs, in the words of Ollama's API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine
from datetime import UTC, datetime
from typing import Any

from headstart.core import Report
from headstart.errors import UsageError
from headstart.tools.client import Response, Server, get, post, reason

FAR = 10 * 365
"""Days after which nobody waits for a model to leave."""


def ps(url: str, api_key: str | None) -> Report:
    """What is in memory. Raises UsageError."""
    server = Server.at(url, api_key)
    found = _asked(server, get(server, "/api/ps"))["models"]
    models = [
        {
            "name": each["name"].removesuffix(":latest"),
            "bytes": each["size"],
            "context": each["context_length"],
            "expires_at": each["expires_at"],
        }
        for each in found
    ]
    return Report(True, {"url": str(server), "models": models, "replicas": _replicas(server)})


def _replicas(server: Server) -> list[dict[str, Any]]:
    """Of a server that has several behind its router; none of any other."""
    answer = asyncio.run(get(server, "/replicas"))
    document = json.loads(answer.body) if answer.status == 200 else {}
    found: list[dict[str, Any]] = document.get("replicas", []) if isinstance(document, dict) else []
    return found


def stop(name: str, url: str, api_key: str | None) -> Report:
    """Let a model go. Raises UsageError. `ok`: it is out of memory."""
    server = Server.at(url, api_key)
    said = _asked(server, post(server, "/api/generate", {"model": name, "keep_alive": 0, "stream": False}))
    gone = said.get("done_reason") == "unload"
    line = f"{name} is out of memory" if gone else f"{name} leaves when its requests have ended, if it may"
    return Report(gone, {"model": name, "unloaded": gone}, [line])


def until(expires_at: str) -> str:
    """When a model leaves, for people."""
    left = datetime.fromisoformat(expires_at) - datetime.now(UTC)
    if left.days > FAR:
        return "stays"
    return f"in {max(int(left.total_seconds()), 0)} s"


def _asked(server: Server, work: Coroutine[Any, Any, Response]) -> dict[str, Any]:
    try:
        answer = asyncio.run(work)
    except (OSError, ValueError) as error:  # the latter: no such name can be looked up, or no JSON
        hint = "is the server running, and the address right? headstart serve --port 8000 starts one"
        raise UsageError(f"cannot reach {server}: {reason(error)}", hint) from None
    try:
        document = json.loads(answer.body)
    except ValueError:
        document = {}
    if answer.status != 200 or not isinstance(document, dict):
        said = document.get("error") if isinstance(document, dict) else None
        raise UsageError(f"{server} says {answer.status}: {said or 'no headstart server'}", "look at the server's log")
    return document
