"""`headstart bench`: what this machine does with a model. Each subcommand is a function here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from headstart.cli.help import RunsByDefault
from headstart.cli.options import EngineOptions, LoadTestOptions, Model, OptionGroup, OutputOptions, option
from headstart.cli.render import finish, print_table, progress
from headstart.core import SamplingParams
from headstart.errors import UsageError

HELP = "Measure speed, latency, acceptance and cost: of a model here, or of a server. Without a command: run."
EXAMPLES = (
    "headstart bench --concurrency 1,4,16 --modes off,3,auto --report bench.html",
    "headstart bench step",
    "headstart bench run --help",
)
RUN_EXAMPLES = (
    "headstart bench run",
    "headstart bench --workload code,prose,agent --pairs 10 --out bench.json --report bench.html",
    "headstart bench --workload question.jsonl:each --temperature 0,0.7,1.0,1.5 --price-per-hour 3.31",
    "headstart bench --preset sharegpt-2500-1500 --scale 0.1 --modes off,1,3,5,auto",
    "headstart bench --url http://127.0.0.1:8000 --request-rate 0.5,2",
    "headstart bench --compare before.json after.json",
)
RUN_REFUSED = {"depth"}
"""Engine options that the modes of a bench decide."""
MOST = 10_000_000
"""Requests, runs and tokens beyond this are a slip of the hand."""
CHUNKED = {"on": (True,), "off": (False,), "both": (True, False)}
STEP_EXAMPLES = (
    "headstart bench step",
    "headstart bench step --rows 1,4,8 --context 1000 --repeats 20",
    "headstart bench step ./my-model --quantization int8 --profile --json",
)
STEP_USES = {"backend", "quantization", "kv_cache_dtype", "dtype", "device", "threads", "numa", "drafter", "head",
             "depth", "block_size"}  # fmt: skip
"""Engine options that matter to passes of one sequence; the others are refused."""


@dataclass(frozen=True, kw_only=True)
class StepFlags(OptionGroup):
    """What bench step times; defaults are StepOptions'."""

    rows: str | None = option("Rows per pass, comma-separated. Default: 1 to 512, as far as the context goes.")
    context: int = option("Cached positions before the rows.", default=128, min=0)
    repeats: int | None = option("Passes of each kind. Default: 5 to 50, as time allows.", min=1)
    profile: bool = option("Also show where the time goes, in passes and in engine steps.", default=False)


@dataclass(frozen=True, kw_only=True)
class RunFlags(OptionGroup):
    """What is asked of the model, and how; what is not given keeps the default of BenchOptions."""

    workloads: str | None = option(
        "Comma-separated: code, prose, high-temperature, json, tools, repetitive, long-context, agent, mixed, "
        "synthetic, FILE.jsonl, FILE.jsonl:CATEGORY or FILE.jsonl:each. Default: mixed.",
        "--workload",
    )
    preset: str | None = option("sharegpt-2500-1500: 80 long requests.")
    scale: float = option("Multiplies the lengths of --preset, --input-tokens.", default=1.0)
    concurrency: str | None = option("Requests at a time, comma-separated. Default: 1,4,16.")
    rates: str | None = option("Instead: requests per second, at random (Poisson) times.", "--request-rate")
    requests: int | None = option("Requests of a run. Default: 8, or two per client.", min=1, max=MOST)
    input_tokens: int | None = option("Prompts of this length, made of running text.", min=1, max=MOST)
    output_tokens: int | None = option("Longest answers; exact with --input-tokens.", min=1, max=MOST)
    prompts: Path | None = option("JSONL of texts to make prompts of a given length of.")
    temperatures: str | None = option("Comma-separated; each workload at each of them.", "--temperature")
    modes: str | None = option("Comma-separated: off, depths such as 3, auto. Default: off,auto.")
    pairs: int = option("Runs of each mode, in alternating order.", default=3, min=1, max=MOST)
    chunked_prefill: str = option("on, off (a prompt is one chunk) or both.", default="on")
    url: str | None = option("Measure the OpenAI-compatible server at this address.")
    off_url: str | None = option("A second server, without drafting, for mode off.")
    api_key: str | None = option("For the server.")
    price_per_hour: float | None = option("Of the machine: gives cost per million tokens.")
    out: Path | None = option("Write the JSON document here; what is done is kept.")
    report: Path | None = option("Write an HTML report here.")
    force: bool = option("Replace what an earlier run has written there.", default=False)
    compare: tuple[Path, Path] | None = option("Compare two documents instead of measuring.")

    def chosen(self) -> dict[str, Any]:
        """Fields of BenchOptions. Raises UsageError for lists and numbers that mean nothing."""
        values = self.parsed(workloads=str, concurrency=int, rates=float, temperatures=float, modes=str)
        positive("--concurrency", values["concurrency"])
        positive("--request-rate", values["rates"])
        positive("--scale", (self.scale,))
        positive("--price-per-hour", () if self.price_per_hour is None else (self.price_per_hour,))
        for temperature in values["temperatures"]:
            SamplingParams(temperature=temperature)  # checks it
        if self.chunked_prefill not in CHUNKED:
            raise UsageError(f"--chunked-prefill is {self.chunked_prefill!r}", f"choose {', '.join(CHUNKED)}")
        del values["compare"]
        return values | {"chunked_prefill": CHUNKED[self.chunked_prefill]}


@dataclass(frozen=True, kw_only=True)
class RunEngine(LoadTestOptions):
    """EngineOptions of a bench, whose modes say how deep to draft."""

    usual: ClassVar[frozenset[str]] = LoadTestOptions.usual - RUN_REFUSED


def positive(flag: str, values: Sequence[float]) -> None:
    """Raises UsageError for a value that is not a finite number above 0."""
    for value in values:
        if not 0 < value < math.inf:
            raise UsageError(f"{flag} is {value:g}, but must be a finite number above 0")


def run(model: Model = None, *, flags: RunFlags, engine: RunEngine, output: OutputOptions) -> int:
    """Measure speed with and without drafting, under load: in this process, or a server over HTTP (--url)."""
    if flags.compare is not None:
        return _compare(flags.compare, output)
    if engine.given & RUN_REFUSED:
        raise UsageError("--depth and --no-mtp have no meaning for bench run", "--modes says which depths to measure")
    if flags.url is not None:
        engine.refuse_others({"seed"}, "a server: it was started with its own")

    from headstart.tools.bench import run as bench
    from headstart.tools.bench.summary import tables

    options = bench.BenchOptions(model=model, config=engine.config, **flags.chosen())
    with progress("loading", quiet=output.as_json) as report_progress:
        report, document = bench.run(options, report_progress)
    if not output.as_json:
        for each in tables(document):
            print_table(*each)
    code = finish(report, output.as_json)
    if document.error == bench.INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _compare(paths: tuple[Path, Path], output: OutputOptions) -> int:
    from headstart.tools.bench import compare

    def table(data: dict[str, Any]) -> None:
        print_table(compare.COLUMNS, compare.table(data))

    return output.run("comparing", lambda progress: compare.run(*paths), table)


def step(model: Model = None, *, flags: StepFlags, engine: EngineOptions, output: OutputOptions) -> int:
    """Time one pass by its number of rows, a draft, and the share of the memory's speed that a pass reaches."""
    engine.refuse_others(STEP_USES, "single passes of one sequence")
    values = flags.parsed(rows=int)
    if any(count < 1 for count in values["rows"]):
        raise UsageError(f"--rows is {flags.rows!r}, but a pass has at least 1 row", "for example --rows 1,4,8")

    from headstart.tools.bench import step as bench_step

    def tables(data: dict[str, Any]) -> None:
        for line in bench_step.header(data):
            print(line)
        _print_passes(data["passes"])
        if data["profile"]:
            _print_profile(data["profile"])

    options = bench_step.StepOptions(model=model, config=engine.config, **values)
    return output.run("loading", partial(bench_step.run, options), tables)


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


GROUP = RunsByDefault
COMMANDS = {"run": (run, RUN_EXAMPLES), "step": (step, STEP_EXAMPLES)}
