"""Single passes over prefilled sequences, timed: what `bench step` and `plan` measure a machine with."""

from __future__ import annotations

from collections.abc import Callable, Sequence as Seq
from dataclasses import replace
from typing import TypeVar, cast

from headstart.api import LLM
from headstart.config import EngineConfig
from headstart.core import Progress, SamplingParams, Sequence, Span
from headstart.engine.load import Model
from headstart.kernels.ops import Backend
from headstart.tools.meter import Meter
from headstart.tools.prompts import builtin_prompts

FEWEST_REPEATS, MOST_REPEATS = 5, 50
Key = TypeVar("Key")


class Prefilled:
    """An engine on a Meter, and sequences of its own that the scheduler does not know, with their first positions
    computed: real keys and values, since untouched memory would be read from one page."""

    def __init__(self, model: Model, config: EngineConfig) -> None:
        self.model = model
        self.meter = Meter(model.backend, waits=config.device != "cpu")
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
        """The backend's time for one pass."""
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
