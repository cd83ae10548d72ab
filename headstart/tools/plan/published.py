"""Comparison of published speeds and costs (published.json) with the roofline's predictions."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

from headstart.formats.json_object import read_packaged
from headstart.tools.plan import roofline
from headstart.tools.plan.drafters import DRAFTER_TYPES, acceptances_of_length, with_drafter
from headstart.tools.plan.machine import Machine, make_machine, parse_gpu
from headstart.tools.plan.shape import SizedModel, devices_needed, estimate_memory, kv_bytes, split_of
from headstart.tools.plan.sources import find_shape

DEFAULT_CONTEXT = 2048
MAX_BATCH = 4096
CLOSE = 0.25  # relative error up to which a prediction counts as close
WITHIN = "within"
POINTS: list[dict[str, Any]] = read_packaged("headstart.tools.plan", "published.json")
LIKELY_SHARE = 0.85  # largest share of the memory bandwidth that engines reach


def compare(point: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns each published figure of one point with its prediction; none if the set-up is unknown."""
    return [] if "unknown" in point else list(PublishedSetup(point).comparisons())


class PublishedSetup:
    def __init__(self, point: Mapping[str, Any]) -> None:
        self.point = point
        shape = with_drafter(find_shape(point["model"], point.get("weights")), point.get("drafter"))
        self.model = SizedModel(shape=shape, kv=kv_bytes("bf16"))
        self.machine: Machine = make_machine(*parse_gpu(point["gpu"]), self.model.format.compute)
        self.batch, self.depth = int(point["batch"]), int(point["depth"])
        self.context = float(point.get("context", DEFAULT_CONTEXT))
        given = point.get("acceptance", shape.acceptance or DRAFTER_TYPES[shape.drafter.kind].acceptances)
        self.acceptances = acceptances_of_length(given, self.depth) if isinstance(given, int | float) else tuple(given)

    def tokens_per_s(self, depth: int, batch: int | None = None) -> float:
        """Predicts tokens/s of all streams together, including prefill if the point gives a prompt length."""
        batch = batch or self.batch
        predicted = roofline.step_speed(self.model, self.machine, batch, self.context, depth, self.acceptances)
        if "prompt" not in self.point:
            return predicted.total
        prompt_s = roofline.first_token_seconds(self.model, self.machine, int(self.point["prompt"]))
        output = int(self.point["output"])
        return batch * output / (batch * prompt_s + output / predicted.per_stream)

    def comparisons(self) -> Iterator[dict[str, Any]]:
        published, plain, drafting = self.point["published"], self.tokens_per_s(0), self.tokens_per_s(self.depth)
        name = {"mtp": "MTP"}.get(self.model.shape.drafter.kind, DRAFTER_TYPES[self.model.shape.drafter.kind].title)
        pairs = (("plain", 0, plain), (name, self.depth, drafting))
        for (name, depth, rate), value in zip(pairs, published.get("tokens_per_s", (None, None)), strict=True):
            if value is not None:
                yield self._compared(f"{name} tok/s", value, rate, depth)
        for (name, depth, rate), value in zip(pairs, published.get("dollars_per_million", (None, None)), strict=True):
            if value is not None:
                price = self.point["price_per_hour"]
                cost = price * self.machine.count / 3600e-6 / rate
                yield self._compared(f"{name} $/M", value, cost, depth, rate=price / 3600e-6 / value)
        if "speedup" in published:
            yield self._compared("speed-up", published["speedup"], drafting / plain, None)

    def _compared(
        self, what: str, value: float | list[float], predicted: float, depth: int | None, *, rate: float | None = None
    ) -> dict[str, Any]:
        """Compares a figure or range. `error`: predicted / published (nearer end of the range) - 1; 0 inside."""
        low, high = (value[0], value[-1]) if isinstance(value, list) else (value, value)
        error = predicted / min(max(predicted, low), high) - 1
        verdict = self._verdict(error, rate or high, depth)
        return {"who": self.point["who"], "what": what, "published": (low, high), "predicted": predicted,
                "error": error, "verdict": verdict}  # fmt: skip

    def _verdict(self, error: float, rate: float, depth: int | None) -> str:
        missing = self._missing_memory()
        if abs(error) <= CLOSE:
            return f"{WITHIN} {CLOSE:.0%}{missing}"
        if depth is None:
            return f"predicted is {_times(error)} the figure{missing}"
        bound = roofline.max_tokens_per_s(self.model, self.machine, self.batch, self.context, depth)
        if rate > bound:
            devices = f"; {math.ceil(rate / bound * self.machine.count)} devices at full speed would be needed"
            why = f"{self._why(bound, depth)}{devices}{self._batch_for(rate, depth)}"
            return f"impossible for {self._streams()}: {why}{missing}"
        if rate > LIKELY_SHARE * bound:
            why = f"{rate / bound:.0%} of what the memories allow, nothing left for kernels and interconnect"
            return f"not likely for {self._streams()}: {why}{self._batch_for(rate, depth)}{missing}"
        slower = self._batch_for(rate, depth) if self.tokens_per_s(depth) < rate else ""
        return f"predicted is {_times(error)} the figure{slower}{missing}"

    def _streams(self) -> str:
        return "one stream" if self.batch == 1 else f"{self.batch} streams"

    def _why(self, bound: float, depth: int) -> str:
        """Returns a text: bytes of one pass, bandwidth of all devices, and the speed that they allow."""
        num_bytes = roofline.min_pass_bytes(self.model, self.batch, self.context, depth)
        condition = "" if not depth else ", were its draft always right"
        if depth > 1:
            condition = f", were all {depth} drafts always right"
        return (
            f"{num_bytes / 1e9:.1f} GB a pass at {self.machine.count * self.machine.device.bandwidth / 1e12:.1f} TB/s "
            f"allow {bound:,.0f} tok/s{condition}"
        )

    def _batch_for(self, rate: float, depth: int) -> str:
        for batch in (2**i for i in range(MAX_BATCH.bit_length())):
            if self.tokens_per_s(depth, batch) >= rate:
                return f"; as a total of about {batch} streams the model gives it" if batch > self.batch else ""
        return f"; the model does not give it with {MAX_BATCH} streams either"

    def _missing_memory(self) -> str:
        have = self.machine.count * int(self.point.get("layer_split", 1))
        need = devices_needed(self.model, self.machine.device.memory)
        fits = estimate_memory(self.model, split_of(self.machine), self.context).fits or self.point.get("layer_split")
        return "" if fits and need <= have else f"; the weights need {need} such devices, not {have}"


def _times(error: float) -> str:
    return f"{1 + error:.1f} times" if error > 0 else f"{1 + error:.0%} of"
