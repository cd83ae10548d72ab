"""Measured costs, acceptance estimates, and the draft depth chosen from them."""

from collections.abc import Callable, Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from support import SMALL, VOCAB, headed_model, make, request, run

from headstart.api import LLM
from headstart.config import AUTO, EngineConfig
from headstart.core import Draft, Leaf, Mask, SamplingParams, Sequence, token_mask
from headstart.drafters.base import DraftRequest
from headstart.engine.acceptance import AcceptanceEstimator
from headstart.engine.calibrate import add_prompt_pass, calibrate
from headstart.engine.costs import KNOTS, TRIAL, CostCurve, Costs, CostSamples, PassShape
from headstart.engine.depth import KEPT_STEPS, AutoDepth, DraftCandidate
from headstart.engine.drafting import Drafting

FLAT = CostCurve.fit({1: [1.0], 8: [1.07], 64: [8.0]})
"""A pass that waits for memory up to 8 rows, and computes from there on."""
STEEP = CostCurve.fit({1: [1.0], 2: [2.0], 64: [64.0]})
CHEAP_DRAFTS = CostCurve.fit({1: [0.02], 64: [0.3]})


def sequence(tokens: int = 10, temperature: float = 0.0) -> Sequence:
    submitted = request(range(tokens), seed=1, stops=(), temperature=temperature, max_tokens=1000)
    return Sequence(submitted, 0, list(range(tokens)), 0)


def test_cost_curve_meets_its_measurements_and_is_monotonic() -> None:
    curve = CostCurve.fit({1: [9.0, 3.1, 9.0, 3.0, 9.0], 4: [4.0], 64: [64.0]})
    assert [curve.at(n) for n in (1, 4, 64)] == pytest.approx([3.1, 4.0, 64.0])
    assert curve.at(34) == pytest.approx(34.0) and curve.at(600) == pytest.approx(600.0)
    assert CostCurve.fit({1: [3.0], 2: [2.0], 3: [3.5]}).at(2) == 3.0


def test_cost_curve_learns_at_observed_rows_and_little_elsewhere() -> None:
    curve = CostCurve.fit({1: [1.0], 512: [512.0]})
    for _ in range(200):
        curve.learn(4, 5.0 / curve.at(4))
    assert curve.at(4) == pytest.approx(5.0, rel=0.01) and 1.01 < curve.at(64) / 64 < 1.25


def test_costs_round_trip_through_a_document() -> None:
    costs = Costs(FLAT, CHEAP_DRAFTS, prompt_share=0.7, reach=1e-6, catch_up=1e-5, busy=True)
    assert Costs.from_document(costs.document()) == costs
    with pytest.raises(ValueError, match="knots"):
        Costs.from_document({**costs.document(), "knots": [1, 2]})
    with pytest.raises(ValueError, match="sense"):
        Costs.from_document({**costs.document(), "passes": [0.0] * len(KNOTS)})


def test_stored_costs_scale_with_a_uniformly_slower_machine() -> None:
    stored = Costs(CostCurve.fit({1: [0.010], 4: [0.013]}), CostCurve.fit({1: [0.002]}), trial=TRIAL)
    for _ in range(TRIAL):
        stored.record_pass(PassShape(1), 0.015)
    assert [stored.passes.at(1), stored.passes.at(4), stored.drafts.at(1)] == pytest.approx(
        [0.015, 0.0195, 0.003], rel=0.05
    )
    for _ in range(200):  # after the trial a deviation counts mostly for its own number of rows
        stored.record_pass(PassShape(1), 0.010)
    assert stored.passes.at(1) == pytest.approx(0.010, rel=0.05) and stored.passes.at(4) > 0.015
    assert stored.drafts.at(1) == pytest.approx(0.003, rel=0.05)


@pytest.mark.slow
def test_calibration_measures_pass_and_draft_costs() -> None:
    engine = LLM(headed_model("mimo"), EngineConfig(**SMALL)).engine
    costs = calibrate(engine)
    assert costs.passes.at(16) >= costs.passes.at(1) > 0 < costs.drafts.at(1)
    assert not engine.has_work and engine.stats.passes == 0


def learn(acceptance: AcceptanceEstimator, each: Sequence, score: float, right: bool) -> None:
    acceptance.record_draft(each, Draft([7 if right else 8], method="mtp", scores=[score]))
    each.tokens.append(7)
    acceptance.record_outcomes(each)


@pytest.mark.slow
def test_prompt_pass_extends_the_curve_of_slow_passes() -> None:
    """Many rows of a slow mixture of experts are not assumed cheap; a cold first pass is limited."""
    slow = CostSamples({1: [0.2]}, prompts=[(PassShape(1, 23), 1.3)])
    add_prompt_pass(slow)
    assert CostCurve.fit(slow.passes).at(24) == pytest.approx(1.3)
    cold = CostSamples({1: [0.2]}, prompts=[(PassShape(1, 23), 50.0)])
    add_prompt_pass(cold)
    assert CostCurve.fit(cold.passes).at(24) == pytest.approx(0.2 * 24**0.7)
    concave = CostSamples({1: [0.2], 2: [0.4]}, prompts=[(PassShape(1, 23), 1.3)])
    add_prompt_pass(concave)
    assert CostCurve.fit(concave.passes).at(6) < 0.6  # the first slope, extrapolated, gives 1.2
    known = CostSamples({1: [0.2], 8: [0.21]}, prompts=[(PassShape(1, 23), 50.0)])
    add_prompt_pass(known)
    assert list(known.passes) == [1, 8]


def test_acceptance_is_calibrated_by_score() -> None:
    acceptance, rng = AcceptanceEstimator(), np.random.default_rng(0)
    for _ in range(600):
        score = float(rng.choice([0.15, 0.55, 0.97]))
        learn(acceptance, sequence(), score, rng.random() < score / 2)
    drafts = [Draft([7], method="mtp", scores=[score]) for score in (0.15, 0.55, 0.97)]
    found = [acceptance.prefix_probabilities(sequence(), draft, 0.0)[0] for draft in drafts]
    assert found == pytest.approx([0.075, 0.275, 0.485], abs=0.08)


def test_tokens_after_a_rejected_one_are_not_recorded() -> None:
    acceptance, each = AcceptanceEstimator(), sequence()
    acceptance.record_draft(each, Draft([7, 8, 9], method="mtp", scores=[0.5] * 3))
    each.tokens += [7, 1, 9]
    acceptance.record_outcomes(each)
    assert acceptance.table(each, "mtp", 0).num_tries == 1
    assert acceptance.table(each, "mtp", 1).num_tries == 1  # the rejected token; the third is unknown


def test_acceptance_is_tracked_per_sequence_and_temperature() -> None:
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


class FixedCosts(Costs):
    """Costs without corrections from measured passes."""

    def record_pass(self, work: PassShape, seconds: float) -> None:
        pass


@dataclass
class Simulation:
    """Decodes sequences with drafts of the depth that `AutoDepth` chooses; a token's score is its acceptance
    probability."""

    costs: Costs
    count: int
    rate: Callable[[np.random.Generator], float]
    prompt_rows: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def run(self, steps: int) -> tuple[float, float, float]:
        """Seconds per token, tokens verified per step and sequence, and share of time spent on drafts, over the second
        half of the steps."""
        auto = AutoDepth("mtp")
        auto.costs = self.costs
        sequences = [sequence() for _ in range(self.count)]
        for step in range(2 * steps):
            if step in (0, steps):
                seconds = drafting = tokens = verified = 0
            requests: list[DraftRequest] = []
            if not auto.should_skip_step() and auto.estimate_costs(PassShape(self.count, self.prompt_rows)):
                requests = auto.make_requests([DraftCandidate(each, 8, 0) for each in sequences])
            probabilities = {request.sequence: self._draft(request) for request in requests}
            lengths = [len(request.sequence.draft.tokens) for request in requests]
            taken = self.costs.draft_seconds([sum(n > i for n in lengths) for i in range(max(lengths, default=0))], 0)
            auto.cut(requests)
            rows = self.count + sum(len(each.draft.tokens) for each in sequences)
            took = self.costs.pass_seconds(PassShape(rows, self.prompt_rows))
            emitted = sum(self._commit(auto, each, probabilities.get(each, ())) for each in sequences)
            auto.record_step(PassShape(rows, self.prompt_rows), self.count, emitted, took, taken)
            seconds, drafting, tokens = seconds + took + taken, drafting + taken, tokens + emitted
            verified += rows - self.count
        return seconds / tokens, verified / steps / self.count, drafting / seconds

    def _draft(self, request: DraftRequest) -> Seq[float]:
        request.sequence.draft, probabilities = Draft(method="mtp"), []
        if request.gate is None or not request.gate.should_start:
            return probabilities
        while len(request.sequence.draft.tokens) < request.depth:
            probabilities.append(self.rate(self.rng))
            request.sequence.draft.tokens.append(int(self.rng.random() < probabilities[-1]))  # 1 is accepted
            request.sequence.draft.scores.append(probabilities[-1])
            if not request.gate.should_continue(request.sequence.draft):
                break
        return probabilities

    def _commit(self, auto: AutoDepth, each: Sequence, probabilities: Seq[float]) -> int:
        accepted = next((i for i, token in enumerate(each.draft.tokens) if token != 1), len(each.draft.tokens))
        each.tokens += [1] * (accepted + 1)
        auto.acceptance.record_outcomes(each)
        each.draft = Draft()
        return accepted + 1


def constant(probability: float) -> Callable[[Any], float]:
    return lambda rng: probability


def mixed_confidence(rng: np.random.Generator) -> float:
    """High probability for half of the tokens, low for the others."""
    return float(rng.choice([0.03, 0.97]))


def plain_seconds(costs: Costs, count: int) -> float:
    return costs.pass_seconds(PassShape(count)) / count


@pytest.mark.parametrize(
    ("passes", "rate", "slowest", "depths", "drafting"),
    [(FLAT, 0.97, 0.3, (5, 8), 1.0), (FLAT, 0.02, 1.01, (0, 8), 0.01), (STEEP, 0.8, 1.01, (0, 0.05), 1.0)],
    ids=["cheap rows, accepted drafts", "rejected drafts", "expensive rows"],
)
def test_depth_follows_costs_and_acceptance(
    passes: CostCurve, rate: float, slowest: float, depths: tuple[float, float], drafting: float
) -> None:
    costs = FixedCosts(passes, CHEAP_DRAFTS)
    per_token, depth, share = Simulation(costs, 1, constant(rate)).run(300)
    assert per_token < slowest * plain_seconds(costs, 1) and depths[0] <= depth < depths[1] and share < drafting


def test_depth_falls_with_batch_size() -> None:
    depths = []
    for count in (1, 2, 4, 8, 32):
        costs = FixedCosts(FLAT, CHEAP_DRAFTS)
        per_token, depth, _ = Simulation(costs, count, constant(0.6)).run(150)
        assert per_token < 1.01 * plain_seconds(costs, count)
        depths.append(depth)
    assert depths[0] > 2 and depths[-1] < 0.1 and depths == sorted(depths, reverse=True)


def best_fixed_depth_seconds(costs: Costs, rate: float) -> float:
    """Seconds per token at the best fixed depth."""
    steps = [costs.pass_seconds(PassShape(1 + k)) + costs.draft_seconds([1] * k, 0) for k in range(9)]
    return min(seconds / sum(rate**i for i in range(k + 1)) for k, seconds in enumerate(steps))


@pytest.mark.slow
def test_auto_depth_is_close_to_the_best_fixed_depth() -> None:
    costs = FixedCosts(CostCurve.fit({1: [1.0], 8: [1.6], 64: [9.0]}), CostCurve.fit({1: [0.08], 64: [0.8]}))
    for rate in (0.3, 0.5, 0.7, 0.9):
        per_token, _, _ = Simulation(costs, 1, constant(rate)).run(400)
        assert per_token < 1.03 * best_fixed_depth_seconds(costs, rate)


def test_scores_decide_the_length_of_each_draft() -> None:
    """Half of the drafts are worthless, so per-draft decisions beat every fixed depth."""
    costs = FixedCosts(CostCurve.fit({1: [1.0], 8: [3.0], 64: [20.0]}), CHEAP_DRAFTS)
    per_token, _, _ = Simulation(costs, 1, mixed_confidence).run(400)
    assert per_token < 0.95 * best_fixed_depth_seconds(costs, 0.5)


def test_prompt_rows_reduce_depth() -> None:
    costs = FixedCosts(FLAT, CHEAP_DRAFTS)
    _, alone, _ = Simulation(costs, 1, constant(0.5)).run(150)
    _, beside, _ = Simulation(replace(costs), 1, constant(0.5), prompt_rows=64).run(150)
    assert beside < alone


def test_drafting_starts_only_if_catching_up_pays() -> None:
    auto = AutoDepth("mtp")
    auto.costs = FixedCosts(FLAT, CHEAP_DRAFTS, catch_up=0.05)
    each = sequence()
    auto.estimate_costs(PassShape(1))
    drafts = [auto.make_requests([DraftCandidate(each, 8, uncached)])[0] for uncached in (0, 100, 100_000)]
    assert [draft.gate.should_start for draft in drafts] == [True, True, False]


def test_catching_up_is_paid_by_draft_steps_not_by_tokens() -> None:
    pilot, each = AutoDepth("mtp"), sequence()
    pilot.costs = FixedCosts(FLAT, CHEAP_DRAFTS, catch_up=0.05)
    pilot.estimate_costs(PassShape(1))
    (saved,) = pilot._savings(each, 8)
    uncached = int((saved - pilot.draft_s) * pilot._mean_length / 0.05) - 1  # paid if each token left saved as much
    (draft,) = pilot.make_requests([DraftCandidate(each, 8, uncached)])
    assert not draft.gate.should_start
    (draft,) = pilot.make_requests([DraftCandidate(each, 8, uncached // 2)])
    assert draft.gate.should_start


class ForcedText:
    """A constraint that allows one text."""

    done, accepting, error = False, False, ""

    def __init__(self, tokens: Seq[int]) -> None:
        self._tokens, self._place = tokens, 0

    def masks(self, draft: Seq[int], count: int | None = None) -> Mask:
        rows = np.stack([token_mask([token], VOCAB) for token in self._tokens[self._place :][: len(draft) + 1]])
        return rows[-(count or len(rows)) :]

    def fitting(self, draft: Seq[int]) -> int:
        return len(draft)

    def forced(self, limit: int) -> list[int]:
        return list(self._tokens[self._place :][:limit])

    def advance(self, token: int) -> bool:
        self._place += 1
        return token == self._tokens[self._place - 1]

    def copy(self) -> "ForcedText":
        return ForcedText(self._tokens)


@pytest.mark.parametrize(("passes", "depth", "drafted"), [(FLAT, AUTO, True), (STEEP, AUTO, False), (STEEP, 2, True)])
def test_auto_depth_drafts_forced_tokens_only_if_that_saves_time(
    passes: CostCurve, depth: int | str, drafted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Drafting, "learn", lambda *args: None)  # keeps the costs set below
    engine, text = make(headed_model("mimo"), drafter="ngram", depth=depth), list(range(20, 60))
    engine.drafting.auto.costs = FixedCosts(passes, CHEAP_DRAFTS)
    constrained = request(range(5), max_tokens=24, stops=(), constraint=ForcedText(text))
    (output,) = run(engine, [constrained]).values()
    assert output.tokens == text[:24]
    assert (engine.stats.forced > 0, engine.stats.passes < 12) == (drafted, drafted)


@pytest.mark.slow
def test_auto_depth_keeps_the_text_and_depth_by_batch_limits_it() -> None:
    model = headed_model("mimo")
    engine = LLM(model, EngineConfig(**SMALL, depth_by_batch="[[1, 2, 1], [3, 64, 0]]")).engine
    assert [engine.config.depth_limit(n) for n in (1, 2, 3, 100)] == [1, 1, 0, 0]
    params, texts = SamplingParams(max_tokens=40, ignore_eos=True), {}
    for depth in (0, AUTO):
        llm = LLM(model, EngineConfig(**SMALL, depth=depth))
        texts[depth] = [done.token_ids for done in llm.generate(["one two three", "the"], params)]
    assert texts[0] == texts[AUTO]


@pytest.mark.parametrize(("passes", "width"), [(FLAT, 3), (STEEP, 1), (CostCurve.fit({1: [1.0], 8: [2.0]}), 1)])
def test_draft_width_follows_row_costs(passes: CostCurve, width: int) -> None:
    auto = AutoDepth("mtp")
    auto.costs = FixedCosts(passes, CHEAP_DRAFTS)
    auto.estimate_costs(PassShape(1))
    assert auto.width == width


def test_leaves_are_kept_only_if_worth_their_row() -> None:
    auto, each = AutoDepth("mtp"), sequence()
    auto.costs = FixedCosts(CostCurve.fit({1: [1.0], 8: [1.7], 64: [8.0]}), CHEAP_DRAFTS)
    auto.estimate_costs(PassShape(1))
    (request,) = auto.make_requests([DraftCandidate(each, 8, 0, width=2)])
    assert request.width == 2
    leaves = [Leaf(0, 1, 9, 0.35), Leaf(1, 1, 4, 0.01), Leaf(2, 1, 5, 0.9)]
    each.draft = Draft([7, 8, 3], method="mtp", scores=[0.6, 0.6, 0.01], leaves=list(leaves))
    auto.cut([request])
    assert each.draft.tokens == [7, 8] and each.draft.leaves == leaves[:1]  # leaves beside a cut token are cut as well


def test_leaf_acceptance_is_calibrated_separately() -> None:
    acceptance, each, leaf = AcceptanceEstimator(), sequence(), Leaf(0, 1, 8, 0.5)
    for _ in range(100):
        acceptance.record_draft(each, Draft([7], method="mtp", scores=[0.5], leaves=[leaf]))
        each.tokens.append(8)
        acceptance.record_outcomes(each)
    assert (
        acceptance.leaf_probability(each, "mtp", leaf) > 0.9 > 0.1 > acceptance.table(each, "mtp", 0).probability(0.5)
    )
    assert acceptance.first_token_rate("mtp") == (100, 0)


def test_further_draft_steps_have_a_cost_of_their_own() -> None:
    """A draft of n steps takes 0.9 + 0.3 (n - 1): the cost of one more step is 0.3, whatever the usual depth is."""
    samples = CostSamples()
    for steps in (1, 3, 7):
        samples.record_draft([1] * steps, 0, 0.9 + 0.3 * (steps - 1))
    assert samples.further() == pytest.approx(1 / 3)
    costs = Costs(FLAT, CostCurve.fit({1: [0.9]}), further=1.0)
    for step in range(400):
        steps = 1 + step % 3
        costs.record_draft([1] * steps, 0, 0.9 + 0.3 * (steps - 1))
    assert costs.draft_seconds([1], 0) == pytest.approx(0.9, rel=0.05)
    assert costs.draft_seconds([1, 1], 0) == pytest.approx(1.2, rel=0.05)


def test_gate_compares_one_more_token_with_a_further_step() -> None:
    """After a first token that is accepted half of the time, a second is worth 0.25 - row: more than a further step
    costs, less than a first one."""
    auto, each = AutoDepth("mtp"), sequence()
    auto.costs = FixedCosts(FLAT, CostCurve.fit({1: [0.35]}), further=0.2)
    auto.estimate_costs(PassShape(1))
    (request,) = auto.make_requests([DraftCandidate(each, 8, 0)])
    each.draft = Draft([7], method="mtp", scores=[0.55])
    assert request.gate is not None and request.gate.should_continue(each.draft)
    auto.costs.further = 1.0
    each.draft = Draft([7], method="mtp", scores=[0.55])
    assert not request.gate.should_continue(each.draft)


def test_rows_do_not_seem_free_after_the_machine_became_faster() -> None:
    """All passes have four rows while the machine becomes 1.3 times as fast."""
    costs = Costs(CostCurve.fit({1: [1.3], 4: [1.56]}), CHEAP_DRAFTS)
    for _ in range(400):
        costs.record_pass(PassShape(4), 1.2)
    assert costs.passes.at(4) == pytest.approx(1.2, rel=0.01)
    assert costs.passes.at(1) < 0.99 * costs.passes.at(4)


def test_gates_are_kept_while_the_batch_stays_the_same() -> None:
    auto, each = AutoDepth("mtp"), sequence()
    auto.costs = FixedCosts(FLAT, CHEAP_DRAFTS)

    kept: list[Any] = []  # all gates, so that no two have the same id

    def gates(*sequences: Sequence, rows: int) -> list[int]:
        """Ids of the sequences' gates in the next step."""
        auto.should_skip_step()
        auto.estimate_costs(PassShape(rows))
        kept.extend(made.gate for made in auto.make_requests([DraftCandidate(one, 8, 0) for one in sequences]))
        return [id(gate) for gate in kept[-len(sequences) :]]

    first, ended = gates(each, rows=1), sequence()
    assert gates(each, rows=1) == first and kept[0].should_start
    both = gates(each, ended, rows=2)
    assert gates(each, ended, rows=2) == both and both[0] != first[0]
    auto.release(ended)
    assert gates(each, sequence(), rows=2)[0] not in both, "another sequence has taken the place of the ended one"
    last = gates(each, rows=1)
    steps = [gates(each, rows=1) == last for _ in range(KEPT_STEPS + 1)]
    assert steps == [True] * KEPT_STEPS + [False], "gates grow old"
