"""`Journal`: the record from which another engine continues a response, byte for byte.

A response depends only on the request body, the ordered deltas of its texts, and its origin. The origin is a random
number (ids and an unset seed are drawn from it) and the creation time. The record holds one JSON line for each delta,
and one for downloaded images, whose URLs may show others later.
An engine that receives the record renders these deltas again and then continues.
"""

import base64
import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import astuple
from typing import Any

from starlette.types import Scope

from headstart.core import Delta, Draft, TokenLogprob

JOURNAL = "headstart.journal"  # key of the Journal in an ASGI scope
SEED_BITS = 53  # size of a drawn seed, the same as in `LLM`
MAX_UNWRITTEN = 4  # deltas that may wait for the next piece of the response; more are written at once


def new_origin() -> str:
    """The origin of a new response: 32 random hexadecimal digits, a dash, and the Unix time."""
    return f"{secrets.token_hex(16)}-{int(time.time())}"


class Journal:
    """The record of one HTTP request. Without `write` no deltas are recorded."""

    def __init__(
        self, origin: str, record: bytes = b"", write: Callable[[], Awaitable[None]] | None = None,
        *, is_resumed: bool = False,
    ) -> None:  # fmt: skip
        """record: lines that earlier engines wrote; is_resumed: an earlier engine began this response.
        write: sends the lines that `take` returns."""
        self._random, self.created = random.Random(origin), int(origin.rpartition("-")[2])
        self.seed = self._random.getrandbits(SEED_BITS)  # for requests without a seed
        lines = [json.loads(line) for line in record.splitlines()]
        self.history, self.is_resumed = [_read(line) for line in lines if isinstance(line, list)], is_resumed
        self.images = {  # URL -> bytes
            url: base64.b64decode(data) for line in lines if isinstance(line, dict) for url, data in line.items()
        }
        self._write, self._unwritten = write, list[bytes]()

    @classmethod
    def of(cls, scope: Scope) -> "Journal":
        """The journal in an HTTP request's scope; a new one if no relay put one there."""
        found: Journal | None = scope.get(JOURNAL)
        return found or cls(new_origin())

    def new_id(self) -> str:
        """A new id for a response or a part of it: 32 hexadecimal digits."""
        return f"{self._random.getrandbits(128):032x}"

    async def note(self, index: int, delta: Delta, *, with_scores: bool) -> None:
        """Record a new delta of prompt `index` before it is rendered."""
        if self._write is not None:
            self._unwritten.append(_line(index, delta, with_scores))
            if len(self._unwritten) > MAX_UNWRITTEN:
                await self._write()

    def note_images(self, found: Mapping[str, bytes]) -> None:
        """Record downloaded images, by URL. They are written with the first delta."""
        if self._write is not None and found:
            document = {url: base64.b64encode(data).decode() for url, data in found.items()}
            self._unwritten.append(json.dumps(document).encode() + b"\n")

    def take(self) -> bytes:
        """The recorded lines since the last call."""
        lines, self._unwritten = b"".join(self._unwritten), []
        return lines


def _line(index: int, delta: Delta, with_scores: bool) -> bytes:
    draft = delta.draft or Draft()
    drafted = [draft.method, draft.tokens, draft.scores if with_scores else []]
    logprobs = [[each and astuple(each) for each in those] for those in (delta.logprobs, delta.prompt_logprobs)]
    facts = [delta.finish_reason, delta.error, delta.num_accepted, delta.num_cached]
    return json.dumps([index, delta.choice, delta.tokens, *logprobs, drafted, *facts]).encode() + b"\n"


def _read(line: list[Any]) -> tuple[int, Delta]:
    index, choice, tokens, logprobs, prompt_logprobs, drafted, finish, error, num_accepted, num_cached = line
    method, draft, scores = drafted
    return index, Delta(
        request_id="", choice=choice, tokens=tuple(tokens), logprobs=tuple(map(_logprob, logprobs)),
        prompt_logprobs=tuple(map(_logprob, prompt_logprobs)), finish_reason=finish, error=error,
        draft=Draft(draft, method=method, scores=scores), num_accepted=num_accepted, num_cached=num_cached,
    )  # fmt: skip


def _logprob(given: list[Any] | None) -> TokenLogprob | None:
    if given is None:
        return None
    token, logprob, top = given
    return TokenLogprob(token, logprob, tuple((other, value) for other, value in top))
