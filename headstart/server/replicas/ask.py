"""A request to another server of ours, without proxies."""

from __future__ import annotations

import http.client
from collections.abc import Mapping
from urllib.parse import urlsplit

MOST = 64 * 2**20
"""Bytes of an answer that are read."""


def ask(
    url: str, path: str, method: str = "GET", headers: Mapping[str, str] | None = None, seconds: float = 5.0
) -> tuple[int, str]:
    """Status and text. Blocks. Raises OSError where nobody answers in time, or not in HTTP."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=seconds)
    try:
        connection.request(method, parts.path.rstrip("/") + path, headers=dict(headers or {}))
        answer = connection.getresponse()
        return answer.status, answer.read(MOST).decode("utf-8", "replace")
    except http.client.HTTPException as error:
        raise ConnectionError(f"no HTTP: {error!r}") from None
    finally:
        connection.close()
