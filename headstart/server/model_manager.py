"""`ModelManager` loads a server's models when requests name them and unloads idle ones; `ServedModel` is one in memory.

Other models keep running while one is loaded. Requests wait for their model; if it cannot be loaded they fail with the
reason. A model is unloaded when its keep-alive is over, or when another model needs memory (the longest idle first). A
model with requests is never unloaded.
"""

import asyncio
import gc
import hashlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headstart import hub, machine
from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import Request
from headstart.engine.async_engine import AsyncEngine, RequestStream
from headstart.engine.build import pool_bytes
from headstart.engine.load import load_model
from headstart.errors import BusyError, GenerationError, HeadstartError, ModelError
from headstart.files import user_path
from headstart.formats import is_checkpoint, open_checkpoint
from headstart.formats.base import Checkpoint
from headstart.heads.files import is_head
from headstart.layers.build import DecoderConfig
from headstart.models.slices import sliced
from headstart.models.tensors import find_family, read_config
from headstart.server import limits
from headstart.server.accounts import Accounts
from headstart.server.admission import Admission
from headstart.server.body_reader import trim_function
from headstart.server.journal import Journal
from headstart.server.metrics import ServerMetrics, account_metrics
from headstart.server.options import KeepAlive
from headstart.server.prefill_client import PrefillClient
from headstart.server.prepare import OutputFormats, spellings
from headstart.version import __version__

log = logging.getLogger("headstart.server")
SWEEP_INTERVAL_S = 0.5  # time between two looks for models whose keep-alive is over
MIN_KEEP_ALIVE_S = 1.0  # so that requests that waited for a load reach the model before it is unloaded
MAX_STEP_S = 300.0  # an engine that works longer on one step or command hangs
CACHE_DIVISOR = 4  # a model's caches take 1 / CACHE_DIVISOR of the memory that its weights leave


@dataclass(frozen=True, eq=False)
class ServedModel:
    """A model in memory behind its engine thread, with its admission, metrics and output formats."""

    llm: LLM
    names: tuple[str, ...]  # names of the model in requests; responses carry the first
    formats: OutputFormats
    engine: AsyncEngine
    admission: Admission
    metrics: ServerMetrics
    prefill: PrefillClient | None = None  # computes prompts on another server

    def start(self) -> None:
        """Start the engine thread and the recorder."""
        self.engine.start()
        if self.metrics.recorder:
            self.metrics.recorder.start()

    def stop(self) -> None:
        """End the engine thread; streams of running requests get no further tokens. May be called again."""
        self.engine.stop()
        if self.metrics.recorder:
            self.metrics.recorder.stop()

    async def open(self, requests: Seq[Request], journal: Journal | None = None) -> RequestStream:
        """Hand requests to the engine, which continues after the journal's history. Raises what `Admission.begin` and
        `Engine.submit` raise."""
        history, is_resumed = (journal.history, journal.is_resumed) if journal else ((), False)
        self.admission.begin(requests, is_resumed=is_resumed)
        try:
            if self.prefill is not None:
                await self.prefill.prefetch(requests)
        except BaseException:
            self.admission.end(requests, None)
            raise
        return await self.engine.open(requests, partial(self.admission.end, requests), history)

    @cached_property
    def fingerprint(self) -> str:
        """16 hexadecimal digits of a hash over model, options and version. Apart from these a response depends on the
        request only: a server may continue responses of servers with the same fingerprint."""
        model, config, template = self.llm.model, self.llm.config, self.llm.chat_template
        stamps, sources = hub.file_stamps(model.checkpoint.files), template and sorted(template.sources.items())
        options = [config.dtype, config.rounding, config.rule, config.kv_cache_dtype, config.quantization, config.seed]
        facts = (
            __version__,
            model.backend.fingerprint(),
            stamps,
            model.config,
            options,
            sources,
            self.formats,
            self.names,
            [adapter.digest for adapter in self.llm.engine.adapters.loaded.values()],
        )
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:16]

    def expire(self) -> None:
        """End running requests with BusyError, when the shutdown timeout is over."""
        what = "the server has shut down before the text was complete"
        self.engine.end_all(BusyError(what, "send the request to another one"))

    def change_head(self, path: str | None) -> None:
        """Change the head before the engine's next step (see LLM.change_head). Logs the result or the error."""
        self.engine.call(partial(self._change_head, path))

    def _change_head(self, path: str | None) -> None:
        begun = time.perf_counter()
        try:
            self.llm.change_head(path)
        except HeadstartError as error:
            log.error("the head was not changed: %s", error)
            return
        log.info("drafting with %s (changed in %.2f s)", self.llm.info["head"], time.perf_counter() - begun)

    @property
    def fault(self) -> str:
        """The reason why the engine does not work; empty while it works."""
        if not self.engine.is_alive:
            return "the engine's thread has ended; see the server's log"
        if self.engine.num_failed_steps > 1:
            return f"{self.engine.num_failed_steps} steps in a row have failed; see the server's log"
        if (seconds := self.engine.busy_s) > MAX_STEP_S:
            return f"the engine hangs: one step takes {seconds:.0f} s so far"
        return ""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """A model that requests may name."""

    names: tuple[str, ...]
    path: str | None  # path or name, as LLM takes it; None: hub.DEFAULT_MODEL
    config: EngineConfig
    # called when the model is loaded: adds the stored results of tune and adapt to the config
    prepare: Callable[[str | None, EngineConfig], EngineConfig] = lambda path, config: config


@dataclass(eq=False)
class ModelSlot:
    """A ModelSpec and the state of its model."""

    spec: ModelSpec
    keep_alive: KeepAlive
    served: ServedModel | None = None  # None: not in memory
    size_bytes: int = 0  # weights and caches; 0 until the model has been loaded once
    last_used: float = 0.0  # time at which the model last had a request, by the event loop's clock
    num_loads: int = 0
    checkpoint: Checkpoint | None = None  # its headers; None until they are read
    loading: asyncio.Task[None] | None = field(default=None, repr=False)

    @property
    def name(self) -> str:
        return self.spec.names[0]

    @property
    def root(self) -> str:
        """Path or name of the checkpoint."""
        return self.spec.path or hub.DEFAULT_MODEL

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> path of the LoRA adapters, which requests may name as their model."""
        return self.served.llm.adapters if self.served else dict(self.spec.config.adapters)

    @property
    def expires(self) -> float | None:
        """Seconds until the model is unloaded if no request comes; None: it stays in memory, or is not in memory."""
        if self.served is None or self.keep_alive.seconds is None:
            return None
        now = asyncio.get_running_loop().time()
        return max((self.last_used if self.served.admission.is_idle else now) + self.keep_alive.seconds - now, 0.0)


def models_in(folder: Path) -> dict[str, Path]:
    """Model name -> path, for the model directories and .gguf files of a folder. Heads are left out, and a GGUF file
    split into parts is listed once, by its first part."""
    found = {}
    for path in sorted(folder.iterdir()):
        is_first = hub.part_names(path.name)[0] == path.name
        if is_first and not _is_surely_head(path) and is_checkpoint(path):
            found[_stem(path) if path.is_file() else path.name] = path
    return found


def default_names(name: str) -> tuple[str, ...]:
    """Default names of a model in requests: `name`, preceded by the file's stem if `name` is a local file."""
    path = user_path(name)
    return (_stem(path), name) if path.is_file() else (name,)


def _stem(file: Path) -> str:
    return Path(hub.whole_name(file.name)).stem


def _is_surely_head(path: Path) -> bool:
    """Whether a folder is a head. A damaged folder counts as a model, so that requests for it get the reason."""
    with suppress(HeadstartError, OSError):
        return path.is_dir() and is_head(path)
    return False


def read_headers(slot: ModelSlot) -> Checkpoint | None:
    """The headers of a model's checkpoint, read once. None if the files are not on this machine or unreadable."""
    try:
        if slot.checkpoint is None and (path := _on_this_machine(slot.spec.path)) is not None:
            slot.checkpoint = sliced(open_checkpoint(path), slot.spec.config.slice)
    except (HeadstartError, OSError) as error:
        log.debug("%s: %s", slot.name, error)  # loading the model reports more
    return slot.checkpoint


def read_sizes(slot: ModelSlot) -> DecoderConfig | None:
    """The configuration of a loaded model, else read from its files; None if these are missing or damaged."""
    if slot.served is not None:
        return slot.served.llm.model.config
    if (checkpoint := read_headers(slot)) is None:
        return None
    try:
        return read_config(checkpoint, find_family(checkpoint), slot.spec.config.max_model_len)
    except HeadstartError:
        return None


def context_length(slot: ModelSlot) -> int:
    """Maximum tokens of prompt plus output; 0 if unknown. Reads files if the model is not loaded."""
    if slot.served is not None:
        return slot.served.llm.engine.max_length
    config = read_sizes(slot)
    return 0 if config is None else slot.spec.config.max_model_len or config.max_length


def _on_this_machine(name: str | None) -> Path | None:
    """The path of a model's files on this machine, or None. Downloads nothing."""
    if name is None or name in hub.BUILTIN:
        return hub.cached_trunk(name or hub.DEFAULT_MODEL)
    return hub.resolve(name) if hub.is_builtin(name) or user_path(name).exists() else None


MakeServed = Callable[[LLM, tuple[str, ...]], ServedModel]


class ModelManager:
    """All models of a server. Used on the event loop, except for `_read`.

    make_served: makes a ServedModel of a loaded LLM and its names.
    memory: maximum bytes of weights and caches of all models; None: the memory that is free now.
    is_fixed: there is one model, which is never unloaded.
    """

    def __init__(
        self, specs: Seq[ModelSpec], make_served: MakeServed, accounts: Accounts, keep_alive: KeepAlive | None = None,
        memory: int | None = None, *, is_fixed: bool = False,
    ) -> None:  # fmt: skip
        self._keep_alive = keep_alive or KeepAlive()
        self.is_fixed, self.accounts = is_fixed, accounts
        self.slots = [ModelSlot(spec, KeepAlive(None) if is_fixed else self._keep_alive) for spec in specs]
        self.memory = machine.memory().available if memory is None else memory
        self.draining = False
        self._make_served = make_served
        self._by_name = {name: slot for slot in self.slots for name in slot.spec.names}
        self._moving = asyncio.Lock()  # one model is loaded or unloaded at a time
        self._sweeper: asyncio.Task[None] | None = None

    @property
    def loaded(self) -> list[ServedModel]:
        """The models in memory."""
        return [slot.served for slot in self.slots if slot.served is not None]

    @property
    def names(self) -> list[str]:
        """All names of all models and adapters."""
        return [*self._by_name, *(name for slot in self.slots for name in slot.adapters)]

    def find(self, name: str | None) -> ModelSlot:
        """The slot of the name of a model or adapter, with or without LATEST_TAG; None: the first. Raises ModelError if
        unknown."""
        if name is None:
            return self.slots[0]
        for each in spellings(name):
            if each in self._by_name:
                return self._by_name[each]
            if found := next((slot for slot in self.slots if each in slot.adapters), None):
                return found
        what = f"the model {limits.shortened(name)!r} does not exist"
        raise ModelError(what, f"this server has {', '.join(self.names)}")

    def add_loaded(self, llm: LLM) -> None:
        """Use the caller's LLM as the first model. Call before `start`."""
        slot = self.slots[0]
        slot.served = self._make_served(llm, slot.spec.names)
        self._note_loaded(slot, llm)

    def load_first(self) -> None:
        """Load the first model. Call before `start`. Raises HeadstartError as `load_model` does."""
        self.add_loaded(self._read(self.slots[0]))

    def start(self) -> None:
        """Start the loaded models on the running event loop. Grammar vocabularies are built in background threads."""
        for each in self.loaded:
            each.start()
            threading.Thread(target=each.llm.grammars.prepare, name="grammar", daemon=True).start()
        now = asyncio.get_running_loop().time()
        for slot in self.slots:
            slot.last_used = now
        if not self.is_fixed:
            self._sweeper = asyncio.create_task(self._sweep())

    def stop(self) -> None:
        """End all engine threads; streams of running requests get no further tokens."""
        if self._sweeper:
            self._sweeper.cancel()
        for each in self.loaded:
            each.stop()

    def drain(self) -> None:
        """Admit no new requests."""
        self.draining = True
        for each in self.loaded:
            each.admission.draining = True

    def expire(self) -> None:
        """End running requests with BusyError, when the shutdown timeout is over."""
        for each in self.loaded:
            each.expire()

    def get_loaded(self, name: str | None, keep_alive: KeepAlive | None = None) -> ServedModel | None:
        """The model of that name, or None if it is not in memory. Restarts its keep-alive. Raises as `find` does."""
        slot = self.find(name)
        if not self.is_fixed:
            slot.last_used = asyncio.get_running_loop().time()
            slot.keep_alive = keep_alive or self._keep_alive
        return slot.served

    async def get(self, name: str | None, keep_alive: KeepAlive | None = None) -> ServedModel:
        """The model of that name, loaded if it is not in memory. Raises GenerationError if it cannot be loaded,
        BusyError if there is no memory for it."""
        while (found := self.get_loaded(name, keep_alive)) is None:
            slot = self.find(name)
            if slot.loading is None:
                slot.loading = asyncio.create_task(self._load(slot))
                slot.loading.add_done_callback(_retrieve_exception)
            await asyncio.shield(slot.loading)
        return found

    async def release(self, name: str) -> bool:
        """Unload a model that is not fixed: at once if idle (True), else after its requests (False)."""
        slot = self.find(name)
        if self.is_fixed:
            return False
        slot.keep_alive = KeepAlive(0.0)
        async with self._moving:
            return await self._unload(slot)

    async def _load(self, slot: ModelSlot) -> None:
        try:
            async with self._moving:
                if self.draining:
                    raise BusyError("the server is shutting down", "send the request to another one")
                size_bytes = slot.size_bytes or await asyncio.to_thread(_weight_bytes, slot)
                await self._make_room(slot, size_bytes)
                llm = await asyncio.to_thread(self._try_to_read, slot)
                self._note_loaded(slot, llm)
                await self._make_room(slot, slot.size_bytes)
                served = self._make_served(llm, slot.spec.names)
                served.start()
                served.admission.draining = self.draining
                slot.served, slot.last_used = served, asyncio.get_running_loop().time()
                log.info("loaded %s: %.2f GB, %.1f s", slot.name, slot.size_bytes / 1e9, llm.load_s)
        finally:
            slot.loading = None

    def metrics(self) -> list[Metric]:
        """Metrics of loading and unloading, and of API keys; none if the model is fixed."""
        loaded = GaugeMetricFamily("headstart:model_loaded", "1: in memory.", labels=("model_name",))
        loads = CounterMetricFamily("headstart:model_loads", "Loads of the model.", labels=("model_name",))
        size = GaugeMetricFamily("headstart:model_bytes", "Weights and caches in memory.", labels=("model_name",))
        for slot in () if self.is_fixed else self.slots:
            loaded.add_metric([slot.name], int(slot.served is not None))
            loads.add_metric([slot.name], slot.num_loads)
            size.add_metric([slot.name], slot.size_bytes if slot.served is not None else 0)
        return [] if self.is_fixed else [loaded, loads, size, *account_metrics(self.accounts, "")]

    def _try_to_read(self, slot: ModelSlot) -> LLM:
        """Load a model. Raises GenerationError, with the reason, if it cannot be loaded."""
        try:
            return self._read(slot)
        except (HeadstartError, OSError, MemoryError) as error:
            log.error("cannot load %s: %s", slot.name, error)
            why = error.message if isinstance(error, HeadstartError) else str(error) or "the memory is full"
            hint = error.hint if isinstance(error, HeadstartError) else "see the server's log"
            raise GenerationError(f"the model {slot.name} cannot be loaded: {why}", hint) from error

    def _read(self, slot: ModelSlot) -> LLM:
        spec, used_bytes = slot.spec, self._used_bytes()
        config = spec.prepare(spec.path, spec.config)
        neighbour = next((each.llm.model.backend for each in self.loaded), None)
        model = load_model(spec.path, config, neighbour=neighbour)
        left = max(self.memory - used_bytes - model.checkpoint.loaded_bytes, 0)
        return LLM(model, config, cache_bytes=left // CACHE_DIVISOR)

    def _note_loaded(self, slot: ModelSlot, llm: LLM) -> None:
        slot.checkpoint, slot.num_loads = llm.model.checkpoint, slot.num_loads + 1
        slot.size_bytes = llm.model.checkpoint.loaded_bytes + pool_bytes(llm.engine)

    def _used_bytes(self) -> int:
        return sum(slot.size_bytes for slot in self.slots if slot.served is not None)

    async def _make_room(self, wanted: ModelSlot, size: int) -> None:
        """Unload the longest idle models until `size` bytes are free. Raises BusyError if that cannot free enough."""
        if size > self.memory:
            needs, has = f"{size / 1e9:.2f} GB", f"{self.memory / 1e9:.2f} GB"
            raise BusyError(f"the model {wanted.name} needs {needs}, but all models may take {has}", "--memory sets it")
        while self._used_bytes() + size > self.memory:
            idle = [each for each in self.slots if each.served is not None and each.served.admission.is_idle]
            if not idle:
                free = max(self.memory - self._used_bytes(), 0) / 1e9
                what = f"the model {wanted.name} needs {size / 1e9:.2f} GB, but models that run leave {free:.2f} GB"
                raise BusyError(what, "try again later")
            await self._unload(min(idle, key=lambda each: each.last_used))

    async def _unload(self, slot: ModelSlot) -> bool:
        """Unload a model if it is idle. Returns whether the model is out of memory now."""
        served = slot.served
        if served is None or not served.admission.is_idle:
            return served is None
        slot.served = None
        await asyncio.to_thread(served.stop)
        del served
        await asyncio.to_thread(_free_memory)
        log.info("unloaded %s", slot.name)
        return True

    async def _sweep(self) -> None:
        """Unload models whose keep-alive is over."""
        while True:
            await asyncio.sleep(SWEEP_INTERVAL_S)
            async with self._moving:
                for slot in self._expired():
                    await self._unload(slot)

    def _expired(self) -> Iterator[ModelSlot]:
        now = asyncio.get_running_loop().time()
        for slot in self.slots:
            if slot.served is not None and not slot.served.admission.is_idle:
                slot.last_used = now
                continue
            seconds = slot.keep_alive.seconds
            is_over = seconds is not None and now - slot.last_used >= max(seconds, MIN_KEEP_ALIVE_S)
            if slot.served is not None and is_over:
                yield slot


def _weight_bytes(slot: ModelSlot) -> int:
    """Bytes of the weights by the checkpoint's headers; 0 if these are not on this machine."""
    checkpoint = read_headers(slot)
    return checkpoint.loaded_bytes if checkpoint else 0


def _free_memory() -> None:
    """Free an unloaded model: collect reference cycles, and return glibc's freed memory to the system."""
    gc.collect()
    if trim := trim_function():
        trim(0)


def _retrieve_exception(task: asyncio.Task[None]) -> None:
    """Read the exception of a failed load, since asyncio logs exceptions that nobody reads."""
    if not task.cancelled():
        task.exception()
