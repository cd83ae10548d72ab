"""The device `here`: this machine, measured once for each model and kept in the user cache."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.config import EngineConfig
from headstart.core import Progress
from headstart.engine.load import load_model
from headstart.machine import cpu, threads
from headstart.tools.plan import calibrate
from headstart.tools.plan.formats import weight_format
from headstart.tools.plan.machine import HERE, Device, Machine, Rates
from headstart.tools.plan.measure import (
    BATCHES,
    ENGINE_DEPTH,
    PASSES_BUDGET_S,
    PROMPT_ROWS,
    WORKS,
    Passes,
    cache_bytes,
)  # fmt: skip
from headstart.tools.plan.roofline import Pass, SizedModel
from headstart.tools.plan.shape import Shape
from headstart.tools.prefilled import READ_RUNS, held_bytes, readable_bytes
from headstart.tools.quiet import watched

VERSION = 3
"""Raise with every change of what is measured."""


def machine_for(
    model: str | None, shape: Shape, config: EngineConfig, *, measure_again: bool, progress: Progress
) -> tuple[SizedModel, Machine]:
    """The model as it runs here and this machine's rates with it; measured now unless the cache knows them."""
    path = cache_path(model, config)
    measured = None if measure_again else read(path)
    if measured is None:
        loaded = load_model(model, config)
        longest = loaded.config.max_length - PROMPT_ROWS
        works = [replace(work, context=min(work.context, longest)) for work in WORKS]
        passes = Passes(loaded, config, works, progress)
        with watched(config.threads or threads().usable) as quiet:
            measured = measure(passes, passes.time(works, PASSES_BUDGET_S, progress), progress)
        if quiet.disturbed:
            note = f"{quiet.said}; the machine does better than this, which was not kept: ask again when it is idle"
            return calibrated(shape.noted(note), measured)
        with suppress(OSError):  # a folder that cannot be written only means measuring again
            hub.keep_record(path, measured)
    return calibrated(shape, measured)


def measure(passes: Passes, timed: Mapping[Pass, float], progress: Progress) -> dict[str, Any]:
    """Everything a calibration needs, as a JSON document: seconds, bytes as the backend holds them. `timed`: seconds of
    its passes."""
    loaded = passes.model
    progress(0, 1, "reading memory")
    bandwidth = loaded.backend.read_bandwidth(readable_bytes(loaded.backend), READ_RUNS)
    passes.release()
    depth = min(ENGINE_DEPTH, passes.engine.drafting.max_depth)
    plain = [(batch, passes.engine_seconds(batch, 0)["host"]) for batch in BATCHES]
    drafts = [(batch, passes.engine_seconds(batch, depth)["draft"] / depth) for batch in BATCHES] if depth else []
    return {
        "version": VERSION,
        "cpu": cpu().model,
        "threads": passes.config.threads or threads().usable,
        "backend": loaded.backend.name,
        "read_bandwidth": bandwidth,
        "memory": loaded.backend.free_memory(),
        "passes": [{**asdict(work), "seconds": seconds} for work, seconds in timed.items()],
        "engine": plain,
        "draft_step": drafts,
        "layer_bytes": held_bytes(loaded.decoder.layers),
        "lm_head_bytes": held_bytes(loaded.decoder.lm_head),
        "cache_bytes": cache_bytes(loaded),  # of one position
    }


def calibrated(shape: Shape, measured: dict[str, Any]) -> tuple[SizedModel, Machine]:
    """The model with the bytes it takes here, and a machine whose rates were fitted to what was measured."""
    counts = shape.parameters()
    layers = measured["layer_bytes"] / (counts["attention"] + counts["mlp"] + counts["experts"])
    sizes = shape.bytes_per_weight | {"attention": layers, "mlp": layers, "experts": layers}
    sizes["lm_head"] = measured["lm_head_bytes"] / counts["lm_head"]
    width = sum(group.count * group.attention.width for group in shape.layers)
    kv = measured["cache_bytes"] / max(width, 1)
    model = SizedModel(shape=replace(shape, bytes_per_weight=sizes), format=weight_format(shape.weights), kv=kv)
    bandwidth = float(measured["read_bandwidth"])
    device = Device(name=HERE, memory=measured["memory"], bandwidth=bandwidth, tflops={}, kind="cpu", source="measured")
    blank = Machine(device=device, rates=Rates(bandwidth=bandwidth, compute=1, attention=1))
    points = [calibrate.Point(_pass(each), each["seconds"]) for each in measured["passes"]]
    rates = calibrate.fit(points, model, blank, bandwidth)
    step_s, step_row_s = calibrate.line(*measured["engine"])
    draft = calibrate.line(*measured["draft_step"]) if measured["draft_step"] else None
    rates = replace(rates, step_s=step_s, step_row_s=step_row_s, measured_draft=draft)
    return model, replace(blank, rates=rates, assumptions=(said(measured, rates),))


def _pass(of: dict[str, Any]) -> Pass:
    return Pass(of["sequences"], of["rows"], of["context"], of["logit_rows"])


def said(measured: dict[str, Any], rates: Rates) -> str:
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
    """plan/ in the user cache, by model files, weights, cache type, threads, processor and version."""
    trunk = hub.resolve_alias(model).trunk
    files = sorted(trunk.glob("*.safetensors")) if trunk.is_dir() else [trunk]
    facts = {
        "format": VERSION,
        "files": hub.stamps(files),
        "settings": (config.backend, config.quantization, config.kv_cache_dtype, config.threads or threads().usable),
        "cpu": cpu().model,
    }
    return hub.record_path("plan", facts)


def read(path: Path) -> dict[str, Any] | None:
    """None for a file that is missing, damaged or of another version."""
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) and document.get("version") == VERSION else None
