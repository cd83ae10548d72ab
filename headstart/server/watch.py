"""What the server tells about itself: Prometheus metrics under vLLM's names, and a log line every ten seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Sequence as Seq
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.cache.spill import Spill
from headstart.cache.store import Tier
from headstart.config import AUTO
from headstart.engine.engine import Engine
from headstart.engine.odds import Odds
from headstart.server.accounts import Accounts
from headstart.server.recorder import Recorder

Family = CounterMetricFamily | GaugeMetricFamily
log = logging.getLogger("headstart.server")

HANDED = {"prompts": "Prompts that the prefill server computed.", "tokens": "Their tokens that were not known here.",
          "fetched": "Blocks that came over HTTP.", "failed": "Prompts that it did not compute."}  # fmt: skip
TIERS: tuple[Tier, ...] = ("ram", "disk")
LOG_EVERY = 10.0
"""Seconds between log lines while there is work."""
FIRST = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
BETWEEN = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
WHOLE = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
JUDGED_AFTER = 400
"""Drafts over which a head is judged, again and again."""
DEAD_BELOW = 0.02
"""Accepted tokens per draft of a dead head."""
FIRST_PAUSE, LONGEST_PAUSE = 300.0, 3600.0
"""Seconds until a dead head is tried again, at first and after ever longer pauses: traffic changes."""


@dataclass
class Handed:
    """Prompts that were computed elsewhere, their tokens, blocks that were fetched, and prompts for which it failed."""

    prompts: int = 0
    tokens: int = 0
    fetched: int = 0
    failed: int = 0


@dataclass
class Watch:
    """Counts and times of one server, and what its machine costs in dollars. `said`: begins its
    lines in the log, where several models run. `stepped` runs in the engine's thread, the
    rest on the event loop."""

    engine: Engine
    model: str
    price_per_hour: float | None = None
    recorder: Recorder | None = None
    accounts: Accounts = field(default_factory=Accounts)
    said: str = ""
    handoff: Handed | None = None  # prompts that another server computed
    shed: int = 0  # requests refused for want of room
    requests: dict[str, int] = field(default_factory=dict)  # finish reason -> choices
    prompt_tokens: int = 0
    generated_tokens: int = 0
    spec_disabled: bool = False
    registry: CollectorRegistry = field(init=False)

    def __post_init__(self) -> None:
        self.registry = CollectorRegistry()
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", FIRST)
        self.between = self._histogram("vllm:inter_token_latency_seconds", "Between tokens of a choice.", BETWEEN)
        self.whole = self._histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", WHOLE)
        self.registry.register(_Counters(self))
        self._last_log = self.started = time.monotonic()
        self._last_emitted = 0
        self._last_drafts = self._judged = (0, 0)
        self._has_head, self._depth = self.engine.drafting.has_head, self.engine.drafting.depth
        self._pause, self._back_at = FIRST_PAUSE, 0.0

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets)
        return made.labels(self.model)

    def finished(self, reason: str, seconds: float) -> None:
        """One choice has ended, or was given up."""
        self.requests[reason] = self.requests.get(reason, 0) + 1
        self.whole.observe(seconds)

    def stepped(self, engine: Engine) -> None:
        """After every step: now and then a line, and a look at the head."""
        stats = engine.stats
        now = time.monotonic()
        if self.spec_disabled:
            self._try_again(engine, now)
        elif self._has_head and engine.drafting.depth:
            self._judge(engine, now)
        if now - self._last_log < LOG_EVERY:
            return
        seconds, self._last_log = now - self._last_log, now
        tokens, self._last_emitted = stats.emitted - self._last_emitted, stats.emitted
        drafts, accepted = stats.drafts - self._last_drafts[0], stats.accepted - self._last_drafts[1]
        self._last_drafts = (stats.drafts, stats.accepted)
        log.info(
            "%s%.1f tokens/s, %d running, %d waiting, KV cache %.1f %%, acceptance length %.2f, depth %.1f",
            self.said, tokens / seconds, len(engine.scheduler.running), len(engine.scheduler.waiting),
            100 * engine.memory.usage, 1 + accepted / drafts if drafts else 1.0, engine.drafting.mean_depth,
        )  # fmt: skip

    def head_changed(self) -> None:
        """A new head has not failed yet."""
        self._judged, self._pause, self._back_at = (0, 0), FIRST_PAUSE, 0.0

    def _try_again(self, engine: Engine, now: float) -> None:
        if now >= self._back_at:
            self._judged = (engine.judged.drafts, engine.judged.accepted)
            self.spec_disabled, engine.drafting.depth, engine.drafting.auto.odds = False, self._depth, Odds()
            log.info("drafting is tried again")

    def _judge(self, engine: Engine, now: float) -> None:
        """Of ordinary texts: with depth auto all guesses count, verified or not; else the drafts of the engine's own
        depth."""
        if engine.drafting.depth == AUTO:
            tries, rate = engine.drafting.auto.odds.seen(engine.drafting.auto.method)
        else:
            tries, accepted = engine.judged.drafts - self._judged[0], engine.judged.accepted - self._judged[1]
            rate = accepted / max(tries, 1)
        if tries < JUDGED_AFTER:
            return
        self._judged = (engine.judged.drafts, engine.judged.accepted)
        if rate >= DEAD_BELOW:
            self._pause = FIRST_PAUSE
            return
        self.spec_disabled, engine.drafting.depth, self._back_at = True, 0, now + self._pause
        log.error(
            "THE HEAD IS DEAD: of %d drafts %.1f %% began right. Drafting is off for %.0f minutes; run `headstart "
            "inspect` and `headstart verify`: is it a head of this trunk?", tries, 100 * rate, self._pause / 60,
        )  # fmt: skip
        self._pause = min(2 * self._pause, LONGEST_PAUSE)


def exposition(watches: Seq[Watch], more: Seq[Metric] = ()) -> bytes:
    """What /metrics says of several models: each metric once, with all their values."""
    if len(watches) == 1 and not more:
        return generate_latest(watches[0].registry)
    found: dict[str, Metric] = {}
    for metric in [*(metric for watch in watches for metric in watch.registry.collect()), *more]:
        if metric.name in found:
            found[metric.name].samples += metric.samples
        else:
            found[metric.name] = metric
    registry = CollectorRegistry()
    registry.register(_Collected(list(found.values())))
    return generate_latest(registry)


@dataclass(eq=False)
class _Collected(Collector):
    metrics: list[Metric]

    def collect(self) -> list[Metric]:
        return self.metrics


class _Counters(Collector):
    """Totals that the engine keeps anyway, read when somebody asks."""

    def __init__(self, watch: Watch) -> None:
        self._watch = watch

    def collect(self) -> Iterator[Metric]:
        watch, engine = self._watch, self._watch.engine
        stats, scheduler = engine.stats, engine.scheduler
        yield self._counter("vllm:spec_decode_num_drafts", "Drafts.", stats.drafts)
        yield self._counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", stats.drafted)
        yield self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted tokens.", stats.accepted)
        accepted = enumerate(list(stats.per_position))
        name = "vllm:spec_decode_num_accepted_tokens_per_pos"
        yield self._several(CounterMetricFamily, name, "Accepted, by place.", "position", accepted)
        sources = list(stats.sources.items())
        text = "Accepted tokens by who drafted them: a head, the text itself (ngram), other answers (shared)."
        yield self._several(CounterMetricFamily, "headstart:accepted_tokens", text, "source", sources)
        yield self._gauge("vllm:spec_decode_draft_acceptance_rate", "Accepted / drafted.", stats.acceptance_rate)
        yield self._gauge("vllm:num_requests_running", "Sequences in the batch.", len(scheduler.running))
        yield self._gauge("vllm:num_requests_waiting", "Sequences in the queue.", len(scheduler.waiting))
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", engine.memory.usage)
        yield self._counter("vllm:num_preemptions", "Sequences put back.", scheduler.num_preemptions)
        yield self._counter("vllm:prompt_tokens", "Prompt tokens.", watch.prompt_tokens)
        yield self._counter("vllm:generation_tokens", "Tokens put out.", watch.generated_tokens)
        yield self._counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", scheduler.prefix_queries)
        yield self._counter("vllm:prefix_cache_hits", "Prompt tokens found.", scheduler.prefix_hits)
        if engine.memory.spill is not None:
            yield from self._spilled(engine.memory.spill, scheduler.prefix_hits)
        if watch.handoff is not None:
            for name, count in vars(watch.handoff).items():
                yield self._counter(f"headstart:prefill_{name}", HANDED[name], count)
        name, ended = "vllm:request_success", list(watch.requests.items())
        yield self._several(CounterMetricFamily, name, "Choices by how they ended.", "finished_reason", ended)
        if engine.synthetic is not None:
            text = "Load test: share of drafts accepted up to this place, whatever the model says."
            rates = enumerate(engine.synthetic.rates)
            yield self._several(GaugeMetricFamily, "headstart:synthetic_acceptance", text, "position", rates)
        for name, seconds in engine.seconds.items():
            yield self._counter(f"headstart:{name}_seconds", f"Time in {name}.", seconds)
        yield self._counter("headstart:passes_saved", "Tokens that no pass was spent on.", stats.emitted - stats.passes)
        if watch.price_per_hour is not None:  # idle time is paid for, too
            hours = (time.monotonic() - watch.started) / 3600
            yield self._counter(
                "headstart:cost_dollars", "Price of the machine since the start.", hours * watch.price_per_hour
            )
        if watch.recorder is not None:
            yield self._counter("headstart:records_kept", "Texts recorded.", watch.recorder.kept)
            lost = list(watch.recorder.lost.items())
            yield self._several(CounterMetricFamily, "headstart:records_lost", "Texts not recorded.", "reason", lost)
        yield self._counter("headstart:requests_shed", "Requests refused since too much waits.", watch.shed)
        if not watch.said:
            yield from keys_of(watch.accounts, watch.model)
        yield self._gauge("headstart:depth", "Tokens drafted per sequence, lately.", engine.drafting.mean_depth)
        if engine.drafting.num_vocab is not None:
            text = "Tokens whose logits the head computes in full for each draft."
            yield self._gauge("headstart:draft_vocab", text, engine.drafting.num_vocab)
        yield self._gauge("headstart:spec_disabled", "1: drafting was switched off.", int(watch.spec_disabled))

    def _spilled(self, spill: Spill, prefix_hits: int) -> Iterator[Metric]:
        """Of --kv-spill."""
        counts, hits = spill.store.counts, spill.hits
        tiers = [("pool", max(prefix_hits - hits.total(), 0)), *((tier, hits[tier]) for tier in TIERS)]
        text = "Prompt tokens found, by where they were."
        yield self._several(CounterMetricFamily, "headstart:kv_hit_tokens", text, "tier", tiers)
        yield self._counter("headstart:kv_spilled_blocks", "Blocks written.", counts.saved)
        yield self._counter("headstart:kv_spilled_bytes", "Bytes of blocks written.", counts.saved_bytes)
        for name, found in (("blocks", counts.loaded), ("bytes", counts.loaded_bytes)):
            text, values = (
                f"{name.title()} read back, by where they were.",
                [("ram", found["ram"]), ("disk", found["disk"])],
            )
            yield self._several(CounterMetricFamily, f"headstart:kv_loaded_{name}", text, "tier", values)
        yield self._counter("headstart:kv_broken_blocks", "Files dropped for a wrong digest.", counts.dropped)
        yield self._counter("headstart:kv_evicted_blocks", "Files removed, the oldest first.", counts.evicted)
        yield self._counter("headstart:kv_unwritten_blocks", "Writes that failed.", counts.failed)

    def _counter(self, name: str, text: str, value: float) -> Metric:
        return self._several(CounterMetricFamily, name, text, "", [("", value)])

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        return self._several(GaugeMetricFamily, name, text, "", [("", value)])

    def _several(
        self, kind: type[Family], name: str, text: str, label: str, values: Iterable[tuple[object, float]]
    ) -> Metric:
        return _several(self._watch.model, kind, name, text, label, values)


def keys_of(accounts: Accounts, model: str) -> Iterator[Metric]:
    """Of each API key, by the beginning of its hash."""
    if not accounts:
        return
    counts = {"requests": "Requests begun.", "refused": "Requests beyond what the key may have.",
              "prompt_tokens": "Prompt tokens.", "generated_tokens": "Tokens put out."}  # fmt: skip
    for name, text in counts.items():
        values = [(account.name, getattr(account, name)) for account in accounts]
        yield _several(model, CounterMetricFamily, f"headstart:key_{name}", text, "key", values)
    held = [(account.name, account.held) for account in accounts]
    yield _several(model, GaugeMetricFamily, "headstart:key_held", "Texts that run or wait.", "key", held)


def _several(
    model: str, kind: type[Family], name: str, text: str, label: str, values: Iterable[tuple[object, float]]
) -> Metric:
    """A value for each text of `label`; an empty label is left out."""
    family = kind(name, text, labels=("model_name", label) if label else ("model_name",))
    for place, value in values:
        family.add_metric([model, str(place)] if label else [model], value)
    return family
