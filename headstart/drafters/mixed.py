"""Prompt lookup where the text repeats, the model's head elsewhere; both stay ready for every sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Self

from headstart import registry
from headstart.core import Draft, Sequence
from headstart.drafters.base import Drafter, Hope, Target, Wish
from headstart.drafters.ngram import NgramDrafter
from headstart.errors import UsageError
from headstart.heads.kind import head_kind
from headstart.kernels.chain import Drawn


class MixedDrafter(Drafter):
    """Asks the lookup first, which costs next to nothing, and the head where the gate is not content; the head alone
    where there is no gate. The head makes up for what it has not seen when it is asked again (Sequence.filled)."""

    method = "mixed"

    def __init__(self, lookup: NgramDrafter, head: Drafter) -> None:
        self._lookup, self._head = lookup, head
        self.method, self.max_depth, self.tap, self.costs_per = head.method, head.max_depth, head.tap, head.costs_per

    @property
    def auto_limit(self) -> int:
        """A lookup may go deeper than the head."""
        return self._lookup.max_depth

    @classmethod
    def attach(cls, target: Target) -> Self:
        if target.head is None:
            raise UsageError("drafter mixed needs a head, but the model has none", "use --drafter ngram, or --head DIR")
        head: type[Drafter] = registry.find("drafters", head_kind(target.head.spec.kind).drafter).DRAFTER
        return cls(NgramDrafter.attach(target), head.attach(target))

    def missed(self, sequence: Sequence) -> int:
        return self._head.missed(sequence)

    def propose(self, wishes: Seq[Wish]) -> None:
        gated = [wish for wish in wishes if wish.gate is not None]
        self._lookup.propose(gated)
        rest, most = [wish for wish in wishes if wish.gate is None], self.max_depth
        for wish in gated:
            assert wish.gate is not None
            if not wish.gate.suffices(wish.sequence.draft):
                wish.sequence.draft = Draft()
                rest.append(wish if wish.depth <= most else replace(wish, depth=most))
        self._head.propose(rest)

    def begin(self, hopes: Seq[Hope], drawn: Drawn) -> None:
        self._head.begin(hopes, drawn)

    def release(self, sequence: Sequence) -> None:
        self._lookup.release(sequence)
        self._head.release(sequence)

    def forget(self) -> None:
        self._lookup.forget()


DRAFTER = MixedDrafter
