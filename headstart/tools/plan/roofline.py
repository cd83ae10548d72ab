"""The time of one pass: for each part the larger of memory and compute, then interconnect and fixed costs.

Rows of a pass share the weights that are read; rows of one sequence share its cache too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headstart.formats.quantization import WeightBytes
from headstart.tools.plan.formats import part_bytes
from headstart.tools.plan.machine import Machine
from headstart.tools.plan.shape import Attention, Layers, Part, Shape

ACTIVATION_BYTES = 2
LAST_KERNELS = 3
"""Final norm, LM head, sampling."""
DISPATCH_BYTES = 1
"""An activation on its way to its expert travels in FP8."""


@dataclass(frozen=True)
class Pass:
    """What a pass computes: `rows` of each of `sequences`, each after `context` cached positions."""

    sequences: int
    rows: float
    context: float
    logit_rows: float | None = None  # of all sequences together; None: all rows

    @property
    def num_rows(self) -> float:
        return self.sequences * self.rows

    @property
    def num_logits(self) -> float:
        return self.num_rows if self.logit_rows is None else self.logit_rows


@dataclass(frozen=True)
class Cost:
    """One part of a pass: bytes read and operations on one device, and the seconds that they take."""

    name: str
    bytes: float = 0.0
    operations: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SizedModel:
    """A shape in a weight format, with a cache of `kv` bytes an element."""

    shape: Shape
    format: WeightBytes
    kv: float

    def bytes(self, part: Part) -> float:
        return part_bytes(self.shape, self.format, part)

    def drafting(self) -> SizedModel:
        """The drafter as a model: some formats leave a head as it was."""
        shape = replace(self.shape, hidden=self.shape.head.hidden)
        size = self.shape.bytes_per_weight.get("head", self.format.head)
        if size is not None:
            measured: dict[Part, float] = {"attention": size, "mlp": size, "experts": size}
            shape = replace(shape, bytes_per_weight=shape.bytes_per_weight | measured)
        return replace(self, shape=shape)

    def weight_bytes(self) -> dict[Part, float]:
        """Bytes of all weights by part; `head` without an LM head that it shares."""
        sizes: dict[Part, float] = {part: count * self.bytes(part) for part, count in self.shape.parameters().items()}
        head, drafting = self.shape.head, self.drafting()
        stored = sum(_bytes_of(drafting, group) for group in head.layers) + head.projection * drafting.bytes("mlp")
        more = (head.most or 0) * head.per_token * drafting.bytes("mlp") + head.own * self.bytes("lm_head")
        sizes["head"] = head.modules * stored + more
        return sizes


def _bytes_of(model: SizedModel, group: Layers) -> float:
    attention, mlp = group.attention, group.mlp
    return group.count * (
        attention.weights * model.bytes("attention")
        + mlp.weights * model.bytes("mlp")
        + mlp.experts * mlp.expert_weights * model.bytes("experts")
    )


def pass_costs(model: SizedModel, machine: Machine, work: Pass, *others: Pass) -> list[Cost]:
    """A pass of the trunk, part by part. Sequences of different replicas run at the same time. `others` run in the same
    pass with numbers of rows and contexts of their own: all rows share the weights, and each sequence has its cache."""
    each = (work, *others)
    apart = [_local(machine, one) for one in each]
    work, local = _together(each), _together(apart)
    costs = [cost for group in model.shape.layers for cost in _layer_costs(model, machine, work, apart, group)]
    lm_head = model.shape.vocab * model.shape.hidden
    costs.append(_matrix(machine, "lm_head", lm_head, local.num_logits, model.bytes("lm_head")))
    kernels = LAST_KERNELS + sum(g.count * (g.attention.kernels + g.mlp.kernels) for g in model.shape.layers)
    costs.append(Cost("fixed", seconds=machine.rates.pass_s + kernels * machine.rates.kernel_s))
    costs += _links(model, machine, work, local, model.shape.layers)
    return merged(costs)


def pass_seconds(model: SizedModel, machine: Machine, work: Pass, *others: Pass) -> float:
    return sum(cost.seconds for cost in pass_costs(model, machine, work, *others))


def _together(works: Sequence[Pass]) -> Pass:
    """Their rows as those of one pass."""
    if len(works) == 1:
        return works[0]
    sequences = sum(work.sequences for work in works)
    rows = sum(work.num_rows for work in works) / sequences
    return Pass(sequences, rows, works[0].context, sum(work.num_logits for work in works))


def draft_seconds(model: SizedModel, machine: Machine, sequences: int, context: float, depth: int = 1) -> float:
    """A draft of so many tokens for every sequence: the drafter's layers, projection, LM head and cache."""
    head = model.shape.head
    if not depth or not head.drafts:
        return 0.0
    if (measured := machine.rates.measured_draft) is not None:
        return depth * (measured[0] + measured[1] * sequences)
    if not head.vocab:
        return machine.rates.draft_s  # a look-up beside the device
    drafting, rows = model.drafting(), depth + 1 if head.once and head.layers else 1
    steps, tokens = (1, depth) if head.once else (depth, 1)
    work = Pass(sequences, rows, context)
    local = _local(machine, work)
    costs = [cost for group in head.layers for cost in _layer_costs(drafting, machine, work, [local], group)]
    costs.append(_matrix(machine, "projection", head.projection, local.num_rows, drafting.bytes("mlp")))
    each = (head.per_token + head.again) * tokens
    costs.append(_matrix(machine, "projection", each, local.sequences, drafting.bytes("mlp")))
    lm_head = head.vocab * head.hidden
    costs.append(_matrix(machine, "lm_head", lm_head, local.sequences * tokens, model.bytes("lm_head")))
    kernels = LAST_KERNELS + 2 + sum(g.count * (g.attention.kernels + g.mlp.kernels) for g in head.layers)
    costs.append(Cost("fixed", seconds=machine.rates.draft_s + kernels * machine.rates.kernel_s))
    costs += _links(drafting, machine, work, local, head.layers)
    return steps * sum(cost.seconds for cost in costs)


def _local(machine: Machine, work: Pass) -> Pass:
    """The share of one replica."""
    replicas = machine.replicas
    logits = None if work.logit_rows is None else work.logit_rows / replicas
    return replace(work, sequences=math.ceil(work.sequences / replicas), logit_rows=logits)


def _matrix(machine: Machine, name: str, weights: float, rows: float, size: float) -> Cost:
    num_bytes, operations = weights * size / machine.tp, 2 * weights * rows / machine.tp
    return Cost(name, num_bytes, operations, machine.rates.seconds(num_bytes, operations))


def _layer_costs(model: SizedModel, machine: Machine, work: Pass, apart: Sequence[Pass], group: Layers) -> list[Cost]:
    """`apart`: the share of one replica, by what has a context of its own."""
    attention, mlp, count, local = group.attention, group.mlp, group.count, _together(apart)
    costs = [
        _matrix(machine, "attention", attention.weights, local.num_rows, model.bytes("attention")),
        *(_cache(model, machine, each, attention) for each in apart),
        _matrix(machine, "mlp", mlp.weights, local.num_rows, model.bytes("mlp")),
    ]
    if mlp.experts:
        rows = work.num_rows if machine.ep > 1 else local.num_rows
        devices = machine.ep if machine.ep > 1 else machine.tp
        touched = _busiest(mlp.touched(rows), machine.ep, mlp.experts)
        num_bytes = (touched if machine.ep > 1 else touched / devices) * mlp.expert_weights * model.bytes("experts")
        operations = 2 * rows * mlp.active * mlp.expert_weights / devices
        costs.append(Cost("experts", num_bytes, operations, machine.rates.seconds(num_bytes, operations)))
    return [Cost(each.name, count * each.bytes, count * each.operations, count * each.seconds) for each in costs]


def _busiest(touched: float, ep: int, experts: int) -> float:
    """Experts touched on the device that has most of them; without expert parallelism all of them."""
    if ep == 1:
        return touched
    mean = touched / ep
    return min(mean + math.sqrt(2 * mean * math.log(ep)), touched, experts / ep)


def _cache(model: SizedModel, machine: Machine, local: Pass, attention: Attention) -> Cost:
    split = min(machine.tp, attention.splits)
    stored = attention.read(local.context, local.rows) * model.kv + 2 * attention.state * 4
    num_bytes = local.sequences * stored / split
    operations = 2 * local.num_rows * attention.multiply_adds(local.context) / machine.tp
    return Cost("cache", num_bytes, operations, machine.rates.seconds(num_bytes, operations, attention=True))


def _links(model: SizedModel, machine: Machine, work: Pass, local: Pass, layers: tuple[Layers, ...]) -> list[Cost]:
    """All-reduces of tensor parallelism, all-to-alls of expert parallelism."""
    link, latency, tp, ep = machine.device.link, machine.device.link_s, machine.tp, machine.ep
    costs = []
    if tp > 1 and link:
        num_bytes = 2 * (tp - 1) / tp * local.num_rows * model.shape.hidden * ACTIVATION_BYTES
        times = 1 + sum(group.count * (1 if group.mlp.experts and ep > 1 else 2) for group in layers)
        costs.append(Cost("all-reduce", times * num_bytes, 0.0, times * (latency + num_bytes / link)))
    if ep > 1 and link:
        for group in (each for each in layers if each.mlp.experts):
            sent = work.num_rows / ep * group.mlp.active * model.shape.hidden * (ep - 1) / ep
            num_bytes = sent * (DISPATCH_BYTES + ACTIVATION_BYTES)
            seconds = group.count * (2 * latency + num_bytes / link)
            costs.append(Cost("all-to-all", group.count * num_bytes, 0.0, seconds))
    return costs


def merged(costs: list[Cost]) -> list[Cost]:
    """Costs of the same name added up, in the order of their first."""
    by_name: dict[str, Cost] = {}
    for cost in costs:
        old = by_name.get(cost.name, Cost(cost.name))
        by_name[cost.name] = Cost(
            cost.name, old.bytes + cost.bytes, old.operations + cost.operations, old.seconds + cost.seconds
        )
    return list(by_name.values())
