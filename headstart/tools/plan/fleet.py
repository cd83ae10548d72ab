"""`headstart plan --fleet`: how many of these machines a load needs, with and without drafting, and what it costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headstart.core import Progress
from headstart.tools.plan.apart import compare
from headstart.tools.plan.load import Load
from headstart.tools.plan.machine import Machine
from headstart.tools.plan.predict import Drafting, dollars_per_million
from headstart.tools.plan.sizing import MOST_MACHINES, Wanted, at, wanted


def fleet(
    load: Load, drafting: Sequence[Drafting], machine: Machine, price: float | None, progress: Progress
) -> dict[str, Any]:
    """The `fleet` part of a plan: plain decoding, then each drafter. `price`: dollars an hour of one machine."""
    ways = [(drafting[0], True), *((each, False) for each in drafting if each.kind != "none")]
    found = []
    for number, (each, plain) in enumerate(ways):
        progress(number, len(ways) + 1, "simulating")
        found.append(wanted(load, each, machine, plain=plain))
    progress(len(ways), len(ways) + 1, "simulating")
    pairs = [*zip(ways, found, strict=True)][::-1]  # of equals one that drafts
    (each, plain), whole = min(pairs, key=lambda pair: pair[1].machines or MOST_MACHINES + 1)
    compared = compare(load, each, machine, whole, plain=plain)
    progress(len(ways) + 1, len(ways) + 1, "simulating")
    rows = [_row(load, each, price) for each in found]
    return {"load": str(load), "share": load.share, "machine": machine.name, "rows": rows, "apart": compared}


def _row(load: Load, found: Wanted, price: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {"drafter": found.drafter, "machines": found.machines, "why": found.why}
    if found.machines is None or found.served is None:
        return row
    served, cost = found.served, None if price is None else price * found.machines
    for name, values in (("ttft_s", served.ttft_s), ("tpot_s", served.tpot_s)):
        row[name] = {"p50": at(values, 50), "asked": at(values, load.share)}
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
        "apart, a prompt is handed over when all of it is computed, over the network that is said (100 Gbit/s a "
        "machine), to where its last token is computed again; machines that do both may take smaller chunks",
    ]
