"""Published speeds and costs (plan_published.json) against the predictions of `headstart plan`.

    python benchmarks/plan_published.py
    python benchmarks/plan_published.py --json published.json

Each figure has its error. A figure above the bound of the memory bandwidth is called impossible, with the bytes of a
pass.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headstart.tools.plan import roofline
from headstart.tools.plan.drafters import DRAFTER_TYPES, acceptances_of_length, with_drafter
from headstart.tools.plan.machine import Machine, make_machine, parse_gpu
from headstart.tools.plan.shape import SizedModel, devices_needed, estimate_memory, kv_bytes, split_of
from headstart.tools.plan.sources import find_shape

DEFAULT_CONTEXT = 2048
MAX_BATCH = 4096
CLOSE = 0.25  # relative error up to which a prediction counts as close
WITHIN = "within"
POINTS: list[dict[str, Any]] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
LIKELY_SHARE = 0.85  # largest share of the memory bandwidth that engines reach


def min_pass_bytes(model: SizedModel, batch: int, context: float, depth: int) -> float:
    """Returns the bytes that a pass of depth + 1 rows per sequence must read: caches, weights, expected experts."""
    rows, shape = batch * (1 + depth), model.shape
    layers = sum(
        model.layer_bytes(group, rows) + group.count * batch * group.cost.mixer.read(context, 1) * model.kv
        for group in shape.layers
    )
    lm_head = shape.vocab_size * shape.hidden_size * model.bytes("lm_head")
    return layers + shape.outer * model.bytes("mlp") + lm_head


def max_tokens_per_s(model: SizedModel, machine: Machine, batch: int, context: float, depth: int) -> float:
    """Returns an upper bound for any engine: free drafts, all of them accepted, and full memory bandwidth."""
    num_bytes = min_pass_bytes(model, batch, context, depth)
    return batch * (1 + depth) * machine.count * machine.device.bandwidth / num_bytes


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
        bound = max_tokens_per_s(self.model, self.machine, self.batch, self.context, depth)
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
        num_bytes = min_pass_bytes(self.model, self.batch, self.context, depth)
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


def print_table(figures: list[dict[str, Any]]) -> None:
    print(f"{'published':48}{'figure':18}{'is':>16}{'predicted':>12}{'error':>8}")
    for row in figures:
        low, high = row["published"]
        value = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        print(f"{row['who'][:47]:48}{row['what']:18}{value:>16}{row['predicted']:>12.4g}{row['error']:>+8.0%}")
    print()
    for row in figures:
        if not row["verdict"].startswith(WITHIN):
            print(f"{row['who']}, {row['what']}: {row['verdict']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    args = parser.parse_args()

    figures = [row for point in POINTS for row in compare(point)]
    print_table(figures)
    print("\nassumed:")
    for point in (each for each in POINTS if "assumed" in each):
        print(f"  {point['who']}: {point['assumed']}")
    print("\nnot predicted:")
    for point in (each for each in POINTS if "unknown" in each):
        print(f"  {point['who']} ({point['published']}): {point['unknown']}")
    close = sum(row["verdict"].startswith(WITHIN) for row in figures)
    print(f"\n{close} of {len(figures)} figures within {CLOSE:.0%}. Set-ups are mostly assumed, so this is no proof.")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
