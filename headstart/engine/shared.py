"""One engine for callers in several threads: each submits and steps when it likes, one at a time, in order of arrival.

A step serves whatever runs, so requests of all threads share one batch, and whoever has nothing to read makes it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from headstart.core import Delta, Request, Sequence
from headstart.engine.engine import Engine
from headstart.errors import GenerationError


class Turns:
    """A fair lock: a thread that takes it in a loop keeps nobody out. Never taken twice by one thread at a time.

    What is given to `soon` is done in a turn: now, or by whoever has the turn before it is over. So it may come from
    finalizers, which Python runs anywhere, inside of a turn too.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()  # of what follows
        self._owner: int | None = None
        self._waiting: deque[tuple[int, threading.Lock]] = deque()
        self._pending: deque[Callable[[], object]] = deque()

    def __enter__(self) -> None:
        me, called = threading.get_ident(), None
        try:
            with self._guard:
                if self._owner is None or self._owner == me:  # ours: an interrupt came between taking it and its use
                    self._owner = me
                else:
                    called = threading.Lock()
                    called.acquire()
                    self._waiting.append((me, called))
            if called:
                called.acquire()  # whoever hands it over has made us the owner
            self._catch_up()
        except BaseException:
            with self._guard:
                if called and (me, called) in self._waiting:
                    self._waiting.remove((me, called))
            if self._owner == me:
                self.__exit__()
            raise

    def __exit__(self, *error: object) -> None:
        while True:
            self._catch_up()
            with self._guard:
                if self._waiting:
                    self._owner, called = self._waiting.popleft()
                    called.release()
                    return
                self._owner = None
            if not self._pending or not self._try():
                return

    def soon(self, call: Callable[[], object]) -> None:
        self._pending.append(call)
        if self._try():
            self.__exit__()

    def _try(self) -> bool:
        """Never waits. Who is in our way looks at `_pending` later than now."""
        if not self._guard.acquire(blocking=False):
            return False
        try:
            if self._owner is not None:
                return False
            self._owner = threading.get_ident()
            return True
        finally:
            self._guard.release()

    def _catch_up(self) -> None:
        while self._pending:
            self._pending.popleft()()


@dataclass(eq=False)
class Inbox:
    """What has come for one caller and was not taken yet, with the time when it came."""

    deltas: deque[tuple[float, Delta]] = field(default_factory=deque)
    lost: bool = False  # a step of somebody else's broke off, and what it made for this caller with it
    names: list[str] = field(default_factory=list)  # of its requests


class SharedEngine:
    """An inbox belongs to one thread at a time; its requests go on while others step."""

    def __init__(self, engine: Engine) -> None:
        self.engine, self._turns = engine, Turns()
        self.inboxes: dict[str, Inbox] = {}  # by request id

    def stop(self) -> None:
        """Nothing runs any more: whoever still waits for texts is told that they are lost."""
        with self._turns:
            self._lose(self.engine.live)
            for name in list(self.inboxes):
                self.engine.abort(name)
                self.inboxes[name].lost = True

    def submit(self, request: Request, inbox: Inbox) -> list[Sequence]:
        """Raises what Engine.submit raises."""
        with self._turns:
            sequences = self.engine.submit(request)
            inbox.names.append(request.request_id)
            self.inboxes[request.request_id] = inbox
        return sequences

    def wait(self, inbox: Inbox) -> None:
        """Until something has come, or for one step. Raises what the step raises, GenerationError where texts of this
        inbox were lost in somebody else's."""
        if not inbox.deltas and not inbox.lost:
            with self._turns:
                if not inbox.deltas and not inbox.lost:  # else somebody else has made that step
                    self._step()
        if inbox.lost:
            raise GenerationError("the text broke off: a step that it shared with other requests failed")

    def abort(self, request_id: str, choice: int | None = None) -> None:
        """Before the next step."""
        self._turns.soon(partial(self.engine.abort, request_id, choice))

    def close(self, inbox: Inbox) -> None:
        """Nothing of it runs any more, before the next step."""
        for name in inbox.names:
            self.abort(name)
            self.inboxes.pop(name, None)

    def _step(self) -> None:
        live, whole = self.engine.live, False
        try:
            self.engine.step(self._deliver)
            whole = True
        finally:
            if not whole:  # also an interrupt
                self._lose(live)

    def _lose(self, live: set[str]) -> None:
        """Whatever was in a step that broke off may lack tokens: nobody shall go on with it."""
        waiting = {each.request.request_id for each in self.engine.scheduler.waiting}
        for name in live - waiting:
            self.engine.abort(name)
            if inbox := self.inboxes.get(name):
                inbox.lost = True

    def _deliver(self, deltas: list[Delta]) -> None:
        now = time.perf_counter()
        for delta in deltas:
            if inbox := self.inboxes.get(delta.request_id):
                inbox.deltas.append((now, delta))
