"""Requests through a router and engines that batch continuously, event by event, on a clock of its own.

An engine's step decodes all running sequences and reads prompts with the rows that are left; new requests go to the
engine with the fewest. Lengths lie evenly between half and one and a half of their means; arrivals are Poisson's.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Read:
    """What a step reads of prompts: how many of them, their rows, what a row sees on average, and how many end."""

    prompts: int = 0
    rows: float = 0.0
    context: float = 0.0
    ended: int = 0


Step = Callable[[int, float, Read], tuple[float, float]]
"""(sequences that decode, their mean context, prompts) -> seconds of a step, and tokens that each decoding sequence
gains by it."""
WARM_UP = 0.2
"""Share of the requests that find an empty fleet, and are not counted."""


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """`times` in seconds, ascending; tokens of prompts and answers; `known`: of prompts, those computed elsewhere."""

    times: NDArray[np.float64]
    prompts: NDArray[np.float64]
    outputs: NDArray[np.float64]
    known: NDArray[np.float64] | None = None


def arrivals(rate: float, prompt: float, output: float, count: int, seed: int = 0) -> Arrivals:
    """`count` requests at `rate` a second."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    prompts, outputs = (np.ceil(mean * rng.uniform(0.5, 1.5, count)) for mean in (prompt, output))
    return Arrivals(times=times, prompts=prompts, outputs=outputs)


@dataclass(frozen=True, kw_only=True)
class Served:
    """Of the requests that count: seconds to the first token, and per token after it. `busy`: share of the time in
    which an engine steps; `batch`: sequences that decode in a step, on average; `tokens_per_s` of one engine."""

    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    busy: float
    batch: float
    tokens_per_s: float


@dataclass
class _Engine:
    """`gained`: tokens that a sequence here from the beginning would have got; each ends at its own mark."""

    waiting: deque[int] = field(default_factory=deque)
    reading: deque[list[float]] = field(default_factory=deque)  # [request, rows left]
    marks: list[tuple[float, int]] = field(default_factory=list)
    gained: float = 0.0
    contexts: float = 0.0  # of all decoding sequences together
    steps_to: tuple[float, int] = (0.0, 0)  # tokens that this step gives, prompts that it ends
    busy_s: float = 0.0
    decoded: float = 0.0
    steps: int = 0
    stepping: bool = False

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.reading) + len(self.marks)


class _Fleet:
    """One run."""

    def __init__(self, steps: Sequence[Step], engines: int, slots: int, rows: int, asked: Arrivals) -> None:
        self._steps, self._slots, self._rows, self._asked = steps, slots, rows, asked
        self._engines = [_Engine() for _ in range(engines)]
        self._ends: list[tuple[float, int]] = []  # of steps: (time, engine)
        self.first, self.last = np.zeros(len(asked.times)), np.zeros(len(asked.times))

    def run(self) -> list[_Engine]:
        for request, now in enumerate(self._asked.times):
            while self._ends and self._ends[0][0] <= now:
                self._end(*heapq.heappop(self._ends))
            number = min(range(len(self._engines)), key=lambda n: self._engines[n].load)
            self._engines[number].waiting.append(request)
            if not self._engines[number].stepping:
                self._begin(float(now), number)
        while self._ends:
            self._end(*heapq.heappop(self._ends))
        return self._engines

    def _begin(self, now: float, number: int) -> None:
        engine, asked = self._engines[number], self._asked
        while engine.waiting and len(engine.reading) + len(engine.marks) < self._slots:
            request = engine.waiting.popleft()
            known = 0.0 if asked.known is None else asked.known[request]
            engine.reading.append([request, asked.prompts[request] - known])
        decoding = len(engine.marks)
        read = self._read(engine, max(float(self._rows - decoding), 1.0))
        engine.stepping = decoding + read.prompts > 0
        if not engine.stepping:
            return
        others = sum(each.stepping for each in self._engines) - 1
        step = self._steps[min(others, len(self._steps) - 1)]
        seconds, gain = step(decoding, engine.contexts / max(decoding, 1), read)
        engine.steps_to = (gain, read.ended)
        engine.busy_s += seconds
        engine.decoded += decoding
        engine.steps += 1
        heapq.heappush(self._ends, (now + seconds, number))

    def _read(self, engine: _Engine, left: float) -> Read:
        """Rows of the prompts that are being read, in order, as far as there is room."""
        prompts, rows, seen, ended = 0, 0.0, 0.0, 0
        for prompt in engine.reading:
            taken = min(prompt[1], left)
            if not taken:
                break
            seen += taken * (self._asked.prompts[int(prompt[0])] - prompt[1] + taken / 2)
            prompt[1] -= taken
            left -= taken
            rows += taken
            prompts += 1
            ended += not prompt[1]
        return Read(prompts, rows, seen / max(rows, 1.0), ended)

    def _end(self, now: float, number: int) -> None:
        engine, asked = self._engines[number], self._asked
        gain, ended = engine.steps_to
        engine.gained += gain
        engine.contexts += gain * len(engine.marks)
        while engine.marks and engine.marks[0][0] <= engine.gained:
            _, request = heapq.heappop(engine.marks)
            self.last[request] = now
            engine.contexts -= asked.prompts[request] + asked.outputs[request]
        for _ in range(ended):
            request = int(engine.reading.popleft()[0])
            self.first[request] = self.last[request] = now
            if asked.outputs[request] > 1:
                heapq.heappush(engine.marks, (engine.gained + asked.outputs[request] - 1, request))
                engine.contexts += asked.prompts[request]
        engine.contexts = max(engine.contexts, 0.0) if engine.marks else 0.0
        self._begin(now, number)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Of every request the times of its first and its last token; of the engines what `Served` has."""

    asked: Arrivals
    first: NDArray[np.float64]
    last: NDArray[np.float64]
    busy: float
    batch: float
    tokens_per_s: float

    @property
    def waits(self) -> NDArray[np.float64]:
        return self.first - self.asked.times

    @property
    def paces(self) -> NDArray[np.float64]:
        return (self.last - self.first) / np.maximum(self.asked.outputs - 1, 1)


def played(step: Step, asked: Arrivals, *, engines: int, slots: int, rows: int, beside: Sequence[Step] = ()) -> Run:
    """As `simulate`, request by request."""
    fleet = _Fleet([step, *beside], engines, slots, rows, asked)
    ended = fleet.run()
    total = float(fleet.last.max())
    return Run(
        asked=asked,
        first=fleet.first,
        last=fleet.last,
        busy=sum(engine.busy_s for engine in ended) / (engines * total),
        batch=sum(engine.decoded for engine in ended) / max(sum(engine.steps for engine in ended), 1),
        tokens_per_s=float(asked.outputs.sum()) / (engines * total),
    )


def simulate(
    step: Step, asked: Arrivals, *, engines: int, slots: int, rows: int, beside: Sequence[Step] = ()
) -> Served:
    """`slots`: sequences that an engine has room for; `rows`: of a step, those of prompts among them. `beside`: steps
    of engines that share a machine and slow each other down, while one other steps too, two others, and so on."""
    run = played(step, asked, engines=engines, slots=slots, rows=rows, beside=beside)
    counted = slice(int(WARM_UP * len(asked.times)), None)
    return Served(
        ttft_s=run.waits[counted],
        tpot_s=run.paces[counted][asked.outputs[counted] > 1],
        busy=run.busy,
        batch=run.batch,
        tokens_per_s=run.tokens_per_s,
    )
