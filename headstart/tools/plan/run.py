"""`headstart plan`: what a model would do on a machine, before anybody rents one; a roofline with stated factors."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any

from headstart.config import MAX_DEPTH, EngineConfig
from headstart.core import Progress, Report, no_progress
from headstart.errors import UsageError
from headstart.tools.plan import acceptance, published
from headstart.tools.plan.document import Prices, document, lines
from headstart.tools.plan.drafters import KINDS, parse_drafters, with_drafter
from headstart.tools.plan.fleet import assumptions, fleet
from headstart.tools.plan.formats import kv_bytes, weight_format
from headstart.tools.plan.here import machine_for
from headstart.tools.plan.load import Load, parse_load
from headstart.tools.plan.machine import HERE, Machine, find_device, make_machine, parse_gpu
from headstart.tools.plan.predict import Drafting
from headstart.tools.plan.prices import api_price, device_price
from headstart.tools.plan.roofline import SizedModel
from headstart.tools.plan.shape import Shape
from headstart.tools.plan.sources import find_shape, is_card, with_head

HERE_CACHE_TYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "int8": "int8", "float32": "float32"}
HERE_WEIGHTS = ("int8", "int4")
CONTEXT = 2048
"""Positions of a sequence where nothing else is asked for, or the model's own context where that is shorter."""
MOST_CONTEXT, MOST_BATCH = 2**24, 2**20


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """What to plan. Prices in dollars: of one device for an hour (or `on-demand`, `spot`), of an API for a million
    tokens (or `list`); words are looked up in `price_list` (None: the built-in one). `drafter`: kinds, comma-separated;
    `head`: one that is a model of its own. `context` None: CONTEXT, or less where the model has less. `fleet`: a load
    (load.py), which also says the context."""

    model: str | None = None
    gpu: str = HERE
    batches: tuple[int, ...] = (1, 4, 8)
    context: int | None = None
    acceptance: str | None = None
    depths: tuple[int, ...] = ()
    drafter: str | None = None
    head: str | None = None
    weights: str | None = None
    kv_dtype: str | None = None
    tp: int | None = None
    ep: int | None = None
    price_per_hour: str | float | None = None
    api_price: str | float | None = None
    price_list: str | None = None
    recalibrate: bool = False
    fleet: str | None = None

    def __post_init__(self) -> None:
        if not self.batches or not 1 <= min(self.batches) <= max(self.batches) <= MOST_BATCH:
            raise UsageError(f"--batch goes from 1 to {MOST_BATCH:,}", "for example --batch 1,4,8")
        if any(not 0 <= depth <= MAX_DEPTH for depth in self.depths):
            raise UsageError(f"--depth goes from 0 to {MAX_DEPTH}", "for example --depth 1,3")
        if self.context is not None and not 1 <= self.context <= MOST_CONTEXT:
            raise UsageError(f"--context is {self.context}, but goes from 1 to {MOST_CONTEXT:,}")
        if self.api_price is not None and self.price_per_hour is None:
            hint = "add --price-per-hour DOLLARS, for one device"
            raise UsageError("--api-price is given, but not what the machine costs", hint)
        if self.acceptance not in (None, "default"):
            acceptance.parse(str(self.acceptance), self.depths)
        self.prices("")  # numbers that are none are refused before anything is loaded
        parse_drafters(self.drafter)
        if self.load and self.context is not None:
            raise UsageError("--fleet says how long sequences are", "leave --context out")

    @cached_property
    def load(self) -> Load | None:
        return parse_load(self.fleet) if self.fleet is not None else None

    def prices(self, device: str) -> Prices:
        """Of a device of the catalogue; an empty name leaves words unread. Raises UsageError."""
        hour, api = self.price_per_hour, self.api_price
        asked = hour is not None and (device or hour not in ("on-demand", "spot"))
        return Prices(
            hour=device_price(str(hour), device, self.price_list) if asked else None,
            api=api_price(str(api), self.price_list) if api is not None else None,
        )


def run(options: PlanOptions, progress: Progress = no_progress) -> Report:
    """Predict; `ok` is false when the weights do not fit. Raises UsageError or ModelError."""
    name, count = parse_gpu(options.gpu)
    prices = options.prices(name if name == HERE else find_device(name).name)
    trunk = find_shape(options.model, None if name == HERE else options.weights)
    context = _context(options, trunk)
    shapes = _shapes(options, trunk, here=name == HERE)
    made = [_set_up(options, name, count, shape, progress) for shape in shapes]
    drafting = [Drafting(model, *_acceptances(options, model.shape)) for model, _ in made]
    machine, load = made[0][1], options.load
    data = document(drafting, machine, context, options.batches, options.depths, prices)
    if load and data["memory"]["fits"]:
        hour = None if prices.hour is None else prices.hour.dollars * machine.count
        data["fleet"] = fleet(load, drafting, machine, hour, progress)
        data["assumptions"] += assumptions()
    return Report(ok=data["memory"]["fits"], data=data, lines=lines(data, prices))


def _context(options: PlanOptions, shape: Shape) -> int:
    """As asked for, within the model's; what nobody asked for fits. Raises UsageError."""
    longest, load = shape.max_length or MOST_CONTEXT, options.load
    if load and (needed := ceil(1.5 * (load.prompt + load.output))) > longest:
        raise UsageError(f"--fleet has sequences of up to {needed:,} tokens, but the model's context is {longest:,}")
    if options.context is not None and options.context > longest:
        raise UsageError(f"--context is {options.context}, but the model's context is {longest}")
    return options.context or (round(load.prompt + load.output) if load else min(CONTEXT, longest))


def _shapes(options: PlanOptions, trunk: Shape, *, here: bool) -> list[Shape]:
    """The model with each drafter. Raises UsageError or ModelError."""
    kinds = parse_drafters(options.drafter)
    if here and (options.head or any(kind not in (None, "none", trunk.head.kind) for kind in kinds)):
        hint = "leave --drafter and --head out, name a machine, or measure it: headstart bench"
        raise UsageError("--gpu here measures the drafter that the model has, no other", hint)
    if options.head is None:
        return [with_drafter(trunk, kind) for kind in kinds]
    wanted = [kind for kind in kinds if kind not in (None, "none")]
    shape = with_head(trunk, options.head, wanted[0] if wanted else None)
    if wanted and shape.head.kind not in wanted:
        what = f"--head {options.head} is {KINDS[shape.head.kind].title}"
        raise UsageError(f"{what}, but --drafter says {', '.join(map(str, wanted))}", "leave --drafter out")
    return [shape, *(with_drafter(trunk, kind) for kind in wanted if kind != shape.head.kind)]


def _acceptances(options: PlanOptions, shape: Shape) -> tuple[tuple[float, ...], str]:
    if options.acceptance not in (None, "default"):
        return acceptance.parse(str(options.acceptance), options.depths)
    kind = KINDS[shape.head.kind]
    values = shape.acceptance or kind.acceptances
    shown = ", ".join(f"{value:.2g}" for value in values)
    source = shape.acceptance_source or kind.source
    return values, f"{kind.title}: acceptances {shown} by position, the last goes on: {source}"


def _set_up(
    options: PlanOptions, name: str, count: int, shape: Shape, progress: Progress
) -> tuple[SizedModel, Machine]:
    if name != HERE:
        if options.recalibrate:
            raise UsageError("--recalibrate measures this machine", "use it with --gpu here")
        weights = weight_format(shape.weights)
        machine = make_machine(name, count, weights.compute, tp=options.tp, ep=options.ep)
        return SizedModel(shape=shape, format=weights, kv=kv_bytes(options.kv_dtype or "bf16")), machine
    if is_card(options.model) and not (options.model and Path(options.model).exists()):
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
