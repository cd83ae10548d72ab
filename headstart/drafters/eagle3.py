"""EAGLE-3: drafts from the trunk's streams at three depths (heads/eagle3.py), pair by pair as MTP does."""

from __future__ import annotations

from headstart.drafters.mtp import MTPDrafter


class Eagle3Drafter(MTPDrafter):
    """The same rounds; the first step of each fuses stored streams, later ones read the recycled vector."""

    method, label = "eagle3", "EAGLE-3"


DRAFTER = Eagle3Drafter
