"""Machines for `plan`: devices of the catalogue (devices.json), the rates that they reach, and prices."""

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from headstart.errors import ParameterError, UsageError
from headstart.files import user_path
from headstart.formats.json_object import read_packaged

COMPUTE_ORDER = ("fp8", "int8", "bf16")
HERE = "here"
ON_DEMAND, SPOT, LIST = "on-demand", "spot", "list"
MAX_DOLLARS = 1e6
PLATFORM_OF = {"gpu": "cuda", "unified": "metal", "cpu": "cpu"}
"""Class of a device -> its platform, unless its catalogue row names another."""
CATALOGUE: Mapping[str, Any] = read_packaged("headstart.tools.plan", "devices.json")
_GPU = re.compile(r"(?P<name>[a-z0-9][a-z0-9 ._-]*?)(?:x(?P<count>[1-9]\d*))?")


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Achieved rates of one device, and fixed costs in seconds."""

    bandwidth: float  # bytes/s of weights
    compute: float  # operations/s of matrix products
    attention: float  # operations/s
    cache_bandwidth: float | None = None  # bytes/s of keys and values; None: `bandwidth`
    overlap: float | None = None  # p in (memory^p + compute^p)^(1/p) seconds; None: perfect overlap (the maximum)
    kernel_s: float = 0.0  # per kernel launch
    pass_s: float = 0.0  # per pass
    step_s: float = 0.0  # per engine step
    step_row_s: float = 0.0  # per engine step and sampled row
    draft_s: float = 0.0  # per draft step
    measured_draft: tuple[float, float] | None = None  # seconds of a whole draft step: a + b * sequences

    def seconds(self, num_bytes: float, operations: float, *, attention: bool = False) -> float:
        """Returns the time to read `num_bytes` and to compute `operations`, which overlap."""
        bandwidth = (attention and self.cache_bandwidth) or self.bandwidth
        memory, compute = num_bytes / bandwidth, operations / (self.attention if attention else self.compute)
        if self.overlap is None or not memory or not compute:
            return max(memory, compute)
        if attention:  # on a measured machine: few rows per key, so compute does not hide memory
            return memory + compute
        # (memory^p + compute^p)^(1/p), written so that large exponents do not overflow
        long, short = max(memory, compute), min(memory, compute)
        return float(long * (1 + (short / long) ** self.overlap) ** (1 / self.overlap))


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    name: str
    memory: float  # bytes, as drivers report them
    bandwidth: float  # bytes/s
    tflops: Mapping[str, float]  # dense TFLOP/s by precision
    kind: str  # key of CATALOGUE["classes"], which has the achieved shares of peak rates
    source: str  # of the numbers
    platform: str = "cuda"  # cuda, rocm, xpu, npu, metal or cpu
    link: float | None = None  # interconnect in bytes/s, one direction; None: there is none
    link_s: float = 0.0  # latency of the interconnect


@dataclass(frozen=True, kw_only=True)
class Machine:
    """`count` equal devices."""

    device: DeviceSpec
    rates: Rates
    count: int = 1
    tp: int = 1  # devices that divide attention, dense matrices and caches
    ep: int = 1  # devices that divide experts; 1: tp
    assumptions: tuple[str, ...] = field(default=())

    @property
    def replicas(self) -> int:
        """Groups of tp devices, each with its own sequences."""
        return self.count // self.tp

    @property
    def name(self) -> str:
        return self.device.name + (f" x{self.count}" if self.count > 1 else "")


def find_device(name: str) -> DeviceSpec:
    """Returns a device by any usual spelling (rtx-4090, RTX4090, 4090). Raises ParameterError for an unknown name."""
    if (item := DEVICES.get(_normalized(name))) is None:
        known = [HERE, *(item["names"][0] for item in CATALOGUE["devices"])]
        raise ParameterError("--gpu", f"is {name!r}, which is not in the catalogue", f"known: {', '.join(known)}")
    return DeviceSpec(
        name=item["names"][0], memory=item["memory_mib"] * 2**20, bandwidth=item["bandwidth_gb_s"] * 1e9,
        tflops=item["tflops"], kind=item["class"], source=item["source"],
        platform=item.get("platform", PLATFORM_OF[item["class"]]),
        link=item["link_gb_s"] * 1e9 if "link_gb_s" in item else None, link_s=item.get("link_us", 0) * 1e-6,
    )  # fmt: skip


def _normalized(name: str) -> str:
    """Returns the name in lower case, without vendor, product line, units and punctuation."""
    return re.sub(r"nvidia|geforce|amd|instinct|radeon|intel|apple|(?<=\d)-?gb?$|[^a-z0-9]", "", name.lower())


DEVICES = {_normalized(name): item for item in CATALOGUE["devices"] for name in item["names"]}


def parse_gpu(text: str) -> tuple[str, int]:
    """Parses 'h200x4' to ('h200', 4); a device name that itself ends in x and digits is not split. Raises UsageError
    for a text of another form; the name may still be unknown."""
    text = text.strip().lower()
    if text == HERE or _normalized(text) in DEVICES:
        return text, 1
    match = _GPU.fullmatch(text)
    if not match:
        raise ParameterError("--gpu", f"is {text!r}, but takes DEVICExCOUNT", "for example h200x4, or here")
    return match["name"], int(match["count"] or 1)


def device_rates(device: DeviceSpec, wanted: str) -> tuple[Rates, str]:
    """Returns the achieved rates for matrix products in precision `wanted` (bf16, fp8, int8), and a description."""
    shares = CATALOGUE["classes"][device.kind]
    runs_in = _precision(wanted, device.tflops)
    peak = device.tflops[runs_in] * 1e12
    rates = Rates(
        bandwidth=device.bandwidth * shares["bandwidth"], compute=peak * shares["compute"],
        attention=device.tflops["bf16"] * 1e12 * shares["attention"], kernel_s=shares["kernel_us"] * 1e-6,
        step_s=shares["step_us"] * 1e-6, draft_s=shares["draft_us"] * 1e-6,
    )  # fmt: skip
    return rates, (
        f"{device.name}: {device.bandwidth / 1e9:.0f} GB/s and {peak / 1e12:.0f} TFLOP/s ({runs_in}, dense; "
        f"{device.source}), of which a {device.kind} reaches {shares['bandwidth']:.0%} and {shares['compute']:.0%} "
        f"(attention {shares['attention']:.0%} of bf16); {shares['kernel_us']} us for each kernel, "
        f"{shares['step_us']} us for each step of the engine, {shares['draft_us']} us for each draft step: "
        f"{shares['why']}"
    )


def make_machine(name: str, count: int, compute: str, *, tp: int | None = None, ep: int | None = None) -> Machine:
    """Returns a machine of `count` catalogue devices. `tp`: default all; `ep`: default none. Raises UsageError for an
    unknown device or sizes that do not divide the devices."""
    device = find_device(name)
    tp = count if tp is None else tp
    ep = 1 if ep is None else ep
    if tp < 1 or count % tp:
        raise UsageError(f"--tp {tp} does not divide {count} devices", "give a divisor, or leave --tp out")
    if ep not in (1, count):
        raise UsageError(f"--ep is {ep}, but experts are spread over all {count} devices or not at all", "use 1 or all")
    if count > 1 and device.link is None and max(tp, ep) > 1:
        raise UsageError(f"{device.name} has no interconnect in the catalogue", "plan one device, or --tp 1")
    rates, *notes = device_rates(device, compute)
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


def _precision(wanted: str, tflops: Mapping[str, float]) -> str:
    """Returns the precision of matrix products: `wanted`, else the next wider one that the device supports."""
    if wanted in tflops:
        return wanted
    wider = COMPUTE_ORDER[COMPUTE_ORDER.index(wanted) + 1 :] if wanted in COMPUTE_ORDER else COMPUTE_ORDER
    return next(name for name in wider if name in tflops and not (wanted == "fp8" and name == "int8"))


@dataclass(frozen=True)
class Price:
    dollars: float
    source: str = ""  # description; empty: the user gave the number


def device_price(text: str, device: str, file: str | None) -> Price:
    """Returns the price of one device for an hour. `text`: dollars such as 3.31, or on-demand or spot, which are looked
    up in the price list `file` (None: the built-in one). Raises UsageError."""
    if text not in (ON_DEMAND, SPOT):
        return Price(_dollars("--price-per-hour", text, f"a number, {ON_DEMAND} or {SPOT}"))
    listed, source = _price_list(file)
    devices = _table(listed, "devices")
    row = devices.get(device)
    if not isinstance(row, dict) or text not in row:
        known = ", ".join(sorted(name for name, row in devices.items() if isinstance(row, dict) and text in row))
        hint = f"give dollars, or add it to a copy of the list: --price-list FILE; listed: {known or 'none'}"
        raise UsageError(f"--price-per-hour {text}: the price list has none for {device}", hint)
    return Price(_dollars(f"{device}, {text}", row[text], "a number"), f"{device} {text}: {row[text]} $/h, {source}")


def api_price(text: str, file: str | None) -> Price:
    """Returns an API's price of a million output tokens. `text`: dollars, or list. Raises UsageError."""
    if text != LIST:
        return Price(_dollars("--api-price", text, f"a number, or {LIST}"))
    listed, source = _price_list(file)
    row = _table(listed, "api")
    if "output" not in row:
        raise UsageError("--api-price list: the price list has no [api] with output", "give dollars")
    dollars = _dollars("api, output", row["output"], "a number")
    return Price(dollars, f"API: {dollars:g} $ for a million output tokens, {source}")


def _dollars(what: str, value: object, wanted: str) -> float:
    try:
        dollars = float(str(value))
    except ValueError:
        raise UsageError(f"{what} is {value!r}", f"give {wanted}") from None
    if not 0 < dollars <= MAX_DOLLARS:  # NaN is neither
        raise UsageError(f"{what} is {dollars:g}, but a price is above 0 and at most {MAX_DOLLARS:,.0f}")
    return dollars


def _price_list(file: str | None) -> tuple[dict[str, Any], str]:
    path = user_path(file) if file else None
    if path and not path.is_file():
        raise UsageError(f"--price-list: there is no file {path}", "a TOML file like headstart/tools/plan/prices.toml")
    try:
        if path:
            text = path.read_text("utf-8")
        else:
            text = resources.files("headstart.tools.plan").joinpath("prices.toml").read_text("utf-8")
        listed = tomllib.loads(text)
    except (OSError, ValueError) as error:
        raise UsageError(f"--price-list: {path} cannot be read: {error}") from error
    source = f"{path}" if path else str(listed["source"])
    return listed, f"{source} of {listed.get('date', 'no date')}"


def _table(listed: dict[str, Any], key: str) -> dict[str, Any]:
    table = listed.get(key)
    if not isinstance(table, dict):
        raise UsageError(f"--price-list: the file has no table [{key}]", "copy the built-in list and edit it")
    return table
