"""Admission of requests to one model: places in its queue, budgets of API keys, and the end of the server."""

import time
from collections import deque
from collections.abc import Iterator, Sequence as Seq
from contextlib import contextmanager

from headstart.core import Request
from headstart.engine.async_engine import RequestStream
from headstart.errors import BusyError, CapacityError
from headstart.server.accounts import Accounts

NUM_RECENT_ENDS = 32  # ends of choices from which the rate is estimated at which places become free
MAX_RETRY_S = 60.0  # maximum of the header Retry-After


class Admission:
    """Counts choices (outputs) that are being prepared, wait or run. Used on the event loop only."""

    def __init__(self, accounts: Accounts, max_choices: int) -> None:
        self.accounts, self.max_choices = accounts, max_choices
        self.draining = False  # nothing new is admitted
        self.num_shed = 0  # requests refused for want of places
        self.num_preparing, self.num_in_flight = 0, 0  # choices
        self._num_holders = 0
        self._ends: deque[float] = deque(maxlen=NUM_RECENT_ENDS)  # times of the latest ends

    @contextmanager
    def reserve(self, count: int, owner: str = "") -> Iterator[None]:
        """Places for choices while their request is prepared. Raises LimitError, and what `begin` raises."""
        taken, account = self.num_in_flight + self.num_preparing, self.accounts.named(owner)
        self._check_free(count, taken)
        account.check()
        self.accounts.check_room(account, count, self.max_choices - taken, self._seconds_until_free(count))
        self.num_preparing += count
        account.held += count
        try:
            yield
        finally:
            self.num_preparing -= count
            account.held -= count

    def begin(self, requests: Seq[Request], *, is_resumed: bool = False) -> None:
        """The requests go to the engine. Raises BusyError when too much waits, LimitError, and CapacityError for more
        than there is ever room for. Those that another engine had admitted are neither refused nor charged again."""
        count, account = sum(request.params.n for request in requests), self.accounts.named(requests[0].owner)
        if not is_resumed:
            self._check_free(count, self.num_in_flight)
            account.begin(sum(len(request.prompt_ids) for request in requests))
        self.num_in_flight += count
        account.held += count

    def end(self, requests: Seq[Request], stream: RequestStream | None) -> None:
        """The requests have left the engine, or were never opened (None)."""
        for request in requests:
            self.num_in_flight -= request.params.n
            self._ends.extend([time.perf_counter()] * request.params.n)
            account = self.accounts.named(request.owner)
            account.held -= request.params.n
            account.wrote(stream.num_written(request) if stream else 0)

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Keeps the model in memory for work that is not always in the engine."""
        self._num_holders += 1
        try:
            yield
        finally:
            self._num_holders -= 1

    @property
    def is_idle(self) -> bool:
        """May the model leave the memory?"""
        return not (self.num_in_flight or self.num_preparing or self._num_holders)

    @property
    def is_full(self) -> bool:
        """Would the next request be refused?"""
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
        """Time in which so many choices end, at the rate of the latest ends."""
        if len(self._ends) < 2:
            return 1.0
        seconds_per_end = (self._ends[-1] - self._ends[0]) / (len(self._ends) - 1)
        return min(count * seconds_per_end, MAX_RETRY_S)
