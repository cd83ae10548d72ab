"""Prompt lookup where the text repeats, the model's head elsewhere."""

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Self

from headstart import registry
from headstart.core import Draft, Sequence
from headstart.drafters.base import Drafter, DraftRequest, EarlyDraftRequest, TargetModel, no_head
from headstart.drafters.ngram import NgramDrafter
from headstart.heads.kind import head_kind
from headstart.kernels.draft_loop import PendingSample


class MixedDrafter(Drafter):
    """With a gate: tries the lookup, which costs almost nothing, and asks the head if the gate finds the draft
    insufficient. Without a gate: the head alone."""

    def __init__(self, lookup: NgramDrafter, head: Drafter) -> None:
        self._lookup, self._head = lookup, head
        self.method, self.max_depth, self.tap, self.costs_per = head.method, head.max_depth, head.tap, head.costs_per

    @property
    def auto_limit(self) -> int:
        """The lookup may draft more tokens than the head."""
        return self._lookup.max_depth

    @classmethod
    def attach(cls, target: TargetModel) -> Self:
        if target.head is None:
            raise no_head()
        head: type[Drafter] = registry.find("drafters", head_kind(target.head.spec.kind).drafter).DRAFTER
        return cls(NgramDrafter.attach(target), head.attach(target))

    def num_uncached(self, sequence: Sequence) -> int:
        return self._head.num_uncached(sequence)

    def propose(self, requests: Seq[DraftRequest]) -> None:
        gated = [request for request in requests if request.gate is not None]
        self._lookup.propose(gated)
        head_requests, head_limit = [request for request in requests if request.gate is None], self.max_depth
        for request in gated:
            assert request.gate is not None
            if not request.gate.is_sufficient(request.sequence.draft):
                request.sequence.draft = Draft()
                head_requests.append(request if request.depth <= head_limit else replace(request, depth=head_limit))
        self._head.propose(head_requests)

    def propose_early(self, requests: Seq[EarlyDraftRequest], sample: PendingSample) -> None:
        self._head.propose_early(requests, sample)

    def release(self, sequence: Sequence) -> None:
        self._lookup.release(sequence)
        self._head.release(sequence)

    def clear(self) -> None:
        self._lookup.clear()


DRAFTER = MixedDrafter
