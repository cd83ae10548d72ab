"""What engines tell about drafting in their Prometheus metrics: six vocabularies, one meaning."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

PATHS = ("/metrics", "/prometheus/metrics", "/brpc_metrics")
"""Where engines show them: most, TensorRT-LLM (whose /metrics is JSON), xLLM."""


@dataclass(frozen=True, kw_only=True)
class Names:
    """One engine's words; several for one meaning where they changed. `marker`: a name that only it has."""

    engine: str
    marker: str
    drafts: tuple[str, ...] = ()
    drafted: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    per_position: str = ""
    length: str = ""  # a gauge
    saved: str = ""  # passes that drafting saved
    always_there: bool = True  # also without drafting

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(name for name in (*self.drafts, *self.drafted, *self.accepted, self.length) if name)


def _vllm(engine: str, marker: str, prefix: str, *, saved: str = "", always_there: bool = True) -> Names:
    """vLLM's four counters, which others took over."""
    return Names(
        engine=engine,
        marker=marker,
        drafts=(f"{prefix}spec_decode_num_drafts_total",),
        drafted=(f"{prefix}spec_decode_num_draft_tokens_total",),
        accepted=(f"{prefix}spec_decode_num_accepted_tokens_total",),
        per_position=f"{prefix}spec_decode_num_accepted_tokens_per_pos_total",
        saved=saved,
        always_there=always_there,
    )


ENGINES = (
    _vllm("headstart", "headstart:depth", "vllm:", saved="headstart:passes_saved_total"),
    _vllm("vllm", "vllm:", "vllm:", always_there=False),
    _vllm("llamacpp", "llamacpp:", "llamacpp:"),
    Names(
        engine="sglang",
        marker="sglang:",
        drafts=("sglang:spec_verify_calls_total",),
        length="sglang:spec_accept_length",
    ),
    Names(
        engine="trtllm",
        marker="trtllm_",
        drafted=("trtllm_spec_decode_num_draft_tokens_total", "trtllm_spec_decode_drafted_tokens_total"),
        accepted=("trtllm_spec_decode_num_accepted_tokens_total", "trtllm_spec_decode_accepted_tokens_total"),
        length="trtllm_spec_decode_acceptance_length",
        always_there=False,
    ),
    Names(
        engine="xllm",
        marker="speculative_num_drafts_total",
        drafts=("speculative_num_drafts_total",),
        drafted=("speculative_num_draft_tokens_total",),
        accepted=("speculative_num_accepted_tokens_total",),
        per_position="speculative_num_accepted_tokens_per_pos",
        length="speculative_mean_tokens_per_decode_step",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Totals of a server. None: this engine does not tell. `known` False: none of its names for drafting is there; it
    does not draft, then, unless they are `always_there`."""

    engine: str
    known: bool
    always_there: bool = True
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    per_position: dict[int, float] = field(default_factory=dict)
    length: float | None = None  # a gauge: of late
    saved: float | None = None

    def since(self, before: Counts) -> Counts:
        """What happened in between. The gauge stays."""

        def less(now: float | None, then: float | None) -> float | None:
            return None if now is None else now - (then or 0.0)

        places = {place: count - before.per_position.get(place, 0.0) for place, count in self.per_position.items()}
        return Counts(
            engine=self.engine,
            known=self.known,
            always_there=self.always_there,
            drafts=less(self.drafts, before.drafts),
            drafted=less(self.drafted, before.drafted),
            accepted=less(self.accepted, before.accepted),
            per_position=places,
            length=self.length,
            saved=less(self.saved, before.saved),
        )

    @property
    def active(self) -> bool:
        """Were tokens drafted?"""
        return any(count is not None and count > 0 for count in (self.drafts, self.drafted)) or (
            self.drafts is None and self.drafted is None and (self.length or 0) > 0
        )

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts, or the engine's gauge; counts the recovered or bonus token."""
        if not self.active:
            return None
        if self.drafts and self.accepted is not None:
            return 1 + self.accepted / self.drafts
        return self.length


def read(text: str) -> Counts | None:
    """None for a text that is not Prometheus metrics, or of an engine that is not in `ENGINES`."""
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

    def total(wanted: tuple[str, ...]) -> float | None:
        return next((totals[name] for name in wanted if name in totals), None)

    places: dict[int, float] = defaultdict(float)
    for sample in samples:
        if names.per_position and sample.name == names.per_position and sample.labels.get("position", "").isdigit():
            places[int(sample.labels["position"])] += sample.value
    return Counts(
        engine=names.engine,
        known=any(name in totals for name in names.all),
        always_there=names.always_there,
        drafts=total(names.drafts),
        drafted=total(names.drafted),
        accepted=total(names.accepted),
        per_position=dict(sorted(places.items())),
        saved=total((names.saved,)),
        length=_mean([sample.value for sample in samples if sample.name == names.length]),
    )


def _mean(gauges: list[float]) -> float | None:
    """Of the workers that have drafted; 0 if none has."""
    busy = [value for value in gauges if value > 0]
    return sum(busy) / len(busy) if busy else 0.0 if gauges else None
