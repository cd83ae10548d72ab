"""Prompts computed on some machines and tokens on others, beside machines that do both: which serves a load with fewer?

What was computed of a prompt goes from one machine to another before its first token: the bytes of its cache
over the network, one prompt at a time for each machine of the smaller side.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.tools.plan.load import Load
from headstart.tools.plan.machine import Machine
from headstart.tools.plan.memory import Split, cache_bytes
from headstart.tools.plan.predict import Drafting
from headstart.tools.plan.simulate import WARM_UP, Arrivals, Read, Run, Served, Step, played
from headstart.tools.plan.sizing import (
    MOST_ENGINES,
    MOST_MACHINES,
    Steps,
    Wanted,
    asked_of,
    at,
    impossible,
    least,
    meets,
    rows_of,
    served,
    slots_of,
    steps_of,
    wanted,
)  # fmt: skip

SMALLER = 4
"""Machines that do both are also tried with steps of so many times fewer rows, as engines may be told."""
MORE_FOR_PROMPTS = 3
"""So many machines more are tried where the fewest for prompts alone leave too little time for the rest."""
REQUESTS = 4000
"""At most, of a run."""


@dataclass(frozen=True, kw_only=True)
class Side:
    """Machines that read prompts only, or write answers only."""

    step: Step
    slots: int
    rows: int


@dataclass(frozen=True, kw_only=True)
class Apart:
    """What `prompts` and `tokens` machines do together. `served.busy` is about the machines for tokens."""

    prompts: int
    tokens: int
    served: Served
    prompts_busy: float


def together(
    asked: Arrivals, seconds: NDArray[np.float64], first: Side, second: Side, prompts: int, tokens: int
) -> Apart:
    """`seconds`: of each prompt's way from one machine to another. The last token of a prompt is computed again there,
    for the first of the answer."""
    read = _side(first, replace(asked, outputs=np.ones_like(asked.outputs)), prompts)
    there = handed_over(asked.times + read.waits, seconds, min(prompts, tokens))
    order = np.argsort(there, kind="stable")
    known = asked.prompts[order] - 1
    written = _side(
        second, Arrivals(times=there[order], prompts=known + 1, outputs=asked.outputs[order], known=known), tokens
    )
    ttft, tpot = there - asked.times, np.empty_like(there)
    ttft[order] += written.waits
    tpot[order] = written.paces
    counted = slice(int(WARM_UP * len(order)), None)
    served = Served(
        ttft_s=ttft[counted], tpot_s=tpot[counted][asked.outputs[counted] > 1], busy=written.busy, batch=written.batch,
        tokens_per_s=written.tokens_per_s,
    )  # fmt: skip
    return Apart(prompts=prompts, tokens=tokens, served=served, prompts_busy=read.busy)


def _side(side: Side, asked: Arrivals, engines: int) -> Run:
    """Of many engines MOST_ENGINES, which get these requests more slowly."""
    fewer = min(engines, MOST_ENGINES)
    asked = replace(asked, times=asked.times * (engines / fewer))
    return played(side.step, asked, engines=fewer, slots=side.slots, rows=side.rows)


def handed_over(ready: NDArray[np.float64], seconds: NDArray[np.float64], links: int) -> NDArray[np.float64]:
    """When each has arrived, if every link carries one at a time, in order."""
    free, arrived = [0.0] * links, np.empty_like(ready)
    for request in np.argsort(ready, kind="stable"):
        arrived[request] = max(heapq.heappop(free), ready[request]) + seconds[request]
        heapq.heappush(free, float(arrived[request]))
    return arrived


def prompt_bytes(drafting: Drafting, tokens: float) -> float:
    """Of what is handed over: keys, values and states of the trunk and of the head."""
    return cache_bytes(drafting.model, Split(device=0.0, tp=1), tokens)


def fewest(load: Load, drafting: Drafting, machine: Machine, steps: Steps, most: int) -> Apart | None:
    """The fewest machines for prompts, then the fewest for tokens, up to `most` of each; None: these do not suffice."""
    asked, rows = asked_of(load, load.rate, REQUESTS), rows_of(machine)
    lengths, of = np.unique(asked.prompts, return_inverse=True)
    seconds = np.array([_network_s(load, prompt_bytes(drafting, tokens)) for tokens in lengths])[of]
    first = Side(step=steps, slots=slots_of(drafting.model, machine, load.prompt), rows=rows)
    second = Side(step=steps, slots=slots_of(drafting.model, machine, load.prompt + load.output), rows=rows)
    counted = slice(int(WARM_UP * len(asked.times)), None)

    def reads(machines: int) -> bool:
        run = _side(first, replace(asked, outputs=np.ones_like(asked.outputs)), machines)
        return at((run.waits + seconds)[counted], load.share) <= load.ttft_s

    @cache
    def found(prompts: int, tokens: int) -> Apart:
        return together(asked, seconds, first, second, prompts, tokens)

    least_prompts = least(reads, most)
    for prompts in () if least_prompts is None else range(least_prompts, least_prompts + MORE_FOR_PROMPTS):
        tokens = least(lambda machines, prompts=prompts: meets(load, found(prompts, machines).served), most)  # type: ignore[misc]
        if tokens is not None:
            return found(prompts, tokens)
    return None


def _network_s(load: Load, num_bytes: float) -> float:
    return num_bytes * 8 / (load.network * 1e9)


def compare(load: Load, drafting: Drafting, machine: Machine, whole: Wanted, *, plain: bool) -> dict[str, Any] | None:
    """Which is better for a load, and why; None where neither can be had. `whole`: machines that do both."""
    rows, steps = rows_of(machine), steps_of(load, drafting, machine, plain=plain)
    slots = slots_of(drafting.model, machine, load.prompt + load.output)
    if impossible(load, drafting.model, machine, steps, slots):
        return None
    if whole.machines is None or _enough(load, steps, machine, slots, whole.machines - 1):
        most = whole.machines or MOST_MACHINES
        smaller = wanted(load, drafting, machine, plain=plain, rows=rows // SMALLER, most=most)
        whole, rows = (whole, rows) if smaller.machines is None else (smaller, rows // SMALLER)
    apart = fewest(load, drafting, machine, steps, 2 * whole.machines if whole.machines else MOST_MACHINES)
    if whole.machines is None and apart is None:
        return None
    return _document(load, drafting, steps, rows, whole, apart)


def _enough(load: Load, steps: Steps, machine: Machine, slots: int, machines: int) -> bool:
    """Would so many do with smaller steps?"""
    rows = rows_of(machine) // SMALLER
    return machines > 0 and meets(load, served(load, steps, machines, slots, rows))


def _document(
    load: Load, drafting: Drafting, steps: Steps, rows: int, whole: Wanted, apart: Apart | None
) -> dict[str, Any]:
    count = None if apart is None else apart.prompts + apart.tokens
    pays = count is not None and (whole.machines is None or count < whole.machines)
    num_bytes = prompt_bytes(drafting, load.prompt)
    batch = max(round((whole.served or apart.served).batch), 1)  # type: ignore[union-attr]
    context, taken = load.prompt + load.output / 2, min(load.prompt, rows - batch)
    return {
        "pays": pays,
        "drafter": whole.drafter,
        "whole": {"machines": whole.machines, "rows": rows, **_times(load, whole.served)},
        "apart": None
        if apart is None
        else {
            "prompts": apart.prompts,
            "tokens": apart.tokens,
            "prompts_busy": apart.prompts_busy,
            "tokens_busy": apart.served.busy,
            **_times(load, apart.served),
        },
        "handed_over": {"bytes": num_bytes, "seconds": _network_s(load, num_bytes), "gbit_per_s": load.network},
        "step_s": {
            "sequences": batch,
            "alone": steps(batch, context, Read())[0],
            "with_a_prompt": steps(batch, context, Read(1, taken, taken / 2))[0],
        },
    }


def _times(load: Load, served: Served | None) -> dict[str, float]:
    return {} if served is None else {"ttft_s": at(served.ttft_s, load.share), "tpot_s": at(served.tpot_s, load.share)}
