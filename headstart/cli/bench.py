"""`headstart bench`: what this machine does with a model. Each subcommand is a function here."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headstart.cli.options import EngineOptions, LoadTestOptions, Model, OptionGroup, OutputOptions, comma_list
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
CHUNKED = {"on": (True,), "off": (False,), "both": (True, False)}
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


@dataclass(frozen=True, kw_only=True)
class RunFlags(OptionGroup):
    """What is asked of the model, and how; what is not given keeps the default of BenchOptions."""

    workload: Annotated[
        str | None,
        typer.Option(
            "--workload",
            help="Comma-separated: code, prose, high-temperature, json, tools, repetitive, long-context, agent, mixed, "
            "synthetic, FILE.jsonl, FILE.jsonl:CATEGORY or FILE.jsonl:each. Default: mixed.",
        ),
    ] = None
    preset: Annotated[str | None, typer.Option("--preset", help="sharegpt-2500-1500: 80 long requests.")] = None
    scale: Annotated[float, typer.Option("--scale", help="Multiplies the lengths of --preset, --input-tokens.")] = 1.0
    concurrency: Annotated[
        str | None, typer.Option("--concurrency", help="Requests at a time, comma-separated. Default: 1,4,16.")
    ] = None
    request_rate: Annotated[
        str | None, typer.Option("--request-rate", help="Instead: requests per second, at random (Poisson) times.")
    ] = None
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="Requests of a run. Default: 8, or two per client.")
    ] = None
    input_tokens: Annotated[
        int | None, typer.Option("--input-tokens", min=1, help="Prompts of this length, made of running text.")
    ] = None
    output_tokens: Annotated[
        int | None, typer.Option("--output-tokens", min=1, help="Longest answers; exact with --input-tokens.")
    ] = None
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="JSONL of texts to make prompts of a given length of.")
    ] = None
    temperature: Annotated[
        str | None, typer.Option("--temperature", help="Comma-separated; each workload at each of them.")
    ] = None
    modes: Annotated[
        str | None, typer.Option("--modes", help="Comma-separated: off, depths such as 3, auto. Default: off,auto.")
    ] = None
    pairs: Annotated[int, typer.Option("--pairs", min=1, help="Runs of each mode, in alternating order.")] = 3
    chunked_prefill: Annotated[
        str, typer.Option("--chunked-prefill", help="on, off (a prompt is one chunk) or both.")
    ] = "on"
    url: Annotated[str | None, typer.Option("--url", help="Measure the OpenAI-compatible server at this address.")] = (
        None
    )
    off_url: Annotated[
        str | None, typer.Option("--off-url", help="A second server, without drafting, for mode off.")
    ] = None
    api_key: Annotated[str | None, typer.Option("--api-key", help="For the server.")] = None
    price_per_hour: Annotated[
        float | None, typer.Option("--price-per-hour", help="Of the machine: gives cost per million tokens.")
    ] = None
    out: Annotated[Path | None, typer.Option("--out", help="Write the JSON document here; what is done is kept.")] = (
        None
    )
    report: Annotated[Path | None, typer.Option("--report", help="Write an HTML report here.")] = None
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist.")] = False
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Compare two documents instead of measuring.")
    ] = None

    def chosen(self) -> dict[str, Any]:
        """Fields of BenchOptions. Raises UsageError for lists and numbers that mean nothing."""
        concurrency = comma_list("--concurrency", self.concurrency, int)
        rates = comma_list("--request-rate", self.request_rate, float)
        temperatures = comma_list("--temperature", self.temperature, float)
        positive("--concurrency", concurrency)
        positive("--request-rate", rates)
        positive("--scale", (self.scale,))
        positive("--price-per-hour", () if self.price_per_hour is None else (self.price_per_hour,))
        for temperature in temperatures:
            SamplingParams(temperature=temperature)  # checks it
        if self.chunked_prefill not in CHUNKED:
            raise UsageError(f"--chunked-prefill is {self.chunked_prefill!r}", f"choose {', '.join(CHUNKED)}")
        same = ("preset", "scale", "requests", "input_tokens", "output_tokens", "prompts", "pairs", "url", "off_url",
                "api_key", "price_per_hour", "out", "report", "force")  # fmt: skip
        return {name: getattr(self, name) for name in same} | {
            "workloads": comma_list("--workload", self.workload, str),
            "concurrency": concurrency,
            "rates": rates,
            "temperatures": temperatures,
            "modes": comma_list("--modes", self.modes, str),
            "chunked_prefill": CHUNKED[self.chunked_prefill],
        }


def positive(flag: str, values: Sequence[float]) -> None:
    """Raises UsageError for a value that is not a finite number above 0."""
    for value in values:
        if not 0 < value < math.inf:
            raise UsageError(f"{flag} is {value:g}, but must be a finite number above 0")


def run(model: Model = None, *, flags: RunFlags, engine: LoadTestOptions, output: OutputOptions) -> int:
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

    report = compare.run(*paths)
    if not output.as_json:
        print_table(compare.COLUMNS, compare.table(report.data))
    return finish(report, output.as_json)


def step(model: Model = None, *, flags: StepFlags, engine: EngineOptions, output: OutputOptions) -> int:
    """Time one pass by its number of rows, a draft, and the share of the memory's speed that a pass reaches."""
    engine.refuse_others(STEP_USES, "single passes of one sequence")
    rows = comma_list("--rows", flags.rows, int)
    if any(count < 1 for count in rows):
        raise UsageError(f"--rows is {flags.rows!r}, but a pass has at least 1 row", "for example --rows 1,4,8")

    from headstart.tools.bench import step as bench_step

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
