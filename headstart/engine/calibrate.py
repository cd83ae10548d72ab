"""Calibration at start: measures what passes, drafts and long contexts cost, with real steps of the engine."""

import contextlib
import json
import time
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from headstart import hub, machine
from headstart.core import Request, SamplingParams
from headstart.engine.costs import OUTLIER, TRIAL, CostCurve, Costs, CostSamples, lower_quartile
from headstart.engine.engine import Engine
from headstart.noise import check_noise

MAX_SECONDS = 1.2  # time limit: no step starts later
FOR_CURVES = 0.75  # share of the time limit for the cost curves
WORTH_KEEPING_S = 0.25  # shorter calibrations are not stored: they are repeated at each start
PROMPT = 24  # prompt tokens of a measured sequence
WARM_UP, STEPS, ROUNDS = 1, 2, 3
"""Steps per depth and round. With several rounds a temporary slowdown affects all depths, and CostCurve.fit, which
takes the lower quartile, ignores it."""
PLAN = ((1, (0, 1, 3, 7, 2, 5)), (4, (0, 3)), (16, (0, 3)), (1, (11,)), (64, (0, 3)))
"""(number of sequences, depths), most important first. Costs that are not measured in time are extrapolated."""
MIN_CONTEXT = 8  # shorter contexts are not measured
LONG, LONG_DEPTH = 448, 3  # prompt tokens and depth of the long sequence
MAX_REACH = 0.5
"""Upper bound of the extra cost of a pass at LONG, relative to a pass near position 0, against noise in the times."""
MIN_SHARE = 0.3  # lower bound of Costs.prompt_share
CHECKED_DEPTH, TOLERANCE, CHECK_SECONDS = 3, 0.15, 0.3
"""Stored costs are confirmed once, at the next start. Passes and draft steps must take the stored time within a factor
of OUTLIER: costs that let no draft start are hardly corrected later. The ratio of a pass at CHECKED_DEPTH to a plain
one must be the same within TOLERANCE. No step of the check starts later than CHECK_SECONDS."""
FEW_ROWS, GROWTH = 8, 0.7
"""Experts of n tokens in a row are about n ** GROWTH times those of one: 1.62 and 2.5 times for 2 and 4 tokens
(cohere.com/blog/mixture-of-experts-models-get-more-from-speculative-decoding)."""
BUSY = 1.2
"""Ratio of median to fastest step from which other processes are assumed to use the cores. `check_noise` finds a
process that uses a core all the time, which slows all steps alike."""


@dataclass
class _Run:
    """Runs and times steps with one number of sequences at a time."""

    engine: Engine
    until: float  # deadline by time.perf_counter()
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    count: int = 0  # requests submitted so far
    deadline_counts: bool = False  # from the first measured pass on, if not before

    @property
    def is_late(self) -> bool:
        return self.deadline_counts and time.perf_counter() > self.until

    def measure(self, sequences: int, depths: Seq[int], length: int) -> tuple[CostSamples, CostSamples]:
        """Samples of the prompts' passes, and of decode steps at each depth, as far as time allows."""
        drafting, before, decoding = self.engine.drafting, CostSamples(), CostSamples()
        configured, names = drafting.depth, self._submit(sequences, max(depths), length, len(depths))
        drafting.depth, drafting.samples = depths[0], before
        try:
            while self._is_prefilling() and not self.is_late:
                self.engine.step(_discard)
            for depth in ROUNDS * tuple(depths):
                drafting.depth = depth
                for step in range(WARM_UP + STEPS):  # the first step still verifies drafts of the previous depth
                    if self.is_late or not self.engine.has_work:
                        return before, decoding
                    drafting.samples = decoding if step >= WARM_UP else CostSamples()
                    self.engine.step(_discard)
                    self.deadline_counts |= bool(decoding.passes)
            return before, decoding
        finally:
            drafting.depth, drafting.samples = configured, None
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

    def _is_prefilling(self) -> bool:
        """True if a sequence has no output token yet."""
        scheduler = self.engine.scheduler
        return any(sequence.num_output == 0 for sequence in (*scheduler.waiting, *scheduler.running))


def _discard(deltas: Any) -> None:
    """Drops the tokens of a calibration."""


def calibrate(engine: Engine) -> Costs:
    """Measures costs within MAX_SECONDS, and extrapolates the others. The engine must be idle."""
    if engine.max_length < MIN_CONTEXT:
        return Costs.unknown()
    begun = time.perf_counter()
    run, samples = _Run(engine, begun + FOR_CURVES * MAX_SECONDS), CostSamples()
    max_depth, max_seqs = engine.drafting.max_depth, engine.config.max_num_seqs
    length = min(PROMPT, engine.max_length // 4)
    blocks = engine.memory.blocks_for(length + 16 * STEPS * ROUNDS)
    for sequences, planned in PLAN:
        depths = [depth for depth in planned if depth <= max_depth]
        too_many = sequences > max_seqs or sequences * blocks > len(engine.memory.pool.blocks)
        if not depths or (sequences > 1 and too_many):
            continue
        before, measured = run.measure(sequences, depths, length)
        samples.prompts += before.prompts
        for kind in ("passes", "drafts"):
            for count, seconds in getattr(measured, kind).items():
                getattr(samples, kind).setdefault(count, []).extend(seconds)
    if not samples.passes:
        return Costs.unknown()
    add_prompt_pass(samples)
    further, firsts = samples.further(), dict[int, list[float]]()
    for (count, steps), seconds in samples.drafts.items():
        firsts.setdefault(count, []).extend(each / (1 + further * (steps - 1)) for each in seconds)
    firsts = firsts or {1: [0.1 * lower_quartile(samples.passes[1])]}
    costs = Costs(CostCurve.fit(samples.passes), CostCurve.fit(firsts), further=further)
    costs.busy = _busy(samples.passes[1])
    run.until = begun + MAX_SECONDS
    _measure_long(run, costs, length)
    engine.reset_stats()
    engine.drafting.clear()
    return costs


def add_prompt_pass(samples: CostSamples) -> None:
    """Where passes are so slow that only a few rows were measured, takes the first prompt's pass as the last point of
    the curve: costs of a mixture of experts neither rise by a twentieth of a pass per row nor on with the first slope.
    Cold memory may slow a first pass, so its cost is limited by GROWTH."""
    if not samples.prompts or (count := max(samples.passes)) >= FEW_ROWS:
        return
    work, seconds = samples.prompts[0]
    if (rows := work.rows + work.prompt_rows) > count:
        samples.passes[rows] = [min(seconds, lower_quartile(samples.passes[count]) * (rows / count) ** GROWTH)]


def _busy(seconds: Seq[float]) -> bool:
    """True if equal steps differ so much that other processes must have used the cores."""
    return median(seconds) > BUSY * min(seconds)


def _measure_long(run: _Run, costs: Costs, short: int) -> None:
    """Measures the costs of prompt rows, far positions and uncached pairs with a longer prompt, if time allows."""
    engine, left = run.engine, run.until - time.perf_counter()
    length = min(LONG, engine.max_length // 2, engine.scheduler.budget)
    steps = ROUNDS * (WARM_UP + STEPS)
    while length >= 2 * short and costs.passes.at(length) + steps * costs.passes.at(LONG_DEPTH + 1) > left:
        length //= 2
    if length < 2 * short:
        return
    prompts, decoding = run.measure(1, [min(LONG_DEPTH, engine.drafting.max_depth)], length)
    rows, seconds = next(iter(decoding.passes.items()), (0, []))
    if seconds:
        far = max(0.0, lower_quartile(seconds) - costs.passes.at(rows))
        costs.reach = min(far, MAX_REACH * costs.passes.at(rows)) / (rows * (length - short))
    if prompts.prompts:
        work, taken = prompts.prompts[0]
        own = taken - costs.reach * work.reach / 2  # on average, prompt rows attend to half of the prompt
        low, high = MIN_SHARE, 1.5
        for _ in range(20):  # bisection: the share that explains the measured time
            middle = (low + high) / 2
            is_below = costs.passes.at(work.rows + middle * work.prompt_rows) < own
            low, high = (middle, high) if is_below else (low, middle)
        costs.prompt_share = low
    if prompts.caught_up:
        num_uncached, count, taken = prompts.caught_up[0]
        costs.catch_up = max(0.0, (taken - costs.draft_seconds([1] * count, 0)) / num_uncached)


def known_costs(engine: Engine, identity: Mapping[str, Any]) -> Costs:
    """Costs of this machine, model and settings: stored by an earlier start (and corrected by each step), or measured
    now. Costs that two starts have measured alike are not measured again."""
    path = hub.record_path("costs", identity)
    record = _load_record(path)
    with engine.memory.without_spill():
        if record:
            stored, confirmed = record
            holds = True if confirmed else _holds(engine, stored)
            if holds and not confirmed:
                _save_record(path, stored, identity, confirmed=True)
            if holds is not False:
                return replace(stored, trial=TRIAL)
        begun = time.perf_counter()
        with check_noise(machine.thread_count(engine.config.threads)) as noise:
            costs = calibrate(engine)
    costs.busy |= noise.is_disturbed
    if record or time.perf_counter() - begun > WORTH_KEEPING_S:
        _save_record(path, costs, identity, confirmed=False)
    return costs


def _load_record(path: Path) -> tuple[Costs, bool] | None:
    """Stored costs and whether they are confirmed; None if there are none."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document = json.loads(path.read_text())
        return Costs.from_document(document["costs"]), bool(document["confirmed"])
    return None


def _save_record(path: Path, costs: Costs, identity: Mapping[str, Any], *, confirmed: bool) -> None:
    hub.try_save_record(path, {"costs": costs.document(), "of": identity, "confirmed": confirmed})


def _holds(engine: Engine, costs: Costs) -> bool | None:
    """True if plain and deeper passes and draft steps match the stored costs; None if unknown, because other processes
    use the cores or the steps take too long."""
    length, depth = max(min(PROMPT, engine.max_length // 4), 1), min(CHECKED_DEPTH, engine.drafting.max_depth)
    run = _Run(engine, time.perf_counter() + CHECK_SECONDS, deadline_counts=True)
    with check_noise(machine.thread_count(engine.config.threads)) as noise:
        _, measured = run.measure(1, [0, depth], length)
    engine.reset_stats()
    engine.drafting.clear()
    if noise.is_disturbed:
        return None
    factors = []
    for rows, seconds in measured.passes.items():  # by rows: drafters may draft fewer tokens than requested
        if len(seconds) < STEPS or _busy(seconds):
            return None
        factors.append(lower_quartile(seconds) / costs.passes.at(rows))
    if not factors:
        return None
    draft_times = measured.drafts.items()
    drafts = [lower_quartile(each) / costs.draft_seconds([count] * steps, 0) for (count, steps), each in draft_times]
    is_alike = all(1 / OUTLIER <= factor <= OUTLIER for factor in (*factors, *drafts))
    return not costs.busy and is_alike and max(factors) <= (1 + TOLERANCE) * min(factors)
