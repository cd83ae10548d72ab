"""How many of these machines a load needs: steps by the roofline, requests by the simulation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from headstart.config import EngineConfig
from headstart.tools.plan.load import Load
from headstart.tools.plan.machine import HERE, Machine
from headstart.tools.plan.memory import LARGE_DEVICE, ROWS, memory, split_of
from headstart.tools.plan.predict import DEPTHS, Drafting, best, first_token, speed
from headstart.tools.plan.roofline import Pass, SizedModel, pass_seconds
from headstart.tools.plan.simulate import Arrivals, Read, Served, Step, arrivals, simulate

MOST_ENGINES = 8
"""More are simulated as so many with their share of the requests: one queue among 8 or 80 waits alike."""
MOST_MACHINES = 2**16
LEAST_REQUESTS, MOST_REQUESTS = 600, 12_000
STAYS = 8
"""A run lasts as long as so many answers take one after the other."""
CONTEXTS, PROMPT_ROWS = 128, 32
"""Steps whose contexts and prompt rows differ by less take the same time."""


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """How many machines one way of decoding needs, and what they do then; None: no number suffices, and why."""

    drafter: str
    machines: int | None
    served: Served | None = None
    why: str = ""


def rows_of(machine: Machine) -> int:
    """Of a step: what this engine takes, or what others do on such a device."""
    if machine.device.name == HERE:
        return EngineConfig().max_num_batched_tokens
    return ROWS[machine.device.memory >= LARGE_DEVICE] * machine.replicas


class Steps:
    """Seconds of mixed steps by the roofline, and tokens gained, at the best of `depths` for so many sequences."""

    def __init__(self, drafting: Drafting, machine: Machine, context: float, *, depths: Sequence[int]) -> None:
        self._drafting, self._machine, self._context, self._depths = drafting, machine, context, depths
        self._depth: dict[int, tuple[int, float, float]] = {}
        self._seconds: dict[tuple[int, ...], float] = {}

    def __call__(self, decoding: int, context: float, read: Read) -> tuple[float, float]:
        depth, gain, draft_s = self._at(decoding) if decoding else (0, 0.0, 0.0)
        key = (decoding, round(context / CONTEXTS), read.prompts, round(read.rows / PROMPT_ROWS),
               round(read.context / CONTEXTS))  # fmt: skip
        if key not in self._seconds:
            self._seconds[key] = self._mixed(decoding, depth, context, read) + draft_s
        return self._seconds[key], gain

    def _at(self, decoding: int) -> tuple[int, float, float]:
        """Depth, tokens a step, and seconds of a draft."""
        if decoding not in self._depth:
            model, shares = self._drafting.model, self._drafting.acceptances
            found = best([speed(model, self._machine, decoding, self._context, d, shares) for d in self._depths])
            self._depth[decoding] = (found.depth, found.tokens_per_step, found.draft_s)
        return self._depth[decoding]

    def _mixed(self, decoding: int, depth: int, context: float, read: Read) -> float:
        """Rows that decode and rows of prompts share the weights; each attend to what lies before them."""
        rates, works = self._machine.rates, []
        if decoding:
            works.append(Pass(decoding, 1 + depth, context))
        if read.prompts:
            works.append(Pass(read.prompts, read.rows / read.prompts, read.context, logit_rows=read.ended))
        logits = decoding * (1 + depth) + read.ended
        return pass_seconds(self._drafting.model, self._machine, *works) + rates.step_s + rates.step_row_s * logits


def slots_of(model: SizedModel, machine: Machine, tokens: float) -> int:
    """Sequences of so many tokens that it has room for, and takes."""
    slots = memory(model, split_of(machine), tokens).max_batch
    return min(slots, EngineConfig().max_num_seqs) if machine.device.name == HERE else slots


def steps_of(load: Load, drafting: Drafting, machine: Machine, *, plain: bool) -> Steps:
    depths = [0] if plain else [depth for depth in DEPTHS if depth <= drafting.deepest]
    return Steps(drafting, machine, load.prompt + load.output / 2, depths=depths)


def wanted(
    load: Load, drafting: Drafting, machine: Machine, *, plain: bool, rows: int | None = None, most: int = MOST_MACHINES
) -> Wanted:
    """The fewest machines, up to `most`, on which `load.share` percent of the requests have what is asked for. `rows`
    of a step: None: those that engines take."""
    name, rows = "none" if plain else drafting.kind, rows or rows_of(machine)
    slots = slots_of(drafting.model, machine, load.prompt + load.output)
    steps = steps_of(load, drafting, machine, plain=plain)
    if why := impossible(load, drafting.model, machine, steps, slots):
        return Wanted(drafter=name, machines=None, why=why)

    @cache
    def found(machines: int) -> Served:
        return served(load, steps, machines, slots, rows)

    fewest = least(lambda machines: meets(load, found(machines)), most)
    if fewest is None:
        return Wanted(drafter=name, machines=None, why=f"more than {most:,} machines")
    return Wanted(drafter=name, machines=fewest, served=found(fewest))


def least(enough: Callable[[int], bool], most: int) -> int | None:
    """The smallest number from 1 on that is; None: not even `most`."""
    low, high = 0, 1
    while not enough(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def impossible(load: Load, model: SizedModel, machine: Machine, steps: Step, slots: int) -> str:
    """Why a request that is alone does not get what is asked for; empty where it does."""
    if slots < 1:
        return f"no room for one sequence of {load.prompt + load.output:,.0f} tokens"
    longest = 1.5 - (100 - load.share) / 100  # prompts lie between half and one and a half of their mean
    first = first_token(model, machine, round(longest * load.prompt))
    if first > load.ttft_s:
        return f"alone, a prompt of {longest * load.prompt:,.0f} tokens takes {first:.2g} s"
    seconds, gain = steps(1, load.prompt + load.output / 2, Read())
    if seconds / gain > load.tpot_s:
        return f"alone, a request takes {seconds / gain * 1e3:.3g} ms a token"
    return ""


def served(load: Load, steps: Step, machines: int, slots: int, rows: int) -> Served:
    engines = min(machines, MOST_ENGINES)
    asked = asked_of(load, load.rate * engines / machines)
    return simulate(steps, asked, engines=engines, slots=slots, rows=rows)


def asked_of(load: Load, rate: float, most: int = MOST_REQUESTS) -> Arrivals:
    """Requests of a run."""
    stay = load.ttft_s + load.output * load.tpot_s
    count = int(min(max(rate * STAYS * stay, LEAST_REQUESTS), most))
    return arrivals(rate, load.prompt, load.output, count)


def at(values: NDArray[np.float64], share: float) -> float:
    return float(np.percentile(values, share)) if len(values) else 0.0


def meets(load: Load, served: Served) -> bool:
    return at(served.ttft_s, load.share) <= load.ttft_s and at(served.tpot_s, load.share) <= load.tpot_s
