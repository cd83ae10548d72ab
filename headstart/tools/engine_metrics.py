"""Reads drafting counters from the Prometheus metrics of several engines, and derives advice from them."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from headstart.formats.json_object import read_packaged
from headstart.stats import acceptance_length, equal_acceptance

PATHS = ("/metrics", "/prometheus/metrics", "/brpc_metrics")
"""URL paths of metrics: of most engines, of TensorRT-LLM (whose /metrics is JSON), of xLLM."""


@dataclass(frozen=True, kw_only=True)
class MetricNames:
    """Metric names of one engine (engine_metrics.json). A counter that was renamed has several names."""

    engine: str
    marker: str  # prefix of names that only this engine has
    drafts: Sequence[str] = ()
    drafted: Sequence[str] = ()
    accepted: Sequence[str] = ()
    per_position: str = ""
    length: str = ""  # a gauge
    saved: str = ""  # counter of passes that drafting saved
    exist_without_drafting: bool = True  # the metrics exist even if the engine does not draft

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(name for name in (*self.drafts, *self.drafted, *self.accepted, self.length) if name)


ENGINES = tuple(MetricNames(**row) for row in read_packaged("headstart.tools", "engine_metrics.json"))
COUNTERS = ("drafts", "drafted", "accepted", "saved")


@dataclass(frozen=True, kw_only=True)
class EngineCounters:
    """Drafting totals of a server. None: the engine does not report the value."""

    engine: str
    known: bool  # the server shows at least one drafting metric
    exist_without_drafting: bool = True
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    per_position: dict[int, float] = field(default_factory=dict)  # drafts accepted up to each position
    length: float | None = None  # gauge of the acceptance length
    saved: float | None = None  # passes

    def since(self, before: Self) -> Self:
        """Returns the counts since `before`; the gauge stays."""
        known: dict[str, float] = {name: now for name in COUNTERS if (now := getattr(self, name)) is not None}
        changes: dict[str, Any] = {name: now - (getattr(before, name) or 0.0) for name, now in known.items()}
        places = {place: count - before.per_position.get(place, 0.0) for place, count in self.per_position.items()}
        return replace(self, **changes, per_position=places)

    @classmethod
    def total(cls, parts: Sequence[Self | None]) -> Self | None:
        """Returns the sum over several servers, with the gauge of the first; None if one of them is unknown."""
        known = [part for part in parts if part is not None]
        if not known or len(known) < len(parts):
            return None
        columns = {name: [getattr(part, name) for part in known] for name in COUNTERS}
        sums: dict[str, Any] = {name: None if None in values else sum(values) for name, values in columns.items()}
        places = sorted({place for part in known for place in part.per_position})
        per_position = {place: sum(part.per_position.get(place, 0.0) for part in known) for place in places}
        return replace(known[0], **sums, per_position=per_position)

    @property
    def is_drafting(self) -> bool:
        """Whether any tokens were drafted."""
        counts = (self.length,) if self.drafts is None and self.drafted is None else (self.drafts, self.drafted)
        return any(count is not None and count > 0 for count in counts)

    @property
    def acceptance_length(self) -> float | None:
        """`stats.acceptance_length` of the counts, else the engine's gauge; None without drafts."""
        if not self.is_drafting:
            return None
        if self.drafts and self.accepted is not None:
            return acceptance_length(self.drafts, self.accepted)
        return self.length


def read(text: str) -> EngineCounters | None:
    """Parses a text in Prometheus format. Returns None for another format, or an engine that is not in ENGINES."""
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError:
        return None
    totals: dict[str, float] = defaultdict(float)
    for sample in samples:
        totals[sample.name] += sample.value
    names = next((each for each in ENGINES if any(name.startswith(each.marker) for name in totals)), None)
    if names is None:
        return None

    def total(*wanted: str) -> float | None:
        return next((totals[name] for name in wanted if name in totals), None)

    places: dict[int, float] = defaultdict(float)
    for sample in samples:
        if names.per_position and sample.name == names.per_position and sample.labels.get("position", "").isdecimal():
            places[int(sample.labels["position"])] += sample.value
    gauges = [sample.value for sample in samples if sample.name == names.length]
    busy = [value for value in gauges if value > 0]  # of the workers that have drafted
    return EngineCounters(
        engine=names.engine, known=any(name in totals for name in names.all),
        exist_without_drafting=names.exist_without_drafting,
        drafts=total(*names.drafts), drafted=total(*names.drafted), accepted=total(*names.accepted),
        per_position=dict(sorted(places.items())), saved=total(names.saved),
        length=sum(busy) / len(busy) if busy else 0.0 if gauges else None,
    )  # fmt: skip


LOW_ACCEPTANCE = 0.55  # acceptance rate below which the last drafted tokens mostly waste their rows
MIN_DRAFTS = 100  # drafts needed to judge an acceptance rate


def advise(counters: EngineCounters | None, min_drafts: int = MIN_DRAFTS) -> str:
    """Returns advice for a low acceptance rate; "" if the rate is not low, or too few drafts were counted."""
    if counters is None or not counters.drafts or not counters.drafted or counters.accepted is None:
        return ""
    rate, depth = counters.accepted / counters.drafted, round(counters.drafted / counters.drafts)
    if counters.drafts < min_drafts or rate >= LOW_ACCEPTANCE:
        return ""
    taken = _acceptance_by_position(counters.per_position, counters.drafts, rate, depth)
    head = f"{rate:.0%} of the drafted tokens are accepted, which is below {LOW_ACCEPTANCE:.0%}"
    best = max((k for k in range(1, depth + 1) if sum(taken[:k]) / k >= LOW_ACCEPTANCE), default=1)
    now, then = 1 + sum(taken), 1 + sum(taken[:best])
    if best < depth:
        each = ", ".join(f"{one:.2f}" for one in taken)
        sums = f"depth {depth} gives 1 + {' + '.join(f'{one:.2f}' for one in taken)} = {now:.2f} tokens a pass"
        less = f"depth {best} {then:.2f}, with {depth - best} of {depth} drafted rows saved"
        return f"{head}: lower the depth to {best}. A draft at position 1, 2, ... is accepted at {each}: {sums}, {less}"
    entropy = "the text has more entropy than the head can guess: compare with drafting off"
    return f"{head}, at depth 1 already ({then:.2f} tokens a pass); {entropy}"


def _acceptance_by_position(per_position: Mapping[int, float], drafts: float, rate: float, depth: int) -> list[float]:
    """Returns the share of drafts whose first, second, ... token was accepted. Without counts by position, assumes the
    same conditional acceptance at every position."""
    counted = [per_position[place] / drafts for place in sorted(per_position)][:depth]
    if counted:
        return counted + [0.0] * (depth - len(counted))
    acceptance = equal_acceptance(1 + rate * depth, depth)
    return [acceptance**k for k in range(1, depth + 1)]
