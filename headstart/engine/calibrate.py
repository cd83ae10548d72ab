"""A short calibration: what passes, drafts and long contexts cost here, from real steps of the engine itself."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headstart import hub
from headstart.core import Request, SamplingParams
from headstart.engine.costs import TRIAL, Costs, Curve, Samples, undisturbed
from headstart.engine.engine import Engine

MOST_SECONDS = 2.0
"""Within so much all is measured; the curves take three quarters of it at most. No step begins after that."""
FOR_CURVES = 0.75
WORTH_KEEPING_S = 0.25
"""Shorter calibrations are made again at each start."""
PROMPT = 24
WARM_UP, STEPS, ROUNDS = 1, 2, 3
"""Each depth gets so many steps, in so many rounds: whatever slows the machine down for a while then slows all depths
down, and the lower quartile (Curve.fit) passes it by."""
PLAN = ((1, (0, 1, 3, 7, 2, 5)), (4, (0, 3)), (16, (0, 3)), (1, (11,)), (64, (0, 3)))
"""(sequences, depths), what matters most first: a slow machine gets as far as the time goes, and learns the rest."""
LEAST_CONTEXT = 8
"""In a shorter one there is nothing to measure, nor to gain."""
LONG, LONG_DEPTH = 448, 3
MOST_REACH = 0.5
"""Of a pass near position 0: what LONG positions more cost at most. The difference of two measured times is noisy."""
LEAST_SHARE = 0.3
CHECKED_DEPTH, TOLERANCE, CHECK_SECONDS = 3, 0.15, 0.3
"""What is kept is confirmed at the next start, once: by t(4) / t(1), which is the same up to so much. Where that takes
longer than so, it is not."""
BUSY = 1.2
"""A median step of so many times the fastest one: somebody else has the cores, and nothing can be told."""


@dataclass
class _Run:
    """An engine, with the steps of one setting at a time."""

    engine: Engine
    until: float  # by time.perf_counter(): once something is measured, no step begins later
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    count: int = 0
    measured: bool = False

    @property
    def late(self) -> bool:
        return self.measured and time.perf_counter() > self.until

    def measure(self, sequences: int, depths: Seq[int], length: int) -> tuple[Samples, Samples]:
        """Samples of the prompts' passes, and of decode steps at each depth; none where the time is over."""
        drafting, before, decoding = self.engine.drafting, Samples(), Samples()
        asked, names = drafting.depth, self._submit(sequences, max(depths), length, len(depths))
        drafting.depth, drafting.samples = depths[0], before
        try:
            while self._reads() and not self.late:
                self.engine.step(_nowhere)
            for depth in ROUNDS * tuple(depths):
                drafting.depth = depth
                for step in range(WARM_UP + STEPS):  # the first has the drafts of the depth before
                    if self.late or not self.engine.has_work:
                        return before, decoding
                    drafting.samples = decoding if step >= WARM_UP else Samples()
                    self.engine.step(_nowhere)
                    self.measured |= bool(decoding.passes)
            return before, decoding
        finally:
            drafting.depth, drafting.samples = asked, None
            for name in names:
                self.engine.abort(name)

    def _submit(self, sequences: int, depth: int, length: int, depths: int) -> list[str]:
        names = []
        for _ in range(sequences):
            self.count += 1
            names.append(f"calibration-{self.count}")
            prompt = tuple(self.rng.integers(0, self.engine.runner.vocab_size, length).tolist())
            params = SamplingParams(max_tokens=2 + depths * ROUNDS * (WARM_UP + STEPS) * (depth + 1))
            request = Request(request_id=names[-1], prompt_ids=prompt, params=params, seed=0, stop_ids=frozenset())
            self.engine.submit(request)
        return names

    def _reads(self) -> bool:
        """Has a sequence got no token yet?"""
        scheduler = self.engine.scheduler
        return any(sequence.num_output == 0 for sequence in (*scheduler.waiting, *scheduler.running))


def _nowhere(deltas: Any) -> None:
    """Nobody waits for the tokens of a calibration."""


def calibrate(engine: Engine) -> Costs:
    """Measure for about MOST_SECONDS; what was not reached is extrapolated. The engine must be idle."""
    if engine.max_length < LEAST_CONTEXT:
        return Costs.unknown()
    begun = time.perf_counter()
    run, samples = _Run(engine, begun + FOR_CURVES * MOST_SECONDS), Samples()
    deepest, most = engine.drafting.max_depth, engine.config.max_num_seqs
    length = min(PROMPT, engine.max_length // 4)
    blocks = engine.memory.blocks_for(length + 16 * STEPS * ROUNDS)
    for sequences, planned in PLAN:
        depths = [depth for depth in planned if depth <= deepest]
        too_many = sequences > most or sequences * blocks > len(engine.memory.pool.blocks)
        if not depths or (sequences > 1 and too_many):
            continue
        _, measured = run.measure(sequences, depths, length)
        for kind in ("passes", "drafts"):
            for count, seconds in getattr(measured, kind).items():
                getattr(samples, kind).setdefault(count, []).extend(seconds)
    if not samples.passes:
        return Costs.unknown()
    costs = Costs(Curve.fit(samples.passes), Curve.fit(samples.drafts or {1: [0.1 * undisturbed(samples.passes[1])]}))
    costs.busy = _busy(samples.passes[1])
    run.until = begun + MOST_SECONDS
    _measure_long(run, costs, length)
    engine.reset_stats()
    engine.drafting.forget()
    return costs


def _busy(seconds: Seq[float]) -> bool:
    """Do equal steps differ so much that others must have had the cores?"""
    return median(seconds) > BUSY * min(seconds)


def _measure_long(run: _Run, costs: Costs, short: int) -> None:
    """What prompt rows, far positions and missed pairs cost, from one longer prompt: as long as the time allows."""
    engine, left = run.engine, run.until - time.perf_counter()
    length = min(LONG, engine.max_length // 2, engine.scheduler.budget)
    steps = ROUNDS * (WARM_UP + STEPS)
    while length >= 2 * short and costs.passes.at(length) + steps * costs.passes.at(LONG_DEPTH + 1) > left:
        length //= 2
    if length < 2 * short:
        return
    prompts, decoding = run.measure(1, [min(LONG_DEPTH, engine.drafting.max_depth)], length)
    rows, seconds = next(((rows, values) for rows, values in decoding.passes.items()), (0, []))
    if seconds:
        far = max(0.0, undisturbed(seconds) - costs.passes.at(rows))
        costs.reach = min(far, MOST_REACH * costs.passes.at(rows)) / (rows * (length - short))
    if prompts.prompts:
        work, taken = prompts.prompts[0]
        own = taken - costs.reach * work.reach / 2  # rows of a prompt attend to half of it
        low, high = LEAST_SHARE, 1.5
        for _ in range(20):  # the share at which the pass would cost what it did
            middle = (low + high) / 2
            low, high = (
                (middle, high) if costs.passes.at(work.rows + middle * work.prompt_rows) < own else (low, middle)
            )
        costs.prompt_share = low
    if prompts.caught_up:
        missed, count, taken = prompts.caught_up[0]
        costs.catch_up = max(0.0, (taken - count * costs.drafts.at(1)) / missed)


def known_costs(engine: Engine, identity: Mapping[str, Any]) -> Costs:
    """Of this machine, model and settings: as kept from an earlier start, which steps correct, or measured now. What
    two starts have measured alike is not measured again."""
    path = hub.record_path("costs", identity)
    record = _kept(path)
    with engine.memory.alone():
        if record:
            kept, confirmed = record
            holds = True if confirmed else _holds(engine, kept)
            if holds and not confirmed:
                _keep(path, kept, identity, confirmed=True)
            if holds is not False:
                return replace(kept, trial=TRIAL)
        begun = time.perf_counter()
        costs = calibrate(engine)
    if record or time.perf_counter() - begun > WORTH_KEEPING_S:
        _keep(path, costs, identity, confirmed=False)
    return costs


def _kept(path: Path) -> tuple[Costs, bool] | None:
    """Costs, and whether they are confirmed; None where there is nothing of use."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document = json.loads(path.read_text())
        return Costs.of(document["costs"]), bool(document["confirmed"])
    return None


def _keep(path: Path, costs: Costs, identity: Mapping[str, Any], *, confirmed: bool) -> None:
    with contextlib.suppress(OSError):  # a cache that cannot be written is none
        hub.keep_record(path, {"costs": costs.document(), "of": identity, "confirmed": confirmed})


def _holds(engine: Engine, costs: Costs) -> bool | None:
    """Are a plain pass and a deeper one in the proportion that was measured? None: others have the cores now, or a few
    steps take too long to tell."""
    length, depth = max(min(PROMPT, engine.max_length // 4), 1), min(CHECKED_DEPTH, engine.drafting.max_depth)
    if 2 * ROUNDS * (STEPS + WARM_UP) * costs.passes.at(1) > CHECK_SECONDS:
        return None
    run = _Run(engine, time.perf_counter() + CHECK_SECONDS)
    _, measured = run.measure(1, [0, depth], length)
    engine.reset_stats()
    engine.drafting.forget()
    factors = []
    for rows, seconds in measured.passes.items():  # drafters may draft less than they are asked for
        if len(seconds) < STEPS or _busy(seconds):
            return None
        factors.append(undisturbed(seconds) / costs.passes.at(rows))
    if not factors:
        return None
    return not costs.busy and max(factors) <= (1 + TOLERANCE) * min(factors)
