"""Health of drafting from the summed counters of several servers."""

import pytest

from headstart.tools.engine_metrics import EngineCounters
from headstart.tools.launch.run import draft_summary


def counts(drafts: float | None, accepted: float | None, **more: object) -> EngineCounters:
    drafted = None if drafts is None else 2 * drafts
    return EngineCounters(engine="vllm", known=True, drafts=drafts, drafted=drafted, accepted=accepted, **more)


def test_counts_of_several_servers_are_added() -> None:
    found = EngineCounters.total([counts(10, 5, per_position={0: 4.0, 1: 1.0}), counts(30, 27, per_position={0: 27.0})])
    assert found is not None and (found.drafts, found.drafted, found.accepted) == (40, 80, 32)
    assert found.per_position == {0: 31.0, 1: 1.0}
    summary = draft_summary(found, 100)
    assert summary["alive"] and summary["acceptance_length"] == pytest.approx(1.8)


@pytest.mark.parametrize(
    ("each", "why"),
    [([None], "no known drafting metrics"), ([counts(10, 5), None], "no known drafting metrics"),
     ([counts(0, 0), counts(0, 0)], "count no drafts"), ([counts(10, 0), counts(10, 0)], "")],
)  # fmt: skip
def test_missing_metrics_or_drafts_are_not_alive(each: list[EngineCounters | None], why: str) -> None:
    summary = draft_summary(EngineCounters.total(each), None)
    assert not summary["alive"] and why in summary.get("why", "")
