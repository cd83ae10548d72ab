"""The one seam of drafters: attach to a target, propose, release. One file per drafter; the file name is its name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from headstart.cache.memory import KVMemory
from headstart.core import Draft, Rows, Sampled, Sequence
from headstart.kernels.ops import Backend, Buffer, Program, Weight
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import Decoder, Tap
from headstart.layers.mtp import MTPHead
from headstart.layers.weights import Weights


@dataclass(frozen=True)
class AttachedHead:
    """A head that fits the target: its modules, where it came from, its draft vocabulary (ascending target ids)."""

    head: MTPHead
    source: str
    draft_token_ids: NDArray[np.int64] | None = None  # None: the full vocabulary


class Gate(Protocol):
    """Decides for one sequence how far its draft goes (engine.depth). `starts`: a draft that costs a pass of a head is
    worth beginning."""

    starts: bool

    def goes_on(self, draft: Draft) -> bool:
        """Called once after each drafted token, with its score in place: shall there be another?"""

    def takes(self, draft: Draft) -> bool:
        """Is a draft that cost nothing good enough, or shall the head be asked?"""


@dataclass(frozen=True)
class Wish:
    """A sequence that wants a draft of up to `depth` tokens: exactly so many where there is no gate, as far as the
    drafter knows any; a drafter may ignore the gate."""

    sequence: Sequence
    depth: int
    gate: Gate | None = None


class DraftRunner(Protocol):
    """The engine's services during a draft."""

    def run_head(self, program: Program, parts: Seq[Rows], hidden: Buffer = None) -> Mapping[str, Buffer]:
        """A pass of a head program. Row q reads the trunk's hidden state of position q - 1, or its row of `hidden`."""

    def draw(
        self,
        logits: Buffer,
        entries: Seq[tuple[Sequence, int, Seq[int]]],
        token_ids: Weight | None = None,
        *,
        scored: bool = False,
    ) -> Sampled:
        """One token per entry (sequence, absolute position, drafted tokens before it), by the trunk's own sampling
        pipeline, masks and noise; `probs` is kept when the engine's rule needs it. scored: with the raw log
        probability of each token. A row may fail (see Sampled): its draft ends there."""


@dataclass(frozen=True)
class Target:
    """What a drafter may borrow. The block table of a sequence serves the drafter's pools too, as far as
    `memory.reserve` has made it."""

    backend: Backend
    model: Decoder
    config: DecoderConfig
    weights: Weights
    memory: KVMemory
    runner: DraftRunner
    num_slots: int
    token_budget: int
    ngram: tuple[int, int]  # smallest and largest n of prompt lookup
    head: AttachedHead | None = None


class Drafter(Protocol):
    """Proposes tokens for sequences whose every token but the last is computed."""

    method: str
    max_depth: int

    @classmethod
    def attach(cls, target: Target) -> Self:
        """Borrow and allocate. Raises UsageError or ModelError when this target cannot feed the drafter."""

    @classmethod
    def tap(cls, head: AttachedHead | None) -> Tap | None:
        """The trunk hidden state to be kept in the hidden pool; None keeps none."""

    def propose(self, wishes: Seq[Wish]) -> None:
        """Set `draft` of each sequence: at most the wished number of tokens. Slots for them are reserved."""

    def release(self, sequence: Sequence) -> None:
        """The sequence is finished: forget it. A preempted one comes back with the same tokens and other blocks."""
