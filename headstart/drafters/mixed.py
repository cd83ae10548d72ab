"""Prompt lookup where the text repeats, the model's head elsewhere; both stay ready for every sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Self

from headstart import registry
from headstart.core import Draft, Sequence
from headstart.drafters._drafter import AttachedHead, Drafter, Target, Wish
from headstart.drafters.ngram import NgramDrafter
from headstart.errors import UsageError
from headstart.layers.decoder import Tap


class MixedDrafter:
    """Asks the lookup first, which costs next to nothing, and the head where the gate is not content; the head alone
    where there is no gate. The head makes up for what it has not seen when it is asked again (Sequence.num_drafter)."""

    method = "mixed"

    def __init__(self, lookup: NgramDrafter, head: Drafter) -> None:
        self._lookup, self._head = lookup, head
        self.method, self.max_depth = head.method, head.max_depth

    @classmethod
    def attach(cls, target: Target) -> Self:
        return cls(NgramDrafter.attach(target), _head_drafter(target.head).attach(target))

    @classmethod
    def tap(cls, head: AttachedHead | None) -> Tap | None:
        return _head_drafter(head).tap(head)

    def propose(self, wishes: Seq[Wish]) -> None:
        gated = [wish for wish in wishes if wish.gate is not None]
        self._lookup.propose(gated)
        rest = [wish for wish in wishes if wish.gate is None]
        for wish in gated:
            assert wish.gate is not None
            if not wish.gate.takes(wish.sequence.draft):
                wish.sequence.draft = Draft()
                rest.append(wish)
        self._head.propose(rest)

    def release(self, sequence: Sequence) -> None:
        self._lookup.release(sequence)
        self._head.release(sequence)


def _head_drafter(head: AttachedHead | None) -> type[Drafter]:
    if head is None:
        raise UsageError("drafter mixed needs a head, but the model has none", "use --drafter ngram, or --head DIR")
    found: type[Drafter] = registry.find("drafters", head.head.kind).DRAFTER
    return found


DRAFTER = MixedDrafter
