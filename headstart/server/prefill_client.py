"""`serve --role decode`: a prefill server (prefill_server.py) computes prompts, and this server generates the outputs.

KV blocks come through the directory of --kv-spill if both servers share it, else over HTTP. Their bits equal those that
this server would compute. If the prefill server is gone, busy or does not match, this server computes the prompts.
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
from headstart.cache.store import time_of_use
from headstart.core import Request
from headstart.errors import UsageError

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("headstart.server")
PREFILL_PATH, BLOCKS_PATH = "/kv/prefill", "/kv/blocks"
MIN_TOKENS = 128  # prompts with fewer uncached tokens are computed here, since a request would take longer
MAX_WAITING = 64  # maximum prompts that wait for the prefill server at the same time
CONNECT_TIMEOUT_S, RESPONSE_TIMEOUT_S = 2.0, 300.0
RETRY_AFTER_S = 5.0  # pause after a failure of the prefill server


class PrefillBody(BaseModel):
    """Request: a prompt as token ids; `cache_salt` as in a completion."""

    prompt: list[int] = Field(min_length=1)
    cache_salt: str = ""
    model: str | None = None


class PrefillResult(BaseModel):
    """Response: the stored KV blocks of a prompt."""

    trunk: str = Field(description="Name under which the trunk's blocks are stored; must equal the decode server's.")
    files: dict[str, list[int]] = Field(description="Name of a network's blocks -> indices of its stored blocks.")


class _WrongResponseError(Exception):
    """The response did not come from a matching prefill server."""


@dataclass
class PrefillCounts:
    """Counts of the prefill server's work for this server."""

    prompts: int = 0  # prompts that the prefill server computed
    tokens: int = 0  # tokens of these prompts that were not in the local cache
    fetched: int = 0  # blocks fetched over HTTP
    failed: int = 0  # prompts that the prefill server failed to compute


def prefill_url(url: str) -> str:
    """The URL of --prefill with a scheme (default http). Raises UsageError for an invalid URL."""
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
        self._guard = threading.Lock()  # guards the next two fields and `counts`
        self._retry_at, self._is_failing = 0.0, False

    async def prefetch(self, requests: Seq[Request]) -> None:
        """Let the prefill server compute the uncached parts of the prompts. Returns when their blocks are in the local
        store, or the prefill server has failed."""
        loop = asyncio.get_running_loop()
        wanted = {(each.prompt_ids, each.cache_salt): each for each in requests if self._is_wanted(each)}
        await asyncio.gather(*(loop.run_in_executor(self._threads, self._prefetch, each) for each in wanted.values()))

    def _is_wanted(self, request: Request) -> bool:
        if time.monotonic() < self._retry_at or len(request.prompt_ids) <= MIN_TOKENS:
            return False
        is_plain = not (request.embeds or request.images or request.adapter)
        return request.params.prompt_logprobs is None and is_plain

    def _prefetch(self, request: Request) -> None:
        import httpx

        size = self._memory.block_size
        keys = list(prefix_keys(request.prompt_ids[:-1], request.cache_scope, size))
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
        """Let the prefill server compute the prompt. Returns PrefillResult.files."""
        response = client.post(PREFILL_PATH, json={"prompt": request.prompt_ids, "cache_salt": request.cache_salt})
        _check(response)
        try:
            result = PrefillResult.model_validate_json(response.content)
        except ValidationError:
            raise _WrongResponseError("the response did not come from a prefill server") from None
        if result.trunk != self._spill.trunk_name:
            raise _WrongResponseError("its blocks have another model, head, version, processor or KV cache dtype")
        return result.files

    def _fetch(self, client: httpx.Client, keys: Seq[bytes], files: dict[str, list[int]]) -> int:
        """Fetch the blocks that the local store lacks, by the indices of `files`. Returns the number fetched."""
        store, count, now_ns = self._spill.store, 0, time.time_ns()
        for name in self._spill.names.values():
            for place in files.get(name, ()):
                if not 0 <= place < len(keys) or store.has(name, keys[place]):
                    continue
                response = client.get(f"{BLOCKS_PATH}/{name}/{keys[place].hex()}")
                if response.status_code == 404:
                    return count
                _check(response)
                if not store.put_file(name, keys[place], response.content, time_of_use(now_ns, place)):
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
