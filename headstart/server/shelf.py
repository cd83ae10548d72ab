"""The models of a server: which there are, which are in memory, and which of them has to leave for another.

One that is asked for and not in memory is loaded beside what runs; who waits for it is answered when it is there, or
with why it cannot be. A model leaves when nobody has asked for it for its keep-alive, or, the longest idle first, when
another needs its memory; never while a request of it is on its way.
"""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable, Iterator, Sequence as Seq

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headstart import machine
from headstart.api import LLM
from headstart.engine.load import load_model
from headstart.engine.make import pool_bytes
from headstart.errors import BusyError, GenerationError, HeadstartError, ModelError
from headstart.server import limits
from headstart.server.accounts import Accounts
from headstart.server.entries import Entry, KeepAlive, Offer, Served, headers_of
from headstart.server.intake import trim_function
from headstart.server.watch import keys_of

log = logging.getLogger("headstart.server")
LATEST = ":latest"
SWEEP_SECONDS = 0.5
LEAST_SECONDS = 1.0
"""A model that has just come is asked something by those who waited for it."""
POOL_SHARE = 4
"""Caches of a model take one part in so many of what its weights leave of the memory."""

Make = Callable[[LLM, tuple[str, ...]], Served]


class Shelf:
    """All models of a server. `make` puts a loaded one behind an engine thread; `memory`: bytes that weights and caches
    of all may take together, None: what is free now. On the event loop, but for what `_read` does."""

    def __init__(
        self,
        offers: Seq[Offer],
        make: Make,
        accounts: Accounts,
        keep_alive: KeepAlive | None = None,
        memory: int | None = None,
        *,
        stays: bool = False,
    ) -> None:
        self._keep_alive = keep_alive or KeepAlive()
        self.stays, self.accounts = stays, accounts
        self.entries = [Entry(offer, KeepAlive(None) if stays else self._keep_alive) for offer in offers]
        self.memory = machine.memory().available if memory is None else memory
        self.draining = False
        self._make = make
        self._by_name = {name: entry for entry in self.entries for name in entry.offer.names}
        self._moving = asyncio.Lock()  # one model comes or goes at a time
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def loaded(self) -> list[Served]:
        return [entry.served for entry in self.entries if entry.served is not None]

    @property
    def names(self) -> list[str]:
        return list(self._by_name)

    def find(self, name: str | None) -> Entry:
        """None: the first. Raises ModelError for a name of none. Ollama's clients write a tag behind it."""
        if name is None:
            return self.entries[0]
        found = self._by_name.get(name) or self._by_name.get(name.removesuffix(LATEST))
        if found is None:
            what = f"the model {limits.shortened(name)!r} does not exist"
            raise ModelError(what, f"this server has {', '.join(self.names)}")
        return found

    def put(self, llm: LLM) -> Served:
        """The first model, loaded by the caller, before the server runs."""
        entry = self.entries[0]
        entry.served = self._make(llm, entry.offer.names)
        self._note(entry, llm)
        return entry.served

    def load_first(self) -> None:
        """By the caller, before the server runs. Raises what loading raises."""
        self.put(self._read(self.entries[0]))

    def prepare(self) -> None:
        """What no other thread may run beside, so not at the first request that needs it."""
        for each in self.loaded:
            each.llm.grammars.prepare()

    def start(self) -> None:
        """Bind to the running event loop."""
        for each in self.loaded:
            each.bridge.start()
        now = asyncio.get_running_loop().time()
        for entry in self.entries:
            entry.used = now
        if not self.stays:
            self._sweeper = asyncio.create_task(self._sweep())

    def stop(self) -> None:
        """End all threads; what still runs is dropped."""
        if self._sweeper:
            self._sweeper.cancel()
        for each in self.loaded:
            each.bridge.stop()

    def drain(self) -> None:
        """Nothing new is begun."""
        self.draining = True
        for each in self.loaded:
            each.bridge.draining = True

    def expire(self) -> None:
        """What still runs has had its time to end."""
        for each in self.loaded:
            each.bridge.expire()

    def at_hand(self, name: str | None, keep_alive: KeepAlive | None = None) -> Served | None:
        """The model of that name if it is in memory; it has been asked for then. Raises what `find` raises."""
        entry = self.find(name)
        if not self.stays:
            entry.used = asyncio.get_running_loop().time()
            entry.keep_alive = keep_alive or self._keep_alive
        return entry.served

    async def get(self, name: str | None, keep_alive: KeepAlive | None = None) -> Served:
        """The same, loaded where it is not in memory. Raises GenerationError when it cannot be, BusyError where there
        is no room."""
        while (found := self.at_hand(name, keep_alive)) is None:
            entry = self.find(name)
            if entry.loading is None:
                entry.loading = asyncio.create_task(self._load(entry))
                entry.loading.add_done_callback(_look_at)
            await asyncio.shield(entry.loading)
        return found

    async def release(self, name: str) -> bool:
        """Let a model go: now where it is idle, else when its requests have ended. True: it is gone. The one of a
        server with one model stays."""
        entry = self.find(name)
        if self.stays:
            return False
        entry.keep_alive = KeepAlive(0.0)
        async with self._moving:
            return await self._unload(entry)

    async def _load(self, entry: Entry) -> None:
        try:
            async with self._moving:
                if self.draining:
                    raise BusyError("the server is shutting down", "send the request to another one")
                checkpoint_bytes = entry.size or await asyncio.to_thread(self._weight_bytes, entry)
                await self._make_room(entry, checkpoint_bytes)
                llm = await asyncio.to_thread(self._tried, entry)
                self._note(entry, llm)
                await self._make_room(entry, entry.size)
                served = self._make(llm, entry.offer.names)
                served.bridge.start()
                served.bridge.draining = self.draining
                entry.served, entry.used = served, asyncio.get_running_loop().time()
                log.info("loaded %s: %.2f GB, %.1f s", entry.name, entry.size / 1e9, llm.load_s)
        finally:
            entry.loading = None

    def metrics(self) -> list[Metric]:
        """Beside those of each model; none where models stay."""
        loaded = GaugeMetricFamily("headstart:model_loaded", "1: in memory.", labels=("model_name",))
        loads = CounterMetricFamily("headstart:model_loads", "Times it was loaded.", labels=("model_name",))
        size = GaugeMetricFamily("headstart:model_bytes", "Weights and caches in memory.", labels=("model_name",))
        for entry in () if self.stays else self.entries:
            loaded.add_metric([entry.name], int(entry.served is not None))
            loads.add_metric([entry.name], entry.loads)
            size.add_metric([entry.name], entry.size if entry.served is not None else 0)
        return [] if self.stays else [loaded, loads, size, *keys_of(self.accounts, "")]

    def _weight_bytes(self, entry: Entry) -> int:
        """What its weights take, by its headers; 0 where they are not here yet."""
        checkpoint = headers_of(entry)
        return sum(each.nbytes for each in checkpoint.tensors.values()) if checkpoint else 0

    def _tried(self, entry: Entry) -> LLM:
        """In a thread of its own. Raises GenerationError for whatever is wrong with it."""
        try:
            return self._read(entry)
        except (HeadstartError, OSError, MemoryError) as error:
            log.error("cannot load %s: %s", entry.name, error)
            why = error.message if isinstance(error, HeadstartError) else str(error) or "the memory is full"
            hint = error.hint if isinstance(error, HeadstartError) else "see the server's log"
            raise GenerationError(f"the model {entry.name} cannot be loaded: {why}", hint) from error

    def _read(self, entry: Entry) -> LLM:
        offer, taken = entry.offer, self._taken()
        config = offer.prepare(offer.path, offer.config)
        beside = next((each.llm.model.backend for each in self.loaded), None)
        model = load_model(offer.path, config, beside=beside)
        weights = sum(each.nbytes for each in model.checkpoint.tensors.values())
        return LLM(model, config, room=max(self.memory - taken - weights, 0) // POOL_SHARE)

    def _note(self, entry: Entry, llm: LLM) -> None:
        entry.checkpoint, entry.loads = llm.model.checkpoint, entry.loads + 1
        weights = sum(each.nbytes for each in llm.model.checkpoint.tensors.values())
        entry.size = weights + pool_bytes(llm.engine)

    def _taken(self) -> int:
        return sum(entry.size for entry in self.entries if entry.served is not None)

    async def _make_room(self, wanted: Entry, size: int) -> None:
        """The longest idle models leave until so many bytes fit. Raises BusyError where they cannot."""
        if size > self.memory:
            needs, has = f"{size / 1e9:.2f} GB", f"{self.memory / 1e9:.2f} GB"
            raise BusyError(f"the model {wanted.name} needs {needs}, but all models may take {has}", "--memory sets it")
        while self._taken() + size > self.memory:
            idle = [each for each in self.entries if each.served is not None and each.served.bridge.is_idle]
            if not idle:
                free = max(self.memory - self._taken(), 0) / 1e9
                what = f"the model {wanted.name} needs {size / 1e9:.2f} GB, but models that run leave {free:.2f} GB"
                raise BusyError(what, "try again later")
            await self._unload(min(idle, key=lambda each: each.used))

    async def _unload(self, entry: Entry) -> bool:
        """Out of memory, if nobody needs it. Its thread ends; what is still being written down keeps what it needs."""
        served = entry.served
        if served is None or not served.bridge.is_idle:
            return served is None
        entry.served = None
        await asyncio.to_thread(served.bridge.stop)
        del served
        await asyncio.to_thread(_give_back)
        log.info("unloaded %s", entry.name)
        return True

    async def _sweep(self) -> None:
        """Models leave when their time is over."""
        while True:
            await asyncio.sleep(SWEEP_SECONDS)
            async with self._moving:
                for entry in self._over():
                    await self._unload(entry)

    def _over(self) -> Iterator[Entry]:
        now = asyncio.get_running_loop().time()
        for entry in self.entries:
            if entry.served is not None and not entry.served.bridge.is_idle:
                entry.used = now
                continue
            seconds = entry.keep_alive.seconds
            if entry.served is not None and seconds is not None and now - entry.used >= max(seconds, LEAST_SECONDS):
                yield entry


def _give_back() -> None:
    """Memory of what nobody needs: networks and what runs them know each other; glibc keeps what threads have freed."""
    gc.collect()
    if trim := trim_function():
        trim(0)


def _look_at(task: asyncio.Task[None]) -> None:
    """Whoever waited may have gone."""
    if not task.cancelled():
        task.exception()
