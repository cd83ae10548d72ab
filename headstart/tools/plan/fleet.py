"""`headstart plan --fleet`: how many of these machines a load needs, with and without drafting, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.config import EngineConfig
from headstart.core import Progress
from headstart.tools.plan.load import Load
from headstart.tools.plan.machine import HERE, Machine
from headstart.tools.plan.memory import LARGE_DEVICE, ROWS, memory, split_of
from headstart.tools.plan.predict import DEPTHS, Drafting, best, dollars_per_million, first_token, speed
from headstart.tools.plan.roofline import Pass, SizedModel, pass_seconds
from headstart.tools.plan.simulate import Read, Served, Step, arrivals, simulate

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


def wanted(load: Load, drafting: Drafting, machine: Machine, *, plain: bool) -> Wanted:
    """The fewest machines on which `load.share` percent of the requests have what is asked for."""
    name = "none" if plain else drafting.kind
    context = load.prompt + load.output / 2
    slots = memory(drafting.model, split_of(machine), load.prompt + load.output).max_batch
    if machine.device.name == HERE:
        slots = min(slots, EngineConfig().max_num_seqs)
    depths = [0] if plain else [depth for depth in DEPTHS if depth <= drafting.deepest]
    steps = Steps(drafting, machine, context, depths=depths)
    if why := _impossible(load, drafting.model, machine, steps, slots):
        return Wanted(drafter=name, machines=None, why=why)

    def served(machines: int) -> Served:
        return _served(load, steps, machines, slots, rows_of(machine))

    low, high = 0, 1
    while not _meets(load, found := served(high)):
        low, high = high, 2 * high
        if high > MOST_MACHINES:
            return Wanted(drafter=name, machines=None, why=f"more than {MOST_MACHINES:,} machines")
    while high - low > 1:
        middle = (low + high) // 2
        tried = served(middle)
        if _meets(load, tried):
            high, found = middle, tried
        else:
            low = middle
    return Wanted(drafter=name, machines=high, served=found)


def _impossible(load: Load, model: SizedModel, machine: Machine, steps: Step, slots: int) -> str:
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


def _served(load: Load, steps: Step, machines: int, slots: int, rows: int) -> Served:
    engines = min(machines, MOST_ENGINES)
    rate = load.rate * engines / machines
    stay = load.ttft_s + load.output * load.tpot_s
    count = int(min(max(rate * STAYS * stay, LEAST_REQUESTS), MOST_REQUESTS))
    return simulate(steps, arrivals(rate, load.prompt, load.output, count), engines=engines, slots=slots, rows=rows)


def _at(values: NDArray[np.float64], share: float) -> float:
    return float(np.percentile(values, share)) if len(values) else 0.0


def _meets(load: Load, served: Served) -> bool:
    return _at(served.ttft_s, load.share) <= load.ttft_s and _at(served.tpot_s, load.share) <= load.tpot_s


def fleet(
    load: Load, drafting: Sequence[Drafting], machine: Machine, price: float | None, progress: Progress
) -> dict[str, Any]:
    """The `fleet` part of a plan: plain decoding, then each drafter. `price`: dollars an hour of one machine."""
    ways = [(drafting[0], True), *((each, False) for each in drafting if each.kind != "none")]
    rows = []
    for number, (each, plain) in enumerate(ways):
        progress(number, len(ways), "simulating")
        rows.append(_row(load, wanted(load, each, machine, plain=plain), price))
    progress(len(ways), len(ways), "simulating")
    return {"load": str(load), "share": load.share, "machine": machine.name, "rows": rows}


def _row(load: Load, found: Wanted, price: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"drafter": found.drafter, "machines": found.machines, "why": found.why}
    if found.machines is None or found.served is None:
        return row
    served, cost = found.served, None if price is None else price * found.machines
    for name, values in (("ttft_s", served.ttft_s), ("tpot_s", served.tpot_s)):
        row[name] = {"p50": _at(values, 50), "asked": _at(values, load.share)}
    tokens = load.rate * load.output
    return row | {
        "busy": served.busy,
        "batch": served.batch,
        "tokens_per_s": tokens,
        "dollars_per_hour": cost,
        "dollars_per_million": None if cost is None else dollars_per_million(cost, tokens),
    }


def assumptions() -> list[str]:
    return [
        "a fleet is simulated: Poisson arrivals, lengths evenly between half and one and a half of their means, each "
        "request to the engine with the fewest, prompts in chunks between decoding steps, no prefix in common, drafts "
        "right as often as expected",
    ]
