"""What a model takes of its devices' memory: the one arithmetic behind `plan` and `launch`.

    model = sized_model("org/model", config, kv="fp8")        # sources.py: by config.json, or with its tensors' headers
    room = memory(model, Split(device=24e9, tp=1), context=65536, users=4)
    room.verdict   # "fits", "close" (say `room.why`, go on) or "too small" (refuse)
    room.longest   # positions that one sequence can have

A device's memory is what its driver reports; the driver's own context lies within what USABLE leaves.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import Literal

from headstart.tools.plan.machine import Machine
from headstart.tools.plan.roofline import ACTIVATION_BYTES, SizedModel
from headstart.tools.plan.shape import Layers, Shape

Verdict = Literal["fits", "close", "too small"]

USABLE = 0.9
"""Share of a device that engines take by default for weights, activations and caches."""
LIMIT = 0.97
"""Share that they can be told to take; what is above that cannot run."""
LARGE_DEVICE = 70e9
ROWS = (2048, 8192)
"""Rows of the largest pass that engines prepare for: on small devices, and from LARGE_DEVICE on."""
LOGIT_ROWS = 256
LOGIT_BYTES = 8
"""Float32 logits, and a copy of them while they are sampled."""
LEAST_CONTEXT = 1024
"""Positions without which nobody can use a model."""
MOST_CONTEXT = 2**40


@dataclass(frozen=True, kw_only=True)
class Split:
    """`device`: bytes of one device. Attention, dense matrices and caches are divided by `tp`, experts by `ep` (1: by
    tp as well); `replicas` are groups of tp devices, each with sequences of its own."""

    device: float
    tp: int = 1
    ep: int = 1
    replicas: int = 1


def split_of(machine: Machine) -> Split:
    return Split(device=machine.device.memory, tp=machine.tp, ep=machine.ep, replicas=machine.replicas)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device: what it has, its share of the weights (drafter included), of the largest pass's activations
    and of one sequence's caches at the context asked for. `longest`: positions that one sequence alone can have within
    USABLE; None where sizes are not known or nothing grows."""

    device: float
    weights: float
    activations: float
    per_sequence: float
    least_sequence: float
    users: int
    replicas: int
    longest: int | None

    @property
    def usable(self) -> float:
        return USABLE * self.device

    @property
    def free(self) -> float:
        """For caches; negative where the weights are too large."""
        return self.usable - self.weights - self.activations

    @property
    def fits(self) -> bool:
        """Do the weights, at least?"""
        return self.free >= 0

    @property
    def max_batch(self) -> int:
        """Sequences at that context on all devices together."""
        return self.replicas * floor(self.free / max(self.per_sequence, 1.0)) if self.fits else 0

    @property
    def verdict(self) -> Verdict:
        """`fits`: everything asked for, within USABLE. `too small`: not even one short sequence within LIMIT. `close`:
        in between; engines may start, with fewer sequences, a shorter context or a larger share."""
        if self.fits and self.max_batch >= self.users:
            return "fits"
        least = self.weights + self.activations + self.least_sequence
        return "close" if least <= LIMIT * self.device else "too small"

    @property
    def why(self) -> str:
        """What a close verdict lacks, in words; empty where everything fits."""
        weights, have = self.weights / 1e9, self.device / 1e9
        if self.verdict == "too small":
            return f"the weights take {weights:.1f} GB of each device, which has {have:.0f} GB"
        if not self.fits:
            return (
                f"weights and activations take {1 - self.free / self.usable:.0%} of what engines use of {have:.0f} GB"
            )
        if self.verdict == "fits":
            return ""
        need, free = self.users * self.per_sequence / self.replicas / 1e9, self.free / 1e9
        return (
            f"caches of {self.users} sequences would take {need:.1f} GB of each device and {free:.1f} GB are left: "
            f"room for {self.max_batch} at full length"
            + (f", or for one of {self.longest:,} positions" if self.longest is not None else "")
        )


def memory(
    model: SizedModel, split: Split, context: float, *, users: int = 1, weight_bytes: float | None = None
) -> Memory:
    """What `users` sequences of `context` positions take together with the model. `weight_bytes`: of all weights, where
    the files tell; else the sum of their parts by the model's format."""
    sizes = model.weight_bytes()
    scale = 1.0 if weight_bytes is None else weight_bytes / sum(sizes.values())
    experts = sizes.pop("experts") / (split.ep if split.ep > 1 else split.tp)
    weights = scale * (experts + sum(sizes.values()) / split.tp)
    activated = activations(model.shape, split)
    free = USABLE * split.device - weights - activated
    return Memory(
        device=split.device,
        weights=weights,
        activations=activated,
        per_sequence=cache_bytes(model, split, context),
        least_sequence=cache_bytes(model, split, min(context, LEAST_CONTEXT)),
        users=users,
        replicas=split.replicas,
        longest=_longest(model, split, free),
    )


def memory_of_bytes(weight_bytes: float, split: Split) -> Memory:
    """The same for a model of which nothing is known but the bytes of its weights: caches and activations count 0."""
    return Memory(
        device=split.device,
        weights=weight_bytes / split.tp,
        activations=0.0,
        per_sequence=0.0,
        least_sequence=0.0,
        users=1,
        replicas=split.replicas,
        longest=None,
    )


def cache_bytes(model: SizedModel, split: Split, context: float) -> float:
    """Keys, values and recurrent states (float32) of one sequence on one device, the drafter's included."""
    head = model.shape.head
    trunk = sum(_cache_of(group, model.kv, split, context) for group in model.shape.layers)
    return trunk + head.modules * sum(_cache_of(group, model.kv, split, context) for group in head.layers)


def activations(shape: Shape, split: Split) -> float:
    """The largest pass: some copies of the hidden states, the widest layer's inner values, float32 logits."""
    rows = ROWS[split.device >= LARGE_DEVICE]
    widest = max(_inner(group, shape.hidden) for group in shape.layers)
    values = rows * (6 * shape.hidden + widest / split.tp) * ACTIVATION_BYTES
    return values + LOGIT_ROWS * shape.vocab * LOGIT_BYTES / split.tp


def devices_needed(model: SizedModel, device: float) -> int:
    """Fewest devices of so many bytes that hold the weights, whatever the division."""
    return -int(-sum(model.weight_bytes().values()) // (USABLE * device))


def _cache_of(group: Layers, kv: float, split: Split, context: float) -> float:
    attention = group.attention
    kept = attention.kept(context) * kv + 4 * attention.state
    return group.count * kept / min(split.tp, attention.splits)


def _inner(group: Layers, hidden: int) -> float:
    """Values of one row inside a feed-forward part: gate, up and their product; of experts all that it has chosen."""
    mlp = group.mlp
    chosen = mlp.active * (mlp.expert_weights / hidden + hidden)
    return mlp.weights / hidden + chosen


def _longest(model: SizedModel, split: Split, free: float) -> int | None:
    """The longest context whose caches take no more than `free` bytes of a device."""
    if cache_bytes(model, split, MOST_CONTEXT) <= free:
        return None
    low, high = 0, MOST_CONTEXT  # too long always
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cache_bytes(model, split, middle) <= free else (low, middle)
    return low
