"""Metrics and list of all replicas: any replica answers such requests, with the metrics of the others."""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from headstart.server.replicas.group import ReplicaGroup, ReplicaId, ReplicaInfo
from headstart.server.replicas.router import send

log = logging.getLogger("headstart.server")

OWN_HEADER = "x-headstart-own"  # a request with this header and the group's token is about one replica only
ENGINE = "engine"  # label of the replica, as in vLLM
TIMEOUT_S = 2.0
LOAD_METRICS = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"}


async def collect(replica: ReplicaId, own: str) -> list[Metric]:
    """Metrics of all replicas, each with the label of its replica, of their router and of the group, for
    `metrics.exposition`. `own`: text of this replica's metrics. A replica that does not answer in time is left out, and
    counts as down. Raises OSError or ValueError without the group's file."""
    group = await asyncio.to_thread(replica.group)
    texts = await _texts(replica, group, own)
    found: list[Metric] = []
    for number, text in texts.items():
        for metric in text_string_to_metric_families(text):
            label = {ENGINE: str(number)}
            metric.samples = [sample._replace(labels=sample.labels | label) for sample in metric.samples]
            found.append(metric)
    others = (await _text(group.router, {}), await _text(group.relay, {OWN_HEADER: group.token}))
    found += [metric for text in others for metric in text_string_to_metric_families(text)]
    return [*found, *_group_metrics(group, texts)]


async def list_replicas(replica: ReplicaId, own: str) -> list[dict[str, Any]]:
    """Each replica with its state and its load (None where it does not answer)."""
    group = await asyncio.to_thread(replica.group)
    texts = await _texts(replica, group, own)
    found = []
    for each in group.replicas:
        text = texts.get(each.number)
        loads = {name: None if text is None else total(text, metric) for name, metric in LOAD_METRICS.items()}
        found.append(vars(each) | loads)
    return found


async def _texts(replica: ReplicaId, group: ReplicaGroup, own: str) -> dict[int, str]:
    """The metrics of each replica by number."""

    async def of(each: ReplicaInfo) -> str:
        return own if each.number == replica.number else await _text(each.url, {OWN_HEADER: group.token})

    texts = await asyncio.gather(*(of(each) for each in group.replicas))
    return {each.number: text for each, text in zip(group.replicas, texts, strict=True) if text}


async def _text(url: str, headers: Mapping[str, str]) -> str:
    """Empty where no server answers."""
    response = await send("GET", f"{url}/metrics", TIMEOUT_S, headers)
    return response.text if response is not None and response.status_code == 200 else ""


def _group_metrics(group: ReplicaGroup, texts: Mapping[int, str]) -> Iterator[Metric]:
    up = GaugeMetricFamily("headstart:replica_up", "1 if the replica answers, else 0.", labels=(ENGINE,))
    starts = CounterMetricFamily("headstart:replica_starts", "Starts of the replica.", labels=(ENGINE,))
    for each in group.replicas:
        up.add_metric([str(each.number)], float(each.number in texts))
        starts.add_metric([str(each.number)], each.starts)
    yield from (up, starts)


def total(text: str, name: str) -> float:
    """The sum of a metric's samples."""
    families: Iterable[Metric] = text_string_to_metric_families(text)
    return sum(sample.value for metric in families for sample in metric.samples if sample.name == name)
