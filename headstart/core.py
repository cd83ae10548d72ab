"""The vocabulary of the engine: dataclasses and one protocol, nothing else.

Words: *row* = one token position in a pass; *pass* = one trunk forward; *depth* = tokens drafted;
*acceptance length* = 1 + accepted / drafts. Array shapes: R rows, S sequences, B blocks, L sampling rows, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headstart.params import SamplingParams as SamplingParams
from headstart.stats import DraftStats as DraftStats

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float32 = NDArray[np.float32]
Mask = NDArray[np.uint32]
"""Tokens that may come: bit v % 32 of word v // 32 is token v; [ceil(V / 32)] words, or a row of them per token."""
FinishReason = Literal["stop", "length", "abort", "error"]
Progress = Callable[[int, int, str], None]
"""Called with (done, total, what is being done) while something takes its time."""

GREEDY_BELOW = 1e-5  # temperatures below this are greedy: argmax without noise
FORCED = "forced"  # method of drafts that a constraint leaves no choice about


def no_progress(done: int, total: int, what: str) -> None:
    """The Progress of callers that nobody watches."""


class Constraint(Protocol):
    """Where one sequence stands in what its output must be (text.grammar). It sees output tokens only. To look ahead
    (masks, fitting, forced) leaves it where it is. `error`: why the text can neither end nor go on; masks find it."""

    def masks(self, draft: Seq[int], count: int | None = None) -> Mask:
        """[k + 1, words] masks before and after each of k drafted tokens, or the last `count` of them. Rows behind a
        refused token allow everything."""

    def fitting(self, draft: Seq[int]) -> int:
        """How many of the first drafted tokens are taken, up to the end of the text."""

    def forced(self, limit: int) -> list[int]:
        """At most `limit` tokens, each the only one allowed after those before it, up to the end of the text."""

    def advance(self, token: int) -> bool:
        """Take a token; False if it is refused."""

    def rollback(self, count: int) -> None: ...
    def copy(self) -> Self: ...
    @property
    def done(self) -> bool: ...
    @property
    def accepting(self) -> bool: ...
    @property
    def error(self) -> str: ...


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt and how to continue it. `seed` is resolved; `depth` None follows the engine, 0 drafts nothing."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    stop_ids: frozenset[int]  # end-of-text ids of the model (empty with ignore_eos) and stop_token_ids
    banned_until_min: frozenset[int] = frozenset()  # masked while fewer than min_tokens are out
    banned: Mapping[tuple[int, ...], frozenset[int]] = field(default_factory=dict)  # masked where the output ends so
    allowed: Mask | None = field(default=None, compare=False)  # what may come at all, one row; None: everything
    depth: int | None = None
    constraint: Constraint | None = field(default=None, compare=False)  # at its start; each choice walks a copy
    cache_salt: str = ""  # prefixes are shared by requests of the same salt
    owner: str = ""  # who asks: texts serve as drafts for requests of the same owner and salt
    share: float = 1.0  # of the engine, against other owners that wait
    priority: int = 0  # lower runs earlier, whoever asks
    embeds: bool = False  # the prompt's embedding is wanted (see Delta), not a text


@dataclass
class Draft:
    """Tokens a drafter proposes to follow `Sequence.tokens`. `probs` [k, V] is what rule `rejection` needs, else None
    (a one-hot draft). `scores`: how sure the drafter is of each, 0..1, in its own measure; none if it cannot say."""

    tokens: list[int] = field(default_factory=list)
    probs: Any = None
    method: str = ""
    scores: list[float] = field(default_factory=list)

    def cut(self, length: int) -> Draft:
        """Its first `length` tokens."""
        probs = None if self.probs is None else self.probs[:length]
        return Draft(self.tokens[:length], probs, self.method, self.scores[:length])


class RowConstants(NamedTuple):
    """What SamplingRows says of every row of a sequence, where its fields are explained; `has_bias`: its logits may
    be biased or banned."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    choice: int
    repetition: float
    presence: float
    frequency: float
    num_logprobs: int
    has_bias: bool

    @property
    def has_penalties(self) -> bool:
        """Are the counts of its tokens needed?"""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


def int_array() -> array[int]:
    """A list of int32 that numpy copies at once."""
    return array("i")


@dataclass(eq=False)
class TokenCounts:
    """Distinct tokens of a sequence in order of appearance, and how often each is in the output (0: prompt only)."""

    ids: array[int] = field(default_factory=int_array)
    counts: array[int] = field(default_factory=int_array)
    places: dict[int, int] = field(default_factory=dict)  # id -> index
    num_read: int = 0  # tokens of the sequence that are counted


@dataclass(eq=False)
class Sequence:
    """One running choice of a request: its committed tokens and what has been computed of them.

    Invariant between steps: 0 <= num_computed <= len(tokens) - 1; trunk KV and hidden states are valid for positions
    below num_computed, those of the drafter's network i for positions below filled[i].
    """

    request: Request
    choice: int
    tokens: list[int]  # prompt, then output
    order: int  # arrival; lower runs first
    num_computed: int = 0
    filled: Counter[int] = field(default_factory=Counter)
    admitted: bool = False  # has run before, perhaps preempted since
    num_cached: int = 0  # prompt positions taken from the prefix cache on first admission
    num_prompt_logprobs: int = 0  # prompt tokens whose logprobs are out; a preempted prompt is computed twice
    num_pooled: int = 0  # prompt positions whose hidden states are in `pooled`, their sum [H] in float64
    pooled: Any = None
    block_table: array[int] = field(default_factory=int_array)
    draft: Draft = field(default_factory=Draft)
    counts: TokenCounts = field(default_factory=TokenCounts)  # kept by engine.sampling for those that need it
    stats: DraftStats = field(default_factory=lambda: DraftStats())
    finish_reason: FinishReason | None = None
    error: str = ""  # why finish_reason is "error"
    constraint: Constraint | None = None  # after the output so far

    @property
    def prompt_logprobs(self) -> int | None:
        """Top alternatives beside each token of the prompt; None: none are wanted, or the first choice has them."""
        return self.request.params.prompt_logprobs if self.choice == 0 else None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @cached_property
    def is_masked(self) -> bool:
        """May there be tokens that are not allowed?"""
        return self.constraint is not None or self.request.allowed is not None

    @cached_property
    def is_ordinary(self) -> bool:
        """Is the text the model's own: not hot, nothing banned or pushed? Of others a drafter's record says nothing."""
        params, request = self.request.params, self.request
        pushed = params.logit_bias or request.banned or request.allowed is not None
        mild = max(abs(params.presence_penalty), abs(params.frequency_penalty), abs(params.repetition_penalty - 1))
        return not pushed and params.temperature <= 1 and mild <= 0.5

    @cached_property
    def row_constants(self) -> RowConstants:
        params = self.request.params
        return RowConstants(
            temperature=params.temperature,
            top_k=min(params.top_k, 2**31 - 1),
            top_p=params.top_p,
            min_p=params.min_p,
            seed=self.request.seed,
            choice=self.choice,
            repetition=params.repetition_penalty,
            presence=params.presence_penalty,
            frequency=params.frequency_penalty,
            num_logprobs=-1 if params.logprobs is None else params.logprobs,
            has_bias=bool(params.logit_bias or self.request.banned_until_min or self.request.banned),
        )


@dataclass(slots=True)  # these two not frozen, as StepPlan
class Span:
    """Rows of one sequence in a pass: positions start .. start + num_rows - 1; the last num_sample are sampled."""

    sequence: Sequence
    start: int
    num_rows: int
    num_sample: int


@dataclass(slots=True)
class Rows:
    """Rows of one sequence in a pass, in the slots of positions from `start` on; the last `num_logits` get logits.
    Positions follow each other, or are those of a tree: row i behind row parents[i] (< i), or behind position start - 1
    where that is -1. `sees`: the last position that all of them see; None: each sees up to itself."""

    sequence: Sequence
    start: int
    token_ids: Seq[int]
    num_logits: int
    sees: int | None = None
    parents: Seq[int] | None = None


@dataclass(eq=False)
class StateSteps:
    """What a pass does to recurrent states. That of sequence s is read in slot reads[s] (-1: zeros), where it stands
    before position starts[s]; the rows from there to the first row of the pass are those kept last time, and go first.
    After rows have gone up to a store's position the state is written to the store's slot: one of them is its own,
    with position keeps[s]. The rows from keeps[s] on are kept: they are drafted, and may not be true."""

    own: Int32  # [S] the sequence's slot; kept rows belong to it
    reads: Int32  # [S]
    starts: Int32  # [S]
    keeps: Int32  # [S]
    store_starts: Int32  # [S + 1] stores of sequence s are store_starts[s] .. store_starts[s + 1] - 1
    store_positions: Int32  # ascending within a sequence
    store_slots: Int32


MAX_PATH = 17  # slots of a row's path: drafted tokens, and the committed one that they follow


@dataclass(eq=False)
class Paths:
    """Where rows of a tree find their nearest ancestors, CSR: slots of the last n <= MAX_PATH positions of a row, its
    own the last of them. Positions before those, and all those of a row without slots, are in its block table."""

    starts: Int32  # [R + 1]
    slots: Int32


@dataclass(eq=False, kw_only=True)  # frozen but for the time that takes: several are made in a step
class StepPlan:
    """The one per-step input of a forward: row -> token, position, KV slot, sequence."""

    token_ids: Int32  # [R]
    positions: Int32  # [R]
    slots: Int32  # [R] where this row's KV is written
    sees: Int32 | None = None  # [R] the last position a row sees; None: each its own
    paths: Paths | None = None  # of a tree's rows, which see up to their own position
    row_starts: Int32  # [S + 1] rows of sequence s are row_starts[s] .. row_starts[s + 1] - 1
    block_tables: Int32  # [S, B] block ids, padded with 0
    logit_rows: Int32  # [L] rows whose logits are wanted
    first_position: int = 0  # first position that holds KV: 0 in a trunk, 1 in an MTP head (pair p lives at p + 1)
    hidden_slots: Int32 | None = None  # [R] slots of the stored hidden state a head reads; None in a trunk
    block_size: int = 16
    states: StateSteps | None = None  # of a trunk with recurrent layers

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)


@dataclass(eq=False)  # not frozen, as StepPlan
class SamplingRows:
    """What turns L rows of raw logits into L tokens. Order of processing: allowed mask -> bans, bias -> penalties ->
    / T -> min-p -> top-k -> top-p -> + Gumbel noise -> argmax. Sparse parts are CSR over rows (indptr has L + 1)."""

    temperature: Float32  # [L]; below 1e-5 greedy
    top_k: Int32  # [L]; 0 off
    top_p: Float32  # [L]; 1 off
    min_p: Float32  # [L]; 0 off
    seed: NDArray[np.uint64]  # [L] Philox key
    position: Int64  # [L] absolute position of the token to be drawn (row position + 1)
    choice: Int32  # [L] choice index of the request's n
    bias_indptr: Int32
    bias_ids: Int32  # distinct within a row
    bias_values: Float32  # added to the logits; -inf bans (min_tokens)
    penalty_indptr: Int32
    penalty_ids: Int32  # distinct ids of prompt and output
    penalty_counts: Int32  # occurrences in the output; 0 for prompt-only ids
    repetition: Float32  # [L]; 1 off
    presence: Float32  # [L]
    frequency: Float32  # [L]
    num_logprobs: Int32  # [L]; -1 none, else number of top alternatives
    allowed: Mask | None = None  # [L, ceil(V / 32)] over target ids, also of a reduced draft vocabulary; None = all

    def __len__(self) -> int:
        return len(self.temperature)


@dataclass(frozen=True)
class TokenLogprob:
    """Raw log-softmax (before mask, bias, penalties, temperature) of a token and of the top alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


NOTHING_LEFT = "no token is left to choose: logit_bias, min_tokens or the allowed-token mask ban all"
NOT_FINITE = "the logits hold NaN or infinity"  # these two: why a row has no token


@dataclass(frozen=True, eq=False)
class Sampled:
    """Tokens of L rows; `logprobs[i]` for rows that asked; `probs` (opaque, [L, V]) when rule `rejection` asked.

    `failures`: why a row has no token (its token is -1, its logprobs None, its probs 0). Other rows do not notice."""

    tokens: Int64
    logprobs: Seq[TokenLogprob | None]
    probs: Any = None
    failures: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """What one pass decided for one sequence: tokens to emit (accepted drafts, then one recovered or bonus token)."""

    tokens: tuple[int, ...]
    num_drafted: int
    num_accepted: int
    logprobs: tuple[TokenLogprob | None, ...] = ()
    error: str = ""  # why no token comes after the accepted ones


@dataclass(frozen=True)
class Delta:
    """Newly committed tokens of one sequence, in order. `draft`: what the pass judged, of which it accepted the first
    `num_accepted`; the text may end before them."""

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    stats: DraftStats | None = None  # set with finish_reason
    error: str = ""  # why finish_reason is "error"
    embedding: Any = None  # [H] float64: the mean of the prompt's hidden states behind the final norm, if it is wanted
    draft: Draft | None = None
    num_accepted: int = 0


@dataclass
class Report:
    """What a tool found: `ok` decides the exit code, `data` is the one JSON document, `lines` the text for people."""

    ok: bool
    data: dict[str, Any]
    lines: list[str] = field(default_factory=list)
