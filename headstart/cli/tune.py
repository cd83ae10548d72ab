"""`headstart tune`: measure what pays here, and keep the choice."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from headstart.cli.options import EngineOptions, Model, OptionGroup, OutputOptions, option
from headstart.cli.render import print_table
from headstart.errors import UsageError

EXAMPLES = (
    "headstart tune",
    "headstart tune ./my-model --workload my-prompts.jsonl --concurrency 1,8 --minutes 10",
    "headstart tune --workload high-temperature --retune",
)


MOST_MINUTES = 7 * 24 * 60
TUNED = {"depth", "depth_by_batch", "rule"}
"""Engine options that have no meaning where depths are what is looked for."""


@dataclass(frozen=True, kw_only=True)
class TuneFlags(OptionGroup):
    """What to tune for; defaults are TuneOptions'."""

    workload: str = option("As in headstart bench: a name, or FILE.jsonl.", default="mixed")
    concurrency: str = option("Requests at a time, comma-separated.", default="1,4")
    minutes: float = option("Stop at the latest after so long.", default=5.0)
    retune: bool = option("Measure again what is known already.", default=False)


def run(model: Model = None, *, flags: TuneFlags, engine: EngineOptions, output: OutputOptions) -> int:
    """Find the drafter and the depth that pay on this machine; serve and launch then use them."""
    engine.refuse_others(engine.given - TUNED, "tune, which finds the depth")
    values = flags.parsed(concurrency=int)
    if any(count < 1 for count in values["concurrency"]):
        raise UsageError(f"--concurrency is {flags.concurrency!r}, but counts begin at 1")
    if not 0 < flags.minutes <= MOST_MINUTES:
        raise UsageError(f"--minutes is {flags.minutes}, but must be above 0 and at most {MOST_MINUTES:,}")

    from headstart.tools.tune import run as tune

    options = tune.TuneOptions(model=model, config=engine.config, **values)
    return output.run("tuning", partial(tune.run, options), _print_candidates)


def _print_candidates(data: dict[str, Any]) -> None:
    if data["kept"]:
        return
    rows = []
    for each in data["candidates"]:
        known = each["low"] is not None
        interval = f"{each['low']:.2f} to {each['high']:.2f}" if known else ""
        speed = f"{each['speedup']:.2f}x" if each["speedup"] else ""
        rows.append(
            (each["drafter"], str(each["depth"]), speed, interval, each["pairs"],
             f"{each['acceptance_length']:.2f}")
        )  # fmt: skip
    print_table(("drafter", "depth", "speed", "95 % interval", "pairs", "acceptance\nlength"), rows)
