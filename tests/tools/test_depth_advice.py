"""Advice from acceptance: the arithmetic in words."""

from __future__ import annotations

import pytest

from headstart.tools.depth_advice import accepted_by_place, depth_advice
from headstart.tools.engine_metrics import Counts


def counted(drafts: float, drafted: float, accepted: float, *places: float) -> Counts:
    return Counts(
        engine="vllm",
        known=True,
        always_there=False,
        drafts=drafts,
        drafted=drafted,
        accepted=accepted,
        per_position=dict(enumerate(places)),
    )


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        (counted(100, 300, 240, 90, 80, 70), ""),
        (counted(100, 300, 110, 70, 30, 10),
         "acceptance 0.37 is below 0.55 at depth 3: the last 2 tokens of each draft bring 0.40 of 2.10 tokens a pass, "
         "for 2 of 3 draft steps and rows: --depth 1 (1.70 tokens a pass)"),
        (counted(100, 200, 100, 60, 40), "--depth 1 (1.60 tokens a pass)"),
        (counted(100, 100, 40, 40), "compare with --depth 0"),
        (counted(0, 0, 0), ""),
    ],
)  # fmt: skip
def test_advice(counts: Counts, said: str) -> None:
    found = depth_advice(counts)
    assert said in found and bool(said) == bool(found)


def test_without_places_one_chance_gives_as_many() -> None:
    chances = accepted_by_place(counted(100, 300, 87.5), 3)
    assert chances == pytest.approx([0.5, 0.25, 0.125], abs=1e-6)
