"""What a replica answers for all of them, as a router passes such questions to any: /metrics, and who there is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from prometheus_client import Metric
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from headstart.server.replicas.ask import ask
from headstart.server.replicas.state import Fleet, Known, Member

log = logging.getLogger("headstart.server")

OWN = "x-headstart-own"
"""A request with this header, and the token of the fleet, is about the replica that it reaches."""
ENGINE = "engine"
"""The label that tells replicas apart, as vLLM has it."""
SECONDS = 2.0
NUMBERS = {"running": "vllm:num_requests_running", "waiting": "vllm:num_requests_waiting"}


async def metrics(member: Member, own: str) -> list[Metric]:
    """Of all replicas, told apart by a label, and of their router. `own`: what this one says of itself. One that does
    not answer in time is left out, and counts as down. Raises OSError or ValueError without their document."""
    fleet = await asyncio.to_thread(member.fleet)
    texts = await _told(member, fleet, own)
    found: dict[str, Metric] = {}
    for number, text in texts.items():
        for metric in text_string_to_metric_families(text):
            metric.samples = [_of_engine(sample, number) for sample in metric.samples]
            _join(found, metric)
    for metric in [*text_string_to_metric_families(await _text(fleet.router, {})), *_of_fleet(fleet, texts)]:
        _join(found, metric)
    return list(found.values())


async def listed(member: Member, own: str) -> list[dict[str, Any]]:
    """Each replica with its state and its load (None where it does not tell)."""
    fleet = await asyncio.to_thread(member.fleet)
    texts = await _told(member, fleet, own)
    return [vars(each) | _load(texts.get(each.number)) for each in fleet.replicas]


async def _told(member: Member, fleet: Fleet, own: str) -> dict[int, str]:
    """What each says of itself, by number."""

    async def of(each: Known) -> str:
        return own if each.number == member.number else await _text(each.url, {OWN: fleet.token})

    texts = await asyncio.gather(*(of(each) for each in fleet.replicas))
    return {each.number: text for each, text in zip(fleet.replicas, texts, strict=True) if text}


async def _text(url: str, headers: Mapping[str, str]) -> str:
    """Empty where nobody answers."""
    try:
        status, text = await asyncio.to_thread(ask, url, "/metrics", "GET", headers, SECONDS)
    except OSError:
        return ""
    return text if status == 200 else ""


def _of_engine(sample: Sample, number: int) -> Sample:
    return sample._replace(labels={**sample.labels, ENGINE: str(number)})


def _join(found: dict[str, Metric], metric: Metric) -> None:
    if metric.name in found:
        found[metric.name].samples += metric.samples
    else:
        found[metric.name] = metric


def _of_fleet(fleet: Fleet, texts: Mapping[int, str]) -> Iterator[Metric]:
    up = GaugeMetricFamily("headstart:replica_up", "Does a replica answer?", labels=(ENGINE,))
    starts = CounterMetricFamily("headstart:replica_starts", "How often a replica was started.", labels=(ENGINE,))
    for each in fleet.replicas:
        up.add_metric([str(each.number)], float(each.number in texts))
        starts.add_metric([str(each.number)], each.starts)
    yield from (up, starts)


def _load(text: str | None) -> dict[str, float | None]:
    return dict.fromkeys(NUMBERS) if text is None else {name: total(text, metric) for name, metric in NUMBERS.items()}


def total(text: str, name: str) -> float:
    """The sum of a metric's samples."""
    families: Iterable[Metric] = text_string_to_metric_families(text)
    return sum(sample.value for metric in families for sample in metric.samples if sample.name == name)
