"""`headstart bench step`: time of a pass by number of rows, time of a draft, and a profile of both."""

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count as count_up, takewhile
from math import prod
from typing import Any

import numpy as np

from headstart import registry
from headstart.config import AUTO, FIXED_DEPTH, EngineConfig
from headstart.core import Progress, Report, SamplingParams, Sequence, Span, no_progress
from headstart.drafters.base import DraftRequest
from headstart.engine.load import Model, load_model
from headstart.errors import UsageError
from headstart.kernels.backend import backend_kind
from headstart.kernels.ops import Profiler
from headstart.machine import cpu, thread_count
from headstart.tools import doctor
from headstart.tools.options import StepFlags
from headstart.tools.pass_timing import READ_RUNS, PrefilledEngine, held_bytes, kv_bytes, readable_bytes, time_in_turns
from headstart.tools.prompts import builtin_prompts
from headstart.version import __version__

ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 128, 512)
MAX_LOGIT_ROWS = 8  # passes of more rows compute logits only for the last row, as prefill does
PASSES_BUDGET_S = 10.0  # time for all passes; MIN_REPEATS may exceed it
DRAFT_REPEATS = 30
PROFILED_ROWS = (1, 4)
PROFILE_REPEATS, PROFILE_SECONDS = 10, 1.0  # limits of profiling passes: number of passes, and time to start them
GENERATED, GENERATION_SECONDS = 32, 4.0  # limits of a profiled generation: tokens, and time to start steps
IN_PLACE_DEPTHS = (0, 1, 3, 5, 7)
IN_PLACE_STEPS, IN_PLACE_SECONDS = 120, 8.0  # limits of time_in_place: steps per depth, time to start generations
MIN_EXTRA_POSITIONS = 64  # least room after the context, for a generation or a draft


@dataclass(frozen=True, kw_only=True)
class StepOptions(StepFlags):
    config: EngineConfig = field(default_factory=EngineConfig)
    read_bytes: int | None = None  # buffer for the bandwidth test; None: much larger than processor caches


class StepBench(PrefilledEngine):
    """A model and one sequence whose first `context` positions are computed."""

    def __init__(self, options: StepOptions) -> None:
        model = load_model(options.model, options.config)
        self.context, self.rows = options.context, fitting_rows(options, model.config.max_length)
        length = min(model.config.max_length, self.context + max(*self.rows, MIN_EXTRA_POSITIONS))
        limit = model.head.spec.depth_limit if model.head else FIXED_DEPTH
        self.depth = min(FIXED_DEPTH, limit) if options.config.depth == AUTO else options.config.depth
        super().__init__(model, replace(bench_config(model, options.config, length), depth=self.depth))
        if options.profile and not isinstance(model.backend, Profiler):
            what = f"--profile: backend {model.backend.name} does not tell parts of a pass apart"
            raise UsageError(what, "use --backend native, or leave --profile out")
        self.fill(self.context, self.context + max(self.rows))

    def seconds(self, rows: int) -> float:
        (sequence,) = self.sequences
        return self.pass_seconds([Span(sequence, self.context, rows, rows if rows <= MAX_LOGIT_ROWS else 1)])

    def step(self) -> None:
        self.engine.step(lambda deltas: None)

    def submit(self, prompt: list[int], depth: int) -> Sequence:
        """Queues a greedy generation of GENERATED tokens; a long prompt is cut at its beginning."""
        limit = self.engine.max_length
        tokens = min(GENERATED, limit // 2)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        (sequence,) = self.engine.submit(self.llm.request(prompt[tokens - limit :], params, depth=depth))
        return sequence


def fitting_rows(options: StepOptions, limit: int) -> tuple[int, ...]:
    """Returns the row counts to time, ascending. Raises UsageError if they exceed a context of `limit` positions."""
    rows = tuple(sorted(set(options.rows))) or tuple(n for n in ROWS if options.context + n <= limit)
    if not rows or options.context + rows[-1] > limit:
        wanted = f"{rows[-1] if rows else 1} rows after {options.context} positions"
        raise UsageError(f"{wanted} do not fit into the model's context of {limit}", "lower --rows or --context")
    return rows


def bench_config(model: Model, config: EngineConfig, length: int) -> EngineConfig:
    """Returns the configuration of an engine with room for two sequences of `length` positions. It drafts with the
    model's head, or not at all."""
    drafter = (model.head.spec.kind if model.head else "none") if config.drafter == AUTO else config.drafter
    blocks = 2 * -(-length // config.block_size)
    return replace(config, drafter=drafter, max_model_len=length, kv_blocks=blocks, enable_prefix_caching=False)


def run(options: StepOptions, progress: Progress = no_progress) -> Report:
    """Times passes and drafts, and with `profile` their parts. Raises UsageError for a drafter that is not a head, rows
    that do not fit, or a backend without a profiler."""
    if options.config.drafter not in (AUTO, "none", *registry.available("heads")):
        raise UsageError(f"--drafter {options.config.drafter}: bench step times a head", "use --drafter auto")
    bench = StepBench(options)
    in_place = time_in_place(bench, progress)
    passes = time_in_turns(bench.rows, bench.seconds, PASSES_BUDGET_S, progress, options.repeats)
    draft = time_draft(bench, options.repeats or DRAFT_REPEATS) if bench.engine.drafting.drafter else None
    progress(0, 1, "reading memory")
    read_bytes = options.read_bytes or readable_bytes(bench.model.backend)
    bandwidth = bench.model.backend.read_bandwidth(read_bytes, READ_RUNS)  # last: it empties the caches
    data: dict[str, Any] = {
        "model": bench.model.name,
        "machine": machine(bench.model, options.config),
        "weights": {"format": weight_format(bench.model, options.config), "bytes_per_pass": weight_bytes(bench.model)},
        "kv_bytes_per_position": kv_bytes(bench.model),
        "state_bytes": sum(bench.model.backend.state_bytes(spec) for spec in bench.model.decoder.state_specs),
        "read_bandwidth": {"gb_per_s": bandwidth / 1e9, "buffer_bytes": read_bytes, "runs": READ_RUNS},
        "context": options.context,
    }
    data["in_place"] = in_place
    data["passes"] = [pass_row(data, rows, samples) for rows, samples in passes.items()]
    data |= summary(data["passes"], in_place, draft)
    data["profile"] = profile(bench, progress) if options.profile else None
    return Report(ok=True, data=data, lines=_lines(data))


def time_draft(bench: StepBench, repeats: int) -> dict[str, Any]:
    """Times drafts for one sequence. Returns `depth`, `whole` (a draft of `depth` tokens, with its Python) and `step`
    (one pass of the head over one row, without Python; with sampling if the backend runs the whole draft loop)."""
    drafter = bench.engine.drafting.drafter
    assert drafter is not None
    sequence = bench.submit(bench.repeated_text(max(bench.context, 1)), bench.depth)
    while bench.engine.has_work and not sequence.draft.tokens:
        bench.step()
    depth = len(sequence.draft.tokens)
    drafter.propose([DraftRequest(sequence, depth)])
    bench.meter.head.clear()
    wholes = []
    for _ in range(repeats):
        begin = time.perf_counter()
        drafter.propose([DraftRequest(sequence, depth)])
        wholes.append(time.perf_counter() - begin)
    bench.engine.abort(sequence.request.request_id)
    return {"depth": depth, "step": spread(bench.meter.head), "whole": spread(wholes)}


def time_in_place(bench: StepBench, progress: Progress) -> list[dict[str, Any]]:
    """Times engine steps of greedy generations at several fixed depths, which take turns. Returns for each number of
    rows (depth + 1) the median milliseconds of:

    - `forward_ms`: the trunk's pass;
    - `sampling_ms`: sampling of its rows, and planning of the pass;
    - `draft_ms`: the next draft, with its Python;
    - `host_ms`: the rest of the step (Python);
    - `step_ms`: the whole step.
    """
    depths = [depth for depth in IN_PLACE_DEPTHS if depth <= bench.engine.drafting.max_depth]
    samples: dict[int, list[tuple[float, float, float, float, float]]] = {depth + 1: [] for depth in depths}
    prompts = [bench.llm.encode(prompt) for _, prompt in builtin_prompts()]
    begin, turn = time.perf_counter(), 0
    while turn < len(depths) or time.perf_counter() - begin < IN_PLACE_SECONDS:
        depth, prompt = depths[turn % len(depths)], prompts[turn // len(depths) % len(prompts)]
        turn += 1
        if min(map(len, samples.values())) >= IN_PLACE_STEPS:
            break
        progress(min(map(len, samples.values())), IN_PLACE_STEPS, "timing running generations")
        sequence = bench.submit(prompt, depth)
        while bench.engine.has_work:
            rows = len(sequence.tokens) + len(sequence.draft.tokens) - sequence.num_computed
            is_first = not sequence.num_output
            seconds = _time_step(bench)
            if rows == depth + 1 and not is_first:
                samples[rows].append(seconds)
    names = ("forward_ms", "sampling_ms", "draft_ms", "host_ms", "step_ms")
    medians = {rows: (np.median(each, axis=0) * 1e3).tolist() for rows, each in samples.items() if each}
    return [
        {"rows": rows, "steps": len(samples[rows]), **dict(zip(names, each, strict=True))}
        for rows, each in medians.items()
    ]


def _time_step(bench: StepBench) -> tuple[float, float, float, float, float]:
    """Runs one engine step. Returns its seconds: (forward pass, sampling, draft, host, whole step)."""
    bench.meter.trunk.clear()
    before, begin = dict(bench.engine.seconds), time.perf_counter()
    bench.step()
    step, forward = time.perf_counter() - begin, sum(bench.meter.trunk)
    verify, draft = (bench.engine.seconds[part] - before[part] for part in ("verify", "draft"))
    return forward, verify - forward, draft, step - verify - draft, step


def spread(seconds: Iterable[float]) -> dict[str, Any]:
    """Returns median, quartiles, minimum and all samples, in milliseconds."""
    samples = [each * 1e3 for each in seconds]
    low, middle, high = np.percentile(samples, (25, 50, 75)).tolist()
    return {"median_ms": middle, "q1_ms": low, "q3_ms": high, "min_ms": min(samples), "samples_ms": samples}


def pass_row(data: dict[str, Any], rows: int, seconds: list[float]) -> dict[str, Any]:
    """Returns the JSON row of passes with `rows` rows. `bytes`: weights, KV cache (read once, since rows share it) and
    recurrent state (read and written)."""
    cost = spread(seconds)
    num_bytes = data["weights"]["bytes_per_pass"] + data["kv_bytes_per_position"] * (data["context"] + rows)
    num_bytes += 2 * data["state_bytes"]
    speed = num_bytes / cost["median_ms"] / 1e6
    return {
        "rows": rows, "logit_rows": rows if rows <= MAX_LOGIT_ROWS else 1, "bytes": num_bytes, "gb_per_s": speed,
        "share_of_bandwidth": speed / data["read_bandwidth"]["gb_per_s"], "rows_per_s": rows / cost["median_ms"] * 1e3,
        **cost,
    }  # fmt: skip


def summary(
    passes: list[dict[str, Any]], in_place: list[dict[str, Any]], draft: dict[str, Any] | None
) -> dict[str, Any]:
    """Returns the numbers that decide what speculation saves; None if not measured. `flatness`: time of a pass of
    4 rows divided by that of 1 row."""
    cost, longest = {row["rows"]: row["median_ms"] for row in passes}, passes[-1]
    running = {row["rows"]: row["forward_ms"] for row in in_place}
    if draft:
        draft |= {"pass_rows": passes[0]["rows"], "step_share_of_pass": draft["step"]["median_ms"] / cost[min(cost)]}
    prefill = {"rows": longest["rows"], "tokens_per_s": longest["rows_per_s"]}
    return {
        "flatness": cost[4] / cost[1] if {1, 4} <= cost.keys() else None,
        "flatness_in_place": running[4] / running[1] if {1, 4} <= running.keys() else None,
        "draft": draft,
        "prefill": prefill if longest["rows"] > MAX_LOGIT_ROWS else None,
    }


def profile(bench: StepBench, progress: Progress) -> dict[str, Any]:
    """Returns milliseconds by part, of single passes and of engine steps with and without drafting."""
    counts = [rows for rows in sorted({*PROFILED_ROWS, bench.rows[-1]}) if rows <= bench.rows[-1]]
    depths = [0, bench.depth] if bench.engine.drafting.drafter else [0]
    parts: dict[str, Any] = {"passes": [], "steps": []}
    bench.meter.profile(True)
    try:
        for index, rows in enumerate(counts):
            progress(index, len(counts) + len(depths), f"profiling {rows} rows")
            bench.seconds(rows)
            _, times = _repeat_profiled(bench, partial(bench.seconds, rows), range(PROFILE_REPEATS), PROFILE_SECONDS)
            parts["passes"].append({"rows": rows, **times})
        for index, depth in enumerate(depths, len(counts)):
            progress(index, len(counts) + len(depths), f"profiling steps at depth {depth}")
            sequence = bench.submit(bench.text, depth)
            while bench.engine.has_work and not sequence.num_output:
                bench.step()
            tokens = sequence.num_output
            work = takewhile(lambda _: bench.engine.has_work, count_up())
            steps, times = _repeat_profiled(bench, bench.step, work, GENERATION_SECONDS)
            bench.engine.abort(sequence.request.request_id)
            parts["steps"].append({"depth": depth, "steps": steps, "tokens": sequence.num_output - tokens, **times})
    finally:
        bench.meter.profile(False)
    return parts


def _repeat_profiled(
    bench: StepBench, run: Callable[[], object], turns: Iterable[int], seconds: float
) -> tuple[int, dict[str, Any]]:
    """Calls `run` once for each of `turns`, for at most `seconds`. Returns the number of calls, and the mean
    milliseconds of a call and of its parts."""
    bench.meter.reset()
    begin, count, wall = time.perf_counter(), 0, 0.0
    for _ in turns:
        run()
        count, wall = count + 1, time.perf_counter() - begin
        if wall >= seconds:
            break
    parts = bench.meter.parts()
    parts["python"] = max(wall - sum(parts.values()), 0.0)
    scale = 1e3 / max(count, 1)
    return count, {"wall_ms": wall * scale, "parts_ms": {part: each * scale for part, each in parts.items()}}


def weight_bytes(model: Model) -> int:
    """Returns the bytes of weights that a pass of one row reads: no embedding table, only the row's experts."""
    return held_bytes(model.decoder.layers, model.decoder.norm, model.decoder.lm_head)


def weight_format(model: Model, config: EngineConfig) -> str:
    """Describes the matrices' types in the file, largest share first, and their conversion at loading."""
    sizes: Counter[str] = Counter()
    for name in model.weights.used:
        tensor = model.weights.tensors[name]
        if len(tensor.shape) > 1:
            sizes[tensor.dtype] += prod(tensor.shape)
    kinds = " + ".join(kind for kind, _ in sizes.most_common())
    if config.rounding:
        return f"{kinds}, with --quantization {config.rounding}"
    return f"{kinds}, widened to {config.dtype}" if backend_kind(model.backend.name).uses_dtype else kinds


def machine(model: Model, config: EngineConfig) -> dict[str, Any]:
    versions = {"headstart": __version__, "python": platform.python_version(), "numpy": np.__version__}
    for package in backend_kind(model.backend.name).packages:
        versions[package] = doctor.installed_version(package) or "unknown"
    return {
        "device": model.backend.runs_on, "cpu": cpu().model, "threads": thread_count(config.threads),
        "backend": model.backend.name, "path": getattr(model.backend, "path", None), "versions": versions,
    }  # fmt: skip


def header(data: dict[str, Any]) -> list[str]:
    """Returns lines that describe the model, the machine and the package versions."""
    where, weights, first = data["machine"], data["weights"], data["passes"][0]
    backend = where["backend"] + (f" ({where['path']})" if where["path"] else "")
    kv = first["bytes"] - weights["bytes_per_pass"]
    return [
        f"model     {data['model']}: {weights['format']}; a pass reads {weights['bytes_per_pass'] / 1e6:.1f} MB of "
        f"weights, and {kv / 1e6:.1f} MB of KV after {data['context']} positions",
        f"machine   {where['cpu']}, device {where['device']}, {where['threads']} threads, backend {backend}; "
        f"reads {data['read_bandwidth']['gb_per_s']:.1f} GB/s",
        f"versions  {', '.join(f'{name} {version}' for name, version in where['versions'].items())}",
    ]


def _lines(data: dict[str, Any]) -> list[str]:
    lines = []
    if data["flatness_in_place"] is not None:
        lines.append(f"t(4)/t(1) {data['flatness_in_place']:.2f} in running generations")
    if data["flatness"] is not None:
        lines.append(f"t(4)/t(1) {data['flatness']:.2f} for repeated passes")
    if draft := data["draft"]:
        rows = f"{draft['pass_rows']} row{'s' if draft['pass_rows'] > 1 else ''}"
        lines.append(
            f"draft     {draft['step']['median_ms']:.2f} ms a step ({draft['step_share_of_pass']:.1%} of a pass over "
            f"{rows}), {draft['whole']['median_ms']:.2f} ms for depth {draft['depth']} with its sampling and Python"
        )
    if prefill := data["prefill"]:
        lines.append(f"prefill   {prefill['tokens_per_s']:.0f} tokens/s in a pass of {prefill['rows']} rows")
    return lines
