"""Medusa heads (heads/medusa.py): every draft step reads the newest trunk state; nothing is kept between rounds."""

from __future__ import annotations

from headstart.core import Rows, Sequence
from headstart.drafters.mtp import MTPDrafter


class MedusaDrafter(MTPDrafter):
    """The same rounds without a memory: one row, however many tokens came since the last round."""

    method, label = "medusa", "Medusa"

    def missed(self, sequence: Sequence) -> int:
        return 0

    def _pairs(self, sequence: Sequence, limit: int | None = None) -> Rows:
        start = len(sequence.tokens) - 1
        return Rows(sequence, start, sequence.tokens[start:], 1)


DRAFTER = MedusaDrafter
