"""`serve --role decode`: prompts are computed by a prefill server (handed_over.py), and go on here from its blocks.

Blocks come through the directory of --kv-spill where both share it, else over HTTP into this one's. They are the bits
that would be computed here, so where the other server is gone, busy or of another kind, nothing changes but the time.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from typing import Any, NamedTuple, Self
from urllib.parse import urlsplit

from headstart.cache.blocks import keys_of
from headstart.cache.memory import KVMemory
from headstart.core import Request
from headstart.errors import UsageError
from headstart.server.handed_over import BLOCKS, PREFILL
from headstart.server.watch import Handed

log = logging.getLogger("headstart.server")
LEAST_TOKENS = 128
"""Fewer that are not known here are computed here: asking takes longer."""
AT_ONCE = 64
"""Prompts that wait for the other server."""
CONNECT_SECONDS, ANSWER_SECONDS = 2.0, 300.0
AWAY_SECONDS = 5.0
"""For which a server that did not answer is not asked."""


class _WrongAnswerError(Exception):
    """What came is not what a prefill server says."""


class Address(NamedTuple):
    """Where a prefill server is; `prefix` stands before every path."""

    host: str
    port: int | None
    tls: bool
    prefix: str

    @classmethod
    def of(cls, url: str) -> Self:
        """Raises UsageError for what is no URL."""
        with suppress(ValueError):
            parts = urlsplit(url if "//" in url else f"http://{url}")
            if parts.hostname and parts.scheme in ("http", "https"):
                return cls(parts.hostname, parts.port, parts.scheme == "https", parts.path.rstrip("/"))
        raise UsageError(f"--prefill is {url!r}, which is no URL", "for example --prefill http://10.0.0.1:8001")


class Handoff:
    """One prefill server, and the memory that its blocks are for. Raises UsageError for what is no URL."""

    def __init__(self, url: str, api_key: str | None, memory: KVMemory) -> None:
        assert memory.spill is not None, "--role decode needs --kv-spill"
        self.url, self.counts, self._at = url, Handed(), Address.of(url)
        self._api_key, self._memory, self._spill = api_key, memory, memory.spill
        self._threads = ThreadPoolExecutor(AT_ONCE, "headstart-prefill")
        self._guard = threading.Lock()  # of what follows, and of counts
        self._away_until, self._told = 0.0, False

    async def bring(self, requests: Seq[Request]) -> None:
        """Have prompts computed elsewhere as far as they are not known here; at the end they are in the store, or it
        has failed."""
        loop = asyncio.get_running_loop()
        wanted = {(each.prompt_ids, each.cache_salt): each for each in requests if self._is_wanted(each)}
        await asyncio.gather(*(loop.run_in_executor(self._threads, self._bring, each) for each in wanted.values()))

    def _is_wanted(self, request: Request) -> bool:
        if time.monotonic() < self._away_until or len(request.prompt_ids) <= LEAST_TOKENS:
            return False
        return request.params.prompt_logprobs is None and not request.embeds

    def _bring(self, request: Request) -> None:
        size = self._memory.block_size
        keys = list(keys_of(request.prompt_ids[:-1], request.cache_salt, size))
        missing = (len(keys) - self._spill.extent(keys)) * size
        if missing < LEAST_TOKENS:
            return
        kind = HTTPSConnection if self._at.tls else HTTPConnection
        connection = kind(self._at.host, self._at.port, timeout=CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(ANSWER_SECONDS)
            fetched = self._fetch(connection, keys, self._ask(connection, request))
        except (OSError, HTTPException, ValueError, _WrongAnswerError) as error:
            self._fail(error)
            return
        finally:
            connection.close()
        with self._guard:
            self.counts.prompts += 1
            self.counts.tokens += missing
            self.counts.fetched += fetched
            told, self._told = self._told, False
        if told:
            log.info("the prefill server %s answers again", self.url)

    def _ask(self, connection: HTTPConnection, request: Request) -> dict[str, list[int]]:
        """Have it computed; which blocks of it are stored, by the names of parts."""
        body = json.dumps({"prompt": request.prompt_ids, "cache_salt": request.cache_salt}).encode()
        answer = json.loads(self._exchange(connection, "POST", PREFILL, body) or b"null")
        files = answer.get("files") if isinstance(answer, dict) else None
        if not isinstance(files, dict) or not all(_are_places(places) for places in files.values()):
            raise _WrongAnswerError("it answers as no prefill server does")
        if answer.get("trunk") != self._spill.trunk_name:
            raise _WrongAnswerError("its blocks are of another model, head, version, processor or type of keys")
        return files

    def _fetch(self, connection: HTTPConnection, keys: Seq[bytes], files: dict[str, list[int]]) -> int:
        """Files that are there, and not here, come here; returns their number."""
        store, count = self._spill.store, 0
        for name in self._spill.names.values():
            for place in files.get(name, ()):
                if place >= len(keys) or store.has(name, keys[place]):
                    continue
                data = self._exchange(connection, "GET", f"{BLOCKS}/{name}/{keys[place].hex()}", b"")
                # the end of a prefix is worth nothing without its begin, which goes last
                if data is None or not store.put_file(name, keys[place], data, time.time_ns() - place * 1000):
                    return count
                count += 1
        return count

    def _exchange(self, connection: HTTPConnection, method: str, path: str, body: bytes) -> bytes | None:
        """The body of the answer; None: there is no such thing."""
        headers = {"Content-Type": "application/json"}
        headers |= {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
        connection.request(method, self._at.prefix + path, body, headers)
        with connection.getresponse() as response:
            data = response.read()
            if response.status == 404 and method == "GET":
                return None
            if response.status != 200:
                raise _WrongAnswerError(f"it answers {response.status} {response.reason} to {path}")
        return data

    def _fail(self, error: Exception) -> None:
        with self._guard:
            self.counts.failed += 1
            self._away_until = time.monotonic() + AWAY_SECONDS
            told, self._told = self._told, True
        if not told:
            log.warning("the prefill server %s: %s; prompts are computed here", self.url, error)


def _are_places(found: Any) -> bool:
    return isinstance(found, list) and all(isinstance(place, int) and place >= 0 for place in found)
