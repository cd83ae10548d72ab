"""Devices of the catalogue, what they reach of their data sheets, and several of them together."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from headstart.errors import UsageError
from headstart.formats.json_object import read_packaged
from headstart.tools.plan.formats import precision

HERE = "here"
PLATFORM_OF = {"gpu": "cuda", "unified": "metal", "cpu": "cpu"}
"""Class of a device -> its platform, where its row names no other."""
_GPU = re.compile(r"(?P<name>[a-z0-9][a-z0-9 ._-]*?)(?:x(?P<count>[1-9]\d*))?")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """What one device reaches: bytes/s, operations/s of matrix products and of attention, seconds of fixed costs."""

    bandwidth: float
    compute: float
    attention: float
    cache_bandwidth: float | None = None  # of keys and values; None: as the weights
    overlap: float | None = None  # exponent, of a measured machine; None: memory and compute overlap perfectly (max)
    kernel_s: float = 0.0
    pass_s: float = 0.0
    step_s: float = 0.0  # of the engine, in every step
    step_row_s: float = 0.0  # and for every row that is sampled
    draft_s: float = 0.0  # of every draft step
    measured_draft: tuple[float, float] | None = None  # seconds of a whole draft step: a + b * sequences

    def seconds(self, num_bytes: float, operations: float, *, attention: bool = False) -> float:
        """Time of one part."""
        bandwidth = (attention and self.cache_bandwidth) or self.bandwidth
        memory, compute = num_bytes / bandwidth, operations / (self.attention if attention else self.compute)
        if self.overlap is None or not memory or not compute:
            return max(memory, compute)
        if attention:  # on a measured machine: a few rows over one key leave nothing to hide its arrival behind
            return memory + compute
        # the same as (m^p + c^p)^(1/p), safe for any exponent
        long, short = max(memory, compute), min(memory, compute)
        return float(long * (1 + (short / long) ** self.overlap) ** (1 / self.overlap))


@dataclass(frozen=True, kw_only=True)
class Device:
    """A row of the catalogue: bytes (as drivers report them), bytes/s, dense TFLOP/s; link: bytes/s in one direction,
    seconds of latency. `platform`: cuda, rocm, xpu, npu, metal or cpu, whose programs run there."""

    name: str
    memory: float
    bandwidth: float
    tflops: Mapping[str, float]
    kind: str
    source: str
    platform: str = "cuda"
    link: float | None = None
    link_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`count` equal devices: attention and dense matrices divided by `tp`, experts by `ep` (1: by tp as well)."""

    device: Device
    rates: Rates
    count: int = 1
    tp: int = 1
    ep: int = 1
    assumptions: tuple[str, ...] = field(default=())

    @property
    def replicas(self) -> int:
        """Groups of tp devices, each with its own sequences."""
        return self.count // self.tp

    @property
    def name(self) -> str:
        return self.device.name + (f" x{self.count}" if self.count > 1 else "")


@cache
def _document() -> Mapping[str, Any]:
    return dict(read_packaged("headstart.tools.plan", "devices.json"))


def find_device(name: str) -> Device:
    """By any usual spelling (rtx-4090, RTX4090, 4090). Raises UsageError for a name that the catalogue lacks."""
    for item in _document()["devices"]:
        if _bare(name) in map(_bare, item["names"]):
            return Device(
                name=item["names"][0],
                memory=item["memory_mib"] * 2**20,
                bandwidth=item["bandwidth_gb_s"] * 1e9,
                tflops=item["tflops"],
                kind=item["class"],
                source=item["source"],
                platform=item.get("platform", PLATFORM_OF[item["class"]]),
                link=item["link_gb_s"] * 1e9 if "link_gb_s" in item else None,
                link_s=item.get("link_us", 0) * 1e-6,
            )
    known = [HERE, *(item["names"][0] for item in _document()["devices"])]
    raise UsageError(f"--gpu: {name!r} is not in the catalogue", f"known: {', '.join(known)}")


def _bare(name: str) -> str:
    """Without what people write around a device's own name."""
    return re.sub(r"nvidia|geforce|amd|instinct|radeon|intel|apple|(?<=\d)-?gb?$|[^a-z0-9]", "", name.lower())


def parse_gpu(text: str) -> tuple[str, int]:
    """'h200x4' -> ('h200', 4). Names that end in x and digits themselves win."""
    text = text.strip().lower()
    known = {_bare(name) for item in _document()["devices"] for name in item["names"]} | {HERE}
    if _bare(text) in known:
        return text, 1
    match = _GPU.fullmatch(text)
    if not match:
        raise UsageError(f"--gpu is {text!r}", "for example --gpu h200x4, or --gpu here")
    return match["name"], int(match["count"] or 1)


def rates_of(device: Device, wanted: str) -> tuple[Rates, str]:
    """What a device of its class reaches when products run in precision `wanted`, and that said in words."""
    shares = _document()["classes"][device.kind]
    runs_in = precision(wanted, device.tflops)
    peak = device.tflops[runs_in] * 1e12
    rates = Rates(
        bandwidth=device.bandwidth * shares["bandwidth"],
        compute=peak * shares["compute"],
        attention=device.tflops["bf16"] * 1e12 * shares["attention"],
        kernel_s=shares["kernel_us"] * 1e-6,
        step_s=shares["step_us"] * 1e-6,
        draft_s=shares["draft_us"] * 1e-6,
    )
    return rates, (
        f"{device.name}: {device.bandwidth / 1e9:.0f} GB/s and {peak / 1e12:.0f} TFLOP/s ({runs_in}, dense; "
        f"{device.source}), of which a {device.kind} reaches {shares['bandwidth']:.0%} and {shares['compute']:.0%} "
        f"(attention {shares['attention']:.0%} of bf16); {shares['kernel_us']} us for each kernel, "
        f"{shares['step_us']} us for each step of the engine, {shares['draft_us']} us for each draft step: "
        f"{shares['why']}"
    )


def make_machine(name: str, count: int, compute: str, *, tp: int | None = None, ep: int | None = None) -> Machine:
    """Devices of the catalogue. Raises UsageError for a division that does not work out."""
    device = find_device(name)
    tp = count if tp is None else tp
    ep = 1 if ep is None else ep
    if tp < 1 or count % tp:
        raise UsageError(f"--tp {tp} does not divide {count} devices", "give a divisor, or leave --tp out")
    if ep not in (1, count):
        raise UsageError(f"--ep is {ep}, but experts are spread over all {count} devices or not at all", "use 1 or all")
    if count > 1 and device.link is None and max(tp, ep) > 1:
        raise UsageError(f"{device.name} has no interconnect in the catalogue", "plan one device, or --tp 1")
    rates, *notes = rates_of(device, compute)
    if tp > 1:
        notes.append(
            f"tensor parallel {tp}: two all-reduces a layer, {device.link_s * 1e6:.0f} us each and 2 (n - 1) / n of "
            f"the bytes at {(device.link or 0) / 1e9:.0f} GB/s"
        )
    if ep > 1:
        notes.append(
            f"expert parallel {ep}: two all-to-alls a layer of experts; the device with most of the chosen experts "
            "decides (mean + sqrt(2 mean ln n))"
        )
    return Machine(device=device, rates=rates, count=count, tp=tp, ep=ep, assumptions=tuple(notes))
