"""`SharedEngine`: one engine for callers in several threads, which take turns in order of arrival.

A step serves all running requests, so requests of all threads share one batch. A caller runs a step when its inbox is
empty. `AsyncEngine` (async_engine.py) is a caller with its own thread.
"""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from headstart.core import Delta, Request, Sequence
from headstart.engine.engine import Engine
from headstart.errors import GenerationError


class FairLock:
    """First-come, first-served lock. Not reentrant.

    Functions passed to `call_soon` run while the lock is held: at once if it is free, else by its holder before the
    release. `call_soon` never waits, so finalizers may call it even in a thread that holds the lock.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # protects the next two fields
        self._owner: int | None = None
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._pending: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        me, turn = threading.get_ident(), None
        try:
            with self._guard:
                if self._owner is None or self._owner == me:  # own thread: an interrupt came just after acquiring
                    self._owner = me
                else:
                    turn = threading.Lock()
                    turn.acquire()
                    self._waiting.append((me, turn))
            if turn:
                turn.acquire()  # released by the thread that made this one the owner
            self._run_pending()
        except BaseException:
            with self._guard:
                if turn and (me, turn) in self._waiting:
                    self._waiting.remove((me, turn))
            if self._owner == me:
                self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        while True:
            self._run_pending()
            with self._guard:
                if self._waiting:
                    self._owner, turn = self._waiting.popleft()
                    turn.release()
                    return
                self._owner = None
            if not self._pending or not self._try():
                return

    def call_soon(self, call: Callable[[], object]) -> None:
        self._pending.append(call)
        if self._try():
            self.__exit__()

    def _try(self) -> bool:
        """Takes the lock if it is free, without waiting; else its holder will run `_pending`."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if self._owner is not None:
                return False
            self._owner = threading.get_ident()
            return True
        finally:
            self._guard.release()

    def _run_pending(self) -> None:
        while self._pending:
            self._pending.popleft()()


@dataclass(eq=False)
class Inbox:
    """Unread deltas of one caller's requests, with arrival times (time.perf_counter)."""

    deltas: deque[tuple[float, Delta]] = field(default_factory=deque)
    error: str = ""  # why deltas are missing: another caller's step failed, or the engine was closed
    request_ids: list[str] = field(default_factory=list)


class Listener(Protocol):
    """Receives the deltas of requests without an inbox. Methods are called in the thread that runs the step."""

    def deliver(self, deltas: list[Delta]) -> None:
        """Deltas of a step; requests of other listeners may be among them."""

    def end(self, request_ids: Iterable[str], error: GenerationError) -> None:
        """Reports that these requests have ended with an error."""


class SharedEngine:
    """An engine behind a fair lock. An inbox belongs to one thread; other threads' steps advance its requests."""

    def __init__(self, engine: Engine, named_errors: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        """named_errors: makes a context in which errors have the callers' names of options."""
        self.engine, self._lock, self._named_errors = engine, FairLock(), named_errors
        self.inboxes: dict[str, Inbox] = {}  # by request id
        self.listeners: list[Listener] = []
        # At the program's end other threads wait for the lock: Python aborts if it ends them in compiled code.
        weakref.finalize(self, self._lock.__enter__)

    def stop(self) -> None:
        """Ends all requests; their callers get GenerationError."""
        with self._lock:
            live, reason = self.engine.live, "the engine was closed before the text was complete"
            for name in live:
                self.engine.abort(name)
            for inbox in self.inboxes.values():
                inbox.error = reason
            for listener in self.listeners:
                listener.end(live, GenerationError(reason))

    def submit(self, request: Request, inbox: Inbox | None = None, history: Iterable[Delta] = ()) -> list[Sequence]:
        """Submits a request. inbox: receives its deltas; None: the listeners do. history, errors: see Engine.submit."""
        with self._named_errors(), self._lock:
            sequences = self.engine.submit(request, tuple(history))
            if inbox is not None:
                inbox.request_ids.append(request.request_id)
                self.inboxes[request.request_id] = inbox
        return sequences

    def wait(self, inbox: Inbox) -> None:
        """Returns when the inbox has a delta, or after one step. Raises an error of the step, and GenerationError if
        deltas of this inbox were lost in another caller's step."""
        if not inbox.deltas and not inbox.error:
            with self._lock:
                if not inbox.deltas and not inbox.error:  # another caller may have run the step meanwhile
                    self._step()
        if inbox.error:
            raise GenerationError(inbox.error)

    def step(self) -> None:
        """Runs one step; raises what Engine.step raises."""
        with self._lock:
            self._step()

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Ends a request, or one choice of it, before the next step."""
        self._lock.call_soon(partial(self.engine.abort, request_id, choice))

    def call(self, function: Callable[[], object]) -> None:
        """Calls the function between two steps."""
        with self._lock:
            function()

    def close(self, inbox: Inbox) -> None:
        """Ends the inbox's requests before the next step."""
        for name in inbox.request_ids:
            self.abort(name)
            self.inboxes.pop(name, None)

    def _step(self) -> None:
        live = self.engine.live
        try:
            self.engine.step(self._deliver)
        except BaseException as error:  # also an interrupt
            self._end_requests(live, error)
            raise

    def _end_requests(self, live: set[str], error: BaseException) -> None:
        """Ends all requests of a failed step, which may lack tokens. If none was running, waiting ones end: they would
        make the next step fail, too."""
        ended = live - {each.request.request_id for each in self.engine.scheduler.waiting}
        if isinstance(error, Exception):
            ended = ended or live
        for name in ended:
            self.engine.abort(name)
            if inbox := self.inboxes.get(name):
                inbox.error = "the text broke off: a step that it shared with other requests failed"
        failed = GenerationError("the engine failed while it worked on this request", "see the log")
        for listener in self.listeners:
            listener.end(ended, failed)

    def _deliver(self, deltas: list[Delta]) -> None:
        now, others = time.perf_counter(), []
        for delta in deltas:
            if inbox := self.inboxes.get(delta.request_id):
                inbox.deltas.append((now, delta))
            else:
                others.append(delta)
        for listener in self.listeners if others else ():
            listener.deliver(others)
