"""`headstart plan`: speed, memory and cost of a model on a machine, predicted by a roofline with stated factors."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from math import ceil
from pathlib import Path
from typing import Any, cast, get_args

from headstart.config import KV_SPELLINGS, EngineConfig, KVDtype
from headstart.core import Progress, Report, no_progress
from headstart.errors import UsageError
from headstart.tools.bench.summary import cost_per_million
from headstart.tools.options import MAX_TOKENS, PlanFlags
from headstart.tools.plan import drafters, roofline
from headstart.tools.plan.fleet import ASSUMPTIONS, FleetLoad, parse_load, plan_fleet
from headstart.tools.plan.machine import (
    HERE,
    ON_DEMAND,
    SPOT,
    Machine,
    Price,
    api_price,
    device_price,
    find_device,
    make_machine,
    parse_gpu,
)
from headstart.tools.plan.measure import measured_machine
from headstart.tools.plan.shape import (
    USABLE,
    MemoryEstimate,
    ModelShape,
    SizedModel,
    devices_needed,
    estimate_memory,
    kv_bytes,
    split_of,
)
from headstart.tools.plan.sources import CARD_OF, find_shape, with_head

HERE_WEIGHTS = ("int8", "int4")
CONTEXT = 2048  # default context in positions; at most the model's


@dataclass(frozen=True)
class Prices:
    hour: Price | None = None  # of one device for an hour
    api: Price | None = None  # of an API for a million output tokens

    def dollars_per_hour(self, devices: int) -> float | None:
        """Dollars for this number of devices; None: not known."""
        return None if self.hour is None else self.hour.dollars * devices


@dataclass(frozen=True, kw_only=True)
class PlanOptions(PlanFlags):
    def __post_init__(self) -> None:
        if self.api_price is not None and self.price_per_hour is None:
            hint = "add --price-per-hour DOLLARS, for one device"
            raise UsageError("--api-price is given, but not what the machine costs", hint)
        if self.acceptance not in (None, "default"):
            drafters.parse_acceptances(str(self.acceptance), self.depths)
        self.prices("")  # refuses bad numbers before anything is loaded
        drafters.parse_drafters(self.drafter)
        if self.load and self.context is not None:
            raise UsageError("--context cannot go with --fleet, which sets the lengths", "leave --context out")

    @cached_property
    def load(self) -> FleetLoad | None:
        return parse_load(self.fleet) if self.fleet is not None else None

    def prices(self, device: str) -> Prices:
        """Returns the prices. With an empty `device`, on-demand and spot are not looked up. Raises UsageError for a
        price that is not a number or not in the list."""
        hour, api = self.price_per_hour, self.api_price
        has_hour = hour is not None and (device or hour not in (ON_DEMAND, SPOT))
        dollars = device_price(str(hour), device, self.price_list) if has_hour else None
        return Prices(hour=dollars, api=api_price(str(api), self.price_list) if api is not None else None)


def run(options: PlanOptions, progress: Progress = no_progress) -> Report:
    """Predicts speed, memory and cost. `ok` is false if the weights do not fit. Raises UsageError or ModelError."""
    name, count = parse_gpu(options.gpu)
    if name != HERE and options.recalibrate:
        raise UsageError("--recalibrate measures this machine", "use it with --gpu here")
    prices = options.prices(name if name == HERE else find_device(name).name)
    trunk = find_shape(options.model, None if name == HERE else options.weights)
    context = _context(options, trunk)
    shapes = _shapes(options, trunk, here=name == HERE)
    if name == HERE:
        (shape,) = shapes
        model, machine = _measured(options, count, shape, progress)
        models = [model]
    else:
        models = [SizedModel(shape=shape, kv=kv_bytes(options.kv_dtype or "bf16")) for shape in shapes]
        machine = make_machine(name, count, models[0].format.compute, tp=options.tp, ep=options.ep)
    drafting = [roofline.DraftingSetup(model, *_acceptances(options, model.shape)) for model in models]
    load = options.load
    data = _document(options, drafting, machine, context, prices)
    if load and data["memory"]["fits"]:
        data["fleet"] = plan_fleet(load, drafting, machine, prices.dollars_per_hour(machine.count), progress)
        data["assumptions"] += ASSUMPTIONS
    return Report(ok=data["memory"]["fits"], data=data, lines=_lines(data, prices))


def _context(options: PlanOptions, shape: ModelShape) -> int:
    """Returns the context of --context or --fleet, else the default. Raises UsageError for one above the model's."""
    longest, load = shape.max_length or MAX_TOKENS, options.load
    if load and (needed := ceil(1.5 * (load.prompt + load.output))) > longest:
        raise UsageError(f"--fleet has sequences of up to {needed:,} tokens, but the model's context is {longest:,}")
    if options.context is not None and options.context > longest:
        raise UsageError(f"--context is {options.context}, but the model's context is {longest}")
    return options.context or (round(load.prompt + load.output) if load else min(CONTEXT, longest))


def _shapes(options: PlanOptions, trunk: ModelShape, *, here: bool) -> list[ModelShape]:
    kinds = drafters.parse_drafters(options.drafter)
    if here and (options.head or any(kind not in (None, "none", trunk.drafter.kind) for kind in kinds)):
        hint = "leave --drafter and --head out, name a machine, or measure it: headstart bench"
        raise UsageError("--gpu here measures the drafter that the model has, no other", hint)
    if options.head is None:
        return [drafters.with_drafter(trunk, kind) for kind in kinds]
    wanted = [kind for kind in kinds if kind not in (None, "none")]
    shape = with_head(trunk, options.head, wanted[0] if wanted else None)
    if wanted and shape.drafter.kind not in wanted:
        what = f"--head {options.head} is {drafters.DRAFTER_TYPES[shape.drafter.kind].title}"
        raise UsageError(f"{what}, but --drafter says {', '.join(map(str, wanted))}", "leave --drafter out")
    return [shape, *(drafters.with_drafter(trunk, kind) for kind in wanted if kind != shape.drafter.kind)]


def _acceptances(options: PlanOptions, shape: ModelShape) -> tuple[tuple[float, ...], str]:
    if options.acceptance not in (None, "default"):
        return drafters.parse_acceptances(str(options.acceptance), options.depths)
    kind = drafters.DRAFTER_TYPES[shape.drafter.kind]
    values = shape.acceptance or kind.acceptances
    shown = ", ".join(f"{value:.2g}" for value in values)
    source = shape.acceptance_source or kind.source
    return values, f"{kind.title}: acceptances {shown} by position, the last for later positions too: {source}"


def _measured(options: PlanOptions, count: int, shape: ModelShape, progress: Progress) -> tuple[SizedModel, Machine]:
    """Measures the model on this machine. Raises UsageError for options that only a named machine has."""
    if options.model in CARD_OF and not (options.model and Path(options.model).exists()):
        hint = "name a machine, for example --gpu h200x4"
        raise UsageError(f"{options.model} is a card without weights, so it cannot be measured here", hint)
    if count > 1 or options.tp not in (None, 1) or options.ep not in (None, 1):
        raise UsageError("--gpu here is this one machine", "leave the count, --tp and --ep out")
    if options.weights not in (None, *HERE_WEIGHTS):
        what = f"--weights {options.weights}: here weights stay as they are or are rounded"
        raise UsageError(what, "use int8 or int4")
    if options.kv_dtype not in (known := (None, *KV_SPELLINGS, *get_args(KVDtype))):
        use = ", ".join(filter(None, known))
        raise UsageError(f"--kv-dtype {options.kv_dtype} is not one of this engine's", f"use {use}")
    quantization, kv_dtype = cast("Any", options.weights), cast("Any", options.kv_dtype)
    config = EngineConfig(quantization=quantization, kv_cache_dtype=kv_dtype)
    shape = replace(shape, weight_format=options.weights or shape.weight_format)
    return measured_machine(options.model, shape, config, measure_again=options.recalibrate, progress=progress)


def _document(
    options: PlanOptions, drafting: Sequence[roofline.DraftingSetup], machine: Machine, context: int, prices: Prices
) -> dict[str, Any]:
    model = drafting[0].model
    memory = estimate_memory(model, split_of(machine), context, users=max(options.batches))
    price = prices.dollars_per_hour(machine.count)
    rows = [_row(drafting, machine, context, batch, options.depths, price) for batch in options.batches]
    for row in rows:
        row["fits"] = row["batch"] <= memory.max_batch
    return {
        "model": _model(model),
        "machine": {
            "name": machine.name,
            "count": machine.count,
            "tp": machine.tp,
            "ep": machine.ep,
            "rates": asdict(machine.rates),
        },
        "context": context,
        "drafters": [_drafter(each, machine, context) for each in drafting],
        "memory": _memory(model, machine, memory),
        "ttft_s": roofline.first_token_seconds(model, machine, context),
        "batches": rows,
        "break_even": _break_even(prices, machine, rows),
        "assumptions": _assumptions(drafting, machine, prices),
    }


def _row(
    drafting: Sequence[roofline.DraftingSetup], machine: Machine, context: int, batch: int, depths: Sequence[int],
    price: float | None,
) -> dict[str, Any]:  # fmt: skip
    """Returns the JSON row of one batch size: plain decoding, each drafter at the requested depths or its best one, and
    milliseconds of a plain pass by part."""

    def speed_at(each: roofline.DraftingSetup, depth: int) -> roofline.StepSpeed:
        return roofline.step_speed(each.model, machine, batch, context, depth, each.acceptances)

    plain, shown, candidates = speed_at(drafting[0], 0), [], []
    for each in drafting:
        drafter = each.model.shape.drafter
        # a block drafter drafts all its tokens in one pass, so large depths are worth trying
        default = range(each.max_depth + 1) if drafter.single_pass else roofline.DEPTHS
        possible = [depth for depth in depths or default if depth <= each.max_depth]
        speeds = [(each, speed_at(each, depth)) for depth in possible or [each.max_depth]]
        candidates += speeds
        shown += speeds if depths else [(each, roofline.fastest([found for _, found in speeds]))]
    best_setup, best = max(candidates, key=lambda pair: (pair[1].per_stream, -pair[1].depth))
    costs = roofline.pass_costs(drafting[0].model, machine, roofline.Pass(batch, 1, context))
    return {
        "batch": batch,
        "plain": _speed(plain, plain, price),
        "drafting": [{"drafter": each.kind, **_speed(found, plain, price)} for each, found in shown],
        "best_depth": best.depth,
        "best_drafter": best_setup.kind if best.depth else "none",
        "plain_pass_ms": {cost.name: cost.seconds * 1e3 for cost in costs if cost.seconds},
    }


def _speed(predicted: roofline.StepSpeed, plain: roofline.StepSpeed, price: float | None) -> dict[str, Any]:
    return {
        "depth": predicted.depth, "step_ms": predicted.step_s * 1e3, "pass_ms": predicted.pass_s * 1e3,
        "draft_ms": predicted.draft_s * 1e3, "tokens_per_step": predicted.tokens_per_step,
        "tokens_per_s_per_stream": predicted.per_stream, "tokens_per_s": predicted.total,
        "speedup": predicted.total / plain.total,
        "dollars_per_million": cost_per_million(price, predicted.total),
    }  # fmt: skip


def _model(model: SizedModel) -> dict[str, Any]:
    shape = model.shape
    return {
        "name": shape.name, "weights": shape.weight_format,
        "parameters": sum(count for part, count in shape.parameters().items() if part != "head"),
        "active_parameters": shape.active_parameters(),
        "experts": max(group.cost.feed_forward.experts for group in shape.layers), "bytes": dict(model.weight_bytes()),
        "cache_bytes_per_element": model.kv, "head_assumed": shape.drafter.assumed,
    }  # fmt: skip


def _drafter(each: roofline.DraftingSetup, machine: Machine, context: int) -> dict[str, Any]:
    drafter = each.model.shape.drafter
    return {
        "kind": each.kind, "parameters": drafter.parameters, "bytes": each.model.weight_bytes()["head"],
        "max_depth": drafter.max_depth, "assumed": drafter.assumed, "acceptances": list(each.acceptances),
        "max_batch": estimate_memory(each.model, split_of(machine), context).max_batch,
    }  # fmt: skip


def _memory(model: SizedModel, machine: Machine, memory: MemoryEstimate) -> dict[str, Any]:
    return {
        "device_bytes": memory.device, "usable_bytes": memory.usable, "weight_bytes_per_device": memory.weights,
        "activation_bytes_per_device": memory.activations, "cache_bytes_per_sequence": memory.per_sequence,
        "fits": memory.fits, "verdict": memory.verdict, "why": memory.reason, "max_context": memory.max_context,
        "max_batch": memory.max_batch, "devices_needed": devices_needed(model, machine.device.memory),
    }  # fmt: skip


def _break_even(prices: Prices, machine: Machine, rows: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Returns for each batch size the utilisation at which the machine costs as much as the API."""
    if prices.api is None or prices.hour is None:
        return None
    needed = roofline.break_even(prices.hour.dollars * machine.count, prices.api.dollars)
    found = []
    for row in rows:
        highest = max(each["tokens_per_s"] for each in (row["plain"], *row["drafting"]))
        found.append({"batch": row["batch"], "tokens_per_s": needed, "utilisation": needed / highest})
    return found


def _assumptions(drafting: Sequence[roofline.DraftingSetup], machine: Machine, prices: Prices) -> list[str]:
    model = drafting[0].model
    experts = any(group.cost.feed_forward.experts for group in model.shape.layers)
    with_it = " with the drafter" if model.weight_bytes()["head"] else ""
    mixed = ["acceptance rates of several drafters were measured on other models and texts: measure your own"]
    costs = [price.source for price in (prices.hour, prices.api) if price and price.source]
    return [
        *model.shape.notes,
        *(drafters.describe_drafter(each.model.shape.drafter) for each in drafting),
        f"weights {model.shape.weight_format}: {sum(model.weight_bytes().values()) / 1e9:.2f} GB{with_it}, cache "
        f"{model.kv:g} bytes an element",
        *machine.assumptions,
        *(each.note for each in drafting if each.kind != "none"),
        *(mixed if len(drafting) > 1 else []),
        *(["each row chooses its experts independently, all experts equally often"] if experts else []),
        *(["the catalogue's figures were written from memory of the named documents"] if machine.name != HERE else []),
        "a step is one pass over depth + 1 rows of every sequence, the drafter's passes, and the engine's host time; "
        "prefill of other requests is not counted",
        f"{USABLE:.0%} of the memory is for weights, activations of the largest pass, and caches",
        *costs,
    ]


def _lines(data: dict[str, Any], prices: Prices) -> list[str]:
    found = [f"memory: {data['memory']['why']}"] if data["memory"]["why"] else []
    for each in data["break_even"] or ():
        used = each["utilisation"]
        needs = f"{used:.0%} of the time" if used <= 1 else f"never: {used:.1f} times what it does"
        found.append(f"batch {each['batch']}: as cheap as the API at {each['tokens_per_s']:,.0f} tok/s, {needs}")
    if prices.hour is None:
        found.append("cost: give --price-per-hour (dollars for one device, on-demand or spot), and --api-price")
    return [*found, "assumptions:", *(f"  - {text}" for text in data["assumptions"])]
