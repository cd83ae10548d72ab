"""`headstart plan`: what a model would do on a machine, before anybody rents one; a roofline with stated factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from headstart.config import MAX_DEPTH, EngineConfig
from headstart.core import Progress, Report, no_progress
from headstart.errors import UsageError
from headstart.tools.plan import acceptance, published
from headstart.tools.plan.formats import kv_bytes, weight_format
from headstart.tools.plan.here import machine_for
from headstart.tools.plan.machine import HERE, Machine, make_machine, parse_gpu
from headstart.tools.plan.memory import USABLE, Memory, devices_needed, memory, split_of
from headstart.tools.plan.predict import (
    DEPTHS,
    Speed,
    best,
    break_even,
    dollars_per_million,
    first_token,
    speed,
)
from headstart.tools.plan.roofline import Pass, SizedModel, pass_costs
from headstart.tools.plan.shape import Shape
from headstart.tools.plan.sources import card_names, find_shape

HERE_CACHE_TYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "int8": "int8", "float32": "float32"}
HERE_WEIGHTS = ("int8", "int4")


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan. Prices in dollars: of one device for an hour, of an API for a million tokens."""

    model: str | None = None
    gpu: str = HERE
    batches: tuple[int, ...] = (1, 4, 8)
    context: int = 2048
    acceptance: str | None = None
    depths: tuple[int, ...] = ()
    weights: str | None = None
    kv_dtype: str | None = None
    tp: int | None = None
    ep: int | None = None
    price_per_hour: float | None = None
    api_price: float | None = None
    recalibrate: bool = False

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1:
            raise UsageError("--batch needs numbers of at least 1", "for example --batch 1,4,8")
        if any(not 0 <= depth <= MAX_DEPTH for depth in self.depths):
            raise UsageError(f"--depth goes from 0 to {MAX_DEPTH}", "for example --depth 1,3")
        if self.context < 1:
            raise UsageError(f"--context is {self.context}, but must be at least 1")
        for flag, price in (("--price-per-hour", self.price_per_hour), ("--api-price", self.api_price)):
            if price is not None and price <= 0:
                raise UsageError(f"{flag} is {price:g}, but a price is above 0")
        if self.api_price is not None and self.price_per_hour is None:
            hint = "add --price-per-hour DOLLARS, for one device"
            raise UsageError("--api-price is given, but not what the machine costs", hint)


def run(options: PlanOptions, progress: Progress = no_progress) -> Report:
    """Predict; `ok` is false when the weights do not fit. Raises UsageError or ModelError."""
    here = options.gpu.strip().lower() == HERE  # --weights is rounded at load and measured; elsewhere it is the format
    shape = find_shape(options.model, None if here else options.weights)
    if shape.max_length and options.context > shape.max_length:
        raise UsageError(f"--context is {options.context}, but the model's context is {shape.max_length}")
    acceptances, said = _acceptances(options, shape)
    model, machine = _set_up(options, shape, progress)
    room = memory(model, split_of(machine), options.context, users=max(options.batches))
    rows = [_row(options, model, machine, batch, acceptances) for batch in options.batches]
    for row in rows:
        row["fits"] = row["batch"] <= room.max_batch
    data: dict[str, Any] = {
        "model": _model_document(model),
        "machine": {
            "name": machine.name,
            "count": machine.count,
            "tp": machine.tp,
            "ep": machine.ep,
            "rates": asdict(machine.rates),
        },
        "context": options.context,
        "acceptances": list(acceptances),
        "memory": _memory_document(model, machine, room),
        "ttft_s": first_token(model, machine, options.context),
        "batches": rows,
        "break_even": _break_even(options, machine, rows),
        "assumptions": _assumptions(model, machine, said),
    }
    return Report(ok=room.fits, data=data, lines=_lines(options, data))


def _acceptances(options: PlanOptions, shape: Shape) -> tuple[tuple[float, ...], str]:
    if options.acceptance not in (None, "default"):
        return acceptance.parse(str(options.acceptance), options.depths)
    if shape.acceptance:
        shown = ", ".join(f"{value:.2f}" for value in shape.acceptance)
        return shape.acceptance, f"acceptances {shown} by position: {shape.acceptance_source}; the last goes on"
    shown = ", ".join(f"{value:g}" for value in acceptance.DEFAULT)
    return acceptance.DEFAULT, f"acceptances {shown} by position: a guess, as no source is known; give --acceptance"


def _set_up(options: PlanOptions, shape: Shape, progress: Progress) -> tuple[SizedModel, Machine]:
    name, count = parse_gpu(options.gpu)
    if name != HERE:
        if options.recalibrate:
            raise UsageError("--recalibrate measures this machine", "use it with --gpu here")
        weights = weight_format(shape.weights)
        machine = make_machine(name, count, weights.compute, tp=options.tp, ep=options.ep)
        return SizedModel(shape=shape, format=weights, kv=kv_bytes(options.kv_dtype or "bf16")), machine
    if shape.name in card_names():
        hint = "name a machine, for example --gpu h200x4"
        raise UsageError(f"{options.model} is a card without weights, so it cannot be measured here", hint)
    if count > 1 or options.tp not in (None, 1) or options.ep not in (None, 1):
        raise UsageError("--gpu here is this one machine", "leave the count, --tp and --ep out")
    config = EngineConfig(quantization=_here_weights(options.weights), kv_cache_dtype=_here_cache(options.kv_dtype))
    shape = replace(shape, weights=options.weights or shape.weights)
    return machine_for(options.model, shape, config, measure_again=options.recalibrate, progress=progress)


def _here_weights(name: str | None) -> Any:
    if name is not None and name not in HERE_WEIGHTS:
        raise UsageError(f"--weights {name}: here weights stay as they are or are rounded", "use int8 or int4")
    return name


def _here_cache(name: str | None) -> Any:
    if name is not None and name not in HERE_CACHE_TYPES:
        raise UsageError(f"--kv-dtype {name} is not one of this engine's", f"use {', '.join(HERE_CACHE_TYPES)}")
    return HERE_CACHE_TYPES[name] if name else None


def _row(
    options: PlanOptions, model: SizedModel, machine: Machine, batch: int, acceptances: Sequence[float]
) -> dict[str, Any]:
    """One batch: plain decoding, the depths asked for or the best one of DEPTHS, and where a plain pass spends time."""

    def at(depth: int) -> Speed:
        return speed(model, machine, batch, options.context, depth, acceptances)

    plain, tried = at(0), [at(depth) for depth in options.depths or DEPTHS]
    chosen = tried if options.depths else [best(tried)]
    price = None if options.price_per_hour is None else options.price_per_hour * machine.count
    costs = pass_costs(model, machine, Pass(batch, 1, options.context))
    return {
        "batch": batch,
        "plain": _speed_document(plain, plain, price),
        "with_mtp": [_speed_document(each, plain, price) for each in chosen],
        "best_depth": best(tried).depth,
        "plain_pass_ms": {cost.name: cost.seconds * 1e3 for cost in costs if cost.seconds},
    }


def _speed_document(predicted: Speed, plain: Speed, price: float | None) -> dict[str, Any]:
    return {
        "depth": predicted.depth,
        "step_ms": predicted.step_s * 1e3,
        "pass_ms": predicted.pass_s * 1e3,
        "draft_ms": predicted.draft_s * 1e3,
        "tokens_per_step": predicted.tokens_per_step,
        "tokens_per_s_per_stream": predicted.per_stream,
        "tokens_per_s": predicted.total,
        "speedup": predicted.total / plain.total,
        "dollars_per_million": None if price is None else dollars_per_million(price, predicted.total),
    }


def _model_document(model: SizedModel) -> dict[str, Any]:
    sizes = model.weight_bytes()
    return {
        "name": model.shape.name,
        "weights": model.shape.weights,
        "parameters": sum(count for part, count in model.shape.parameters().items() if part != "head"),
        "bytes": dict(sizes),
        "cache_bytes_per_element": model.kv,
        "head_assumed": model.shape.head.assumed,
    }


def _memory_document(model: SizedModel, machine: Machine, room: Memory) -> dict[str, Any]:
    return {
        "device_bytes": room.device,
        "usable_bytes": room.usable,
        "weight_bytes_per_device": room.weights,
        "activation_bytes_per_device": room.activations,
        "cache_bytes_per_sequence": room.per_sequence,
        "fits": room.fits,
        "verdict": room.verdict,
        "why": room.why,
        "longest": room.longest,
        "max_batch": room.max_batch,
        "devices_needed": devices_needed(model, machine.device.memory),
    }


def _break_even(options: PlanOptions, machine: Machine, rows: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """For every batch the share of the time that a machine must work to cost what the API asks."""
    if options.api_price is None or options.price_per_hour is None:
        return None
    needed = break_even(options.price_per_hour * machine.count, options.api_price)
    fastest = [max(each["tokens_per_s"] for each in (row["plain"], *row["with_mtp"])) for row in rows]
    return [
        {"batch": row["batch"], "tokens_per_s": needed, "utilisation": needed / rate}
        for row, rate in zip(rows, fastest, strict=True)
    ]


def _assumptions(model: SizedModel, machine: Machine, acceptances: str) -> list[str]:
    experts = any(group.mlp.experts for group in model.shape.layers)
    return [
        *model.shape.notes,
        f"weights {model.shape.weights}: {sum(model.weight_bytes().values()) / 1e9:.2f} GB with the head, cache "
        f"{model.kv:g} bytes an element",
        *machine.assumptions,
        acceptances,
        *(["rows choose experts independently and evenly"] if experts else []),
        *(["figures of the catalogue are from memory of the documents named"] if machine.name != HERE else []),
        "a step is one pass over depth + 1 rows of every sequence, depth passes of the head, and the engine's own "
        "time; prompts in between are not counted",
        f"{USABLE:.0%} of the memory is for weights, activations of the largest pass, and caches",
    ]


def _lines(options: PlanOptions, data: dict[str, Any]) -> list[str]:
    lines = []
    for each in data["break_even"] or ():
        used = each["utilisation"]
        needs = f"{used:.0%} of the time" if used <= 1 else f"never: {used:.1f} times what it does"
        lines.append(f"batch {each['batch']}: as cheap as the API at {each['tokens_per_s']:,.0f} tok/s, {needs}")
    if options.price_per_hour is None:
        lines.append("cost: give --price-per-hour (dollars, one device), and --api-price to compare with an API")
    lines += ["assumptions:", *(f"  - {text}" for text in data["assumptions"])]
    return lines


def compare_published() -> Report:
    """Beside every published figure what the model predicts."""
    points = published.documents()
    rows = [each for point in points for each in published.compare(point)]
    unknown = [{key: point[key] for key in ("who", "published", "unknown")} for point in points if "unknown" in point]
    assumed = {point["who"]: point["assumed"] for point in points if "assumed" in point}
    close = sum(row["verdict"].startswith(published.WITHIN) for row in rows)
    lines = [
        f"{close} of {len(rows)} figures within {published.CLOSE:.0%}; the same factors for every point, by "
        "class of device only",
        "close is no proof: set-ups are mostly assumed, several figures of a point are not independent",
        "acceptance lengths that others publish are inputs here: the cards carry them with their sources",
        "not predicted:",
        *(f"  - {each['who']} ({each['published']}): {each['unknown']}" for each in unknown),
    ]
    return Report(ok=True, data={"figures": rows, "assumed": assumed, "not_predicted": unknown}, lines=lines)
