"""`headstart probe`: detects whether an OpenAI-compatible endpoint uses speculative decoding, and whether it helps.

Known metrics decide if the server has them. Otherwise two kinds of text are streamed, predictable and random: with
drafting, tokens arrive in bursts, and predictable text arrives faster. Times count from the first piece of text. The
usual test, the time of 200 tokens against that of 50, is confounded by the time to the first token.
"""

import random
from dataclasses import dataclass, field
from typing import Any

from headstart.core import Progress, Report, no_progress
from headstart.tools.client import Server
from headstart.tools.engine_metrics import EngineCounters, advise
from headstart.tools.options import ProbedServer
from headstart.tools.probe import timing
from headstart.tools.probe.endpoint import Endpoint

LENGTHS = (16, 32, 64)
ROUNDS = 3
ENOUGH = 0.95  # confidence at which no further round is needed
PREDICTABLE = (
    "".join(f"Item {number}: the number is {number}, and the next number is {number + 1}.\n" for number in range(1, 9)),
    "The quick brown fox jumps over the lazy dog. " * 8,
    "for i in range(10):\n    print(i)\n" * 8,
)
NAIVE = "the naive test (200 tokens against 50, whole answers) is confounded by the time to the first token"


@dataclass(frozen=True, kw_only=True)
class ProbeOptions(ProbedServer):
    use_metrics: bool = True  # False: judge by times only
    rounds: int = ROUNDS
    seed: int = 0  # chooses the texts


@dataclass
class ProbeMeasurement:
    traces: list[timing.StreamTrace] = field(default_factory=list)
    counters: EngineCounters | None = None  # since the probe began
    before: EngineCounters | None = None  # before the probe, since the server started

    def of_kind(self, kind: timing.Kind) -> list[timing.StreamTrace]:
        return [trace for trace in self.traces if trace.kind == kind]

    def verdict(self) -> timing.DraftingVerdict:
        return timing.judge_drafting(
            self.counters, timing.summarize(self.of_kind("predictable")), timing.summarize(self.of_kind("random"))
        )


def run(options: ProbeOptions, progress: Progress = no_progress) -> Report:
    """Detects whether an endpoint drafts. `ok`: it does, and drafts are accepted. Raises UsageError."""
    endpoint = Endpoint(Server.at(options.url, options.api_key), options.model)
    measured = measure(endpoint, options, progress)
    data = document(endpoint, measured.verdict(), measured)
    return Report(data["drafting"] == "on", data, _lines(data))


def measure(endpoint: Endpoint, options: ProbeOptions, progress: Progress) -> ProbeMeasurement:
    """Streams texts until the verdict is clear or the rounds are over; reads counters before and after each round."""
    measured = ProbeMeasurement()
    total = options.rounds * len(LENGTHS) * 2
    endpoint.stream("random", random_text(options.seed), 8, 1.0)  # warm-up, not counted
    measured.before = before = endpoint.metrics() if options.use_metrics else None
    for turn in range(options.rounds):
        for place, length in enumerate(LENGTHS):
            progress(len(measured.traces), total, "streaming")
            prompt = PREDICTABLE[(options.seed + turn + place) % len(PREDICTABLE)]
            measured.traces.append(endpoint.stream("predictable", prompt, length, 0.0))
            text = random_text(1000 * options.seed + 10 * turn + place + 1)
            measured.traces.append(endpoint.stream("random", text, length, 1.0))
        if before is not None and (now := endpoint.metrics()):
            measured.counters = now.since(before)
        verdict = measured.verdict()
        if verdict.source == "metrics" or (turn and verdict.confidence > ENOUGH):
            break
    return measured


def random_text(seed: int) -> str:
    source = random.Random(seed)
    return " ".join("".join(source.choices("0123456789abcdefghjkmnpqrstvwxyz", k=7)) for _ in range(16))


def document(endpoint: Endpoint, verdict: timing.DraftingVerdict, measured: ProbeMeasurement) -> dict[str, Any]:
    length = verdict.acceptance_length
    return {
        "url": str(endpoint.server), "model": endpoint.model, "drafting": verdict.answer,
        "confidence": round(verdict.confidence, 3), "source": verdict.source,
        "engine": measured.counters.engine if measured.counters else None,
        "acceptance_length": None if length is None else round(length, 3),
        "advice": advise(measured.before) if verdict.answer == "on" else "", "evidence": verdict.evidence,
        "timing": {kind: timing.summarize(measured.of_kind(kind)).document() for kind in ("predictable", "random")},
        "by_length": timing.pace_by_length(measured.of_kind("predictable")), "note": NAIVE,
    }  # fmt: skip


ANSWERS = {
    "on": "drafting is ON",
    "dead": "drafting is ON, but its drafts are not accepted: the head is dead",
    "off": "drafting is OFF",
    "unknown": "cannot be told",
}


def _lines(data: dict[str, Any]) -> list[str]:
    length = data["acceptance_length"]
    shown = f", acceptance length {length:.2f}" if length else ""
    lines = [f"{ANSWERS[data['drafting']]} ({data['confidence']:.0%} sure, by {data['source']}{shown})"]
    lines += [f"  {line}" for line in data["evidence"]]
    lines += [f"  advice, from what it has answered so far: {data['advice']}"] if data["advice"] else []
    lines += [
        f"  {length:>4} tokens: {paces['ms_per_token']:.2f} ms a token after the first, "
        f"{paces['naive_ms_per_token']:.2f} with it"
        for length, paces in data["by_length"].items()
    ]
    return [*lines, f"  {data['note']}"]
