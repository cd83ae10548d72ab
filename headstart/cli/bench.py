"""Commands that measure speed: `headstart bench` (under load, or single passes), `tune` and `demo`."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from headstart.cli.options import EngineOptions, LoadTestOptions, OutputOptions
from headstart.cli.parser import CommandGroup, command
from headstart.cli.render import finish, print_note, print_records, print_table, progress
from headstart.config import config_fields
from headstart.errors import UsageError
from headstart.tools.options import BenchFlags, DemoFlags, StepFlags, TuneFlags

MODE_OPTIONS = frozenset({"depth"})  # engine options that --modes sets
STEP_OPTIONS = {"backend", "quantization", "kv_cache_dtype", "dtype", "device", "threads", "numa", "drafter", "head",
                "depth", "block_size", "portable_bits"}  # fmt: skip
"""Engine options that `bench step` accepts; it refuses the others."""
IN_PLACE_COLUMNS = {
    "rows": "{rows}", "forward\nms": "{forward_ms:.2f}", "times\nfirst": "{ratio:.2f}",
    "sampling\nms": "{sampling_ms:.2f}", "draft\nms": "{draft_ms:.2f}", "host\nms": "{host_ms:.2f}",
    "step\nms": "{step_ms:.2f}", "steps": "{steps}",
}  # fmt: skip
PASS_COLUMNS = {
    "rows": "{rows}", "ms": "{median_ms:.2f}", "quartiles": "{q1_ms:.2f} - {q3_ms:.2f}", "times\nfirst": "{ratio:.2f}",
    "rows/s": "{rows_per_s:.0f}", "GB/s": "{gb_per_s:.1f}", "of read\nspeed": "{share_of_bandwidth:.0%}",
    "passes": "{num_passes}",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BenchEngineOptions(LoadTestOptions):
    """EngineOptions of a bench; --modes has the depths."""

    refused: ClassVar[frozenset[str]] = MODE_OPTIONS


@command(
    "headstart bench run",
    "headstart bench --workload code,prose,agent --pairs 10 --out bench.json --report bench.html",
    "headstart bench --workload question.jsonl:each --temperature 0,0.7,1.0,1.5 --price-per-hour 3.31",
    "headstart bench --preset sharegpt-2500-1500 --scale 0.1 --modes off,1,3,5,auto",
    "headstart bench --url http://127.0.0.1:8000 --request-rate 0.5,2",
    "headstart bench --compare before.json after.json",
)
def run(flags: BenchFlags, engine: BenchEngineOptions, output: OutputOptions) -> int:
    """Measure speed under load with and without drafting, in this process or of a server (--url)."""
    if flags.compare is not None:
        return _compare(flags.compare, output)
    if engine.given & MODE_OPTIONS:
        raise UsageError("--depth and --no-mtp have no meaning for bench run", "--modes says which depths to measure")
    if flags.url is not None:
        engine.refuse_others({"seed"}, "a server: it was started with its own")

    from headstart.tools.bench import run as bench
    from headstart.tools.bench.summary import MIN_PAIRS, tables

    options = bench.BenchOptions(config=engine.config, **vars(flags))
    if not output.as_json and flags.pairs < MIN_PAIRS:
        shown = "1 pair shows" if flags.pairs == 1 else f"{flags.pairs} pairs show"
        print_note(f"{shown} speeds; a verdict on them needs --pairs {MIN_PAIRS}")
    with progress("loading") as report_progress:
        report, document = bench.run(options, report_progress)
    if not output.as_json:
        for each in tables(document):
            print_table(*each)
    code = finish(report, output.as_json)
    if document.error == bench.INTERRUPTED:
        raise KeyboardInterrupt
    return code


def _compare(paths: tuple[Path, Path], output: OutputOptions) -> int:
    from headstart.tools.bench.summary import COLUMNS, compare_documents, comparison_rows

    return output.run(
        "comparing",
        lambda progress: compare_documents(*paths),
        lambda data: print_table(COLUMNS, comparison_rows(data)),
    )


@dataclass(frozen=True, kw_only=True)
class StepEngineOptions(EngineOptions):
    """EngineOptions of single passes."""

    refused: ClassVar[frozenset[str]] = frozenset(config_fields()) - STEP_OPTIONS


@command(
    "headstart bench step",
    "headstart bench step --rows 1,4,8 --context 1000 --repeats 20",
    "headstart bench step ./my-model --quantization int8 --profile --json",
)
def step(flags: StepFlags, engine: StepEngineOptions, output: OutputOptions) -> int:
    """Measure the time of a pass by number of rows, of a draft, and the share of memory bandwidth that a pass
    reaches."""
    engine.refuse_others(STEP_OPTIONS, "single passes of one sequence")

    from headstart.tools.bench import step as bench_step

    def tables(data: dict[str, Any]) -> None:
        for line in bench_step.header(data):
            print(line)
        print("steps of running greedy generations, medians:")
        steps = data["in_place"]
        print_records(
            IN_PLACE_COLUMNS, [each | {"ratio": each["forward_ms"] / steps[0]["forward_ms"]} for each in steps]
        )
        print(f"the same pass repeated after {data['context']} positions:")
        passes, first_ms = data["passes"], data["passes"][0]["median_ms"]
        more = [{"ratio": each["median_ms"] / first_ms, "num_passes": len(each["samples_ms"])} for each in passes]
        print_records(PASS_COLUMNS, [each | added for each, added in zip(passes, more, strict=True)])
        if data["profile"]:
            _print_profile(data["profile"])

    options = bench_step.StepOptions(config=engine.config, **vars(flags))
    return output.run("loading", partial(bench_step.run, options), tables)


def _print_profile(profile: dict[str, list[dict[str, Any]]]) -> None:
    """Prints milliseconds: a column for each pass and each kind of engine step, a row for each part."""
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


GROUP = CommandGroup(
    {"run": run, "step": step},
    default="run",
    help="Measure speed, latency, acceptance and cost of a model or a server. Without a command: run.",
    examples=(
        "headstart bench --concurrency 1,4,16 --modes off,3,auto --report bench.html",
        "headstart bench step",
        "headstart bench run --help",
    ),
)


DEMO_COLUMNS = {
    "prompt": "{kind}", "same\ntext": "{same}", "tokens": "{tokens}", "passes": "{passes_off} → {passes_on}",
    "passes\n/token": "{passes_per_token:.2f}", "accept.\nlength": "{acceptance_length:.2f}",
    "tokens/s": "{tokens_per_s_off:.1f} → {tokens_per_s_on:.1f}", "ratio": "{speed_ratio:.2f}x",
}  # fmt: skip


@command("headstart demo", "headstart demo --depth 5 --max-tokens 128", "headstart demo --drafter ngram --json")
def demo(flags: DemoFlags, engine: EngineOptions, output: OutputOptions) -> int:
    """Decode the same prompts with and without drafting, and compare texts and speed."""
    if engine.config.depth == 0 or engine.config.drafter == "none":
        raise UsageError("demo compares with drafting, but drafting is switched off", "leave out --no-mtp or --depth 0")

    from headstart.tools import demo as demo_run

    options = demo_run.DemoOptions(config=engine.config, **vars(flags))
    return output.run("decoding", partial(demo_run.run, options), _print_prompts)


def print_demo(data: dict[str, Any]) -> None:
    """Print the JSON document of `demo` for people; also used by benchmarks/results.py."""
    from headstart.tools.demo import lines_of

    _print_prompts(data)
    for line in lines_of(data):
        print(line)


def _print_prompts(data: dict[str, Any]) -> None:
    same = ["yes" if each["identical"] else f"no, at {each['first_difference']}" for each in data["prompts"]]
    print_records(DEMO_COLUMNS, [{**each, "same": text} for each, text in zip(data["prompts"], same, strict=True)])


TUNED = frozenset({"depth", "depth_by_batch", "rule"})  # engine options that tune finds


@dataclass(frozen=True, kw_only=True)
class TuneEngineOptions(EngineOptions):
    """EngineOptions of tune."""

    refused: ClassVar[frozenset[str]] = EngineOptions.refused | TUNED


@command(
    "headstart tune",
    "headstart tune ./my-model --workload my-prompts.jsonl --concurrency 1,8 --minutes 10",
    "headstart tune --workload high-temperature --retune",
    "headstart tune --url http://localhost:8000 --concurrency 1,16",
    "headstart tune --url http://localhost:8080 --minutes 30 --start-off 'llama-server -m model.gguf' "
    "--start 'llama-server -m model.gguf --spec-type draft-mtp --spec-draft-n-max {depth}'",
)
def tune(flags: TuneFlags, engine: TuneEngineOptions, output: OutputOptions) -> int:
    """Find the fastest drafter and depth on this machine; serve and launch then use them."""
    if flags.url is None:
        engine.refuse_others(engine.given - TUNED, "tune, which finds the depth")
    else:
        engine.refuse_others(set(), "tune --url: the server has its own")

    from headstart.tools.tune import TuneOptions, run as find_fastest

    options = TuneOptions(config=engine.config, **vars(flags))
    return output.run("tuning", partial(find_fastest, options), _print_candidates)


def _print_candidates(data: dict[str, Any]) -> None:
    if data["kept"]:
        return
    rows = [
        (each["drafter"], each["depth"], f"{each['speedup']:.2f}x" if each["speedup"] else "",
         "" if each["low"] is None else f"{each['low']:.2f} to {each['high']:.2f}", each["pairs"],
         f"{each['acceptance_length']:.2f}")
        for each in data["candidates"]
    ]  # fmt: skip
    print_table(("drafter", "depth", "speed", "95 % interval", "pairs", "acceptance\nlength"), rows)
