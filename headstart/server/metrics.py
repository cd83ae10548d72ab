"""The server's metrics: Prometheus metrics under vLLM's names, and a log line of the load every ten seconds."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from headstart.api import Choice
from headstart.cache.spill import KVSpill
from headstart.engine.engine import Engine
from headstart.server.accounts import Accounts
from headstart.server.admission import Admission
from headstart.server.prefill_client import PrefillCounts
from headstart.server.records import TextRecorder
from headstart.stats import acceptance_length

log = logging.getLogger("headstart.server")

PREFILL_HELP = {
    "prompts": "Prompts that the prefill server computed.", "tokens": "Tokens of these prompts not in the local cache.",
    "fetched": "KV blocks fetched over HTTP.", "failed": "Prompts that the prefill server failed to compute.",
}  # fmt: skip
LOG_EVERY_S = 10.0  # time between log lines while there is work
TTFT_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5)
REQUEST_BUCKETS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 300, 600)
PHASE_BUCKETS = (  # vLLM's
    0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680,
)  # fmt: skip
PHASES = {
    "queue": ("queued", "first pass"), "prefill": ("first pass", "first token"),
    "decode": ("first token", "last token"), "inference": ("first pass", "last token"),
}  # fmt: skip
"""Phases of a choice in vLLM's metrics: name -> the moments between which its time is measured."""


@dataclass(eq=False)
class ServerMetrics(Collector):
    """Counts and times of one served model. `log_load` runs in the engine's thread, the rest on the event loop."""

    engine: Engine
    model: str  # its name
    admission: Admission
    price_per_hour: float | None = None  # dollars that the machine costs
    recorder: TextRecorder | None = None
    log_prefix: str = ""  # of log lines, where several models run
    prefill: PrefillCounts | None = None  # prompts that another server computed
    requests: dict[str, int] = field(default_factory=dict)  # finish reason -> number of choices
    prompt_tokens: int = 0
    generated_tokens: int = 0
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)

    def __post_init__(self) -> None:
        self.first_token = self._histogram("vllm:time_to_first_token_seconds", "Queued to first token.", TTFT_BUCKETS)
        self.between = self._histogram("vllm:inter_token_latency_seconds", "Between tokens of a choice.", TOKEN_BUCKETS)
        self.whole = self._histogram("vllm:e2e_request_latency_seconds", "Queued to last token.", REQUEST_BUCKETS)
        self.phases = {
            name: self._histogram(f"vllm:request_{name}_time_seconds", f"{start} to {end}.".capitalize(), PHASE_BUCKETS)
            for name, (start, end) in PHASES.items()
        }
        self.registry.register(self)
        self._last_log = self.started = time.monotonic()
        self._last_emitted = 0
        self._last_drafts = (0, 0)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        made = Histogram(name, text, ("model_name",), registry=self.registry, buckets=buckets)
        return made.labels(self.model)

    def finished(self, reason: str, begun: float, choice: Choice) -> None:
        """Count a choice that has ended or was aborted. `begun`: when it was queued, by time.perf_counter()."""
        self.requests[reason] = self.requests.get(reason, 0) + 1
        self.whole.observe(time.perf_counter() - begun)
        if choice.sequence is None or not choice.sequence.scheduled_s or not choice.arrivals:
            return
        moments = {"queued": begun, "first pass": choice.sequence.scheduled_s,
                   "first token": choice.arrivals[0], "last token": choice.arrivals[-1]}  # fmt: skip
        for name, (start, end) in PHASES.items():
            self.phases[name].observe(moments[end] - moments[start])

    def log_load(self) -> None:
        """Log the load at most every LOG_EVERY_S. The engine thread calls this after each step."""
        engine, stats, now = self.engine, self.engine.stats, time.monotonic()
        if now - self._last_log < LOG_EVERY_S:
            return
        seconds, self._last_log = now - self._last_log, now
        tokens, self._last_emitted = stats.emitted - self._last_emitted, stats.emitted
        drafts, accepted = stats.drafts - self._last_drafts[0], stats.accepted - self._last_drafts[1]
        self._last_drafts = (stats.drafts, stats.accepted)
        log.info(
            "%s%.1f tokens/s, %d running, %d waiting, KV cache %.1f %%, acceptance length %.2f, depth %.1f",
            self.log_prefix, tokens / seconds, len(engine.scheduler.running), len(engine.scheduler.waiting),
            100 * engine.memory.usage, acceptance_length(drafts, accepted), engine.drafting.mean_depth,
        )  # fmt: skip

    def collect(self) -> Iterator[Metric]:
        """Prometheus calls this at each request of /metrics; the values are the engine's own counters."""
        counter = partial(_family, CounterMetricFamily, self.model)
        gauge = partial(_family, GaugeMetricFamily, self.model)
        engine, stats, scheduler = self.engine, self.engine.stats, self.engine.scheduler
        yield counter("vllm:spec_decode_num_drafts", "Drafts.", stats.drafts)
        yield counter("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", stats.drafted)
        yield counter("vllm:spec_decode_num_accepted_tokens", "Accepted tokens.", stats.accepted)
        name, accepted = "vllm:spec_decode_num_accepted_tokens_per_pos", dict(enumerate(list(stats.per_position)))
        yield counter(name, "Accepted tokens by position in the draft.", accepted, "position")
        text = "Accepted tokens by drafter: a head's method, ngram (from the text itself), shared (from other outputs)."
        yield counter("headstart:accepted_tokens", text, dict(stats.sources), "source")
        yield gauge("vllm:spec_decode_draft_acceptance_rate", "Accepted / drafted.", stats.acceptance_rate)
        yield gauge("vllm:num_requests_running", "Sequences in the batch.", len(scheduler.running))
        yield gauge("vllm:num_requests_waiting", "Sequences in the queue.", len(scheduler.waiting))
        yield gauge("vllm:kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", engine.memory.usage)
        yield counter("vllm:num_preemptions", "Preempted sequences.", scheduler.num_preemptions)
        yield counter("vllm:prompt_tokens", "Prompt tokens.", self.prompt_tokens)
        yield counter("vllm:generation_tokens", "Output tokens.", self.generated_tokens)
        yield counter("vllm:prefix_cache_queries", "Prompt tokens looked up.", scheduler.prefix_queries)
        yield counter("vllm:prefix_cache_hits", "Prompt tokens found.", scheduler.prefix_hits)
        if engine.memory.spill is not None:
            yield from self._collect_spill(engine.memory.spill, counter)
        for name, count in vars(self.prefill).items() if self.prefill is not None else ():
            yield counter(f"headstart:prefill_{name}", PREFILL_HELP[name], count)
        yield counter("vllm:request_success", "Choices by how they ended.", dict(self.requests), "finished_reason")
        if engine.synthetic is not None:
            text = "Load test: share of drafts accepted up to this position, independent of the model."
            rates = dict(enumerate(engine.synthetic.rates))
            yield gauge("headstart:synthetic_acceptance", text, rates, "position")
        for name, seconds in engine.seconds.items():
            yield counter(f"headstart:{name}_seconds", f"Time in {name}.", seconds)
        yield counter("headstart:passes_saved", "Output tokens minus model passes.", stats.emitted - stats.passes)
        if self.price_per_hour is not None:  # counts idle time too
            dollars = (time.monotonic() - self.started) / 3600 * self.price_per_hour
            yield counter("headstart:cost_dollars", "Price of the machine since the start.", dollars)
        if self.recorder is not None:
            yield counter("headstart:records_kept", "Texts recorded.", self.recorder.kept)
            yield counter("headstart:records_lost", "Texts not recorded.", self.recorder.lost, "reason")
        yield counter("headstart:requests_shed", "Requests refused at a full queue.", self.admission.num_shed)
        if not self.log_prefix:
            yield from account_metrics(self.admission.accounts, self.model)
        yield gauge("headstart:depth", "Tokens drafted per sequence, lately.", engine.drafting.mean_depth)
        if engine.drafting.num_vocab is not None:
            text = "Tokens whose logits the head computes in full for each draft."
            yield gauge("headstart:draft_vocab", text, engine.drafting.num_vocab)
        text = "1: drafting is paused because too few drafts of the head are accepted."
        yield gauge("headstart:spec_disabled", text, int(engine.head_health.is_paused))

    def _collect_spill(self, spill: KVSpill, counter: Callable[..., Metric]) -> Iterator[Metric]:
        """Metrics of --kv-spill."""
        counts, hits = spill.store.counts, spill.hits
        in_pool = max(self.engine.scheduler.prefix_hits - hits.total(), 0)
        tiers = {"pool": in_pool, "ram": hits["ram"], "disk": hits["disk"]}
        yield counter("headstart:kv_hit_tokens", "Prompt tokens found, by storage tier.", tiers, "tier")
        yield counter("headstart:kv_spilled_blocks", "Blocks written.", counts.saved)
        yield counter("headstart:kv_spilled_bytes", "Bytes of blocks written.", counts.saved_bytes)
        for name, found in (("blocks", counts.loaded), ("bytes", counts.loaded_bytes)):
            text = f"{name.title()} read back, by storage tier."
            yield counter(f"headstart:kv_loaded_{name}", text, {"ram": found["ram"], "disk": found["disk"]}, "tier")
        yield counter("headstart:kv_broken_blocks", "Files dropped for a wrong digest.", counts.dropped)
        yield counter("headstart:kv_evicted_blocks", "Files removed, the oldest first.", counts.evicted)
        yield counter("headstart:kv_unwritten_blocks", "Writes that failed.", counts.failed)


def exposition(models: Seq[ServerMetrics], more: Seq[Metric] = ()) -> bytes:
    """The text of /metrics: each metric once, with the values of all `models`, then the metrics `more`."""
    if len(models) == 1 and not more:
        return generate_latest(models[0].registry)
    merged = _MergedMetrics()
    for metric in [*(metric for model in models for metric in model.registry.collect()), *more]:
        if metric.name in merged:
            merged[metric.name].samples += metric.samples
        else:
            merged[metric.name] = metric
    return generate_latest(merged)


class _MergedMetrics(dict[str, Metric], Collector):
    """Metrics by name, as a collector that Prometheus can render."""

    def collect(self) -> Iterator[Metric]:
        yield from self.values()


def account_metrics(accounts: Accounts, model: str) -> Iterator[Metric]:
    """Metrics of each API key, named by the beginning of its hash."""
    if not accounts:
        return
    counts = {"requests": "Requests begun.", "refused": "Requests beyond the key's limits.",
              "prompt_tokens": "Prompt tokens.", "generated_tokens": "Output tokens."}  # fmt: skip
    for name, text in counts.items():
        values = {account.name: getattr(account, name) for account in accounts}
        yield _family(CounterMetricFamily, model, f"headstart:key_{name}", text, values, "key")
    held = {account.name: account.held for account in accounts}
    yield _family(GaugeMetricFamily, model, "headstart:key_held", "Texts that run or wait.", held, "key")


def _family(
    kind: type[CounterMetricFamily | GaugeMetricFamily], model: str, name: str, text: str,
    value: float | Mapping[Any, float], label: str = "",
) -> Metric:  # fmt: skip
    """A Prometheus metric with one value, or with one for each key of the mapping `value` under `label`."""
    family = kind(name, text, labels=("model_name", label) if label else ("model_name",))
    for key, number in value.items() if isinstance(value, Mapping) else [("", value)]:
        family.add_metric([model, str(key)] if label else [model], number)
    return family
