"""The drafter interface: attach to a target model, propose drafts, release sequences. One file per drafter, named after
its method."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Literal, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headstart.config import MAX_DEPTH
from headstart.core import Draft, Rows, Sampled, Sequence
from headstart.errors import UsageError
from headstart.heads.base import Head
from headstart.kernels.draft_loop import GateRule, PendingSample
from headstart.kernels.ops import Backend, Buffer, Weight
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import Decoder, Tap
from headstart.layers.linear import SketchedLinear
from headstart.layers.network import Network, NetworkHandle
from headstart.layers.weights import Weights
from headstart.wording import option


def no_head(what: str = "head") -> UsageError:
    """The error of a drafter whose head is missing."""
    hint = "attach one with " + option("head", "DIR") + ", or use " + option("drafter", "ngram")
    return UsageError(f"the model has no {what}", hint)


class Gate(Protocol):
    """Decides how many tokens the draft of one sequence gets (implemented by engine.depth for depth `auto`)."""

    should_start: bool  # a draft that costs a pass of a head is worth starting
    max_depth: int  # number of tokens worth their rows in a draft that costs one pass

    def should_continue(self, draft: Draft) -> bool:
        """True if one more token is worth drafting. Called once after each token, when its score is set."""

    def rule(self, method: str) -> GateRule:
        """`should_continue` as data, for a draft by this method."""

    def is_sufficient(self, draft: Draft) -> bool:
        """True if a free draft (prompt lookup) is good enough; False: ask the head."""


@dataclass(frozen=True)
class DraftRequest:
    """Request for a draft of one sequence.

    Without a gate the draft has exactly `depth` tokens if the drafter can make as many; a drafter may ignore the gate.
    """

    sequence: Sequence
    depth: int  # maximum number of tokens
    gate: Gate | None = None
    width: int = 1  # candidates for each token; those after the first become leaves, if the draft loop draws any

    @property
    def should_start(self) -> bool:
        """True if a draft that costs a pass is worth starting."""
        return self.gate is None or self.gate.should_start

    @property
    def pass_depth(self) -> int:
        """Maximum number of tokens in a draft that costs one pass."""
        return min(self.depth, self.gate.max_depth) if self.gate else self.depth


@dataclass(frozen=True)
class EarlyDraftRequest:
    """Request for a draft of a sequence whose pass is still running."""

    sequence: Sequence
    depth: int  # maximum number of tokens
    draw: int  # index of the sequence's first sampled token among all sampled tokens of the pass
    accepted: int | None  # number of accepted draft tokens, if known before the pass ends
    scored: bool  # scores are needed, for a gate


@dataclass(frozen=True, eq=False)
class DraftPrograms:
    """Programs of a network that drafts.

    Step by step: `first` runs over rows of committed tokens; its last row gives the logits of the first draft token and
    the vector that the next step reads in place of a hidden state. Draft step i >= 1 runs `others[i - 1]`.
    With `is_block`: `first` gives the logits of all draft tokens; `others` is empty, or one program that corrects each
    token's logits by the token before it (Markov head).
    """

    network: NetworkHandle
    first: str
    others: Seq[tuple[str, int]]  # program, and number of rows between the committed rows and its own row
    token_ids: Weight | None  # [V'] target ids of the draft vocabulary (Backend.index); None: the full vocabulary
    is_block: bool = False


class DraftRunner(Protocol):
    """Services of the engine for drafters."""

    def open(self, network: Network, source: NetworkHandle | None = None) -> NetworkHandle:
        """Registers a network of the drafter; called by Drafter.attach. It reads the hidden states that `source` stores
        (None: the trunk)."""

    def run(
        self, handle: NetworkHandle, program: str, rows: Seq[Rows], *, hidden: Buffer = None
    ) -> Mapping[str, Buffer]:
        """Runs a program over rows. Rows read `hidden` [R, width] if given, else the trunk's stored hidden states."""

    def fill(self, handle: NetworkHandle, rows: Seq[Rows]) -> None:
        """Marks these rows' positions as valid in the network's KV cache. Rows must come from true hidden states."""

    def filled(self, handle: NetworkHandle, sequence: Sequence) -> int:
        """First position that the network has not computed; below it its KV is held, as far back as it attends."""

    def draft(self, steps: DraftPrograms, requests: Seq[DraftRequest], parts: Seq[Rows], method: str) -> list[int]:
        """Makes whole drafts in one call where the backend can, and sets `sequence.draft`.

        `parts`: rows of each request. Returns the indices of the other requests, which the drafter makes step by step
        with `run` and `draw`; the tokens are the same.
        """

    def draft_early(
        self, steps: DraftPrograms, requests: Seq[EarlyDraftRequest], parts: Seq[Rows], sample: PendingSample
    ) -> None:
        """Starts drafts for sequences whose pass is still running, where the backend can; `draft` uses them if they
        match.

        `parts` end with a row for each drafted token of the running pass and one more. The tokens of these rows are
        read from `sample`.
        """

    def draw(
        self, logits: Buffer, entries: Seq[tuple[Sequence, int, Seq[int]]], token_ids: Weight | None = None, *,
        scored: bool = False,
    ) -> Sampled:  # fmt: skip
        """Samples one token per entry (sequence, absolute position, drafted tokens before it), with the trunk's
        sampling parameters, masks and noise (coupled sampling).

        `probs` is set if the engine's rule needs it. scored: also the raw log probability of each token. A failed row
        (see Sampled) ends its draft.
        """


@dataclass
class GrowingDraft:
    """A draft that grows token by token."""

    sequence: Sequence
    depth: int  # maximum number of tokens; lowered when the draft ends early
    gate: Gate | None
    draft: Draft
    row: int = 0  # row of its next logits in the latest pass

    @classmethod
    def start(cls, request: DraftRequest, method: str, row: int = 0) -> Self:
        """Gives the sequence an empty draft that grows with the returned object."""
        request.sequence.draft = Draft(method=method)
        return cls(request.sequence, request.depth, request.gate, request.sequence.draft, row)

    @property
    def can_grow(self) -> bool:
        return len(self.draft.tokens) < self.depth

    @property
    def position(self) -> int:
        """Absolute position of the next token."""
        return len(self.sequence.tokens) + len(self.draft.tokens)

    @property
    def entry(self) -> tuple[Sequence, int, Seq[int]]:
        """Entry of the next token for `DraftRunner.draw`."""
        return self.sequence, self.position, self.draft.tokens

    def append(self, sampled: Sampled, row: int, score: float | None = None) -> None:
        """Appends the token sampled in `row`. Its score is `score`, or else its own probability if that is known.

        A failed row (no allowed token is in the draft vocabulary, or the head fails) and the gate end the draft."""
        token, draft = int(sampled.tokens[row]), self.draft
        if token < 0:
            self.depth = min(self.depth, len(draft.tokens))
        if not self.can_grow:
            return
        draft.tokens.append(token)
        if sampled.probs is not None:
            draft.probs = [*(draft.probs or []), sampled.probs[row]]
        if score is not None:
            draft.scores.append(score)
        elif known := sampled.logprobs[row]:
            draft.scores.append(math.exp(known.logprob))
        if self.can_grow and self.gate is not None and not self.gate.should_continue(draft):
            self.depth = len(draft.tokens)


@dataclass(frozen=True)
class DraftVocabulary:
    """Reduced vocabulary, or cheaper LM head, for a head that has no draft vocabulary."""

    token_ids: NDArray[np.int64] | None = None  # [V'] ascending target ids that are drafted; None: the full vocabulary
    sketch: SketchedLinear | None = None  # replaces the LM head


class TextLookup(Protocol):
    """An index of texts, each with an owner."""

    def find(self, owner: int, tokens: Seq[int], limit: int) -> tuple[list[int], int]:
        """Up to `limit` tokens after the longest match with the end of `tokens`, and the match's length; 0: none."""


class TextCompleter(Protocol):
    """A draft model with an engine of its own (implemented by engine.draft_engine)."""

    def __call__(self, prompts: Seq[Seq[int]], counts: Seq[int]) -> list[list[int]]:
        """The next `counts[i]` tokens (fewer at an end of the text) after each prompt, in the model's own ids."""


@dataclass(frozen=True)
class TargetModel:
    """Parts and settings of the target model for a drafter.

    A sequence's block table serves the pools of the drafter's networks too, as far as blocks are reserved.
    """

    backend: Backend
    model: Decoder
    config: DecoderConfig
    weights: Weights
    runner: DraftRunner
    token_budget: int  # maximum rows per pass
    ngram: tuple[int, int]  # smallest and largest n of prompt lookup
    shared_lookup: bool = False  # texts of other requests may be looked up
    lookup_corpus: TextLookup | None = None  # index of a text that all requests look up
    head: Head | None = None
    vocabulary: DraftVocabulary = DraftVocabulary()
    draft_texts: TextCompleter | None = None  # of a draft model that has another tokenizer
    network: NetworkHandle | None = None  # of a draft model whose own head is attached; None: the trunk


class Drafter:
    """Proposes tokens for sequences that have computed every token but the last."""

    method: str
    max_depth: int = MAX_DEPTH  # longest draft
    tap: Tap | None = None  # trunk hidden state that is stored for the drafter; None: none
    # "step": each token costs a pass of the drafter; "pass": one pass drafts all tokens
    costs_per: Literal["step", "pass"] = "step"
    takes_vocabulary: bool = False  # drafts with TargetModel.vocabulary

    @property
    def auto_limit(self) -> int:
        """Longest draft with depth `auto`."""
        return self.max_depth

    @classmethod
    def attach(cls, target: TargetModel) -> Drafter:
        """Creates the drafter for a target and opens its networks. Raises UsageError or ModelError for a misfit."""
        return cls()

    def num_uncached(self, sequence: Sequence) -> int:
        """Number of positions, beside the newest, that the drafter's networks must compute before the next draft."""
        return 0

    def propose(self, requests: Seq[DraftRequest]) -> None:
        """Sets `draft` of each sequence, with at most `depth` tokens. KV slots for them are reserved."""
        raise NotImplementedError

    def propose_early(self, requests: Seq[EarlyDraftRequest], sample: PendingSample) -> None:
        """Starts drafts while the pass of these sequences is running (DraftRunner.draft_early); optional.

        `propose` is called afterwards all the same. KV slots are reserved for the drafted tokens, one more token and
        `depth` further ones.
        """

    def release(self, sequence: Sequence) -> None:
        """Drops the state of a finished sequence. A preempted sequence keeps its tokens and gets other blocks."""

    def clear(self) -> None:
        """Drops all texts and statistics of finished sequences."""
