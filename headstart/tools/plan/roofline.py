"""Roofline model: seconds of a pass, a draft and an engine step.

Each part of a pass takes the larger of its memory time and compute time. Interconnect and fixed costs are added. All
rows of a pass share one read of the weights; rows of one sequence also share one read of its cache.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from headstart.config import MAX_DEPTH
from headstart.layers.costs import MixerCost
from headstart.tools.plan.drafters import expected_tokens
from headstart.tools.plan.machine import Machine
from headstart.tools.plan.shape import ACTIVATION_BYTES, LayerGroup, SizedModel

LAST_KERNELS = 3  # kernels after the layers: final norm, LM head, sampling
DISPATCH_BYTES = 1  # bytes of an activation sent to its expert (FP8)
DEPTHS = range(9)  # depths among which a plan chooses the best


@dataclass(frozen=True)
class Pass:
    """The rows that one pass of the model computes."""

    sequences: int
    rows: float  # per sequence
    context: float  # mean number of cached positions that a row attends to
    logit_rows: float | None = None  # rows with logits, over all sequences; None: all rows

    @property
    def num_rows(self) -> float:
        return self.sequences * self.rows

    @property
    def num_logits(self) -> float:
        return self.num_rows if self.logit_rows is None else self.logit_rows


@dataclass(frozen=True)
class PartCost:
    name: str  # part of a pass, such as attention, mlp, cache, all-reduce
    bytes: float = 0.0
    operations: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class StepSpeed:
    """Predicted engine step of `batch` sequences, each of which drafts `depth` tokens."""

    batch: int
    depth: int
    tokens_per_step: float  # per sequence
    pass_s: float
    draft_s: float
    step_s: float

    @property
    def per_stream(self) -> float:
        return self.tokens_per_step / self.step_s

    @property
    def total(self) -> float:
        return self.batch * self.per_stream


@dataclass(frozen=True)
class DraftingSetup:
    model: SizedModel
    acceptances: tuple[float, ...]  # conditional, by position
    note: str  # the acceptances and their source

    @property
    def kind(self) -> str:
        return self.model.shape.drafter.kind

    @property
    def max_depth(self) -> int:
        limit = self.model.shape.drafter.max_depth
        return MAX_DEPTH if limit is None else min(limit, MAX_DEPTH)


def pass_costs(model: SizedModel, machine: Machine, work: Pass, *others: Pass) -> list[PartCost]:
    """Returns the costs of one pass of the trunk by part. `others`: further sequences of the same pass, with other
    numbers of rows or contexts."""
    works = (work, *others)
    locals_ = [_per_replica(machine, each) for each in works]
    work, local, shape = _combined(works), _combined(locals_), model.shape
    costs = [cost for group in shape.layers for cost in _layer_costs(model, machine, work, locals_, group)]
    costs.append(_matrix(machine, "mlp", shape.outer, local.num_rows, model.bytes("mlp")))
    lm_head = shape.vocab_size * shape.hidden_size
    costs.append(_matrix(machine, "lm_head", lm_head, local.num_logits, model.bytes("lm_head")))
    num_kernels = LAST_KERNELS + sum(group.count * group.cost.num_kernels for group in shape.layers)
    costs.append(PartCost("fixed", seconds=machine.rates.pass_s + num_kernels * machine.rates.kernel_s))
    costs += _links(model, machine, work, local, shape.layers)
    return _merged(costs)


def pass_seconds(model: SizedModel, machine: Machine, work: Pass, *others: Pass) -> float:
    """Returns the seconds of a pass of the trunk: the sum of `pass_costs`."""
    return sum(cost.seconds for cost in pass_costs(model, machine, work, *others))


def draft_seconds(model: SizedModel, machine: Machine, sequences: int, context: float, depth: int = 1) -> float:
    """Returns the seconds to draft `depth` tokens for each sequence: layers, projection, LM head and cache."""
    drafter = model.shape.drafter
    if not depth or not drafter.can_draft:
        return 0.0
    if (measured := machine.rates.measured_draft) is not None:
        return depth * (measured[0] + measured[1] * sequences)
    if not drafter.vocab_size:
        return machine.rates.draft_s  # an n-gram lookup on the host
    drafting, rows = model.drafter_model(), depth + 1 if drafter.single_pass and drafter.layers else 1
    steps, tokens = (1, depth) if drafter.single_pass else (depth, 1)
    work = Pass(sequences, rows, context)
    local = _per_replica(machine, work)
    costs = [cost for group in drafter.layers for cost in _layer_costs(drafting, machine, work, [local], group)]
    costs.append(_matrix(machine, "projection", drafter.projection, local.num_rows, drafting.bytes("mlp")))
    per_token = (drafter.per_token + drafter.shared_per_token) * tokens
    costs.append(_matrix(machine, "projection", per_token, local.sequences, drafting.bytes("mlp")))
    lm_head = drafter.vocab_size * drafter.hidden_size
    costs.append(_matrix(machine, "lm_head", lm_head, local.sequences * tokens, model.bytes("lm_head")))
    num_kernels = LAST_KERNELS + 2 + sum(group.count * group.cost.num_kernels for group in drafter.layers)
    costs.append(PartCost("fixed", seconds=machine.rates.draft_s + num_kernels * machine.rates.kernel_s))
    costs += _links(drafting, machine, work, local, drafter.layers)
    return steps * sum(cost.seconds for cost in costs)


def step_speed(
    model: SizedModel, machine: Machine, batch: int, context: float, depth: int, acceptances: Sequence[float]
) -> StepSpeed:
    """Predicts a step that verifies depth + 1 rows of each sequence and drafts `depth` tokens."""
    pass_s = pass_seconds(model, machine, Pass(batch, 1 + depth, context))
    draft_s = draft_seconds(model, machine, batch, context, depth)
    step_s = pass_s + draft_s + machine.rates.step_s + machine.rates.step_row_s * batch * (1 + depth)
    tokens = expected_tokens(acceptances, depth)
    return StepSpeed(batch=batch, depth=depth, tokens_per_step=tokens, pass_s=pass_s, draft_s=draft_s, step_s=step_s)


def fastest(speeds: Sequence[StepSpeed]) -> StepSpeed:
    """Returns the fastest step; among equal ones that with the smallest depth."""
    return max(speeds, key=lambda each: (each.per_stream, -each.depth))


def first_token_seconds(model: SizedModel, machine: Machine, prompt: int) -> float:
    """Returns the seconds to prefill one prompt alone in one pass; a row attends to half of the prompt on average."""
    rates = machine.rates
    return pass_seconds(model, machine, Pass(1, prompt, prompt / 2, logit_rows=1)) + rates.step_s + rates.step_row_s


def break_even(price_per_hour: float, api_price: float) -> float:
    """Returns the sustained tokens/s at which a machine costs as much as an API at `api_price` per million tokens."""
    return price_per_hour / 3600 / api_price * 1e6


def _combined(works: Sequence[Pass]) -> Pass:
    """Returns one Pass with the total rows and logits of several; its context is that of the first."""
    if len(works) == 1:
        return works[0]
    sequences = sum(work.sequences for work in works)
    rows = sum(work.num_rows for work in works) / sequences
    return Pass(sequences, rows, works[0].context, sum(work.num_logits for work in works))


def _per_replica(machine: Machine, work: Pass) -> Pass:
    replicas = machine.replicas
    logits = None if work.logit_rows is None else work.logit_rows / replicas
    return replace(work, sequences=math.ceil(work.sequences / replicas), logit_rows=logits)


def _matrix(machine: Machine, name: str, weights: float, rows: float, size: float) -> PartCost:
    num_bytes, operations = weights * size / machine.tp, 2 * weights * rows / machine.tp
    return PartCost(name, num_bytes, operations, machine.rates.seconds(num_bytes, operations))


def _layer_costs(
    model: SizedModel, machine: Machine, work: Pass, locals_: Sequence[Pass], group: LayerGroup
) -> list[PartCost]:
    """Returns the costs of a group of layers. `locals_`: the share of each pass that one replica computes."""
    mixer, feed, count, local = group.cost.mixer, group.cost.feed_forward, group.count, _combined(locals_)
    costs = [
        _matrix(machine, "attention", mixer.weights, local.num_rows, model.bytes("attention")),
        *(_cache(model, machine, each, mixer) for each in locals_),
        _matrix(machine, "mlp", feed.weights, local.num_rows, model.bytes("mlp")),
    ]
    if feed.experts:
        rows = work.num_rows if machine.ep > 1 else local.num_rows
        devices = machine.ep if machine.ep > 1 else machine.tp
        touched = _busiest(feed.touched(rows), machine.ep, feed.experts)
        num_bytes = (touched if machine.ep > 1 else touched / devices) * feed.expert_weights * model.bytes("experts")
        operations = 2 * rows * feed.active * feed.expert_weights / devices
        costs.append(PartCost("experts", num_bytes, operations, machine.rates.seconds(num_bytes, operations)))
    return [PartCost(each.name, count * each.bytes, count * each.operations, count * each.seconds) for each in costs]


def _busiest(touched: float, ep: int, experts: int) -> float:
    """Returns the number of used experts on the device that has most of them; all without expert parallelism."""
    if ep == 1:
        return touched
    mean = touched / ep
    return min(mean + math.sqrt(2 * mean * math.log(ep)), touched, experts / ep)


def _cache(model: SizedModel, machine: Machine, local: Pass, mixer: MixerCost) -> PartCost:
    stored = mixer.read(local.context, local.rows) * model.kv + 2 * mixer.state * 4
    num_bytes = local.sequences * stored / min(machine.tp, mixer.splits)
    operations = 2 * local.num_rows * mixer.multiply_adds(local.context) / machine.tp
    return PartCost("cache", num_bytes, operations, machine.rates.seconds(num_bytes, operations, attention=True))


def _links(
    model: SizedModel, machine: Machine, work: Pass, local: Pass, layers: tuple[LayerGroup, ...]
) -> list[PartCost]:
    """Costs of all-reduces (tensor parallelism) and all-to-alls (expert parallelism)."""
    link, latency, tp, ep = machine.device.link, machine.device.link_s, machine.tp, machine.ep
    costs, hidden = [], model.shape.hidden_size
    if tp > 1 and link:
        num_bytes = 2 * (tp - 1) / tp * local.num_rows * hidden * ACTIVATION_BYTES
        times = 1 + sum(group.count * (1 if group.cost.feed_forward.experts and ep > 1 else 2) for group in layers)
        costs.append(PartCost("all-reduce", times * num_bytes, 0.0, times * (latency + num_bytes / link)))
    if ep > 1 and link:
        for group in (each for each in layers if each.cost.feed_forward.experts):
            sent = work.num_rows / ep * group.cost.feed_forward.active * hidden * (ep - 1) / ep
            num_bytes = sent * (DISPATCH_BYTES + ACTIVATION_BYTES)
            seconds = group.count * (2 * latency + num_bytes / link)
            costs.append(PartCost("all-to-all", group.count * num_bytes, 0.0, seconds))
    return costs


def _merged(costs: list[PartCost]) -> list[PartCost]:
    """Adds up the costs of each part, in the order of first appearance."""
    by_name: dict[str, PartCost] = {}
    for each in costs:
        old = by_name.get(each.name, PartCost(each.name))
        sums = (old.bytes + each.bytes, old.operations + each.operations, old.seconds + each.seconds)
        by_name[each.name] = PartCost(each.name, *sums)
    return list(by_name.values())
