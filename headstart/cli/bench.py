"""`headstart bench`: what this machine does with a model. Each subcommand is a function here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from headstart.cli.options import EngineOptions, Model, OptionGroup, OutputOptions, comma_list
from headstart.cli.render import finish, print_table, progress
from headstart.errors import UsageError

HELP = "Measure speed on this machine."
EXAMPLES = ("headstart bench step", "headstart bench step --help")
STEP_EXAMPLES = (
    "headstart bench step",
    "headstart bench step --rows 1,4,8 --context 1000 --repeats 20",
    "headstart bench step ./my-model --quantization int8 --profile --json",
)
STEP_USES = {"backend", "quantization", "kv_cache_dtype", "dtype", "device", "threads", "drafter", "head", "depth",
             "block_size"}  # fmt: skip
"""Engine options that matter to passes of one sequence; the others are refused."""


@dataclass(frozen=True, kw_only=True)
class StepFlags(OptionGroup):
    """What bench step times; defaults are StepOptions'."""

    rows: Annotated[
        str | None,
        typer.Option("--rows", help="Rows per pass, comma-separated. Default: 1 to 512, as far as the context goes."),
    ] = None
    context: Annotated[int, typer.Option("--context", min=0, help="Cached positions before the rows.")] = 128
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Passes of each kind. Default: 5 to 50, as time allows.")
    ] = None
    profile: Annotated[
        bool, typer.Option("--profile", help="Also show where the time goes, in passes and in engine steps.")
    ] = False


def step(model: Model = None, *, flags: StepFlags, engine: EngineOptions, output: OutputOptions) -> int:
    """Time one pass by its number of rows, a draft, and the share of the memory's speed that a pass reaches."""
    engine.refuse_others(STEP_USES, "single passes of one sequence")
    rows = comma_list("--rows", flags.rows, int)
    if any(count < 1 for count in rows):
        raise UsageError(f"--rows is {flags.rows!r}, but a pass has at least 1 row", "for example --rows 1,4,8")

    from headstart.tools import bench_step

    options = bench_step.StepOptions(
        model=model,
        config=engine.config,
        rows=rows,
        context=flags.context,
        repeats=flags.repeats,
        profile=flags.profile,
    )
    with progress("loading", quiet=output.as_json) as report_progress:
        report = bench_step.run(options, report_progress)
    if not output.as_json:
        for line in bench_step.header(report.data):
            print(line)
        _print_passes(report.data["passes"])
        if report.data["profile"]:
            _print_profile(report.data["profile"])
    return finish(report, output.as_json)


def _print_passes(passes: list[dict[str, Any]]) -> None:
    columns = ("rows", "ms", "quartiles", "times\nfirst", "rows/s", "GB/s", "of read\nspeed", "passes")
    rows = [
        (
            row["rows"],
            f"{row['median_ms']:.2f}",
            f"{row['q1_ms']:.2f} - {row['q3_ms']:.2f}",
            f"{row['median_ms'] / passes[0]['median_ms']:.2f}",
            f"{row['rows_per_s']:.0f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['share_of_bandwidth']:.0%}",
            len(row["samples_ms"]),
        )
        for row in passes
    ]
    print_table(columns, rows)


def _print_profile(profile: dict[str, list[dict[str, Any]]]) -> None:
    """Milliseconds: a column for each pass and each kind of engine step, a row for each part."""
    measured = profile["passes"] + profile["steps"]
    names = [f"pass of\n{each['rows']}" for each in profile["passes"]]
    names += [f"step,\ndepth {each['depth']}" for each in profile["steps"]]
    parts = list(dict.fromkeys(part for each in measured for part in each["parts_ms"] if part != "python"))
    rows = [
        (part, *(f"{each['parts_ms'][part]:.2f}" if part in each["parts_ms"] else "" for each in measured))
        for part in (*parts, "python")
    ]
    rows.append(("total", *(f"{each['wall_ms']:.2f}" for each in measured)))
    print_table(("ms", *names), rows)
