"""`headstart bench step`: what one pass costs by its rows, what a draft costs, and where the time goes."""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import Any

import numpy as np

from headstart import __version__, registry
from headstart.config import AUTO, FIXED_DEPTH, EngineConfig
from headstart.core import Progress, Report, SamplingParams, Sequence, Span, no_progress
from headstart.drafters.base import Wish
from headstart.engine.load import Model, load_model
from headstart.errors import UsageError
from headstart.kernels.backend import kind_of
from headstart.machine import cpu, threads
from headstart.tools import doctor
from headstart.tools.bench.profile import profile_pass, profile_steps, profiling, require_profiler
from headstart.tools.prefilled import READ_RUNS, Prefilled, held_bytes, in_turns, readable_bytes

ROWS = (1, 2, 3, 4, 6, 8, 16, 32, 128, 512)
MOST_VERIFIED = 8
"""Passes of up to so many rows give logits for all of them, as in verification; longer ones are a span of a prompt."""
PASSES_BUDGET_S = 10.0
"""Time for all passes together, as far as FEWEST_REPEATS allow."""
DRAFT_REPEATS = 30
PROFILED_ROWS = (1, 4)
GENERATED = 32
"""Tokens of a profiled generation."""
ROOM = 64
"""Positions beyond the context, at least: for a generation, or a draft."""


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What to time. `rows` () stands for ROWS, as far as the model's context holds them."""

    model: str | None = None
    config: EngineConfig = field(default_factory=EngineConfig)
    rows: tuple[int, ...] = ()
    context: int = 128
    repeats: int | None = None  # None: as many as the time allows
    profile: bool = False
    read_bytes: int | None = None  # buffer for the read bandwidth; None: far more than caches hold


class Bench(Prefilled):
    """A model and one sequence whose first `context` positions are computed."""

    def __init__(self, options: StepOptions) -> None:
        model = load_model(options.model, options.config)
        self.context, self.rows = options.context, fitting_rows(options, model.config.max_length)
        length = min(model.config.max_length, self.context + max(*self.rows, ROOM))
        most = model.head.spec.depth_limit if model.head else FIXED_DEPTH
        self.depth = min(FIXED_DEPTH, most) if options.config.depth == AUTO else options.config.depth
        super().__init__(model, replace(bench_config(model, options.config, length), depth=self.depth))
        if options.profile:
            require_profiler(self.meter)
        self.fill(self.context, self.context + max(self.rows))

    def seconds(self, rows: int) -> float:
        """The backend's time for one pass."""
        (sequence,) = self.sequences
        return self.seconds_of([Span(sequence, self.context, rows, rows if rows <= MOST_VERIFIED else 1)])

    def submit(self, prompt: list[int], depth: int) -> Sequence:
        """Queue a greedy continuation of a prompt, or of as much of it as fits."""
        room = self.engine.max_length
        tokens = min(GENERATED, room // 2)
        params = SamplingParams(max_tokens=tokens, ignore_eos=True)
        (sequence,) = self.engine.submit(self.llm.request(prompt[tokens - room :], params, depth=depth))
        return sequence


def fitting_rows(options: StepOptions, limit: int) -> tuple[int, ...]:
    """Row counts in ascending order. Raises UsageError for more than the model's context holds."""
    rows = tuple(sorted(set(options.rows))) or tuple(n for n in ROWS if options.context + n <= limit)
    if not rows or options.context + rows[-1] > limit:
        wanted = f"{rows[-1] if rows else 1} rows after {options.context} positions"
        raise UsageError(f"{wanted} do not fit into the model's context of {limit}", "lower --rows or --context")
    return rows


def bench_config(model: Model, config: EngineConfig, length: int) -> EngineConfig:
    """An engine for two sequences of `length`; it drafts with the model's head, or not at all."""
    drafter = (model.head.spec.kind if model.head else "none") if config.drafter == "auto" else config.drafter
    blocks = 2 * -(-length // config.block_size)
    return replace(config, drafter=drafter, max_model_len=length, kv_blocks=blocks, enable_prefix_caching=False)


def run(options: StepOptions, progress: Progress = no_progress) -> Report:
    """Time passes, drafts and, if asked for, their parts. Raises UsageError for what this model or backend lacks."""
    if options.config.drafter not in ("auto", "none", *registry.available("heads")):
        raise UsageError(f"--drafter {options.config.drafter}: bench step times a head", "use --drafter auto")
    bench = Bench(options)
    progress(0, 1, "reading memory")
    read_bytes = options.read_bytes or readable_bytes(bench.model.backend)
    bandwidth = bench.model.backend.read_bandwidth(read_bytes, READ_RUNS)
    passes = in_turns(bench.rows, bench.seconds, PASSES_BUDGET_S, progress, options.repeats)
    draft = time_draft(bench, options.repeats or DRAFT_REPEATS) if bench.engine.drafting.drafter else None
    data: dict[str, Any] = {
        "model": bench.model.name,
        "machine": machine(bench.model, options.config),
        "weights": {"format": weight_format(bench.model, options.config), "bytes_per_pass": weight_bytes(bench.model)},
        "kv_bytes_per_position": sum(bench.model.backend.kv_bytes(spec) for spec in bench.model.decoder.kv_specs),
        "state_bytes": sum(bench.model.backend.state_bytes(spec) for spec in bench.model.decoder.state_specs),
        "read_bandwidth": {"gb_per_s": bandwidth / 1e9, "buffer_bytes": read_bytes, "runs": READ_RUNS},
        "context": options.context,
    }
    data["passes"] = [pass_row(data, rows, samples) for rows, samples in passes.items()]
    data |= summary(data["passes"], draft)
    data["profile"] = profile(bench, progress) if options.profile else None
    return Report(ok=True, data=data, lines=_lines(data))


def time_draft(bench: Bench, repeats: int) -> dict[str, Any]:
    """Whole drafts by the drafter itself, for a sequence of which it has seen all but the last token; a step is one
    pass of the head over one row, with its sampling where the backend makes whole drafts; its Python is not in it."""
    drafter = bench.engine.drafting.drafter
    assert drafter is not None
    sequence = bench.submit(bench.repeated_text(max(bench.context, 1)), bench.depth)
    while bench.engine.has_work and not sequence.draft.tokens:
        bench.engine.step(lambda deltas: None)
    depth = len(sequence.draft.tokens)
    drafter.propose([Wish(sequence, depth)])
    bench.meter.head.clear()
    wholes = []
    for _ in range(repeats):
        begin = time.perf_counter()
        drafter.propose([Wish(sequence, depth)])
        wholes.append(time.perf_counter() - begin)
    bench.engine.abort(sequence.request.request_id)
    return {"depth": depth, "step": spread(bench.meter.head), "whole": spread(wholes)}


def spread(seconds: Iterable[float]) -> dict[str, Any]:
    """Median, quartiles, minimum and all samples in milliseconds."""
    samples = [each * 1e3 for each in seconds]
    low, middle, high = np.percentile(samples, (25, 50, 75)).tolist()
    return {"median_ms": middle, "q1_ms": low, "q3_ms": high, "min_ms": min(samples), "samples_ms": samples}


def pass_row(data: dict[str, Any], rows: int, seconds: list[float]) -> dict[str, Any]:
    """What one row count costs. KV counts once per pass: rows of one sequence share it; so does recurrent state, which
    is read and written."""
    cost = spread(seconds)
    num_bytes = data["weights"]["bytes_per_pass"] + data["kv_bytes_per_position"] * (data["context"] + rows)
    num_bytes += 2 * data["state_bytes"]
    speed = num_bytes / cost["median_ms"] / 1e6
    return {
        "rows": rows,
        "logit_rows": rows if rows <= MOST_VERIFIED else 1,
        "bytes": num_bytes,
        "gb_per_s": speed,
        "share_of_bandwidth": speed / data["read_bandwidth"]["gb_per_s"],
        "rows_per_s": rows / cost["median_ms"] * 1e3,
        **cost,
    }


def summary(passes: list[dict[str, Any]], draft: dict[str, Any] | None) -> dict[str, Any]:
    """The numbers that speculation lives on; None for what was not measured."""
    cost = {row["rows"]: row["median_ms"] for row in passes}
    longest = passes[-1]
    if draft:
        draft |= {"pass_rows": passes[0]["rows"], "step_share_of_pass": draft["step"]["median_ms"] / cost[min(cost)]}
    return {
        "flatness": cost[4] / cost[1] if {1, 4} <= cost.keys() else None,
        "draft": draft,
        "prefill": {"rows": longest["rows"], "tokens_per_s": longest["rows_per_s"]}
        if longest["rows"] > MOST_VERIFIED
        else None,
    }


def profile(bench: Bench, progress: Progress) -> dict[str, Any]:
    """Parts of passes, and of engine steps of a greedy generation without and with drafting."""
    counts = sorted({*PROFILED_ROWS, bench.rows[-1]})
    fitting = [rows for rows in counts if rows <= bench.rows[-1]]
    depths = [0, bench.depth] if bench.engine.drafting.drafter else [0]
    parts: dict[str, Any] = {"passes": [], "steps": []}
    with profiling(bench.meter):
        for rows in fitting:
            progress(len(parts["passes"]), len(fitting) + len(depths), f"profiling {rows} rows")
            parts["passes"].append({"rows": rows, **profile_pass(bench.meter, partial(bench.seconds, rows))})
        for depth in depths:
            progress(len(fitting), len(fitting) + len(depths), f"profiling steps at depth {depth}")
            steps = profile_steps(bench.meter, bench.engine, bench.submit(bench.text, depth))
            parts["steps"].append({"depth": depth, **steps})
    return parts


def weight_bytes(model: Model) -> int:
    """Bytes of weights that every pass reads: all but an embedding table, of which it needs single rows, and of experts
    as many as one row takes."""
    return held_bytes(model.decoder.layers, model.decoder.norm, model.decoder.lm_head)


def weight_format(model: Model, config: EngineConfig) -> str:
    """Types of the matrices in the file, the largest share first, and what was done to them."""
    sizes: Counter[str] = Counter()
    for name in model.weights.used:
        tensor = model.weights.tensors[name]
        if len(tensor.shape) > 1:
            sizes[tensor.dtype] += prod(tensor.shape)
    kinds = " + ".join(kind for kind, _ in sizes.most_common())
    if config.quantization:
        return f"{kinds}, with --quantization {config.quantization}"
    return f"{kinds}, widened to {config.dtype}" if kind_of(model.backend.name).widens else kinds


def machine(model: Model, config: EngineConfig) -> dict[str, Any]:
    versions = {"headstart": __version__, "python": platform.python_version(), "numpy": np.__version__}
    for package in kind_of(model.backend.name).packages:
        versions[package] = doctor.installed_version(package) or "unknown"
    return {
        "device": model.backend.runs_on,
        "cpu": cpu().model,
        "threads": config.threads or threads().usable,
        "backend": model.backend.name,
        "path": getattr(model.backend, "path", None),
        "versions": versions,
    }


def header(data: dict[str, Any]) -> list[str]:
    """What was measured, and on what."""
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
    lines = [] if data["flatness"] is None else [f"t(4)/t(1) {data['flatness']:.2f}"]
    if draft := data["draft"]:
        rows = f"{draft['pass_rows']} row{'s' if draft['pass_rows'] > 1 else ''}"
        lines.append(
            f"draft     {draft['step']['median_ms']:.2f} ms a step ({draft['step_share_of_pass']:.1%} of a pass over "
            f"{rows}), {draft['whole']['median_ms']:.2f} ms for depth {draft['depth']} with its sampling and Python"
        )
    if prefill := data["prefill"]:
        lines.append(f"prefill   {prefill['tokens_per_s']:.0f} tokens/s in a pass of {prefill['rows']} rows")
    return lines
