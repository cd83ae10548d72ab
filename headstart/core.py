"""Data types of the engine: requests, sequences, drafts, step plans, sampling rows, results.

Terms: *row* = one token position in a pass; *pass* = one trunk forward; *depth* = number of tokens drafted; *acceptance
length* = 1 + accepted / drafts. Array shapes: R rows, S sequences, B blocks, L sampling rows, V vocabulary.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence as Seq
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
Float64 = NDArray[np.float64]
Bytes = NDArray[np.uint8]
Mask = NDArray[np.uint32]
"""Allowed-token mask: bit v % 32 of word v // 32 is token v. Shape [ceil(V / 32)], or [L, ceil(V / 32)] for L rows."""
FinishReason = Literal["stop", "length", "abort", "error"]
Progress = Callable[[int, int, str], None]  # called with (done, total, description) during long operations

GREEDY_BELOW = 1e-5  # temperatures below this are greedy: argmax without noise
FORCED = "forced"  # Draft.method of tokens that are the only ones a constraint allows


def token_mask(ids: Iterable[int], vocab_size: int) -> Mask:
    """Mask [ceil(V / 32)] that allows only these ids."""
    flags = np.zeros(-(-vocab_size // 32) * 32, bool)
    flags[list(ids)] = True
    return np.packbits(flags, bitorder="little").view(np.uint32)


def no_progress(done: int, total: int, what: str) -> None:
    """Progress callback that shows nothing."""


class Constraint(Protocol):
    """State of one sequence in its output grammar (text.grammar), after its output tokens.

    `masks`, `fitting` and `forced` look ahead and do not change the state.
    """

    def masks(self, draft: Seq[int], count: int | None = None) -> Mask:
        """Token masks [k + 1, ceil(V / 32)] before and after each of k drafted tokens, or only the last `count` of
        these masks. Masks after a refused token allow every token."""

    def fitting(self, draft: Seq[int]) -> int:
        """Number of leading drafted tokens that the grammar accepts, up to the end of the text."""

    def forced(self, limit: int) -> list[int]:
        """Up to `limit` next tokens, each the only allowed one after those before it, up to the end of the text."""

    def advance(self, token: int) -> bool:
        """Appends a token; returns False if the grammar refuses it."""

    def rollback(self, count: int) -> None:
        """Removes the last `count` tokens."""

    def copy(self) -> Self: ...
    @property
    def done(self) -> bool:
        """True if the text is complete and no token may follow."""

    @property
    def error(self) -> str:
        """Why the text can neither end nor continue; empty if it can. Set by `masks`."""


IMAGE_ROW = -1
"""Token id of an image's rows, for layers that treat images unlike text."""


@dataclass(frozen=True, eq=False)
class ImageInput:
    """An image as a vision tower reads it."""

    patches: Float32  # [P, channels * patch height * patch width] normalized pixels, patches row by row
    grid: tuple[int, int]  # rows and columns of its tokens
    digest: bytes  # of the pixels and their preparation
    patch_grid: tuple[int, int]  # rows and columns of its patches; tokens at the lower and right edge may lack some
    order: Int32 | None = None  # tokens and learned rows (text/image_blocks.py) in the prompt's order; None: tokens

    @property
    def num_tokens(self) -> int:
        """Tokens that the tower makes of the image."""
        return self.grid[0] * self.grid[1]

    @property
    def num_rows(self) -> int:
        """Positions of the image in a prompt."""
        return self.num_tokens if self.order is None else len(self.order)


@dataclass(frozen=True, eq=False)
class PlacedImage:
    """An image at its place in a prompt: positions first .. end - 1 hold its features instead of embeddings."""

    first: int
    image: ImageInput
    is_bidirectional: bool = False  # all positions of the image attend to each other, so one pass computes all
    widens_windows: bool = False  # windows of its positions reach back to `first` at least
    has_axes: bool = False  # the rotary positions have three axes, from `rope_positions`
    offset: int = 0  # first feature of the image at this place; other places may hold the other features
    count: int = 0  # features at this place; 0: all
    is_marked: bool = False  # the trunk's layers see IMAGE_ROW for its token ids

    @property
    def end(self) -> int:
        return self.first + (self.count or self.image.num_rows)


def rope_positions(images: Seq[PlacedImage]) -> Int32:
    """Rotary positions [n, 3] on the axes time, row and column of a prompt up to the end of its last image (M-RoPE;
    transformers 5.24, Qwen3_5Model.get_rope_index). The tokens of an image share a time and have its rows and columns.
    A token after an image follows the largest position before it, on all axes; so do all later tokens."""
    parts, first, following = [np.zeros((0, 3), np.int32)], 0, 0
    for placed in images:
        text = np.arange(following, following + placed.first - first, dtype=np.int32)
        following += len(text)
        rows, columns = placed.image.grid
        places = np.indices((1, rows, columns), np.int32).reshape(3, -1).T
        parts += [np.repeat(text[:, None], 3, 1), places + np.int32(following)]
        first, following = placed.end, following + max(rows, columns)
    return np.concatenate(parts)


class LoraFactors(NamedTuple):
    """A low-rank addition B A to a matrix [out, in] (Hu et al. 2021, "LoRA", section 4.1), scale included."""

    a: NDArray[np.float32]  # [rank, in]
    b: NDArray[np.float32]  # [out, rank]


class Adapter(NamedTuple):
    """A LoRA adapter that an engine holds."""

    name: str
    slot: int  # index of its factors in the engine's tables
    digest: str  # AdapterFile.digest
    path: str


@dataclass(frozen=True, kw_only=True)
class Request:
    """One prompt with its sampling parameters."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    seed: int  # resolved: never None
    stop_ids: frozenset[int]  # end-of-text ids of the model (none with ignore_eos), and stop_token_ids
    banned_until_min: frozenset[int] = frozenset()  # token ids banned while fewer than min_tokens are output
    # token ids banned after an output that ends with the key
    banned: Mapping[tuple[int, ...], frozenset[int]] = field(default_factory=dict)
    # [ceil(V / 32)] mask of all tokens that may be output; None: every token
    allowed: Mask | None = field(default=None, compare=False)
    depth: int | None = None  # None: the engine's depth; 0: no drafts
    # initial state; each choice advances its own copy
    constraint: Constraint | None = field(default=None, compare=False)
    cache_salt: str = ""  # the prefix cache is shared between requests of the same salt only
    owner: str = ""  # API key or user; output texts serve as drafts for requests of the same owner and salt
    share: float = 1.0  # weight of the owner in fair scheduling
    priority: int = 0  # lower runs earlier, for all owners
    images: tuple[PlacedImage, ...] = field(default=(), compare=False)  # in ascending order
    embeds: bool = False  # return the prompt's embedding (Delta.embedding) instead of a text
    adapter: Adapter | None = None  # None: the model without an adapter

    @cached_property
    def cache_scope(self) -> str:
        """Adapter and salt; empty without both. The prefix cache is shared between requests of the same scope only."""
        digest = self.adapter.digest if self.adapter else ""
        return f"{digest}\0{self.cache_salt}" if digest or self.cache_salt else ""

    @cached_property
    def rope_positions(self) -> Int32 | None:
        """See `rope_positions`; None: all rotary positions are those in the sequence."""
        return rope_positions(self.images) if any(each.has_axes for each in self.images) else None

    def rope_positions_at(self, positions: Int32) -> Int32:
        """Rotary positions [n, 3] of the tokens at these positions [n]."""
        if (known := self.rope_positions) is None:
            return np.repeat(positions[:, None], 3, 1)
        shift = known[self.images[-1].first :].max() + 1 - len(known)
        later = positions[:, None] + np.int32(shift)
        return np.where(positions[:, None] < len(known), known[np.minimum(positions, len(known) - 1)], later)


class Leaf(NamedTuple):
    """Another candidate for the token at index `place` of a draft. Nothing is drafted after it."""

    place: int
    rank: int  # 1: the drafter's second choice
    token: int
    score: float  # as Draft.scores; 0 without scores


@dataclass
class Draft:
    """Tokens proposed after `Sequence.tokens`: a chain of k tokens, and leaves, alternatives to tokens of the chain."""

    tokens: list[int] = field(default_factory=list)  # [k]
    probs: Any = None  # [k, V] draft distributions, needed by rule `rejection`; None: one-hot drafts
    method: str = ""  # name of the drafter
    # [k] confidence of each token in 0..1, in the drafter's own scale; empty: unknown
    scores: list[float] = field(default_factory=list)
    leaves: list[Leaf] = field(default_factory=list)  # places are below k

    @property
    def num_rows(self) -> int:
        """Rows that verify the draft, beside the row of the last committed token."""
        return len(self.tokens) + len(self.leaves)

    @property
    def prefixes(self) -> list[list[int]]:
        """[1 + num_rows] drafted tokens up to each row of a pass: the row before the draft, its tokens, its leaves."""
        tokens = self.tokens
        chain = [tokens[:i] for i in range(len(tokens) + 1)]
        return chain + [[*tokens[: leaf.place], leaf.token] for leaf in self.leaves]

    @property
    def parents(self) -> list[int]:
        """[num_rows] index of the draft's token before each token and leaf; -1: none."""
        return [*range(-1, len(self.tokens) - 1), *(leaf.place - 1 for leaf in self.leaves)]

    def to_leaf(self, leaf: Leaf) -> Draft:
        """The chain that ends in a leaf."""
        scores = [*self.scores[: leaf.place], leaf.score] if self.scores else []
        return Draft([*self.tokens[: leaf.place], leaf.token], None, self.method, scores)

    def cut(self, length: int) -> Draft:
        """The first `length` tokens, without leaves."""
        probs = None if self.probs is None else self.probs[:length]
        return Draft(self.tokens[:length], probs, self.method, self.scores[:length])


class RowConstants(NamedTuple):
    """Values of SamplingRows that are the same for all rows of a sequence."""

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
    has_bias: bool  # some logits may be biased or banned

    @property
    def has_penalties(self) -> bool:
        """True if token counts are needed."""
        return self.repetition != 1 or self.presence != 0 or self.frequency != 0


def int_array() -> array[int]:
    """Empty int32 array that numpy copies in one call."""
    return array("i")


@dataclass(eq=False)
class TokenCounts:
    """Distinct tokens of a sequence and their number of occurrences in the output."""

    ids: array[int] = field(default_factory=int_array)  # in order of appearance
    counts: array[int] = field(default_factory=int_array)  # occurrences in the output; 0: prompt only
    places: dict[int, int] = field(default_factory=dict)  # token id -> index in `ids`
    num_read: int = 0  # tokens of the sequence counted so far


@dataclass(eq=False)
class Sequence:
    """One choice of a request: its committed tokens, and how far their states are computed.

    Invariant between steps: 0 <= num_computed <= len(tokens) - 1. Trunk KV and hidden states are valid for positions
    below num_computed, KV of the drafter's network i for positions below filled[i].
    """

    request: Request
    choice: int  # index among the request's n choices
    tokens: list[int]  # prompt, then output
    order: int  # arrival number; lower runs first
    num_computed: int = 0  # positions computed by the trunk
    # positions computed by each of the drafter's networks, by network index
    filled: Counter[int] = field(default_factory=Counter)
    admitted: bool = False  # has run before (and may have been preempted since)
    scheduled_s: float = 0.0  # time.perf_counter() of the first admission; 0: another engine admitted it, or none yet
    num_cached: int = 0  # prompt positions found in the prefix cache at the first admission
    num_prompt_logprobs: int = 0  # prompt tokens whose logprobs were delivered; a preempted prompt is computed twice
    num_pooled: int = 0  # prompt positions summed in `pooled`
    pooled: Any = None  # [H] float64 sum of hidden states of the prompt, for embeddings
    # ids of the sequence's KV blocks, by position // block_size
    block_table: array[int] = field(default_factory=int_array)
    draft: Draft = field(default_factory=Draft)
    counts: TokenCounts = field(default_factory=TokenCounts)  # updated by engine.sampling when penalties need it
    stats: DraftStats = field(default_factory=lambda: DraftStats())
    finish_reason: FinishReason | None = None
    error: str = ""  # reason if finish_reason is "error"
    constraint: Constraint | None = None  # state after the output so far

    @property
    def prompt_logprobs(self) -> int | None:
        """Number of top alternatives beside each prompt token; None: no prompt logprobs, or the first choice returns
        them."""
        return self.request.params.prompt_logprobs if self.choice == 0 else None

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @cached_property
    def is_masked(self) -> bool:
        """True if some tokens may not be allowed."""
        return self.constraint is not None or self.request.allowed is not None

    @cached_property
    def is_ordinary(self) -> bool:
        """True if sampling follows the model closely: T <= 1, mild penalties, no bias, bans or token lists.

        Only ordinary sequences tell how good a drafter is.
        """
        params, request = self.request.params, self.request
        pushed = params.logit_bias or request.banned or request.allowed is not None
        mild = max(abs(params.presence_penalty), abs(params.frequency_penalty), abs(params.repetition_penalty - 1))
        return not pushed and params.temperature <= 1 and mild <= 0.5

    @cached_property
    def row_constants(self) -> RowConstants:
        """The values that all sampling rows of this sequence share."""
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


@dataclass(slots=True)  # Span and Rows are not frozen, for the reason given at StepPlan
class Span:
    """Scheduled rows of one sequence: positions start .. start + num_rows - 1."""

    sequence: Sequence
    start: int
    num_rows: int
    num_sample: int  # number of last rows whose next token is sampled


@dataclass(slots=True)
class Rows:
    """Rows of one sequence in a pass of any network, at positions from `start` on.

    In a tree, row i follows row parents[i] (< i), or position start - 1 if parents[i] is -1.
    """

    sequence: Sequence
    start: int
    token_ids: Seq[int]  # [n]
    num_logits: int  # number of last rows whose logits are computed
    # last position that every row attends to, or [n] that of each row; None: each row attends up to its own position
    visible_end: int | Int32 | None = None
    parents: Seq[int] | None = None  # [n] parent row of each row in a draft tree; None: a chain
    visible_start: Int32 | None = None  # [n] as in StepPlan


@dataclass(eq=False)
class StateSteps:
    """Reads and writes of recurrent states in one pass.

    Sequence s starts from the state in slot reads[s], which precedes position starts[s]. Rows from starts[s] to the
    first row of the pass were kept by the pass before, and are applied first. The state is written to a store's slot
    when rows up to the store's position have been applied; one store of each sequence is its own slot, at position
    keeps[s]. Rows from keeps[s] on are drafted and may be rejected: they are kept beside the state, not applied to it.
    """

    own: Int32  # [S] slot of the sequence; kept rows are stored there
    reads: Int32  # [S] slot of the initial state; -1: zeros
    starts: Int32  # [S] position that the initial state precedes
    keeps: Int32  # [S] first position whose rows are kept
    store_starts: Int32  # [S + 1] stores of sequence s are store_starts[s] .. store_starts[s + 1] - 1
    store_positions: Int32  # [stores] ascending within a sequence
    store_slots: Int32  # [stores]


@dataclass(eq=False)
class Paths:
    """Ancestors of the rows of a draft tree, as CSR over rows.

    `slots` of a row belong to its last n <= 17 positions, its own last: up to 16 drafted tokens and the committed token
    before them. Earlier positions, and all positions of a row without slots, are found through the block table.
    """

    starts: Int32  # [R + 1]
    slots: Int32  # [starts[R]]


@dataclass(eq=False, kw_only=True)  # not frozen: frozen dataclasses are slow to create, and a step creates several
class StepPlan:
    """Input of one forward pass: token, position, KV slot and sequence of each row."""

    token_ids: Int32  # [R]
    positions: Int32  # [R]
    slots: Int32  # [R] KV slot that the row writes
    visible_end: Int32 | None = None  # [R] last position that the row attends to; None: its own
    visible_start: Int32 | None = None  # [R] a position that every window of the row includes; None: its own
    paths: Paths | None = None  # ancestors of tree rows, which attend up to their own position
    row_starts: Int32  # [S + 1] rows of sequence s are row_starts[s] .. row_starts[s + 1] - 1
    block_tables: Int32  # [S, B] block ids, padded with 0
    logit_rows: Int32  # [L] rows whose logits are computed
    # first position with KV: 0 in a trunk, 1 in an MTP head (pair p is stored at position p + 1)
    first_position: int = 0
    hidden_slots: Int32 | None = None  # [R] slots of the stored hidden states that a head reads; None in a trunk
    block_size: int = 16
    states: StateSteps | None = None  # set for trunks with recurrent layers
    # [R, 3] positions on rotary axes (RopeSpec.axes): time, row and column; None: the row's position on each
    rope_positions: Int32 | None = None
    adapter_slots: Int32 | None = None  # [R] slot of the row's LoRA adapter, -1: none; None: no row has one

    @classmethod
    def of_rows(cls, token_ids: NDArray[np.integer]) -> StepPlan:
        """A pass over rows [R] of one sequence, with logits of all rows, for a program without KV and state."""
        rows = np.arange(len(token_ids), dtype=np.int32)
        return cls(
            token_ids=token_ids.astype(np.int32), positions=rows, slots=rows, block_tables=np.zeros((1, 1), np.int32),
            row_starts=np.array([0, len(rows)], np.int32), logit_rows=rows,
        )  # fmt: skip

    @property
    def num_rows(self) -> int:
        return len(self.token_ids)

    @property
    def sequences(self) -> Int32:
        """[R] index of each row's sequence."""
        return np.repeat(np.arange(len(self.row_starts) - 1, dtype=np.int32), np.diff(self.row_starts))

    @property
    def block_starts(self) -> Int32:
        """[R] position of the first row of each row's sequence."""
        return np.repeat(self.positions[self.row_starts[:-1]], np.diff(self.row_starts))


@dataclass(eq=False)  # not frozen, for the reason given at StepPlan
class SamplingRows:
    """Parameters that turn L rows of raw logits into L tokens.

    Order of processing: allowed mask -> bans and bias -> penalties -> / T -> min-p -> top-k -> top-p -> + Gumbel noise
    -> argmax. Sparse fields are CSR over rows: row i has the entries indptr[i] .. indptr[i + 1] - 1.
    """

    temperature: Float32  # [L]; below 1e-5: greedy
    top_k: Int32  # [L]; 0: off
    top_p: Float32  # [L]; 1: off
    min_p: Float32  # [L]; 0: off
    seed: NDArray[np.uint64]  # [L] Philox key
    position: Int64  # [L] absolute position of the sampled token (row position + 1)
    choice: Int32  # [L] index among the request's n choices
    bias_indptr: Int32  # [L + 1]
    bias_ids: Int32  # token ids, distinct within a row
    bias_values: Float32  # added to the logits; -inf bans a token
    penalty_indptr: Int32  # [L + 1]
    penalty_ids: Int32  # distinct token ids of prompt and output
    penalty_counts: Int32  # occurrences in the output; 0: prompt only
    repetition: Float32  # [L]; 1: off
    presence: Float32  # [L]; 0: off
    frequency: Float32  # [L]; 0: off
    num_logprobs: Int32  # [L] number of top alternatives; -1: no logprobs
    # [L, ceil(V / 32)] over target token ids, also for a reduced draft vocabulary; None: every token
    allowed: Mask | None = None

    def __len__(self) -> int:
        return len(self.temperature)


@dataclass(frozen=True)
class TokenLogprob:
    """Raw log-softmax (before mask, bias, penalties and temperature) of a token and of the top alternatives."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, logprob), best first


NOTHING_LEFT = "no token is left to choose: logit_bias, min_tokens or the allowed-token mask ban all"
NOT_FINITE = "the logits hold NaN or infinity"  # values of `Sampled.failures`
NOT_FINITE_HINT = "are the weights whole? compare them with those that they were made from"


@dataclass(frozen=True, eq=False)
class Sampled:
    """Sampled tokens of L rows."""

    tokens: Int64  # [L]; -1 for a failed row
    logprobs: Seq[TokenLogprob | None]  # [L]; None for failed rows and rows without logprobs
    probs: Any = None  # [L, V] processed distributions for rule `rejection`, opaque; 0 for failed rows
    # row -> reason why it has no token; other rows are not affected
    failures: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class VerifyResult:
    """Tokens that one pass commits for one sequence: accepted drafts, then one recovered or bonus token."""

    tokens: tuple[int, ...]
    num_drafted: int  # with leaves
    num_accepted: int
    logprobs: tuple[TokenLogprob | None, ...] = ()
    error: str = ""  # why no token follows the accepted ones
    leaf: int | None = None  # index of the draft's leaf that is the last accepted token


@dataclass(frozen=True)
class Delta:
    """Newly committed tokens of one sequence, in order."""

    request_id: str
    choice: int
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    finish_reason: FinishReason | None = None
    stats: DraftStats | None = None  # set with finish_reason
    error: str = ""  # reason if finish_reason is "error"
    embedding: Any = None  # [H] float64 mean of the prompt's hidden states after the final norm, if requested
    draft: Draft | None = None  # the draft that this pass verified
    num_accepted: int = 0  # leading draft tokens that were accepted; the text may end before them
    num_cached: int = 0  # prompt positions found in the prefix cache


@dataclass
class Report:
    """Result of a tool."""

    ok: bool  # False: exit code 1
    data: dict[str, Any]  # the one JSON document of --json
    lines: list[str] = field(default_factory=list)  # text for people
