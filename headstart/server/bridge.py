"""The engine in a thread of its own, fed by one queue; what it commits comes back in one call a step.

Two worlds: `_begin`, `_step` and everything they call run in the engine's thread; `open`, `Stream` and `_hand_out` on
the event loop. They share the command queue, `call_soon_threadsafe`, and counters that are only read elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence as Seq
from contextlib import contextmanager, suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from headstart.api import LLM
from headstart.core import Delta, Request, Sequence
from headstart.errors import BusyError, CapacityError, GenerationError, HeadstartError
from headstart.server.watch import Watch

if TYPE_CHECKING:
    from headstart.server.handoff import Handoff

log = logging.getLogger("headstart.server")
DRAIN, LONGEST_RETRY = 32, 60.0
"""Ends from which the pace is told at which places become free, and the most seconds that a client is told to wait."""


class Stream:
    """The engine requests of one HTTP request, and what comes back for them: (request number, delta)."""

    def __init__(self, bridge: Bridge, requests: Seq[Request]) -> None:
        self.requests = requests
        self.sequences: dict[tuple[str, int], Sequence] = {}
        self.arrived = time.perf_counter()
        self._bridge = bridge
        self._numbers = {request.request_id: number for number, request in enumerate(requests)}
        self._items: asyncio.Queue[Delta | HeadstartError] = asyncio.Queue()
        self._open = {(request.request_id, choice) for request in requests for choice in range(request.params.n)}

    def put(self, item: Delta | HeadstartError) -> None:
        self._items.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """Deltas until every choice has ended or was stopped. Raises what ended the request early."""
        while self._open:
            item = await self._items.get()
            if isinstance(item, HeadstartError):
                raise item
            key = (item.request_id, item.choice)
            if key not in self._open:
                continue  # a stop string has ended it meanwhile
            if item.finish_reason:
                self._open.discard(key)
            yield self._numbers[item.request_id], item

    def stop(self, number: int, choice: int) -> None:
        """This choice needs no more tokens."""
        key = (self.requests[number].request_id, choice)
        if key in self._open:
            self._open.discard(key)
            self._bridge.abort(*key)

    def close(self) -> None:
        """Free whatever still runs; the engine does so before its next step."""
        self._bridge.forget(self, running=bool(self._open))
        self._open.clear()

    def written(self, request: Request) -> list[int]:
        """Tokens of each of its choices so far; none where it has not begun."""
        return [each.num_output for (name, _), each in self.sequences.items() if name == request.request_id]

    def sequence(self, number: int, choice: int) -> Sequence:
        return self.sequences[self.requests[number].request_id, choice]


class Bridge:
    """One engine, its thread, and the streams that wait for it."""

    def __init__(self, llm: LLM, watch: Watch, max_queue: int) -> None:
        self.llm, self.watch = llm, watch
        self.failures = 0  # steps in a row that raised
        self.draining = False
        self.handoff: Handoff | None = None  # who computes prompts for it
        self._room = llm.config.max_num_seqs + max_queue
        self._in_flight = 0  # choices
        self._ended: deque[float] = deque(maxlen=DRAIN)  # when the latest of them did
        self._preparing = 0  # choices that are on their way to it
        self._held = 0
        self._streams: dict[str, Stream] = {}
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    # On the event loop.

    def start(self) -> None:
        """Bind to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def stop(self) -> None:
        """End the thread; what still runs is dropped."""
        self._commands.put(None)
        self._thread.join(timeout=30)

    async def open(self, requests: Seq[Request]) -> Stream:
        """Hand requests to the engine. Raises BusyError when too much waits, and what `Engine.submit` raises."""
        count, account = sum(request.params.n for request in requests), self.watch.accounts.named(requests[0].owner)
        self._check_free(count, self._in_flight)
        account.begin(sum(len(request.prompt_ids) for request in requests))
        stream = Stream(self, requests)
        self._in_flight += count
        account.held += count
        self._streams |= dict.fromkeys([request.request_id for request in requests], stream)
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            if self.handoff is not None:
                await self.handoff.bring(requests)
            self._commands.put(partial(self._begin, stream, accepted))
            await accepted
        except BaseException:
            stream.close()
            raise
        return stream

    @contextmanager
    def preparing(self, count: int, owner: str = "") -> Iterator[None]:
        """Choices that will be opened; they take a place from now on. Raises what `open` raises for want of room, and
        LimitError for what the owner may not have."""
        taken, account = self._in_flight + self._preparing, self.watch.accounts.named(owner)
        self._check_free(count, taken)
        account.check()
        self.watch.accounts.check_room(account, count, self._room - taken, self._drain_s(count))
        self._preparing += count
        account.held += count
        try:
            yield
        finally:
            self._preparing -= count
            account.held -= count

    @contextmanager
    def held(self) -> Iterator[None]:
        """Somebody works with it who has nothing in the engine yet, or not all the time."""
        self._held += 1
        try:
            yield
        finally:
            self._held -= 1

    @property
    def is_idle(self) -> bool:
        """Would nobody miss it?"""
        return not (self._in_flight or self._preparing or self._held)

    def _check_free(self, count: int, taken: int) -> None:
        if self.draining:
            raise BusyError("the server is shutting down", "send the request to another one")
        self.check_room(count)
        if (excess := taken + count - self._room) > 0:
            self.watch.shed += 1
            seconds = self._drain_s(excess)
            raise BusyError(f"{taken} sequences run or wait, and {self._room} are allowed", "try again later", seconds)

    def _drain_s(self, count: int) -> float:
        """Seconds until so many have ended, at the pace of the latest."""
        if len(self._ended) < 2:
            return 1.0
        pace = (self._ended[-1] - self._ended[0]) / (len(self._ended) - 1)
        return min(count * pace, LONGEST_RETRY)

    @property
    def is_full(self) -> bool:
        """Would the next request be refused?"""
        return self._in_flight + self._preparing >= self._room

    def expire(self) -> None:
        """What still runs has had its time to end."""
        shown = BusyError("the server has shut down before the text was complete", "send the request to another one")
        for stream in set(self._streams.values()):
            stream.put(shown)

    def check_room(self, count: int) -> None:
        """Raises CapacityError for more choices than there is ever room for."""
        if count > self._room:
            raise CapacityError(
                f"the request asks for {count} texts, but {self._room} may run or wait", "ask for fewer"
            )

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    def forget(self, stream: Stream, *, running: bool) -> None:
        for request in stream.requests:
            if self._streams.pop(request.request_id, None) is None:
                continue
            self._in_flight -= request.params.n
            self._ended.extend([time.perf_counter()] * request.params.n)
            account = self.watch.accounts.named(request.owner)
            account.held -= request.params.n
            account.wrote(sum(stream.written(request)))
            if running:
                self.abort(request.request_id)

    def change_head(self, path: str | None) -> None:
        """Before the next step (see LLM.change_head); the log says what came of it."""
        self._commands.put(partial(self._change_head, path))

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._commands.put(partial(self.llm.engine.abort, request_id, choice))

    def _hand_out(self, items: Seq[tuple[str, Delta | HeadstartError]]) -> None:
        for request_id, item in items:
            if stream := self._streams.get(request_id):
                stream.put(item)

    # In the engine's thread.

    def _run(self) -> None:
        engine = self.llm.engine
        while True:
            with suppress(Empty):
                while command := self._commands.get(block=not engine.has_work):
                    self._guarded(command)
                return
            self._step()

    def _begin(self, stream: Stream, accepted: asyncio.Future[None]) -> None:
        engine = self.llm.engine
        try:
            for request in stream.requests:
                for sequence in engine.submit(request):
                    stream.sequences[request.request_id, sequence.choice] = sequence
        except BaseException as error:
            for request in stream.requests:
                engine.abort(request.request_id)
            if not isinstance(error, HeadstartError):
                log.exception("a request could not be begun", exc_info=error)
                error = GenerationError("the engine failed to begin this request", "see the server's log")
            self._call(_settle, accepted, error)
        else:
            self._call(_settle, accepted, None)

    def _change_head(self, path: str | None) -> None:
        begun = time.perf_counter()
        try:
            self.llm.change_head(path)
        except HeadstartError as error:
            log.error("the head stays as it is: %s", error)
            return
        self.watch.head_changed()
        log.info("drafting with %s (changed in %.2f s)", self.llm.info["head"], time.perf_counter() - begun)

    def _guarded(self, command: Callable[[], None]) -> None:
        try:
            command()
        except BaseException:
            log.exception("a command to the engine failed")

    def _step(self) -> None:
        engine = self.llm.engine
        live = engine.live
        try:
            engine.step(self._deliver)
            self.watch.stepped(engine)
        except BaseException as error:  # noqa: BLE001  a fault of one step must not end the server
            self._fail_step(error, live)
        else:
            self.failures = 0

    def _deliver(self, deltas: list[Delta]) -> None:
        self._call(self._hand_out, [(delta.request_id, delta) for delta in deltas])

    def _fail_step(self, error: BaseException, live: set[str]) -> None:
        """Everything that ran in the step ends with an error, what had just finished too: its last tokens are lost.
        What waits goes on."""
        self.failures += 1
        log.exception("a step failed", exc_info=error)
        waiting = {each.request.request_id for each in self.llm.engine.scheduler.waiting}
        names = live - waiting or waiting
        for name in names:
            self.llm.engine.abort(name)
        shown = GenerationError("the engine failed while it worked on this request", "see the server's log")
        self._call(self._hand_out, [(name, shown) for name in names])

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody waits any more
            log.debug("a result came after the end of the event loop")


def _settle(accepted: asyncio.Future[None], error: HeadstartError | None) -> None:
    if accepted.done():  # the client has gone
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)
