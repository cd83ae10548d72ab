"""`Journal`: what another engine needs in order to go on with a response to the byte.

A response is a function of its body, of the deltas of its texts in order, and of its origin: a random number that ids
and an unset seed are drawn from, and a time. The record holds the deltas, a JSON line each. An engine that gets it
renders them again, and goes on.
"""

import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import astuple
from typing import Any

from starlette.types import Scope

from headstart.core import Delta, Draft, TokenLogprob

JOURNAL = "headstart.journal"  # key in an ASGI scope
SEED_BITS = 53  # as of seeds that `LLM` draws
MAX_UNWRITTEN = 4  # deltas that are written with the next piece of the response at the latest


def new_origin() -> str:
    """The origin of a new response."""
    return f"{secrets.token_hex(16)}-{int(time.time())}"


class Journal:
    """The record of one HTTP request. Without `write` nothing is kept."""

    def __init__(
        self, origin: str, record: bytes = b"", write: Callable[[], Awaitable[None]] | None = None,
        *, is_resumed: bool = False,
    ) -> None:  # fmt: skip
        """record: of the engines before; is_resumed: there were some. write: sends what `take` returns."""
        self._random, self.created = random.Random(origin), int(origin.rpartition("-")[2])
        self.seed = self._random.getrandbits(SEED_BITS)  # where the request has none
        self.history, self.is_resumed = [_read(line) for line in record.splitlines()], is_resumed
        self._write, self._unwritten = write, list[bytes]()

    @classmethod
    def of(cls, scope: Scope) -> "Journal":
        """The journal of an HTTP request; a new one for requests that no relay has sent."""
        found: Journal | None = scope.get(JOURNAL)
        return found or cls(new_origin())

    def new_id(self) -> str:
        """32 hexadecimal digits."""
        return f"{self._random.getrandbits(128):032x}"

    async def note(self, index: int, delta: Delta, *, with_scores: bool) -> None:
        """Record a new delta of prompt `index` before it is rendered."""
        if self._write is not None:
            self._unwritten.append(_line(index, delta, with_scores))
            if len(self._unwritten) > MAX_UNWRITTEN:
                await self._write()

    def take(self) -> bytes:
        """The lines since the last call."""
        lines, self._unwritten = b"".join(self._unwritten), []
        return lines


def _line(index: int, delta: Delta, with_scores: bool) -> bytes:
    draft = delta.draft or Draft()
    drafted = [draft.method, draft.tokens, draft.scores if with_scores else []]
    logprobs = [[each and astuple(each) for each in those] for those in (delta.logprobs, delta.prompt_logprobs)]
    facts = [delta.finish_reason, delta.error, delta.num_accepted, delta.num_cached]
    return json.dumps([index, delta.choice, delta.tokens, *logprobs, drafted, *facts]).encode() + b"\n"


def _read(line: bytes) -> tuple[int, Delta]:
    index, choice, tokens, logprobs, prompt_logprobs, drafted, finish, error, num_accepted, num_cached = json.loads(
        line
    )
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
