"""What a machine does with a model: speed by batch and depth, first token, cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headstart.config import MAX_DEPTH
from headstart.tools.plan.acceptance import expected_tokens
from headstart.tools.plan.machine import Machine
from headstart.tools.plan.roofline import Pass, SizedModel, draft_seconds, pass_seconds

DEPTHS = range(9)
"""Depths that a plan chooses from."""


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One step of `batch` sequences at a depth, and what it gives. Seconds, tokens/s."""

    batch: int
    depth: int
    tokens_per_step: float  # of one sequence
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
class Drafting:
    """A model with its drafter, how often its drafts stand, and that in words."""

    model: SizedModel
    acceptances: tuple[float, ...]
    said: str

    @property
    def kind(self) -> str:
        return self.model.shape.head.kind

    @property
    def deepest(self) -> int:
        most = self.model.shape.head.most
        return MAX_DEPTH if most is None else min(most, MAX_DEPTH)


def speed(
    model: SizedModel, machine: Machine, batch: int, context: float, depth: int, acceptances: Sequence[float]
) -> Speed:
    """Verify depth + 1 rows of every sequence, draft depth times, and the engine's own time."""
    pass_s = pass_seconds(model, machine, Pass(batch, 1 + depth, context))
    draft_s = draft_seconds(model, machine, batch, context, depth)
    engine_s = machine.rates.step_s + machine.rates.step_row_s * batch * (1 + depth)
    return Speed(
        batch=batch,
        depth=depth,
        tokens_per_step=expected_tokens(acceptances, depth),
        pass_s=pass_s,
        draft_s=draft_s,
        step_s=pass_s + draft_s + engine_s,
    )


def best(speeds: Sequence[Speed]) -> Speed:
    """The fastest; of equals the shallowest."""
    return max(speeds, key=lambda each: (each.per_stream, -each.depth))


def first_token(model: SizedModel, machine: Machine, prompt: int) -> float:
    """Seconds of one prompt alone, in one pass; its rows see half of the prompt on average."""
    rates = machine.rates
    return pass_seconds(model, machine, Pass(1, prompt, prompt / 2, logit_rows=1)) + rates.step_s + rates.step_row_s


def floor_bytes(model: SizedModel, batch: int, context: float, depth: int) -> float:
    """Bytes that a pass over depth + 1 rows of every sequence cannot do without: weights (of experts those expected to
    be chosen) and caches, each read once."""
    work = Pass(batch, 1 + depth, context)
    layers = sum(
        group.count
        * (
            group.attention.weights * model.bytes("attention")
            + group.mlp.weights * model.bytes("mlp")
            + group.mlp.touched(work.num_rows) * group.mlp.expert_weights * model.bytes("experts")
            + batch * group.attention.read(context, 1) * model.kv
        )
        for group in model.shape.layers
    )
    return layers + model.shape.vocab * model.shape.hidden * model.bytes("lm_head")


def most_tokens_per_s(model: SizedModel, machine: Machine, batch: int, context: float, depth: int) -> float:
    """What no engine can beat: every draft stands, drafting is free, and all memories together read the bytes of a pass
    at their full speed."""
    num_bytes = floor_bytes(model, batch, context, depth)
    return batch * (1 + depth) * machine.count * machine.device.bandwidth / num_bytes


def dollars_per_million(price_per_hour: float, tokens_per_s: float) -> float:
    """price / 3600 / (tokens/s / 1e6)"""
    return price_per_hour / 3600 / (tokens_per_s / 1e6)


def break_even(price_per_hour: float, api_price: float) -> float:
    """Tokens/s, day and night, at which a machine costs what an API asks for a million tokens."""
    return price_per_hour / 3600 / api_price * 1e6
