"""Single passes over prefilled sequences, timed: what `bench step` and `plan` measure a machine with."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import fields, is_dataclass, replace
from typing import Any, TypeVar, cast

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import Progress, SamplingParams, Sequence, Span
from headstart.engine.load import Model
from headstart.kernels.ops import Backend
from headstart.layers.moe import MoE
from headstart.tools.meter import Meter
from headstart.tools.prompts import builtin_prompts

FEWEST_REPEATS, MOST_REPEATS = 5, 50
MOST_READ_BYTES, READ_RUNS = 2**30, 5
Key = TypeVar("Key")


class Prefilled:
    """An engine on a Meter, and sequences of its own that the scheduler does not know, with their first positions
    computed: real keys and values, since untouched memory would be read from one page."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.model = model
        self.meter = Meter(model.backend, waits=model.backend.runs_on != "cpu")
        self.llm = LLM(replace(model, backend=cast(Backend, self.meter)), config)
        self.engine = self.llm.engine
        self.text = self.llm.encode(builtin_prompts()[0][1])
        self.sequences: list[Sequence] = []

    def repeated_text(self, length: int) -> list[int]:
        return (self.text * -(-length // len(self.text)))[:length]

    def fill(self, context: int, length: int) -> None:
        """One more sequence, of which so many positions are computed and have room."""
        tokens = self.repeated_text(length)
        sequence = Sequence(self.llm.request(tokens, SamplingParams()), 0, tokens, len(self.sequences))
        reserved = self.engine.memory.reserve(sequence, length)
        assert reserved
        budget = self.engine.scheduler.budget
        for start in range(0, context, budget):
            self.engine.runner.forward([Span(sequence, start, min(budget, context - start), 1)])
        self.sequences.append(sequence)

    def seconds_of(self, spans: list[Span]) -> float:
        """The backend's time for one pass; a pass that was timed before starts from the same states again."""
        if states := self.engine.memory.states:
            for span in spans:
                states.rewind(span.sequence, span.start)
        self.engine.runner.forward(spans)
        return self.meter.trunk[-1]

    def release(self) -> None:
        """Give the caches back to the engine."""
        for sequence in self.sequences:
            self.engine.memory.release(sequence)
        self.sequences = []


def in_turns(
    keys: Seq[Key], seconds: Callable[[Key], float], budget_s: float, progress: Progress, repeats: int | None = None
) -> dict[Key, list[float]]:
    """Seconds by key, taken in turns: what slows the machine down for a while slows all of them down. `repeats` None:
    as many as the time allows for each."""
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
    return max(FEWEST_REPEATS, min(MOST_REPEATS, int(budget_s / max(seconds, 1e-9))))


def readable_bytes(backend: Backend) -> int:
    """A buffer to time reading with: far more than caches hold."""
    return min(MOST_READ_BYTES, backend.free_memory() // 4)


def held_bytes(*parts: Any) -> int:
    """Bytes of all weights within modules, each counted once."""
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
