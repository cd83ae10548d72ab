"""A plan as a JSON document, and its lines for people."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headstart.tools.plan.drafters import said
from headstart.tools.plan.machine import HERE, Machine
from headstart.tools.plan.memory import USABLE, Memory, devices_needed, memory, split_of
from headstart.tools.plan.predict import (
    DEPTHS,
    Drafting,
    Speed,
    best,
    break_even,
    dollars_per_million,
    first_token,
    speed,
)
from headstart.tools.plan.prices import Price
from headstart.tools.plan.roofline import Pass, SizedModel, pass_costs


@dataclass(frozen=True)
class Prices:
    """Of one device for an hour, of an API for a million tokens."""

    hour: Price | None = None
    api: Price | None = None


def document(
    drafting: Sequence[Drafting],
    machine: Machine,
    context: int,
    batches: Sequence[int],
    depths: Sequence[int],
    prices: Prices,
) -> dict[str, Any]:
    """The first of `drafting` is what memory and cost of the model are told with."""
    model = drafting[0].model
    room = memory(model, split_of(machine), context, users=max(batches))
    rows = [_row(drafting, machine, context, batch, depths, prices) for batch in batches]
    for row in rows:
        row["fits"] = row["batch"] <= room.max_batch
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
        "memory": _memory(model, machine, room),
        "ttft_s": first_token(model, machine, context),
        "batches": rows,
        "break_even": _break_even(prices, machine, rows),
        "assumptions": _assumptions(drafting, machine, prices),
    }


def _row(
    drafting: Sequence[Drafting],
    machine: Machine,
    context: int,
    batch: int,
    depths: Sequence[int],
    prices: Prices,
) -> dict[str, Any]:
    """One batch: plain decoding; of every drafter the depths asked for, or its best one; where a plain pass spends its
    time."""

    def at(each: Drafting, depth: int) -> Speed:
        return speed(each.model, machine, batch, context, depth, each.acceptances)

    plain, shown, tried = at(drafting[0], 0), [], []
    price = None if prices.hour is None else prices.hour.dollars * machine.count
    for each in drafting:
        head = each.model.shape.head
        deep = range(each.deepest + 1) if head.once else DEPTHS  # a block's last tokens cost little
        possible = [depth for depth in depths or deep if depth <= each.deepest]
        speeds = [(each, at(each, depth)) for depth in possible or [each.deepest]]
        tried += speeds
        shown += speeds if depths else [(each, best([found for _, found in speeds]))]
    fastest = max(tried, key=lambda pair: (pair[1].per_stream, -pair[1].depth))
    costs = pass_costs(drafting[0].model, machine, Pass(batch, 1, context))
    return {
        "batch": batch,
        "plain": _speed(plain, plain, price),
        "drafting": [{"drafter": each.kind, **_speed(found, plain, price)} for each, found in shown],
        "best_depth": fastest[1].depth,
        "best_drafter": fastest[0].kind if fastest[1].depth else "none",
        "plain_pass_ms": {cost.name: cost.seconds * 1e3 for cost in costs if cost.seconds},
    }


def _speed(predicted: Speed, plain: Speed, price: float | None) -> dict[str, Any]:
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


def _model(model: SizedModel) -> dict[str, Any]:
    shape = model.shape
    return {
        "name": shape.name,
        "weights": shape.weights,
        "parameters": sum(count for part, count in shape.parameters().items() if part != "head"),
        "active_parameters": shape.active(),
        "experts": max(group.mlp.experts for group in shape.layers),
        "bytes": dict(model.weight_bytes()),
        "cache_bytes_per_element": model.kv,
        "head_assumed": shape.head.assumed,
    }


def _drafter(each: Drafting, machine: Machine, context: int) -> dict[str, Any]:
    head = each.model.shape.head
    return {
        "kind": each.kind,
        "parameters": head.parameters,
        "bytes": each.model.weight_bytes()["head"],
        "deepest": head.most,
        "assumed": head.assumed,
        "acceptances": list(each.acceptances),
        "max_batch": memory(each.model, split_of(machine), context).max_batch,
    }


def _memory(model: SizedModel, machine: Machine, room: Memory) -> dict[str, Any]:
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


def _break_even(prices: Prices, machine: Machine, rows: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """For every batch the share of the time that a machine must work to cost what the API asks."""
    if prices.api is None or prices.hour is None:
        return None
    needed = break_even(prices.hour.dollars * machine.count, prices.api.dollars)
    fastest = [max(each["tokens_per_s"] for each in (row["plain"], *row["drafting"])) for row in rows]
    return [
        {"batch": row["batch"], "tokens_per_s": needed, "utilisation": needed / rate}
        for row, rate in zip(rows, fastest, strict=True)
    ]


def _assumptions(drafting: Sequence[Drafting], machine: Machine, prices: Prices) -> list[str]:
    model = drafting[0].model
    experts = any(group.mlp.experts for group in model.shape.layers)
    with_it = " with the drafter" if model.weight_bytes()["head"] else ""
    mixed = ["acceptances of several drafters come from other models and texts: measure yours"]
    costs = [price.said for price in (prices.hour, prices.api) if price and price.said]
    return [
        *model.shape.notes,
        *(said(each.model.shape.head) for each in drafting),
        f"weights {model.shape.weights}: {sum(model.weight_bytes().values()) / 1e9:.2f} GB{with_it}, cache "
        f"{model.kv:g} bytes an element",
        *machine.assumptions,
        *(each.said for each in drafting if each.kind != "none"),
        *(mixed if len(drafting) > 1 else []),
        *(["rows choose experts independently and evenly"] if experts else []),
        *(["figures of the catalogue are from memory of the documents named"] if machine.name != HERE else []),
        "a step is one pass over depth + 1 rows of every sequence, the drafter's own passes, and the engine's own "
        "time; prompts in between are not counted",
        f"{USABLE:.0%} of the memory is for weights, activations of the largest pass, and caches",
        *costs,
    ]


def lines(data: dict[str, Any], prices: Prices) -> list[str]:
    told = [f"memory: {data['memory']['why']}"] if data["memory"]["why"] else []
    for each in data["break_even"] or ():
        used = each["utilisation"]
        needs = f"{used:.0%} of the time" if used <= 1 else f"never: {used:.1f} times what it does"
        told.append(f"batch {each['batch']}: as cheap as the API at {each['tokens_per_s']:,.0f} tok/s, {needs}")
    if prices.hour is None:
        told.append("cost: give --price-per-hour (dollars for one device, on-demand or spot), and --api-price")
    return [*told, "assumptions:", *(f"  - {text}" for text in data["assumptions"])]
