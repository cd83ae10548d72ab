"""`AsyncEngine`: an engine in its own thread for asyncio callers: the HTTP server and `AsyncLLM`.

`_run` and its callees run in the engine's thread; `open`, `RequestStream` and `_put_all` on event loops. The two sides
communicate by the command queue and `call_soon_threadsafe`.
"""

import asyncio
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from functools import partial
from queue import Empty, SimpleQueue

from headstart.core import Delta, Request, Sequence
from headstart.engine.shared import SharedEngine
from headstart.errors import GenerationError, HeadstartError

log = logging.getLogger("headstart.engine")
Item = Delta | HeadstartError


class RequestStream:
    """Requests opened together; iterates over (index of the request, delta)."""

    def __init__(
        self, engine: "AsyncEngine", requests: Seq[Request], on_close: "Callable[[RequestStream], None] | None",
        history: Seq[tuple[int, Delta]] = (),
    ) -> None:  # fmt: skip
        self.requests, self.loop = requests, asyncio.get_running_loop()
        self.sequences: dict[tuple[str, int], Sequence] = {}  # by request id and choice
        self._engine, self._on_close = engine, on_close
        self._indices = {request.request_id: index for index, request in enumerate(requests)}
        self.history = [replace(delta, request_id=requests[index].request_id) for index, delta in history]
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        for delta in self.history:
            self.put(delta)
        self._open = {(request.request_id, choice) for request in requests for choice in range(request.params.n)}

    def put(self, item: Item) -> None:
        self._items.put_nowait(item)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Delta]]:
        """Yields deltas until every choice has ended or is stopped. Raises the error that ended the requests early."""
        while self._open:
            item = await self._items.get()
            if isinstance(item, HeadstartError):
                raise item
            key = (item.request_id, item.choice)
            if key not in self._open:
                continue  # stopped meanwhile, for example by a stop string
            if item.finish_reason:
                self._open.discard(key)
            yield self._indices[item.request_id], item

    def stop(self, index: int, choice: int) -> None:
        """Ends one choice early."""
        key = (self.requests[index].request_id, choice)
        if key in self._open:
            self._open.discard(key)
            self._engine.abort(*key)

    def close(self) -> None:
        """Ends the open choices; the engine frees their memory before the next step. Idempotent."""
        self._engine.forget(self, running=bool(self._open))
        self._open.clear()
        on_close, self._on_close = self._on_close, None
        if on_close:
            on_close(self)

    def num_written(self, request: Request) -> int:
        """Number of output tokens of a request so far, over all choices, without those of its history."""
        name = request.request_id
        before = sum(len(delta.tokens) for delta in self.history if delta.request_id == name)
        return sum(each.num_output for (owner, _), each in self.sequences.items() if owner == name) - before

    def sequence(self, index: int, choice: int) -> Sequence:
        return self.sequences[self.requests[index].request_id, choice]


class AsyncEngine:
    """Runs a SharedEngine in a thread that starts with `start` or the first `open`. Streams may belong to several event
    loops. after_step: called in the thread after each step."""

    def __init__(self, shared: SharedEngine, after_step: Callable[[], None] = lambda: None) -> None:
        self.num_failed_steps = 0  # consecutive
        self._busy_since: float | None = None  # time.monotonic() at the start of the step or command that runs
        self._shared, self._after_step = shared, after_step
        self._streams: dict[str, RequestStream] = {}  # by request id
        self._commands: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # On an event loop.

    def start(self) -> None:
        self._shared.listeners.append(self)
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread. Streams get no more deltas."""
        self._commands.put(None)
        if self._thread.ident is not None and threading.current_thread() is not self._thread:
            self._thread.join(timeout=30)
        with suppress(ValueError):
            self._shared.listeners.remove(self)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def busy_s(self) -> float:
        """Seconds since the step or command that runs was begun; 0 between two."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    async def open(
        self, requests: Seq[Request], on_close: Callable[[RequestStream], None] | None = None,
        history: Seq[tuple[int, Delta]] = (),
    ) -> RequestStream:  # fmt: skip
        """Submits requests. on_close: called when the stream is closed. history: the (index, delta) pairs that another
        engine's stream has yielded for these requests. The new stream yields them again, then the rest of the texts.
        Raises what `Engine.submit` raises."""
        if self._thread.ident is None:
            self.start()
        stream = RequestStream(self, requests, on_close, history)
        self._streams |= dict.fromkeys([request.request_id for request in requests], stream)
        accepted: asyncio.Future[None] = stream.loop.create_future()
        try:
            self._commands.put(partial(self._submit, stream, accepted))
            await accepted
        except BaseException:
            stream.close()
            raise
        return stream

    def abort(self, request_id: str, choice: int | None = None) -> None:
        self._commands.put(partial(self._shared.abort, request_id, choice))

    def call(self, function: Callable[[], None]) -> None:
        """Calls the function in the engine's thread between two steps."""
        self._commands.put(partial(self._shared.call, function))

    def forget(self, stream: RequestStream, *, running: bool) -> None:
        """Drops a stream; running: also aborts its requests."""
        for request in stream.requests:
            if self._streams.pop(request.request_id, None) is not None and running:
                self.abort(request.request_id)

    def end_all(self, error: HeadstartError) -> None:
        """Ends every stream with `error`."""
        for stream in set(self._streams.values()):
            stream.put(error)

    @staticmethod
    def _put_all(items: Seq[tuple[RequestStream, Item]]) -> None:
        for stream, item in items:
            stream.put(item)

    # In the engine's thread.

    def _run(self) -> None:
        engine = self._shared.engine
        while True:
            self._busy_since = None
            with suppress(Empty):
                while command := self._commands.get(block=not (self._streams and engine.has_work)):
                    self._busy_since = time.monotonic()
                    try:
                        command()
                    except BaseException:
                        log.exception("a command to the engine failed")
                    self._busy_since = None
                return
            self._busy_since = time.monotonic()
            try:
                self._shared.step()
                self._after_step()
            except BaseException as error:  # a fault of one step must not end the thread
                log.exception("a step failed", exc_info=error)
            else:
                self.num_failed_steps = 0

    def _submit(self, stream: RequestStream, accepted: asyncio.Future[None]) -> None:
        error: HeadstartError | None = None
        try:
            for request in stream.requests:
                history = [delta for delta in stream.history if delta.request_id == request.request_id]
                for sequence in self._shared.submit(request, history=history):
                    stream.sequences[request.request_id, sequence.choice] = sequence
        except BaseException as found:
            for request in stream.requests:
                self._shared.abort(request.request_id)
            if not isinstance(found, HeadstartError):
                log.exception("a request could not be started", exc_info=found)
                found = GenerationError("the engine failed to start this request", "see the log")
            error = found
        self._call_on_loop(stream.loop, _resolve, accepted, error)

    # In the thread that makes a step (see Listener).

    def deliver(self, deltas: list[Delta]) -> None:
        """Passes deltas to their streams, with one call per event loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[RequestStream, Item]]] = {}
        for delta in deltas:
            if stream := self._streams.get(delta.request_id):
                by_loop.setdefault(stream.loop, []).append((stream, delta))
        for loop, items in by_loop.items():
            self._call_on_loop(loop, self._put_all, items)

    def end(self, request_ids: Iterable[str], error: GenerationError) -> None:
        self.num_failed_steps += 1
        for stream in {stream for name in request_ids if (stream := self._streams.get(name))}:
            self._call_on_loop(stream.loop, stream.put, error)

    @staticmethod
    def _call_on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the event loop is closed
            log.debug("a result arrived after its event loop was closed")


def _resolve(accepted: asyncio.Future[None], error: HeadstartError | None) -> None:
    if accepted.done():  # the client has disconnected
        return
    if error is None:
        accepted.set_result(None)
    else:
        accepted.set_exception(error)
