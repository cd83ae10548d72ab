"""Timing of single passes over prefilled sequences."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import Progress, Sampled, SamplingParams, SamplingRows, Sequence, Span, StepPlan
from headstart.engine.load import Model
from headstart.kernels.draft_loop import DraftedTokens, DraftLoop
from headstart.kernels.ops import Backend, Buffer, Handle, Pool, Profiler, Program
from headstart.layers.moe import MoE
from headstart.tools.prompts import builtin_prompts

MIN_REPEATS, MAX_REPEATS = 5, 50
MAX_READ_BYTES, READ_RUNS = 2**30, 5
Key = TypeVar("Key")


class MeteredBackend:
    """Forwards all calls to a backend and records the seconds of each trunk pass, head pass and sampling call. A step
    of a DraftLoop counts as one head pass, including its sampling.

    `waits`: wait for the device after each pass, for backends whose passes are asynchronous.
    """

    def __init__(self, backend: Backend, *, waits: bool = False) -> None:
        self.backend, self._waits = backend, waits
        self.trunk: list[float] = []
        self.head: list[float] = []
        self.drafts: list[float] = []  # the head passes in draft loops; `head` contains them too
        self.sampling: list[float] = []
        self._trunk: Handle = None
        self._handles: dict[int, tuple[Handle, bool]] = {}  # id -> (handle, is it a head's)
        self._is_profiling = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.backend, name)

    def profile(self, on: bool) -> None:
        """Starts or stops timing the parts of passes; the backend must be a Profiler."""
        assert isinstance(self.backend, Profiler)
        self._is_profiling = on
        for handle, _ in self._handles.values():
            self.backend.profile(handle, on)

    def prepare(self, program: Program, **more: Any) -> Handle:
        handle = self.backend.prepare(program, **more)
        self._trunk = self._trunk or handle  # an engine prepares the trunk's program first, then heads
        return handle

    def run(
        self, handle: Handle, plan: StepPlan, *, hidden_pool: Pool = None, hidden: Buffer = None
    ) -> Mapping[str, Buffer]:
        is_head = handle is not self._trunk
        if id(handle) not in self._handles:
            self._handles[id(handle)] = handle, is_head
            if self._is_profiling:
                self.profile(True)
        begin = time.perf_counter()
        results = self.backend.run(handle, plan, hidden_pool=hidden_pool, hidden=hidden)
        if self._waits:
            self.backend.numpy(results["hidden"])
        (self.head if is_head else self.trunk).append(time.perf_counter() - begin)
        return results

    def prepare_draft_loop(self, steps: Seq[tuple[Handle, int]], **more: Any) -> DraftLoop | None:
        loop = self.backend.prepare_draft_loop(steps, **more)
        return MeteredDraftLoop(self, loop) if loop else None

    def start_sample(self, *arguments: Any, **more: Any) -> None:
        """Does nothing, so that sampling does not overlap with other work and can be timed."""

    def sample(self, logits: Buffer, rows: SamplingRows, **more: Any) -> Sampled:
        begin = time.perf_counter()
        sampled = self.backend.sample(logits, rows, **more)
        self.sampling.append(time.perf_counter() - begin)
        return sampled

    def reset(self) -> None:
        """Clears all times, including the backend's own."""
        for seconds in (self.trunk, self.head, self.drafts, self.sampling):
            seconds.clear()
        self.parts()

    def parts(self) -> dict[str, float]:
        """Returns the seconds since the last reset: by part of trunk passes, of all head passes as `draft`, and of
        `sampling`."""
        assert isinstance(self.backend, Profiler)
        seconds_of: dict[str, float] = defaultdict(float)
        for handle, is_head in self._handles.values():
            for part, seconds in self.backend.times(handle, reset=True).items():
                if seconds:
                    seconds_of["draft" if is_head else part] += seconds
        if self.drafts:
            seconds_of["draft"] += sum(self.drafts)
        if self.sampling:
            seconds_of["sampling"] = sum(self.sampling)
        return dict(seconds_of)


@dataclass(frozen=True)
class MeteredDraftLoop:
    """A draft loop that records its time in a MeteredBackend."""

    backend: MeteredBackend
    loop: DraftLoop

    def draft(self, *arguments: Any, **options: Any) -> Seq[DraftedTokens]:
        begin = time.perf_counter()
        drafts = self.loop.draft(*arguments, **options)
        steps = max([len(tokens) for tokens, _, _ in drafts]) or 1
        seconds = [(time.perf_counter() - begin) / steps] * steps
        self.backend.head += seconds
        self.backend.drafts += seconds
        return drafts


class PrefilledEngine:
    """An engine on a MeteredBackend, with prefilled `sequences` outside its scheduler. Their keys and values are really
    computed, since untouched memory would be read from a single page."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.model = model
        self.meter = MeteredBackend(model.backend, waits=model.backend.runs_on != "cpu")
        self.llm = LLM(replace(model, backend=cast(Backend, self.meter)), config)
        self.engine = self.llm.engine
        self.text = self.llm.encode(builtin_prompts()[0][1])
        self.sequences: list[Sequence] = []

    def repeated_text(self, length: int) -> list[int]:
        return (self.text * -(-length // len(self.text)))[:length]

    def fill(self, context: int, length: int) -> None:
        """Adds a sequence with `context` computed positions and room for `length`."""
        tokens = self.repeated_text(length)
        sequence = Sequence(self.llm.request(tokens, SamplingParams()), 0, tokens, len(self.sequences))
        reserved = self.engine.memory.reserve(sequence, length)
        assert reserved
        budget = self.engine.scheduler.budget
        for start in range(0, context, budget):
            self.engine.runner.forward([Span(sequence, start, min(budget, context - start), 1)])
        self.sequences.append(sequence)

    def pass_seconds(self, spans: list[Span]) -> float:
        """Returns the backend's seconds for one pass. Recurrent states are rewound first, so passes can be repeated."""
        if states := self.engine.memory.states:
            for span in spans:
                states.rewind(span.sequence, span.start)
        self.engine.runner.forward(spans)
        return self.meter.trunk[-1]

    def release(self) -> None:
        for sequence in self.sequences:
            self.engine.memory.release(sequence)
        self.sequences = []


def time_in_turns(
    keys: Seq[Key], seconds: Callable[[Key], float], budget_s: float, progress: Progress, repeats: int | None = None
) -> dict[Key, list[float]]:
    """Calls `seconds` for all keys in turns, so that a slow phase of the machine affects all of them. Returns the
    measured seconds by key. `repeats`: per key; None: as many as `budget_s` allows."""
    for index, key in enumerate(keys):
        progress(index, len(keys), "warming up")
        seconds(key)
    samples = {key: [seconds(key)] for key in keys}
    wanted = {key: repeats or affordable_repeats(first, budget_s / len(keys)) for key, (first,) in samples.items()}
    total, done = sum(wanted.values()), len(samples)
    for turn in range(1, max(wanted.values())):
        for key in (key for key in samples if turn < wanted[key]):
            progress(done, total, "timing passes")
            samples[key].append(seconds(key))
            done += 1
    return samples


def affordable_repeats(seconds: float, budget_s: float) -> int:
    return max(MIN_REPEATS, min(MAX_REPEATS, int(budget_s / max(seconds, 1e-9))))


def readable_bytes(backend: Backend) -> int:
    return min(MAX_READ_BYTES, backend.free_memory() // 4)


def kv_bytes(model: Model) -> int:
    """Returns the bytes of the trunk's KV cache per position."""
    return sum(model.backend.kv_bytes(spec) for spec in model.decoder.kv_specs)


def held_bytes(*parts: Any) -> int:
    """Returns the bytes of all weights in modules, each counted once; of experts only those that one row uses."""
    sizes: dict[int, int] = {}

    def visit(part: Any) -> None:
        if isinstance(part, MoE):
            visit([part.router, part.bias, part.shared, part.shared_gate])
            sizes[id(part)] = held_bytes(part.experts) * part.spec.top_k // part.spec.num_experts
        elif is_dataclass(part):
            for item in fields(part):
                visit(getattr(part, item.name))
        elif isinstance(part, list | tuple):
            for each in part:
                visit(each)
        else:
            sizes[id(part)] = int(getattr(part, "num_bytes", 0) or getattr(part, "nbytes", 0))

    for part in parts:
        visit(part)
    return sum(sizes.values())
