"""The machine `here`: its rates are fitted to measured passes of the model, and kept in the user cache."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headstart import hub
from headstart.config import EngineConfig
from headstart.core import Float64, Progress, SamplingParams, Span
from headstart.engine.load import Model as LoadedModel, load_model
from headstart.errors import UsageError
from headstart.machine import cpu, thread_count
from headstart.noise import check_noise
from headstart.tools import pass_timing
from headstart.tools.plan.machine import HERE, DeviceSpec, Machine, Rates
from headstart.tools.plan.roofline import Pass, pass_seconds
from headstart.tools.plan.shape import ModelShape, Part, SizedModel

VERSION = 3  # version of cached measurements; raise it when their content changes
BATCHES = (1, 8)
CONTEXTS = (128, 1024)
PROMPT_ROWS = 128
CALIBRATION_PASSES = (
    *(Pass(batch, 1, context) for context in CONTEXTS for batch in BATCHES),
    *(Pass(1, max(BATCHES), context) for context in CONTEXTS),
    *(Pass(1, PROMPT_ROWS, context, logit_rows=1) for context in CONTEXTS),
)
"""1 and 8 sequences, 8 rows of one sequence, and a chunk of a prompt, at two contexts. The chunk is needed because many
rows fill tiles and share the keys that are read, so their cost does not follow from passes of few rows."""
PASSES_BUDGET_S = 6.0
ENGINE_STEPS, ENGINE_PROMPT = 24, 64
ENGINE_DEPTH = 3
MEMORY_SHARE = 0.5  # largest share of the free memory for the caches of a measurement
TRUSTED = 0.03  # assumed relative error of a measured pass
SPREADS = {
    "bandwidth": 0.3, "cache_bandwidth": 0.5, "compute": 2.0, "attention": 2.0, "overlap": 0.3, "pass_s": 0.3,
}  # fmt: skip
"""Prior of each rate: the deviation from its start value, in log, that counts as much as one error of TRUSTED."""
START_OVERLAP = 4.0
START_PASS_S = 1e-4
FIT_STEPS = 60


def measured_machine(
    model: str | None, shape: ModelShape, config: EngineConfig, *, measure_again: bool, progress: Progress
) -> tuple[SizedModel, Machine]:
    """Returns the model with its bytes on this machine, and the machine with rates fitted for this model. Measures them
    unless the user cache has them. Raises UsageError if the measurement does not fit context or memory."""
    path = cache_path(model, config)
    measured = None if measure_again else read_cached(path)
    if measured is None:
        loaded = load_model(model, config)
        longest = loaded.config.max_length - PROMPT_ROWS
        passes = [replace(work, context=min(work.context, longest)) for work in CALIBRATION_PASSES]
        timer = PassTimer(loaded, config, passes, progress)
        with check_noise(thread_count(config.threads)) as noise:
            measured = measure(timer, timer.time(passes, PASSES_BUDGET_S, progress), progress)
        if noise.is_disturbed:
            note = f"{noise.reason}; these rates are too low and were not kept: measure again on an idle machine"
            return calibrate(shape.with_notes(note), measured)
        hub.try_save_record(path, measured)
    return calibrate(shape, measured)


def measure(timer: "PassTimer", seconds: Mapping[Pass, float], progress: Progress) -> dict[str, Any]:
    """Returns the JSON input of `calibrate`: `seconds` of passes, seconds of engine steps, bytes in memory."""
    loaded = timer.model
    progress(0, 1, "reading memory")
    bandwidth = loaded.backend.read_bandwidth(pass_timing.readable_bytes(loaded.backend), pass_timing.READ_RUNS)
    timer.release()
    depth = min(ENGINE_DEPTH, timer.engine.drafting.max_depth)
    plain = [(batch, timer.engine_seconds(batch, 0)["host"]) for batch in BATCHES]
    drafts = [(batch, timer.engine_seconds(batch, depth)["draft"] / depth) for batch in BATCHES] if depth else []
    return {
        "version": VERSION,
        "cpu": cpu().model,
        "threads": thread_count(timer.config.threads),
        "backend": loaded.backend.name,
        "read_bandwidth": bandwidth,
        "memory": loaded.backend.free_memory(),
        "passes": [{**asdict(work), "seconds": time_s} for work, time_s in seconds.items()],
        "engine": plain,
        "draft_step": drafts,
        "layer_bytes": pass_timing.held_bytes(loaded.decoder.layers),
        "lm_head_bytes": pass_timing.held_bytes(loaded.decoder.lm_head),
        "cache_bytes": pass_timing.kv_bytes(loaded),  # of one position
    }


def calibrate(shape: ModelShape, measured: dict[str, Any]) -> tuple[SizedModel, Machine]:
    """Returns the model with its bytes on this machine, and the machine with rates fitted to the measurements."""
    counts = shape.parameters()
    layers = measured["layer_bytes"] / (counts["attention"] + counts["mlp"] + counts["experts"])
    sizes: dict[Part, float] = {**shape.bytes_per_weight, "attention": layers, "mlp": layers, "experts": layers}
    sizes["lm_head"] = measured["lm_head_bytes"] / counts["lm_head"]
    kv = measured["cache_bytes"] / max(sum(group.count * group.cost.mixer.pool_width for group in shape.layers), 1)
    model = SizedModel(shape=replace(shape, bytes_per_weight=sizes), kv=kv)
    bandwidth = float(measured["read_bandwidth"])
    memory = measured["memory"]
    device = DeviceSpec(name=HERE, memory=memory, bandwidth=bandwidth, tflops={}, kind="cpu", source="measured")
    blank = Machine(device=device, rates=Rates(bandwidth=bandwidth, compute=1, attention=1))
    fields = ("sequences", "rows", "context", "logit_rows")
    points = [(Pass(*(each[key] for key in fields)), each["seconds"]) for each in measured["passes"]]
    rates = fit_rates(points, model, blank, bandwidth)
    step_s, step_row_s = fit_line(*measured["engine"])
    draft = fit_line(*measured["draft_step"]) if measured["draft_step"] else None
    rates = replace(rates, step_s=step_s, step_row_s=step_row_s, measured_draft=draft)
    return model, replace(blank, rates=rates, assumptions=(_describe(measured, rates),))


def _describe(measured: dict[str, Any], rates: Rates) -> str:
    draft, contexts = rates.measured_draft, sorted({each["context"] for each in measured["passes"]})
    rows = sorted({int(each["rows"]) for each in measured["passes"]})
    return (
        f"here: {measured['cpu']}, {measured['threads']} threads, backend {measured['backend']}; fitted to passes of "
        f"{', '.join(map(str, rows))} rows at contexts {' and '.join(map(str, contexts))}: "
        f"{rates.bandwidth / 1e9:.1f} of {measured['read_bandwidth'] / 1e9:.1f} GB/s for weights and "
        f"{(rates.cache_bandwidth or rates.bandwidth) / 1e9:.1f} for caches, "
        f"{rates.compute / 1e9:.0f} Gop/s in matrices, {rates.attention / 1e9:.0f} in attention, overlap exponent "
        f"{rates.overlap or 0:.1f}, {rates.pass_s * 1e3:.2f} ms for each pass; engine {rates.step_s * 1e3:.2f} ms a "
        f"step and {rates.step_row_s * 1e6:.0f} us a row"
        + (f", a draft step {draft[0] * 1e3:.2f} ms and {draft[1] * 1e6:.0f} us a sequence" if draft else "")
    )


def cache_path(model: str | None, config: EngineConfig) -> Path:
    """Returns the cache file for measurements of these model files, options, threads, processor and VERSION."""
    trunk = hub.resolve(model)
    files = hub.file_stamps(sorted(trunk.glob("*.safetensors")) if trunk.is_dir() else [trunk])
    settings = (config.backend, config.rounding, config.kv_cache_dtype, thread_count(config.threads))
    return hub.record_path("plan", {"format": VERSION, "files": files, "settings": settings, "cpu": cpu().model})


def read_cached(path: Path) -> dict[str, Any] | None:
    """Returns cached measurements; None for a file that is missing, damaged or of another version."""
    with suppress(OSError, ValueError):
        document = json.loads(path.read_text("utf-8"))
        return document if isinstance(document, dict) and document.get("version") == VERSION else None
    return None


class PassTimer(pass_timing.PrefilledEngine):
    """Times single passes over prefilled sequences of a loaded model."""

    def __init__(self, loaded: LoadedModel, config: EngineConfig, passes: Sequence[Pass], progress: Progress) -> None:
        self.config = config
        longest = max(int(work.context + work.rows) for work in passes)
        num_sequences = max(work.sequences for work in passes)
        length, batch = max(longest, 4 * ENGINE_PROMPT), max(num_sequences, *BATCHES)
        if length > loaded.config.max_length:
            raise UsageError(f"{length} positions are more than the model's context of {loaded.config.max_length}")
        blocks = batch * -(-length // config.block_size)
        _check_memory(loaded, blocks * config.block_size)
        engine_config = replace(
            config, drafter="auto" if loaded.head else "none",
            depth=min(ENGINE_DEPTH, loaded.head.spec.depth_limit) if loaded.head else ENGINE_DEPTH,
            max_model_len=length, max_num_seqs=max(config.max_num_seqs, batch), kv_blocks=blocks,
            enable_prefix_caching=False,
        )  # fmt: skip
        super().__init__(loaded, engine_config)
        for index in range(num_sequences):
            progress(index, num_sequences, "filling caches")
            self.fill(max(int(work.context) for work in passes if work.sequences > index), longest)

    def seconds(self, work: Pass) -> float:
        """Returns the seconds of one pass in the backend. The mean context of a prompt chunk is `work.context`, so the
        chunk starts half of its rows before that."""
        rows = int(work.rows)
        logits = int(work.num_logits) // work.sequences
        start = int(work.context) - (rows // 2 if logits < rows else 0)
        return self.pass_seconds([Span(each, start, rows, logits) for each in self.sequences[: work.sequences]])

    def time(self, passes: Sequence[Pass], budget_s: float, progress: Progress) -> dict[Pass, float]:
        times = pass_timing.time_in_turns(passes, self.seconds, budget_s, progress)
        return {work: median(each) for work, each in times.items()}

    def engine_seconds(self, batch: int, depth: int) -> dict[str, float]:
        """Returns the median seconds of an engine step of `batch` greedy sequences, by part: host, draft, ..."""
        params = SamplingParams(max_tokens=ENGINE_STEPS * (1 + depth) + 8, ignore_eos=True)
        requests = [self.llm.request(self.repeated_text(ENGINE_PROMPT), params, depth=depth) for _ in range(batch)]
        sequences = [sequence for request in requests for sequence in self.engine.submit(request)]
        while any(not sequence.num_output for sequence in sequences):
            self.engine.step(lambda deltas: None)
        totals = [dict(self.engine.seconds)]
        for _ in range(ENGINE_STEPS):
            self.engine.step(lambda deltas: None)
            totals.append(dict(self.engine.seconds))
        for request in requests:
            self.engine.abort(request.request_id)
        return {name: median(after[name] - before[name] for before, after in pairwise(totals)) for name in totals[0]}


def _check_memory(loaded: LoadedModel, positions: int) -> None:
    free = loaded.backend.free_memory()
    needed = positions * (loaded.config.hidden_size * 4 + pass_timing.kv_bytes(loaded))
    if needed > MEMORY_SHARE * free:
        what = f"the caches of this measurement need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        raise UsageError(what, "measure fewer sequences or shorter contexts")


def fit_rates(
    points: Sequence[tuple[Pass, float]], model: SizedModel, machine: Machine, read_bandwidth: float
) -> Rates:
    """Fits the roofline's rates to measured (pass, seconds) by weighted least squares on logarithms.

    Passes of 1 and 8 rows determine bandwidth and compute, passes at a second context the rate of attention. Rates that
    the points do not determine stay at their start values: `read_bandwidth`, START_PASS_S, START_OVERLAP. Raises
    ValueError for fewer than two points.
    """
    if len(points) < 2:
        raise ValueError("a fit needs at least two measured passes")
    names = list(SPREADS)
    start = np.log([read_bandwidth, read_bandwidth, *_start_rates(points, model), START_OVERLAP, START_PASS_S])
    spreads = np.array([SPREADS[name] for name in names])

    def residuals(logs: Float64) -> Float64:
        candidate = replace(machine, rates=_rates(machine.rates, names, logs))
        errors = [np.log(pass_seconds(model, candidate, work) / time_s) / TRUSTED for work, time_s in points]
        return np.array([*errors, *((logs - start) / spreads)])

    return _rates(machine.rates, names, _least_squares(residuals, start))


def _rates(rates: Rates, names: Sequence[str], logs: Float64) -> Rates:
    return replace(rates, **dict(zip(names, np.exp(logs).tolist(), strict=True)))


def _start_rates(points: Sequence[tuple[Pass, float]], model: SizedModel) -> tuple[float, float]:
    """Returns start values in operations/s for (matrices, attention), as if the pass with most rows only multiplied."""
    largest, time_s = max(points, key=lambda point: point[0].num_rows)
    shape = model.shape
    weights = shape.outer + sum(group.count * group.cost.active_weights for group in shape.layers)
    lm_head = shape.vocab_size * shape.hidden_size
    compute = 2 * (weights * largest.num_rows + lm_head * largest.num_logits) / time_s
    return compute, compute / 4


def _least_squares(residuals: Callable[[Float64], Float64], start: Float64) -> Float64:
    """Minimizes the sum of squared residuals: Levenberg-Marquardt with a numerical Jacobian."""
    logs, damping = start.copy(), 1e-2
    current = residuals(logs)
    for _ in range(FIT_STEPS):
        jacobian = np.stack([(residuals(logs + step) - current) / 1e-4 for step in np.eye(len(logs)) * 1e-4], axis=1)
        normal, gradient = jacobian.T @ jacobian, jacobian.T @ current
        candidate = logs - np.linalg.solve(normal + damping * np.diag(np.diag(normal)), gradient)
        if not np.isfinite(candidate).all() or np.abs(candidate - start).max() > 20:
            damping *= 10
            continue
        proposed = residuals(candidate)
        if proposed @ proposed < current @ current:
            logs, current, damping = candidate, proposed, max(damping / 3, 1e-9)
        else:
            damping = min(damping * 4, 1e9)
    return logs


def fit_line(one: tuple[int, float], other: tuple[int, float]) -> tuple[float, float]:
    """Returns (a, b) of seconds = a + b * n through two points (n, seconds); both are at least 0."""
    (n, first), (m, second) = one, other
    slope = max(0.0, (second - first) / (m - n))
    return max(0.0, first - slope * n), slope
