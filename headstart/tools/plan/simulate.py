"""Discrete-event simulation of a router and engines with continuous batching.

An engine step decodes all running sequences and prefills prompts with the remaining rows. A new request goes to the
engine with the fewest requests. Lengths are uniform from 0.5 to 1.5 times their mean; arrivals are a Poisson process.
"""

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class PrefillRows:
    """The prompt rows of one engine step."""

    prompts: int = 0
    rows: float = 0.0  # of all prompts together
    context: float = 0.0  # mean number of positions that a row attends to
    finished: int = 0  # prompts whose last row is in this step


NO_ROWS = PrefillRows()
StepTime = Callable[[int, float, PrefillRows], tuple[float, float]]
"""(decoding sequences, their mean context, prompt rows) -> (seconds of the step, new tokens per decoding sequence)."""
WARM_UP = 0.2  # share of the first requests that are not counted


@dataclass(frozen=True, kw_only=True)
class Arrivals:
    """Requests in the order of their arrival."""

    times: NDArray[np.float64]  # seconds, ascending
    prompts: NDArray[np.float64]  # tokens
    outputs: NDArray[np.float64]  # tokens
    computed: NDArray[np.float64] | None = None  # prompt tokens that another machine has prefilled; None: none


def poisson_arrivals(rate: float, prompt: float, output: float, count: int, seed: int = 0) -> Arrivals:
    """Draws `count` requests at `rate` per second, with mean lengths `prompt` and `output` in tokens."""
    rng = np.random.default_rng(seed)
    times = np.cumsum(rng.exponential(1 / rate, count))
    prompts, outputs = (np.ceil(mean * rng.uniform(0.5, 1.5, count)) for mean in (prompt, output))
    return Arrivals(times=times, prompts=prompts, outputs=outputs)


def after_warm_up(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Returns the values without those of the first WARM_UP share of requests."""
    return values[int(WARM_UP * len(values)) :]


def percentile(values: NDArray[np.float64], share: float) -> float:
    return float(np.percentile(values, share)) if len(values) else 0.0


@dataclass(frozen=True, kw_only=True)
class SimulationResult:
    """Latencies [requests] and utilisation of a simulated fleet."""

    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    outputs: NDArray[np.float64]  # tokens
    busy: float  # share of the time in which an engine steps
    batch: float  # mean number of decoding sequences per step

    def ttft(self, share: float) -> float:
        """Returns the `share`-th percentile of TTFT after the warm-up, in seconds."""
        return percentile(after_warm_up(self.ttft_s), share)

    def tpot(self, share: float) -> float:
        """Returns the `share`-th percentile of time per token, over answers of more than one token, in seconds."""
        return percentile(after_warm_up(self.tpot_s)[after_warm_up(self.outputs) > 1], share)


@dataclass
class _Engine:
    waiting: deque[int] = field(default_factory=deque)  # requests
    prefilling: deque[list[float]] = field(default_factory=deque)  # [request, rows left]
    decoding: list[tuple[float, int]] = field(default_factory=list)  # heap of (value of `decoded` at its end, request)
    decoded: float = 0.0  # tokens that a sequence would have if it had decoded since the start
    contexts: float = 0.0  # positions of all decoding sequences together
    step_result: tuple[float, int] = (0.0, 0)  # (new tokens per sequence, prompts that finish) of this step
    busy_s: float = 0.0
    rows: float = 0.0  # decoding sequences, summed over steps
    steps: int = 0
    is_stepping: bool = False

    @property
    def load(self) -> int:
        return len(self.waiting) + len(self.prefilling) + len(self.decoding)


class _Fleet:
    def __init__(self, step: StepTime, engines: int, slots: int, rows: int, arrivals: Arrivals) -> None:
        self._step, self._slots, self._rows = step, slots, rows
        # lists, since reading single elements of arrays is slow
        self._times, self._prompts, self._outputs = (
            each.tolist() for each in (arrivals.times, arrivals.prompts, arrivals.outputs)
        )
        count = len(self._times)
        self._computed = [0.0] * count if arrivals.computed is None else arrivals.computed.tolist()
        self._engines = [_Engine() for _ in range(engines)]
        self._ends: list[tuple[float, int]] = []  # heap of ends of steps: (time, engine)
        self.first, self.last = [0.0] * count, [0.0] * count

    def run(self) -> list[_Engine]:
        for request, now in enumerate(self._times):
            while self._ends and self._ends[0][0] <= now:
                self._end_step(*heapq.heappop(self._ends))
            loads = [engine.load for engine in self._engines]
            number = loads.index(min(loads))
            self._engines[number].waiting.append(request)
            if not self._engines[number].is_stepping:
                self._begin_step(now, number)
        while self._ends:
            self._end_step(*heapq.heappop(self._ends))
        return self._engines

    def _begin_step(self, now: float, number: int) -> None:
        engine = self._engines[number]
        while engine.waiting and len(engine.prefilling) + len(engine.decoding) < self._slots:
            request = engine.waiting.popleft()
            engine.prefilling.append([request, self._prompts[request] - self._computed[request]])
        num_decoding = len(engine.decoding)
        prefill = self._prefill_rows(engine, max(float(self._rows - num_decoding), 1.0))
        engine.is_stepping = num_decoding + prefill.prompts > 0
        if not engine.is_stepping:
            return
        seconds, gain = self._step(num_decoding, engine.contexts / max(num_decoding, 1), prefill)
        engine.step_result = (gain, prefill.finished)
        engine.busy_s += seconds
        engine.rows += num_decoding
        engine.steps += 1
        heapq.heappush(self._ends, (now + seconds, number))

    def _prefill_rows(self, engine: _Engine, left: float) -> PrefillRows:
        """Takes up to `left` rows of the prompts being prefilled, in order."""
        if not engine.prefilling:
            return NO_ROWS
        prompts, rows, seen, finished = 0, 0.0, 0.0, 0
        for prompt in engine.prefilling:
            taken = min(prompt[1], left)
            if not taken:
                break
            seen += taken * (self._prompts[int(prompt[0])] - prompt[1] + taken / 2)
            prompt[1] -= taken
            left -= taken
            rows += taken
            prompts += 1
            finished += not prompt[1]
        return PrefillRows(prompts, rows, seen / max(rows, 1.0), finished)

    def _end_step(self, now: float, number: int) -> None:
        engine, prompts, outputs = self._engines[number], self._prompts, self._outputs
        gain, finished = engine.step_result
        engine.decoded += gain
        engine.contexts += gain * len(engine.decoding)
        while engine.decoding and engine.decoding[0][0] <= engine.decoded:
            _, request = heapq.heappop(engine.decoding)
            self.last[request] = now
            engine.contexts -= prompts[request] + outputs[request]
        for _ in range(finished):
            request = int(engine.prefilling.popleft()[0])
            self.first[request] = self.last[request] = now
            if outputs[request] > 1:
                heapq.heappush(engine.decoding, (engine.decoded + outputs[request] - 1, request))
                engine.contexts += prompts[request]
        engine.contexts = max(engine.contexts, 0.0) if engine.decoding else 0.0
        self._begin_step(now, number)


def simulate(step: StepTime, arrivals: Arrivals, *, engines: int, slots: int, rows: int) -> SimulationResult:
    """Simulates a fleet. `slots`: running sequences per engine; `rows`: largest number of rows in a step."""
    fleet = _Fleet(step, engines, slots, rows, arrivals)
    ended = fleet.run()
    first, last = np.array(fleet.first), np.array(fleet.last)
    return SimulationResult(
        ttft_s=first - arrivals.times,
        tpot_s=(last - first) / np.maximum(arrivals.outputs - 1, 1),
        outputs=arrivals.outputs,
        busy=sum(engine.busy_s for engine in ended) / (engines * float(last.max())),
        batch=sum(engine.rows for engine in ended) / max(sum(engine.steps for engine in ended), 1),
    )
