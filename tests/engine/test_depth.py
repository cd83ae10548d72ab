"""Costs, odds, and the depth that follows from them."""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from support import SMALL, headed_model, request

from headstart.api import LLM
from headstart.config import AUTO, EngineConfig
from headstart.core import Draft, Leaf, SamplingParams, Sequence
from headstart.drafters.base import DraftRequest
from headstart.engine.acceptance import AcceptanceEstimator
from headstart.engine.calibrate import add_prompt_pass, calibrate
from headstart.engine.costs import KNOTS, TRIAL, CostCurve, Costs, CostSamples, PassShape
from headstart.engine.depth import AutoDepth, DraftCandidate

FLAT = CostCurve.fit({1: [1.0], 8: [1.07], 64: [8.0]})
"""A pass that waits for memory up to 8 rows, and computes from there on."""
STEEP = CostCurve.fit({1: [1.0], 2: [2.0], 64: [64.0]})
CHEAP_DRAFTS = CostCurve.fit({1: [0.02], 64: [0.3]})


def sequence(tokens: int = 10, temperature: float = 0.0) -> Sequence:
    asked = request(range(tokens), seed=1, stops=(), temperature=temperature, max_tokens=1000)
    return Sequence(asked, 0, list(range(tokens)), 0)


def test_a_curve_goes_through_what_was_measured_and_never_falls() -> None:
    curve = CostCurve.fit({1: [9.0, 3.1, 9.0, 3.0, 9.0], 4: [4.0], 64: [64.0]})
    assert [curve.at(n) for n in (1, 4, 64)] == pytest.approx([3.1, 4.0, 64.0])
    assert curve.at(34) == pytest.approx(34.0) and curve.at(600) == pytest.approx(600.0)
    assert CostCurve.fit({1: [3.0], 2: [2.0], 3: [3.5]}).at(2) == 3.0


def test_a_curve_learns_where_it_is_looked_at_and_drifts_elsewhere() -> None:
    curve = CostCurve.fit({1: [1.0], 512: [512.0]})
    for _ in range(200):
        curve.learn(4, 5.0 / curve.at(4))
    assert curve.at(4) == pytest.approx(5.0, rel=0.01) and 1.01 < curve.at(64) / 64 < 1.25


def test_costs_survive_a_file() -> None:
    costs = Costs(FLAT, CHEAP_DRAFTS, prompt_share=0.7, reach=1e-6, catch_up=1e-5, busy=True)
    assert Costs.from_document(costs.document()) == costs
    with pytest.raises(ValueError, match="knots"):
        Costs.from_document({**costs.document(), "knots": [1, 2]})
    with pytest.raises(ValueError, match="sense"):
        Costs.from_document({**costs.document(), "passes": [0.0] * len(KNOTS)})


def test_costs_of_an_earlier_start_follow_a_machine_that_is_slower_as_a_whole() -> None:
    kept = Costs(CostCurve.fit({1: [0.010], 4: [0.013]}), CostCurve.fit({1: [0.002]}), trial=TRIAL)
    for _ in range(TRIAL):
        kept.record_pass(PassShape(1), 0.015)
    assert [kept.passes.at(1), kept.passes.at(4), kept.drafts.at(1)] == pytest.approx([0.015, 0.0195, 0.003], rel=0.05)
    for _ in range(200):  # from then on a surprise is one of its count first of all
        kept.record_pass(PassShape(1), 0.010)
    assert kept.passes.at(1) == pytest.approx(0.010, rel=0.05) and kept.passes.at(4) > 0.015
    assert kept.drafts.at(1) == pytest.approx(0.003, rel=0.05)


@pytest.mark.slow
def test_a_calibration_measures_this_engine() -> None:
    engine = LLM(headed_model("mimo"), EngineConfig(**SMALL)).engine
    costs = calibrate(engine)
    assert costs.passes.at(16) >= costs.passes.at(1) > 0 < costs.drafts.at(1)
    assert not engine.has_work and engine.stats.passes == 0


def learn(acceptance: AcceptanceEstimator, each: Sequence, score: float, right: bool) -> None:
    acceptance.record_draft(each, Draft([7 if right else 8], method="mtp", scores=[score]))
    each.tokens.append(7)
    acceptance.record_outcomes(each)


@pytest.mark.slow
def test_slow_passes_take_the_prompt_as_the_last_point() -> None:
    """Rows of a slow mixture of experts are not cheap before they are measured; a cold first pass is limited."""
    slow = CostSamples({1: [0.2]}, prompts=[(PassShape(1, 23), 1.3)])
    add_prompt_pass(slow)
    assert CostCurve.fit(slow.passes).at(24) == pytest.approx(1.3)
    cold = CostSamples({1: [0.2]}, prompts=[(PassShape(1, 23), 50.0)])
    add_prompt_pass(cold)
    assert CostCurve.fit(cold.passes).at(24) == pytest.approx(0.2 * 24**0.7)
    concave = CostSamples({1: [0.2], 2: [0.4]}, prompts=[(PassShape(1, 23), 1.3)])
    add_prompt_pass(concave)
    assert CostCurve.fit(concave.passes).at(6) < 0.6  # on with the first slope: 1.2
    known = CostSamples({1: [0.2], 8: [0.21]}, prompts=[(PassShape(1, 23), 50.0)])
    add_prompt_pass(known)
    assert list(known.passes) == [1, 8]


def test_scores_are_calibrated() -> None:
    acceptance, rng = AcceptanceEstimator(), np.random.default_rng(0)
    for _ in range(600):
        score = float(rng.choice([0.15, 0.55, 0.97]))
        learn(acceptance, sequence(), score, rng.random() < score / 2)
    drafts = [Draft([7], method="mtp", scores=[score]) for score in (0.15, 0.55, 0.97)]
    found = [acceptance.probability(sequence(), draft, 0) for draft in drafts]
    assert found == pytest.approx([0.075, 0.275, 0.485], abs=0.08)


def test_nothing_is_learned_behind_a_miss() -> None:
    acceptance, each = AcceptanceEstimator(), sequence()
    acceptance.record_draft(each, Draft([7, 8, 9], method="mtp", scores=[0.5] * 3))
    each.tokens += [7, 1, 9]
    acceptance.record_outcomes(each)
    assert acceptance.table(each, "mtp", 0).num_tries == 1
    assert acceptance.table(each, "mtp", 1).num_tries == 1  # the miss itself; the third token says nothing


def test_sequences_and_temperatures_have_records_of_their_own() -> None:
    acceptance, good, bad = AcceptanceEstimator(), sequence(), sequence()
    for _ in range(40):
        learn(acceptance, good, 0.5, True)
        learn(acceptance, bad, 0.5, False)
    assert acceptance.factor(good, "mtp") > 1.3 and acceptance.factor(bad, "mtp") < 0.6
    acceptance.release(bad)
    assert acceptance.factor(bad, "mtp") == 1.0
    acceptance, cold, hot = AcceptanceEstimator(), sequence(), sequence(temperature=1.0)
    for _ in range(100):
        learn(acceptance, cold, 0.5, True)
        learn(acceptance, hot, 0.5, False)
    assert acceptance.table(cold, "mtp", 0).mean > acceptance.table(hot, "mtp", 0).mean + 0.2


class Known(Costs):
    """Costs that nobody corrects."""

    def record_pass(self, work: PassShape, seconds: float) -> None:
        pass


@dataclass
class World:
    """Sequences that are drafted for as the pilot says; the drafter's score is what its token's chance is."""

    costs: Costs
    count: int
    rate: Callable[[np.random.Generator], float]
    prompt_rows: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def run(self, steps: int) -> tuple[float, float, float]:
        """(seconds per token, tokens verified per step and sequence, share of the time spent on drafts), of the second
        half."""
        pilot = AutoDepth("mtp")
        pilot.costs = self.costs
        sequences = [sequence() for _ in range(self.count)]
        for step in range(2 * steps):
            if step in (0, steps):
                seconds = drafting = tokens = verified = 0
            requests: list[DraftRequest] = []
            if not pilot.should_skip_step() and pilot.estimate_costs(PassShape(self.count, self.prompt_rows)):
                requests = pilot.make_requests([DraftCandidate(each, 8, 0) for each in sequences])
            probabilities = {request.sequence: self._draft(request) for request in requests}
            lengths = [len(request.sequence.draft.tokens) for request in requests]
            taken = self.costs.draft_seconds([sum(n > i for n in lengths) for i in range(max(lengths, default=0))], 0)
            pilot.cut(requests)
            rows = self.count + sum(len(each.draft.tokens) for each in sequences)
            took = self.costs.pass_seconds(PassShape(rows, self.prompt_rows))
            emitted = sum(self._commit(pilot, each, probabilities.get(each, ())) for each in sequences)
            pilot.record_step(PassShape(rows, self.prompt_rows), self.count, emitted, took, taken)
            seconds, drafting, tokens = seconds + took + taken, drafting + taken, tokens + emitted
            verified += rows - self.count
        return seconds / tokens, verified / steps / self.count, drafting / seconds

    def _draft(self, request: DraftRequest) -> Seq[float]:
        request.sequence.draft, probabilities = Draft(method="mtp"), []
        if request.gate is None or not request.gate.should_start:
            return probabilities
        while len(request.sequence.draft.tokens) < request.depth:
            probabilities.append(self.rate(self.rng))
            request.sequence.draft.tokens.append(int(self.rng.random() < probabilities[-1]))  # 1 is right
            request.sequence.draft.scores.append(probabilities[-1])
            if not request.gate.should_continue(request.sequence.draft):
                break
        return probabilities

    def _commit(self, pilot: AutoDepth, each: Sequence, probabilities: Seq[float]) -> int:
        accepted = next((i for i, token in enumerate(each.draft.tokens) if token != 1), len(each.draft.tokens))
        each.tokens += [1] * (accepted + 1)
        pilot.acceptance.record_outcomes(each)
        each.draft = Draft()
        return accepted + 1


def always(probability: float) -> Callable[[Any], float]:
    return lambda rng: probability


def confident(rng: np.random.Generator) -> float:
    """Sure in half of the cases, clueless in the other."""
    return float(rng.choice([0.03, 0.97]))


def plain(costs: Costs, count: int) -> float:
    return costs.pass_seconds(PassShape(count)) / count


@pytest.mark.parametrize(
    ("passes", "rate", "slowest", "depths", "drafting"),
    [(FLAT, 0.97, 0.3, (5, 8), 1.0), (FLAT, 0.02, 1.01, (0, 8), 0.01), (STEEP, 0.8, 1.01, (0, 0.05), 1.0)],
    ids=["free rows, right guesses", "wrong guesses", "dear rows"],
)
def test_depth_by_cost_and_rate(
    passes: CostCurve, rate: float, slowest: float, depths: tuple[float, float], drafting: float
) -> None:
    costs = Known(passes, CHEAP_DRAFTS)
    per_token, depth, share = World(costs, 1, always(rate)).run(300)
    assert per_token < slowest * plain(costs, 1) and depths[0] <= depth < depths[1] and share < drafting


def test_the_depth_falls_with_the_number_of_sequences() -> None:
    depths = []
    for count in (1, 2, 4, 8, 32):
        costs = Known(FLAT, CHEAP_DRAFTS)
        per_token, depth, _ = World(costs, count, always(0.6)).run(150)
        assert per_token < 1.01 * plain(costs, count)
        depths.append(depth)
    assert depths[0] > 2 and depths[-1] < 0.1 and depths == sorted(depths, reverse=True)


def best_fixed(costs: Costs, rate: float) -> float:
    """Seconds per token at the best of all depths."""
    steps = [costs.pass_seconds(PassShape(1 + k)) + costs.draft_seconds([1] * k, 0) for k in range(9)]
    return min(seconds / sum(rate**i for i in range(k + 1)) for k, seconds in enumerate(steps))


@pytest.mark.slow
def test_never_far_from_the_best_fixed_depth() -> None:
    costs = Known(CostCurve.fit({1: [1.0], 8: [1.6], 64: [9.0]}), CostCurve.fit({1: [0.08], 64: [0.8]}))
    for rate in (0.3, 0.5, 0.7, 0.9):
        per_token, _, _ = World(costs, 1, always(rate)).run(400)
        assert per_token < 1.03 * best_fixed(costs, rate)


def test_a_score_decides_over_each_draft() -> None:
    """Half of the drafts are worthless: no fixed depth can do what looking at each of them does."""
    costs = Known(CostCurve.fit({1: [1.0], 8: [3.0], 64: [20.0]}), CHEAP_DRAFTS)
    per_token, _, _ = World(costs, 1, confident).run(400)
    assert per_token < 0.95 * best_fixed(costs, 0.5)


def test_prompt_rows_make_rows_dearer() -> None:
    costs = Known(FLAT, CHEAP_DRAFTS)
    _, alone, _ = World(costs, 1, always(0.5)).run(150)
    _, beside, _ = World(replace(costs), 1, always(0.5), prompt_rows=64).run(150)
    assert beside < alone


def test_what_a_head_must_make_up_for_has_to_pay() -> None:
    pilot = AutoDepth("mtp")
    pilot.costs = Known(FLAT, CHEAP_DRAFTS, catch_up=0.05)
    each = sequence()
    pilot.estimate_costs(PassShape(1))
    drafts = [pilot.make_requests([DraftCandidate(each, 8, uncached)])[0] for uncached in (0, 100, 100_000)]
    assert [draft.gate.should_start for draft in drafts] == [True, True, False]


@pytest.mark.slow
def test_auto_keeps_the_text_and_a_table_by_batch_size() -> None:
    model = headed_model("mimo")
    engine = LLM(model, EngineConfig(**SMALL, depth_by_batch="[[1, 2, 1], [3, 64, 0]]")).engine
    assert [engine.config.depth_limit(n) for n in (1, 2, 3, 100)] == [1, 1, 0, 0]
    params, texts = SamplingParams(max_tokens=40, ignore_eos=True), {}
    for depth in (0, AUTO):
        llm = LLM(model, EngineConfig(**SMALL, depth=depth))
        texts[depth] = [done.token_ids for done in llm.generate(["one two three", "the"], params)]
    assert texts[0] == texts[AUTO]


@pytest.mark.parametrize(("passes", "width"), [(FLAT, 3), (STEEP, 1), (CostCurve.fit({1: [1.0], 8: [2.0]}), 1)])
def test_a_draft_is_as_wide_as_rows_are_cheap(passes: CostCurve, width: int) -> None:
    pilot = AutoDepth("mtp")
    pilot.costs = Known(passes, CHEAP_DRAFTS)
    pilot.estimate_costs(PassShape(1))
    assert pilot.width == width


def test_a_leaf_stays_where_it_promises_more_than_its_row() -> None:
    pilot, each = AutoDepth("mtp"), sequence()
    pilot.costs = Known(CostCurve.fit({1: [1.0], 8: [1.7], 64: [8.0]}), CHEAP_DRAFTS)
    pilot.estimate_costs(PassShape(1))
    (request,) = pilot.make_requests([DraftCandidate(each, 8, 0, width=2)])
    assert request.width == 2
    leaves = [Leaf(0, 1, 9, 0.35), Leaf(1, 1, 4, 0.01), Leaf(2, 1, 5, 0.9)]
    each.draft = Draft([7, 8, 3], method="mtp", scores=[0.6, 0.6, 0.01], leaves=list(leaves))
    pilot.cut([request])
    assert each.draft.tokens == [7, 8] and each.draft.leaves == leaves[:1]  # no leaf beside a token that is cut


def test_leaves_are_calibrated_apart_from_first_choices() -> None:
    acceptance, each, leaf = AcceptanceEstimator(), sequence(), Leaf(0, 1, 8, 0.5)
    for _ in range(100):
        acceptance.record_draft(each, Draft([7], method="mtp", scores=[0.5], leaves=[leaf]))
        each.tokens.append(8)
        acceptance.record_outcomes(each)
    assert (
        acceptance.leaf_probability(each, "mtp", leaf) > 0.9 > 0.1 > acceptance.table(each, "mtp", 0).probability(0.5)
    )
    assert acceptance.first_token_rate("mtp") == (100, 0)
