"""`serve --role decode`: prompts are computed by a prefill server (prefill_server.py) and continued here.

KV blocks come through the directory of --kv-spill where both servers share it, else over HTTP. They hold the bits that
this server would compute, so a prefill server that is gone, busy or of another kind costs time and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Sequence as Seq
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from pydantic import BaseModel, Field, ValidationError

from headstart.cache.blocks import prefix_keys
from headstart.cache.kv_cache import KVCacheManager
from headstart.core import Request
from headstart.errors import UsageError

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("headstart.server")
PREFILL_PATH, BLOCKS_PATH = "/kv/prefill", "/kv/blocks"
MIN_TOKENS = 128  # prompts with fewer unknown tokens are computed here: a request takes longer
MAX_WAITING = 64  # prompts that wait for the prefill server at the same time
CONNECT_TIMEOUT_S, RESPONSE_TIMEOUT_S = 2.0, 300.0
RETRY_AFTER_S = 5.0  # time without requests to a server that failed


class PrefillBody(BaseModel):
    """A prompt; `cache_salt` as in a completion."""

    prompt: list[int] = Field(min_length=1)
    cache_salt: str = ""
    model: str | None = None


class PrefillResult(BaseModel):
    """Which blocks of a prompt are stored."""

    trunk: str = Field(description="Name of the trunk's blocks; the decode server's must be the same.")
    files: dict[str, list[int]] = Field(description="Name of a part -> numbers of its stored blocks.")


class _WrongResponseError(Exception):
    """The response is not that of a matching prefill server."""


@dataclass
class PrefillCounts:
    """Counts of the prefill server's work for this server."""

    prompts: int = 0  # prompts it computed
    tokens: int = 0  # their tokens that were not known here
    fetched: int = 0  # blocks that came over HTTP
    failed: int = 0  # prompts that it did not compute


def prefill_url(url: str) -> str:
    """The URL with its scheme. Raises UsageError for an invalid URL."""
    with suppress(ValueError):
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.hostname and parts.scheme in ("http", "https") and (parts.port is None or parts.port):
            return parts.geturl().rstrip("/")
    raise UsageError(f"--prefill is {url!r}, which is no URL", "for example --prefill http://10.0.0.1:8001")


class PrefillClient:
    """Client of one prefill server, whose KV blocks go into `memory`. Raises UsageError for an invalid URL."""

    def __init__(self, url: str, api_key: str | None, memory: KVCacheManager) -> None:
        assert memory.spill is not None, "--role decode needs --kv-spill"
        import httpx

        self.url, self.counts = prefill_url(url), PrefillCounts()
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._verify = httpx.create_ssl_context() if self.url.startswith("https:") else False
        self._timeout = httpx.Timeout(RESPONSE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        self._memory, self._spill = memory, memory.spill
        self._threads = ThreadPoolExecutor(MAX_WAITING, "headstart-prefill")
        self._guard = threading.Lock()  # of the next two fields and of counts
        self._retry_at, self._is_failing = 0.0, False

    async def prefetch(self, requests: Seq[Request]) -> None:
        """Let the prefill server compute the unknown parts of the prompts. Afterwards their blocks are in the store, or
        the prefill server has failed."""
        loop = asyncio.get_running_loop()
        wanted = {(each.prompt_ids, each.cache_salt): each for each in requests if self._is_wanted(each)}
        await asyncio.gather(*(loop.run_in_executor(self._threads, self._prefetch, each) for each in wanted.values()))

    def _is_wanted(self, request: Request) -> bool:
        if time.monotonic() < self._retry_at or len(request.prompt_ids) <= MIN_TOKENS:
            return False
        return request.params.prompt_logprobs is None and not request.embeds

    def _prefetch(self, request: Request) -> None:
        import httpx

        size = self._memory.block_size
        keys = list(prefix_keys(request.prompt_ids[:-1], request.cache_salt, size))
        num_unknown = (len(keys) - self._spill.extent(keys)) * size
        if num_unknown < MIN_TOKENS:
            return
        try:
            with httpx.Client(
                base_url=self.url, headers=self._headers, timeout=self._timeout, verify=self._verify, trust_env=False
            ) as client:
                fetched = self._fetch(client, keys, self._compute(client, request))
        except (OSError, httpx.HTTPError, ValueError, _WrongResponseError) as error:
            self._fail(error)
            return
        with self._guard:
            self.counts.prompts += 1
            self.counts.tokens += num_unknown
            self.counts.fetched += fetched
            was_failing, self._is_failing = self._is_failing, False
        if was_failing:
            log.info("the prefill server %s answers again", self.url)

    def _compute(self, client: httpx.Client, request: Request) -> dict[str, list[int]]:
        """Let the server compute the prompt; returns the numbers of its stored blocks by part."""
        response = client.post(PREFILL_PATH, json={"prompt": request.prompt_ids, "cache_salt": request.cache_salt})
        _check(response)
        try:
            result = PrefillResult.model_validate_json(response.content)
        except ValidationError:
            raise _WrongResponseError("the response is not that of a prefill server") from None
        if result.trunk != self._spill.trunk_name:
            raise _WrongResponseError("its blocks are of another model, head, version, processor or type of keys")
        return result.files

    def _fetch(self, client: httpx.Client, keys: Seq[bytes], files: dict[str, list[int]]) -> int:
        """Fetch the blocks that are not in this store; returns their number."""
        store, count = self._spill.store, 0
        for name in self._spill.names.values():
            for place in files.get(name, ()):
                if not 0 <= place < len(keys) or store.has(name, keys[place]):
                    continue
                response = client.get(f"{BLOCKS_PATH}/{name}/{keys[place].hex()}")
                if response.status_code == 404:
                    return count
                _check(response)
                # the end of a prefix is of no use without its beginning, which is evicted last
                if not store.put_file(name, keys[place], response.content, time.time_ns() - place * 1000):
                    return count
                count += 1
        return count

    def _fail(self, error: Exception) -> None:
        with self._guard:
            self.counts.failed += 1
            self._retry_at = time.monotonic() + RETRY_AFTER_S
            was_failing, self._is_failing = self._is_failing, True
        if not was_failing:
            log.warning("the prefill server %s: %s; prompts are computed here", self.url, error)


def _check(response: httpx.Response) -> None:
    if response.status_code != 200:
        what = f"{response.status_code} {response.reason_phrase} for {response.request.url.path}"
        raise _WrongResponseError(what)
