"""Admission of requests to one model: queue places, rate limits of API keys, and refusal during shutdown."""

import time
from collections import deque
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager

from headstart.core import Request
from headstart.engine.async_engine import RequestStream
from headstart.errors import BusyError, CapacityError
from headstart.server.accounts import Accounts

NUM_RECENT_ENDS = 32  # latest finished choices; their rate estimates when a place becomes free
MAX_RETRY_S = 60.0  # maximum of the header Retry-After


class Admission:
    """Counts choices (outputs) that are being prepared, wait or run. Used on the event loop only."""

    def __init__(self, accounts: Accounts, max_choices: int) -> None:
        self.accounts, self.max_choices = accounts, max_choices
        self.draining = False  # True: the server shuts down, every new request is refused
        self.num_shed = 0  # requests refused because the queue was full
        self.num_preparing, self.num_in_flight = 0, 0  # choices
        self._num_holders = 0  # callers inside `hold`
        self._ends: deque[float] = deque(maxlen=NUM_RECENT_ENDS)  # time.perf_counter() of finished choices

    @contextmanager
    def reserve(self, count: int, owner: str = "") -> Iterator[None]:
        """Reserve `count` places for the account `owner` while a request is prepared. Raises as `begin` does."""
        taken, account = self.num_in_flight + self.num_preparing, self.accounts.named(owner)
        self._check_free(count, taken)
        account.check()
        self.accounts.check_queue_share(account, count, self.max_choices - taken, self._seconds_until_free(count))
        self.num_preparing += count
        account.held += count
        try:
            yield
        finally:
            self.num_preparing -= count
            account.held -= count

    def begin(self, requests: Seq[Request], *, is_resumed: bool = False) -> None:
        """Count and charge requests that go to the engine. Raises BusyError if the queue is full, CapacityError if the
        request can never fit, and LimitError from the API key's limits. Resumed requests were admitted by another
        engine: they are neither refused nor charged again."""
        count, account = sum(request.params.n for request in requests), self.accounts.named(requests[0].owner)
        if not is_resumed:
            self._check_free(count, self.num_in_flight)
            account.begin(sum(len(request.prompt_ids) for request in requests))
        self.num_in_flight += count
        account.held += count

    def end(self, requests: Seq[Request], stream: RequestStream | None) -> None:
        """Free the places of requests and charge their outputs. `stream` is None if the engine never got them."""
        for request in requests:
            self.num_in_flight -= request.params.n
            self._ends.extend([time.perf_counter()] * request.params.n)
            account = self.accounts.named(request.owner)
            account.held -= request.params.n
            account.charge_output(stream.num_written(request) if stream else 0)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keep the model in memory during work that has no request in the engine all the time."""
        self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1

    @property
    def is_idle(self) -> bool:
        """Whether the model may be unloaded."""
        return not (self.num_in_flight or self.num_preparing or self._num_holders)

    @property
    def is_full(self) -> bool:
        """Whether the next request would be refused."""
        return self.num_in_flight + self.num_preparing >= self.max_choices

    def _check_free(self, count: int, taken: int) -> None:
        if self.draining:
            raise BusyError("the server is shutting down", "send the request to another one")
        if count > self.max_choices:
            what = f"the request asks for {count} texts, but {self.max_choices} may run or wait"
            raise CapacityError(what, "ask for fewer")
        if (excess := taken + count - self.max_choices) > 0:
            self.num_shed += 1
            what = f"{taken} sequences run or wait, and {self.max_choices} are allowed"
            raise BusyError(what, "try again later", self._seconds_until_free(excess))

    def _seconds_until_free(self, count: int) -> float:
        """Seconds until `count` more choices end, at the rate of the latest ones; at most MAX_RETRY_S."""
        if len(self._ends) < 2:
            return 1.0
        seconds_per_end = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(count * seconds_per_end, MAX_RETRY_S)
