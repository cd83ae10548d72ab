"""Depth `auto`: how many tokens to draft per sequence and step, from measured costs and estimated acceptance.

A step should minimize seconds / tokens. As in Dinkelbach's method for fractional programs (1967), each row and each
draft step is then decided alone: its acceptance probability times the value of a token must exceed its cost. The value
of a token is the time of plain decoding per token, times the share of that time that recent steps have taken. Prompt
rows in a pass make drafted rows more expensive (a pass that computes anyway does not wait for memory), but do not
change the value of a token: they are paid for whatever is drafted.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from headstart.config import MAX_DEPTH
from headstart.core import Draft, Leaf, Sequence
from headstart.drafters.base import DraftRequest
from headstart.engine.acceptance import EDGES, PLACES, AcceptanceEstimator, score_of
from headstart.engine.costs import Costs, PassShape
from headstart.kernels.draft_loop import GateRule, GateState, expected_saving

MARGIN = 0.02
"""Minimum expected saving of all drafts together, as a share of the step's time: estimates are not exact, and the
Python around a draft costs about as much."""
BATCH_MARGIN, PRUDENCE = 0.06, 0.8
"""Extra margin, and extra factor on the costs of rows and draft steps, in the limit of large batches. A token saved in
one sequence shortens a large batch by less than its share, and sequences that end at different times share no prompt
passes."""
PROBES = 0.005  # share of all time that may be spent on drafts that do not pay at present
FIRST_PROBES = 16  # drafts of a new engine that are made without time credit, while acceptance is unknown
MAX_REST_STEPS, REST_PER_SEQUENCE = 7, 2
"""Maximum of successive steps without drafts, when neither the head nor lookups pay: MAX_REST_STEPS, or in large
batches REST_PER_SEQUENCE for each sequence, since a token saved there is a smaller share of the step."""
DRAFT_ROW = 0.1  # cost of a row in a draft that takes one pass, as a share of the draft step
MIN_ROW_SHARE = 0.002
"""Minimum cost of a row, as a share of a plain pass: measured differences may be too small by chance."""
KEPT_STEPS = 8
"""Gates and costs serve up to KEPT_STEPS further steps while the batch stays the same and all its drafts are worth
starting. Computing them takes 1 % of a small model's step (docs/log)."""
TIME_DECAY, KEPT_DECAY = 0.98, 0.9
"""Decay per step of the running sums of seconds, and of the running mean of verified tokens per draft."""
LEAF_ROW_SHARE, LEAF_WIDTH = 0.1, 3
"""Leaves (core.Leaf) are drafted where a row costs less than this share of a token's value, up to this many candidates
for each token. A second choice is right for 1 token in 6: with dearer rows leaves gain less than 1 % (docs/log)."""
MAX_LEAVES = 16  # in a draft
BIN_EDGES = np.array(EDGES)


@dataclass(frozen=True)
class DraftCandidate:
    """A sequence that may get a draft."""

    sequence: Sequence
    limit: int  # maximum number of tokens
    num_uncached: int  # pairs that a head must compute before drafting
    width: int = 1  # candidates for each token


class AutoDepth:
    """Makes the gated draft requests of a step, and learns from its outcome."""

    def __init__(self, method: str, block: int = 0) -> None:
        """method: name of the drafter. block: maximum depth of drafts of one pass; 0: each token costs a step."""
        self.block = block
        self.costs, self.acceptance = Costs.unknown(), AcceptanceEstimator()
        self.token_s = self.row_s = self.draft_s = 0.0  # value of a token, cost of a row and of a draft's first step
        self.method = method
        self._spent = self._plain = 0.0  # seconds of recent steps, and of plain decoding for the same tokens
        self._mean_verified = 2.0  # verified tokens per draft
        self._mean_length = 128.0  # output tokens per sequence
        self._probe_credit_s = 0.0  # seconds available for drafts that do not pay
        self._first_probes = FIRST_PROBES
        self._pass_s = 0.0  # seconds of the next pass without drafts
        self._pass_rows = 0.0  # rows of that pass (Costs.weighted_rows)
        self._reach_s = 0.0  # seconds that the mean position adds to a row
        self._margin, self._prudence, self._min_probability = 0.0, 1.0, 0.0
        self._asks_head = False
        self._shape = PassShape(0)  # of the pass that the costs were computed for
        self._gates: dict[Sequence, AutoGate] = {}  # for these costs
        self._extra_s: list[float] = []  # cost of 1, 2, ... drafted rows in the next pass, as far as known
        self._may_keep_gates = False  # all these drafts are worth starting
        self._keeps_gates, self._age = False, 0  # the present step uses earlier gates; number of such steps
        self._rest_steps = self._steps_to_skip = 0  # steps of the present rest without drafts: in all, and left
        self._max_rest = MAX_REST_STEPS

    @property
    def share(self) -> float:
        """Recent time per token, as a share of plain decoding's."""
        return min(1.0, self._spent / self._plain) if self._plain else 1.0

    def make_requests(self, candidates: Seq[DraftCandidate]) -> list[DraftRequest]:
        """A gated request for each candidate, for the pass given to `estimate_costs`."""
        if not self._keeps_gates or self._gates.keys() != {candidate.sequence for candidate in candidates}:
            self._make_gates(candidates)
        return [DraftRequest(each.sequence, each.limit, self._gates[each.sequence], each.width) for each in candidates]

    def _make_gates(self, candidates: Seq[DraftCandidate]) -> None:
        """Sets `_gates` at the present costs: which drafts of the head are worth starting, and which one is a probe."""
        savings = [self._savings(candidate.sequence, candidate.limit) for candidate in candidates]
        gains = [self._gain(candidate, sum(each)) for candidate, each in zip(candidates, savings, strict=True)]
        positive = [gain for gain in gains if gain > 0]
        # a draft step of a few sequences costs more than their share of a step of all sequences
        extra = self._prudence * self.costs.drafts.at(max(len(positive), 1)) - self.draft_s * len(positive)
        self._asks_head = asks_head = sum(positive) - extra >= self._margin
        self._gates = {
            candidate.sequence: AutoGate(self, candidate.sequence, asks_head and gain > 0, self._num_worthwhile(each))
            for candidate, gain, each in zip(candidates, gains, savings, strict=True)
        }
        refused = [each for each in candidates if not self._gates[each.sequence].should_start]
        self._may_keep_gates = not refused
        if refused:
            least = min(refused, key=lambda each: each.num_uncached)
            self._probe(least, self._gates[least.sequence])

    @property
    def width(self) -> int:
        """Candidates for each token that a draft may have, at the costs of the next pass."""
        return LEAF_WIDTH if self.row_s < LEAF_ROW_SHARE * self.token_s else 1

    def should_skip_step(self) -> bool:
        """True if no drafts are made in this step. Called once per step."""
        self._keeps_gates = False
        self._steps_to_skip -= 1
        return self._steps_to_skip >= 0

    def estimate_costs(self, next_pass: PassShape) -> bool:
        """Sets the value of a token and the costs of a row and a draft step, for the next pass without drafts.

        Returns False if no draft can pay, however sure it is.
        """
        is_same = next_pass[:2] == self._shape[:2]  # rows and prompt rows; positions grow in each step
        self._keeps_gates = self._may_keep_gates and is_same and self._age < KEPT_STEPS
        if self._keeps_gates:
            self._age += 1
            return True
        self._shape, self._age, self._may_keep_gates = next_pass, 0, False
        self._extra_s.clear()
        costs, count = self.costs, next_pass.rows
        self._max_rest = max(MAX_REST_STEPS, REST_PER_SEQUENCE * count)
        self._pass_rows, self._reach_s = costs.weighted_rows(next_pass), costs.reach * next_pass.reach / count
        self._pass_s = costs.passes.at(self._pass_rows) + count * self._reach_s
        plain = costs.passes.at(count) + count * self._reach_s
        crowding = (1 - 1 / count) ** 2
        self._prudence, self._margin = 1 + PRUDENCE * crowding, (MARGIN + BATCH_MARGIN * crowding) * plain
        more = max(1, round(count * self._mean_verified))
        self.row_s = self._prudence * max(self._rows_seconds(more) / more, MIN_ROW_SHARE * plain)
        self.token_s = self.share * plain / count
        self._min_probability = min(self.row_s, self._prudence * self._rows_seconds(1)) / self.token_s
        self.draft_s = self._prudence * costs.drafts.at(count) / count
        if self.row_s < self.token_s:
            return True
        self._steps_to_skip = self._max_rest
        return False

    def saves_time(self, count: int) -> bool:
        """True if a draft of `count` tokens that are certain to be accepted is worth making, at the latest costs."""
        return count * (self.token_s - self.row_s) > self._margin

    def _rows_seconds(self, rows: int) -> float:
        """Seconds that `rows` drafted rows, at the mean position of the others, add to the next pass."""
        passes, before = self.costs.passes, self._pass_rows
        return passes.at(before + rows) - passes.at(before) + rows * self._reach_s

    def _gain(self, candidate: DraftCandidate, saving: float) -> float:
        """Seconds that a draft of the head saves in a step; 0 if its uncached pairs cost more than it saves in the rest
        of the text. saving: of the draft's tokens."""
        sequence, gain = candidate.sequence, saving - self.draft_s
        if gain <= 0 or not candidate.num_uncached:
            return max(gain, 0.0)
        left = min(self._mean_length, sequence.request.params.max_tokens - sequence.num_output)
        steps = left / (1 + self.acceptance.table(sequence, self.method, 0).mean)
        return gain if gain * steps > self.costs.catch_up * candidate.num_uncached else 0.0

    def _savings(self, sequence: Sequence, limit: int) -> list[float]:
        """Expected saving of each token of the head's draft, times the probability that it is reached. Only the first
        token if the others cost draft steps of their own."""
        factor, tables = self.acceptance.factor(sequence, self.method), self.acceptance.tables(sequence, self.method)
        reached, savings = 1.0, list[float]()
        for place in range(min(limit, self.block or 1)):
            if place and reached * factor * self.token_s < self.row_s:
                break
            bins = tables[min(place, PLACES)].bins()
            savings.append(expected_saving(bins, reached * factor * self.token_s, self.row_s))
            reached *= min(1.0, factor * sum([share * probability for share, probability in bins]))
        return savings

    def _num_worthwhile(self, savings: Seq[float]) -> int:
        """Number of tokens in a one-pass draft that save more than their rows cost, plus one to learn from."""
        least = DRAFT_ROW * self.draft_s
        return 1 + next((place for place, saving in enumerate(savings) if saving < least), len(savings))

    def _probe(self, candidate: DraftCandidate, gate: "AutoGate") -> None:
        """Starts a draft that is not expected to pay, to learn its acceptance: one of the first, or one within the time
        credit."""
        seconds = self.costs.draft_seconds([1], candidate.num_uncached)
        if self._first_probes and seconds < self._pass_s:
            self._first_probes, gate.should_start = self._first_probes - 1, True
        elif seconds < self._probe_credit_s:
            self._probe_credit_s, gate.should_start = 0.0, True

    def is_sufficient(self, sequence: Sequence, draft: Draft, *, with_head: bool) -> bool:
        """True if a lookup's draft saves more than the head's expected draft (with_head), or than no draft."""
        if not draft.tokens:
            return False
        self.acceptance.record_draft(sequence, draft)
        worthwhile = self.acceptance.prefix_probabilities(sequence, draft, self.row_s / self.token_s)
        saving = sum(worthwhile) * self.token_s - len(worthwhile) * self.row_s
        if not with_head:
            return saving > 0
        of_head = sum(self._savings(sequence, MAX_DEPTH))
        if not self.block:  # later tokens may save as much as the first
            of_head /= max(1 - self.acceptance.table(sequence, self.method, 0).mean, 0.1)
        return saving > of_head - self.draft_s

    def cut(self, requests: Seq[DraftRequest]) -> None:
        """Cuts the drafts to the rows that are worth verifying together, likeliest first; or to nothing. A leaf stays
        only if the chain's token at its place does."""
        drafts = [request.sequence for request in requests if request.sequence.draft.tokens]
        rows: list[tuple[float, int, Leaf | None]] = []  # acceptance probability, index of the draft
        for index, sequence in enumerate(drafts):
            self.acceptance.record_draft(sequence, sequence.draft)
            kept = self.acceptance.prefix_probabilities(sequence, sequence.draft, self._min_probability)
            rows += [(probability, index, None) for probability in kept]
            if sequence.draft.leaves:
                rows += [(each, index, leaf) for each, leaf in self._leaves(sequence, kept)]
        rows.sort(key=lambda row: -row[0])  # stable: a token never comes before its predecessors
        num_rows = self._num_worth_verifying([probability for probability, _, _ in rows])
        lengths = [0] * len(drafts)
        for _, index, leaf in rows[:num_rows]:
            lengths[index] += leaf is None
        leaves = [(index, leaf) for _, index, leaf in rows[:num_rows] if leaf and leaf.place < lengths[index]]
        for length, sequence in zip(lengths, drafts, strict=True):
            if length < sequence.draft.num_rows:
                sequence.draft = sequence.draft.cut(length)
        for index, leaf in leaves:
            drafts[index].draft.leaves.append(leaf)
        num_verified = sum(lengths) + len(leaves)
        self._rest_steps = 0 if num_verified or self._asks_head else min(2 * self._rest_steps + 1, self._max_rest)
        self._steps_to_skip = self._rest_steps
        if drafts:
            self._mean_verified += (1 - KEPT_DECAY) * (num_verified / len(drafts) - self._mean_verified)

    def _leaves(self, sequence: Sequence, kept: Seq[float]) -> list[tuple[float, Leaf]]:
        """(acceptance probability, leaf) of the likeliest leaves. kept: probabilities of the chain's first tokens."""
        draft, found = sequence.draft, list[tuple[float, Leaf]]()
        for leaf in draft.leaves:
            if leaf.place < len(kept):
                reached = kept[leaf.place - 1] if leaf.place else 1.0
                probability = reached * self.acceptance.leaf_probability(sequence, draft.method, leaf)
                if probability > self._min_probability:
                    found.append((probability, leaf))
        return sorted(found, key=lambda each: -each[0])[:MAX_LEAVES]

    def _num_worth_verifying(self, falling: Seq[float]) -> int:
        """Number of rows that saves most, given falling acceptance probabilities; 0 if the saving is too small."""
        best, count, saved = self._margin, 0, 0.0
        for rows, probability in enumerate(falling, 1):
            saved += probability * self.token_s
            if rows > len(self._extra_s):
                self._extra_s.append(self._prudence * self._rows_seconds(rows))
            if (net := saved - self._extra_s[rows - 1]) > best:
                best, count = net, rows
        return count

    def record_step(self, shape: PassShape, count: int, emitted: int, pass_s: float, draft_s: float) -> None:
        """Learns from a step of `count` sequences that committed `emitted` tokens (0: other depths were requested).

        pass_s, draft_s: seconds of the pass, and of the drafts after it.
        """
        self._probe_credit_s += PROBES * (pass_s + draft_s)
        if not shape.prompt_rows and emitted:
            plain = self.costs.pass_seconds(PassShape(count, 0, shape.reach * count // shape.rows)) / count
            self._spent = TIME_DECAY * self._spent + pass_s + draft_s
            self._plain = TIME_DECAY * self._plain + plain * emitted
        self.costs.record_pass(shape, pass_s)

    def release(self, sequence: Sequence) -> None:
        self._gates.pop(sequence, None)
        self._mean_length += 0.1 * (sequence.num_output - self._mean_length)
        self.acceptance.release(sequence)


@dataclass
class AutoGate:
    """Gate of one sequence while its draft grows."""

    auto: AutoDepth
    sequence: Sequence
    should_start: bool  # the head's draft is worth starting
    max_depth: int = MAX_DEPTH  # tokens worth their rows in a one-pass draft
    _state: GateState | None = None  # set after each draft's first token

    def rule(self, method: str) -> GateRule:
        """`should_continue` as data, for a draft by this method."""
        auto, sequence = self.auto, self.sequence
        counts, factor = auto.acceptance.counts(sequence, method), auto.acceptance.factor(sequence, method)
        further_s = 0.0 if auto.block else auto.draft_s * auto.costs.further
        return GateRule(auto.token_s, auto.row_s, further_s, factor, counts, BIN_EDGES)

    def should_continue(self, draft: Draft) -> bool:
        """True if another token should be drafted. Called after each token."""
        place = len(draft.tokens) - 1
        if place == 0 or self._state is None:
            self._state = GateState(self.rule(draft.method))
        return self._state.should_continue(place, score_of(draft, place))

    def is_sufficient(self, draft: Draft) -> bool:
        return self.auto.is_sufficient(self.sequence, draft, with_head=self.should_start)
