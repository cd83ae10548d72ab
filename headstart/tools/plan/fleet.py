"""`headstart plan --fleet`: the fewest machines that serve a load, their cost, and whether disaggregation needs fewer.

Disaggregation means prefill and decode on separate machines, with a transfer of each prompt's KV cache. The roofline
gives step times, a simulation the latencies.
"""

import heapq
import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.config import EngineConfig
from headstart.core import Progress
from headstart.errors import UsageError
from headstart.tools.bench.summary import cost_per_million
from headstart.tools.plan import roofline, simulate
from headstart.tools.plan.machine import HERE, Machine
from headstart.tools.plan.shape import Split, cache_bytes, estimate_memory, pass_rows, split_of

EXAMPLE = '"100 req/s, 1500 in, 300 out, TTFT 1 s, TPOT 40 ms"'
SECONDS = {"s": 1.0, "ms": 1e-3}
PER_SECOND = {"s": 1.0, "min": 60.0, "h": 3600.0}
_NUMBER = r"(\d+(?:\.\d+)?)"
_PARTS = {
    "rate": re.compile(rf"{_NUMBER}\s*(?:req(?:uests)?)\s*/\s*(s|min|h)"),
    "prompt": re.compile(rf"{_NUMBER}\s*in"),
    "output": re.compile(rf"{_NUMBER}\s*out"),
    "ttft_s": re.compile(rf"ttft\s*{_NUMBER}\s*(m?s)"),
    "tpot_s": re.compile(rf"tpot\s*{_NUMBER}\s*(m?s)"),
    "share": re.compile(rf"p{_NUMBER}"),
    "network": re.compile(rf"{_NUMBER}\s*gbit\s*/\s*s"),
}
MAX_ENGINES = 8
"""Engines in a simulation. Larger fleets are scaled down together with their load: 8 and 80 engines queue alike."""
MAX_MACHINES = 2**16
MIN_REQUESTS, MAX_REQUESTS = 600, 12_000
ANSWERS_PER_RUN = 8  # simulated time, in durations of one answer
CONTEXT_STEP, ROW_STEP = 128, 32  # resolution of contexts and prompt rows in cached step times
SMALLER_STEPS = 4  # colocated machines are also tried with steps of this many times fewer rows
MORE_PREFILL_MACHINES = 3  # numbers of prefill machines that are tried, from the fewest on
MAX_DISAGGREGATED_REQUESTS = 4000  # requests of a simulated run with separate machines
ASSUMPTIONS = (
    "the fleet is simulated: Poisson arrivals; lengths uniform from 0.5 to 1.5 times their means; each request goes to "
    "the engine with the fewest requests; chunked prefill; no common prefixes; acceptance as assumed",
    "with prefill and decode on separate machines, the KV cache is sent once a prompt is computed, at 100 Gbit/s per "
    "machine unless --fleet says otherwise; the decode machine computes the last token again. Combined machines may "
    "use smaller chunks",
)


@dataclass(frozen=True, kw_only=True)
class FleetLoad:
    rate: float  # requests/s
    prompt: float  # mean tokens
    output: float  # mean tokens
    ttft_s: float  # largest time to first token, in seconds
    tpot_s: float  # largest time per later token, in seconds
    share: float = 95.0  # percent of the requests that must meet the targets
    network: float = 100.0  # Gbit/s of each machine, between prefill and decode machines

    def __str__(self) -> str:
        return (
            f"{self.rate:g} req/s, {self.prompt:g} in, {self.output:g} out, TTFT {self.ttft_s:g} s and TPOT "
            f"{self.tpot_s * 1e3:g} ms for {self.share:g} %"
        )


def parse_load(text: str) -> FleetLoad:
    """Parses a load such as EXAMPLE: comma-separated parts in any order, optionally with `p99` and `25 Gbit/s`. Raises
    UsageError for an unknown, repeated or missing part, or a value out of range."""
    found: dict[str, float] = {}
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, match = next(((n, m) for n, each in _PARTS.items() if (m := each.fullmatch(part.lower()))), ("", None))
        if match is None:
            raise UsageError(f"--fleet: {part!r} is not understood", f"for example --fleet {EXAMPLE}")
        if name in found:
            raise UsageError(f"--fleet: {part!r} gives {name.removesuffix('_s')} a second time", "give it once")
        value, unit = float(match[1]), match[2] if match.re.groups > 1 else ""
        found[name] = value / PER_SECOND[unit] if name == "rate" else value * SECONDS.get(unit, 1.0)
    if missing := [each.name for each in fields(FleetLoad) if each.default is MISSING and each.name not in found]:
        shown = {"rate": "req/s", "prompt": "in", "output": "out", "ttft_s": "TTFT", "tpot_s": "TPOT"}
        names = ", ".join(shown[each] for each in missing)
        raise UsageError(f"--fleet lacks {names}", f"for example --fleet {EXAMPLE}")
    load = FleetLoad(**found)
    if min(load.rate, load.ttft_s, load.tpot_s, load.network) <= 0 or min(load.prompt, load.output) < 1:
        raise UsageError("--fleet: rate, times and tokens must be above 0", f"for example --fleet {EXAMPLE}")
    if not 50 <= load.share < 100:
        raise UsageError(f"--fleet: p{load.share:g}, but it goes from p50 to below p100", "for example p99")
    return load


@dataclass(frozen=True, kw_only=True)
class FleetSize:
    drafter: str
    machines: int | None  # fewest machines that meet the targets; None: no number does
    result: simulate.SimulationResult | None = None
    reason: str = ""  # why no number of machines suffices


class RooflineSteps:
    """A StepTime from the roofline; each step drafts at the fastest depth for its number of sequences."""

    def __init__(self, setup: roofline.DraftingSetup, machine: Machine, context: float, depths: Sequence[int]) -> None:
        self._setup, self._machine, self._context, self._depths = setup, machine, context, depths
        self._fastest: dict[int, tuple[int, float, float]] = {}
        self._seconds: dict[tuple[int, ...], float] = {}

    def __call__(self, decoding: int, context: float, prefill: simulate.PrefillRows) -> tuple[float, float]:
        depth, gain, draft_s = self._draft(decoding) if decoding else (0, 0.0, 0.0)
        key = (decoding, round(context / CONTEXT_STEP), prefill.prompts, round(prefill.rows / ROW_STEP),
               round(prefill.context / CONTEXT_STEP))  # fmt: skip
        if key not in self._seconds:
            self._seconds[key] = self._mixed(decoding, depth, context, prefill) + draft_s
        return self._seconds[key], gain

    def _draft(self, decoding: int) -> tuple[int, float, float]:
        """Returns the fastest (depth, tokens per step, seconds of a draft) for `decoding` sequences."""
        if decoding not in self._fastest:
            setup = self._setup
            speeds = [roofline.step_speed(setup.model, self._machine, decoding, self._context, depth, setup.acceptances)
                      for depth in self._depths]  # fmt: skip
            best = roofline.fastest(speeds)
            self._fastest[decoding] = (best.depth, best.tokens_per_step, best.draft_s)
        return self._fastest[decoding]

    def _mixed(self, decoding: int, depth: int, context: float, prefill: simulate.PrefillRows) -> float:
        """Returns the seconds of a step, without the draft, whose pass has decoding rows and prompt rows."""
        rates, works = self._machine.rates, []
        if decoding:
            works.append(roofline.Pass(decoding, 1 + depth, context))
        if prefill.prompts:
            rows = prefill.rows / prefill.prompts
            works.append(roofline.Pass(prefill.prompts, rows, prefill.context, logit_rows=prefill.finished))
        logits = decoding * (1 + depth) + prefill.finished
        pass_s = roofline.pass_seconds(self._setup.model, self._machine, *works)
        return pass_s + rates.step_s + rates.step_row_s * logits


def smallest(is_enough: Callable[[int], bool], limit: int) -> int | None:
    """Returns the smallest number from 1 to `limit` for which the monotonic `is_enough` is true; None without one."""
    tried = [*(2**power for power in range(limit.bit_length()) if 2**power < limit), limit]
    low, high = next((pair for pair in pairwise([0, *tried]) if is_enough(pair[1])), (0, 0))
    return bisect_left(range(high), True, low + 1, high, key=is_enough) if high else None


@dataclass(frozen=True, kw_only=True)
class EngineLimits:
    """Step time and limits of engines that only prefill, or only decode."""

    step: simulate.StepTime
    slots: int  # sequences per engine
    rows: int  # largest number of rows in a step


@dataclass(frozen=True, kw_only=True)
class DisaggregatedFleet:
    num_prefill: int
    num_decode: int
    result: simulate.SimulationResult  # latencies of whole requests; `busy` and `batch` of the decode machines
    prefill_busy: float  # share of the time in which prefill machines work


def simulate_disaggregated(
    arrivals: simulate.Arrivals, transfer_s: NDArray[np.float64], prefill: EngineLimits, decode: EngineLimits,
    num_prefill: int, num_decode: int,
) -> DisaggregatedFleet:  # fmt: skip
    """Simulates separate prefill and decode machines. `transfer_s` [requests]: seconds to transfer each prompt's KV
    cache. The decode machine computes the last token of a prompt again."""
    first = _simulate_prefill(prefill, arrivals, num_prefill)
    return _simulate_decode(arrivals, transfer_s, first, decode, num_prefill, num_decode)


def _simulate_prefill(prefill: EngineLimits, arrivals: simulate.Arrivals, engines: int) -> simulate.SimulationResult:
    return _simulate_side(prefill, replace(arrivals, outputs=np.ones_like(arrivals.outputs)), engines)


def _simulate_decode(
    arrivals: simulate.Arrivals, transfer_s: NDArray[np.float64], first: simulate.SimulationResult,
    decode: EngineLimits, num_prefill: int, num_decode: int,
) -> DisaggregatedFleet:  # fmt: skip
    """Simulates the transfers and decode machines. `first`: the result of the prefill machines."""
    arrived = transfer_ends(arrivals.times + first.ttft_s, transfer_s, min(num_prefill, num_decode))
    order = np.argsort(arrived, kind="stable")
    computed = arrivals.prompts[order] - 1
    waiting = simulate.Arrivals(
        times=arrived[order], prompts=computed + 1, outputs=arrivals.outputs[order], computed=computed
    )
    second = _simulate_side(decode, waiting, num_decode)
    ttft, tpot = arrived - arrivals.times, np.empty_like(arrived)
    ttft[order] += second.ttft_s
    tpot[order] = second.tpot_s
    result = replace(second, ttft_s=ttft, tpot_s=tpot, outputs=arrivals.outputs)
    return DisaggregatedFleet(num_prefill=num_prefill, num_decode=num_decode, result=result, prefill_busy=first.busy)


def _simulate_side(side: EngineLimits, arrivals: simulate.Arrivals, engines: int) -> simulate.SimulationResult:
    fewer = min(engines, MAX_ENGINES)
    slower = replace(arrivals, times=arrivals.times * (engines / fewer))
    return simulate.simulate(side.step, slower, engines=fewer, slots=side.slots, rows=side.rows)


def transfer_ends(ready: NDArray[np.float64], seconds: NDArray[np.float64], links: int) -> NDArray[np.float64]:
    """Returns the time at which each KV cache has arrived. Each of `links` transfers one cache at a time, in the order
    of `ready` (seconds at which the caches can be sent)."""
    free, arrived = [0.0] * links, np.empty_like(ready)
    for request in np.argsort(ready, kind="stable"):
        arrived[request] = max(heapq.heappop(free), ready[request]) + seconds[request]
        heapq.heappush(free, float(arrived[request]))
    return arrived


class FleetPlanner:
    """Finds the size of a fleet for a load with one drafter; `plain`: without a drafter."""

    def __init__(self, load: FleetLoad, setup: roofline.DraftingSetup, machine: Machine, *, plain: bool) -> None:
        self.load, self.setup, self.machine = load, setup, machine
        self.name = "none" if plain else setup.kind
        self._depths = [0] if plain else [depth for depth in roofline.DEPTHS if depth <= setup.max_depth]
        self._slots = self._max_sequences(load.prompt + load.output)
        self._rows = pass_rows(machine.device.memory) * machine.replicas  # of the largest step
        if machine.device.name == HERE:
            self._rows = EngineConfig().max_num_batched_tokens

    def _max_sequences(self, tokens: float) -> int:
        """Returns how many sequences of `tokens` tokens fit the machine's memory and the engine's limit."""
        slots = estimate_memory(self.setup.model, split_of(self.machine), tokens).max_batch
        return min(slots, EngineConfig().max_num_seqs) if self.machine.device.name == HERE else slots

    def _new_steps(self) -> RooflineSteps:
        return RooflineSteps(self.setup, self.machine, self.load.prompt + self.load.output / 2, self._depths)

    def size(self, rows: int | None = None, limit: int = MAX_MACHINES) -> FleetSize:
        """Returns the fewest machines, up to `limit`, that meet the targets. `rows`: largest number of rows in a step;
        None: the engines' default."""
        steps = self._new_steps()
        if reason := self._unreachable_reason(steps):
            return FleetSize(drafter=self.name, machines=None, reason=reason)

        @cache
        def result(machines: int) -> simulate.SimulationResult:
            return self._simulate(steps, machines, rows or self._rows)

        fewest = smallest(lambda machines: meets(self.load, result(machines)), limit)
        if fewest is None:
            return FleetSize(drafter=self.name, machines=None, reason=f"more than {limit:,} machines")
        return FleetSize(drafter=self.name, machines=fewest, result=result(fewest))

    def _unreachable_reason(self, steps: simulate.StepTime) -> str:
        """Returns why even a request that runs alone misses the targets; "" if it meets them."""
        load = self.load
        if self._slots < 1:
            return f"no room for one sequence of {load.prompt + load.output:,.0f} tokens"
        longest = 1.5 - (100 - load.share) / 100  # prompt lengths are uniform from 0.5 to 1.5 times the mean
        first = roofline.first_token_seconds(self.setup.model, self.machine, round(longest * load.prompt))
        if first > load.ttft_s:
            return f"alone, a prompt of {longest * load.prompt:,.0f} tokens takes {first:.2g} s"
        seconds, gain = steps(1, load.prompt + load.output / 2, simulate.PrefillRows())
        if seconds / gain > load.tpot_s:
            return f"alone, a request takes {seconds / gain * 1e3:.3g} ms a token"
        return ""

    def _simulate(self, steps: simulate.StepTime, machines: int, rows: int) -> simulate.SimulationResult:
        engines = min(machines, MAX_ENGINES)
        arrivals = make_arrivals(self.load, self.load.rate * engines / machines, MAX_REQUESTS)
        return simulate.simulate(steps, arrivals, engines=engines, slots=self._slots, rows=rows)

    def compare_disaggregated(self, colocated: FleetSize) -> dict[str, Any] | None:
        """Compares separate machines with `colocated` ones. Returns JSON; None if neither serves the load."""
        rows, steps = self._rows, self._new_steps()
        if self._unreachable_reason(steps):
            return None
        fewer, smaller_rows = (colocated.machines or 0) - 1, rows // SMALLER_STEPS
        can_improve = fewer > 0 and meets(self.load, self._simulate(steps, fewer, smaller_rows))
        if colocated.machines is None or can_improve:
            smaller = self.size(smaller_rows, colocated.machines or MAX_MACHINES)
            colocated, rows = (colocated, rows) if smaller.machines is None else (smaller, smaller_rows)
        separate = self._fewest_disaggregated(steps, 2 * colocated.machines if colocated.machines else MAX_MACHINES)
        if colocated.machines is None and separate is None:
            return None
        return self._comparison(steps, rows, colocated, separate)

    def _fewest_disaggregated(self, steps: RooflineSteps, limit: int) -> DisaggregatedFleet | None:
        """Returns the fleet with fewest prefill, then fewest decode machines, up to `limit` of each; None: too few."""
        load = self.load
        arrivals = make_arrivals(load, load.rate, MAX_DISAGGREGATED_REQUESTS)
        lengths, indices = np.unique(arrivals.prompts, return_inverse=True)
        transfer_s = np.array([self._transfer_seconds(self._prompt_bytes(tokens)) for tokens in lengths])[indices]
        slots = [self._max_sequences(tokens) for tokens in (load.prompt, load.prompt + load.output)]
        prefill, decode = (EngineLimits(step=steps, slots=each, rows=self._rows) for each in slots)

        prefilled = cache(partial(_simulate_prefill, prefill, arrivals))

        def prefills_in_time(machines: int) -> bool:
            ttft_s = prefilled(machines).ttft_s + transfer_s
            return simulate.percentile(simulate.after_warm_up(ttft_s), load.share) <= load.ttft_s

        @cache
        def result(num_prefill: int, num_decode: int) -> DisaggregatedFleet:
            first = prefilled(num_prefill)
            return _simulate_decode(arrivals, transfer_s, first, decode, num_prefill, num_decode)

        fewest = smallest(prefills_in_time, limit)
        for num_prefill in () if fewest is None else range(fewest, fewest + MORE_PREFILL_MACHINES):
            num_decode = smallest(lambda count, num=num_prefill: meets(load, result(num, count).result), limit)  # type: ignore[misc]
            if num_decode is not None:
                return result(num_prefill, num_decode)
        return None

    def _prompt_bytes(self, tokens: float) -> float:
        """Returns the bytes to transfer for a prompt: keys, values and states of trunk and drafter."""
        return cache_bytes(self.setup.model, Split(device=0.0, tp=1), tokens)

    def _transfer_seconds(self, num_bytes: float) -> float:
        return num_bytes * 8 / (self.load.network * 1e9)

    def _comparison(
        self, steps: RooflineSteps, rows: int, colocated: FleetSize, separate: DisaggregatedFleet | None
    ) -> dict[str, Any]:
        load = self.load
        count = None if separate is None else separate.num_prefill + separate.num_decode
        num_bytes = self._prompt_bytes(load.prompt)
        batch = max(round((colocated.result or separate.result).batch), 1)  # type: ignore[union-attr]
        context, taken = load.prompt + load.output / 2, min(load.prompt, rows - batch)
        return {
            "pays": count is not None and (colocated.machines is None or count < colocated.machines),
            "drafter": colocated.drafter,
            "colocated": {"machines": colocated.machines, "rows": rows, **_latencies(load, colocated.result)},
            "disaggregated": None
            if separate is None
            else {
                "num_prefill": separate.num_prefill,
                "num_decode": separate.num_decode,
                "prefill_utilisation": separate.prefill_busy,
                "decode_utilisation": separate.result.busy,
                **_latencies(load, separate.result),
            },
            "transfer": {
                "bytes": num_bytes, "seconds": self._transfer_seconds(num_bytes), "gbit_per_s": load.network,
            },
            "step_s": {
                "sequences": batch,
                "alone": steps(batch, context, simulate.PrefillRows())[0],
                "with_a_prompt": steps(batch, context, simulate.PrefillRows(1, taken, taken / 2))[0],
            },
        }  # fmt: skip


def make_arrivals(load: FleetLoad, rate: float, limit: int) -> simulate.Arrivals:
    answer_s = load.ttft_s + load.output * load.tpot_s
    count = int(min(max(rate * ANSWERS_PER_RUN * answer_s, MIN_REQUESTS), limit))
    return simulate.poisson_arrivals(rate, load.prompt, load.output, count)


def meets(load: FleetLoad, result: simulate.SimulationResult) -> bool:
    return result.ttft(load.share) <= load.ttft_s and result.tpot(load.share) <= load.tpot_s


def _latencies(load: FleetLoad, result: simulate.SimulationResult | None) -> dict[str, float]:
    return {} if result is None else {"ttft_s": result.ttft(load.share), "tpot_s": result.tpot(load.share)}


def plan_fleet(
    load: FleetLoad, setups: Sequence[roofline.DraftingSetup], machine: Machine, price: float | None, progress: Progress
) -> dict[str, Any]:
    """Returns the JSON `fleet` part of a plan, plain decoding first. `price`: dollars per hour of a machine."""
    planners = [FleetPlanner(load, setups[0], machine, plain=True)]
    planners += [FleetPlanner(load, each, machine, plain=False) for each in setups if each.kind != "none"]
    sizes = []
    for number, planner in enumerate(planners):
        progress(number, len(planners) + 1, "simulating")
        sizes.append(planner.size())
    progress(len(planners), len(planners) + 1, "simulating")
    pairs = [*zip(planners, sizes, strict=True)][::-1]  # a drafter wins a tie
    best, colocated = min(pairs, key=lambda pair: pair[1].machines or MAX_MACHINES + 1)
    compared = best.compare_disaggregated(colocated)
    progress(len(planners) + 1, len(planners) + 1, "simulating")
    rows = [_row(load, size, price) for size in sizes]
    return {
        "load": str(load),
        "percentile": load.share,
        "machine": machine.name,
        "rows": rows,
        "disaggregation": compared,
    }


def _row(load: FleetLoad, size: FleetSize, price: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"drafter": size.drafter, "machines": size.machines, "why": size.reason}
    if size.machines is None or size.result is None:
        return row
    result, cost = size.result, None if price is None else price * size.machines
    tokens = load.rate * load.output
    return row | {
        "ttft_s": {"p50": result.ttft(50), "at_percentile": result.ttft(load.share)},
        "tpot_s": {"p50": result.tpot(50), "at_percentile": result.tpot(load.share)},
        "utilisation": result.busy,
        "batch": result.batch,
        "tokens_per_s": tokens,
        "dollars_per_hour": cost,
        "dollars_per_million": cost_per_million(cost, tokens),
    }
