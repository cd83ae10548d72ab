"""Devices: which are there, and how a model is divided over them."""

from __future__ import annotations

from dataclasses import dataclass

from headstart.errors import CapacityError, UsageError
from headstart.tools.doctor import gpus
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import Parallelism
from headstart.tools.plan.machine import find_device, parse_gpu

FREE = 0.75
"""Share of a device's memory that weights may take; the rest is cache and buffers."""
NONE = "none"


@dataclass(frozen=True)
class Devices:
    """GPUs of one node, with bytes of memory each; none: a CPU."""

    count: int = 0
    memory: float = 0.0
    name: str = "CPU"


def here() -> Devices:
    """The GPUs of this machine, as their driver tells."""
    rows = [line.split(", ") for line in gpus()]  # name, memory in MiB, driver
    return Devices(len(rows), min(float(row[1].split()[0]) for row in rows) * 2**20, rows[0][0]) if rows else Devices()


def named_devices(text: str | None) -> Devices:
    """`h200x8`, `none` (a CPU), or this machine's. Raises UsageError."""
    if text is None:
        return here()
    if text == NONE:
        return Devices()
    name, count = parse_gpu(text)
    device = find_device(name)
    return Devices(count, device.memory, device.name)


def divide(
    facts: Facts, devices: Devices, *, nodes: int, tp: int | None, dp: int | None
) -> tuple[Parallelism, list[str]]:
    """Tensor parallel over as few devices as hold the weights, and as divide the attention heads. Raises UsageError or
    CapacityError."""
    if not devices.count:
        if nodes > 1 or (tp or 1) > 1 or (dp or 1) > 1:
            hint = "describe them, as in --gpus h200x8"
            raise UsageError("--nodes, --tp and --dp divide GPUs, but there are none", hint)
        return Parallelism(), []
    total = devices.count * nodes
    allowed = [size for size in range(1, total // (dp or 1) + 1) if facts.attention_heads % size == 0]
    if tp is not None:
        if tp not in allowed:
            what = f"--tp is {tp}, but must divide the {facts.attention_heads} attention heads within {total} GPUs"
            raise UsageError(what, f"choose from {', '.join(map(str, allowed))}")
    else:
        tp = max(allowed) if nodes > 1 else _fewest(facts, devices, allowed)
    data = dp or 1
    notes = []
    if left := total - tp * data:
        heads = facts.attention_heads
        notes.append(f"{left} of {total} GPUs stay idle: sizes must divide {heads} heads; see --tp, --dp")
    expert = tp if facts.experts and tp > 1 else 1
    return Parallelism(gpus=total, tensor=tp, data=data, expert=expert, nodes=nodes), notes


def _fewest(facts: Facts, devices: Devices, allowed: list[int]) -> int:
    if facts.weight_bytes is None:
        return max(allowed)
    for size in allowed:
        if facts.weight_bytes <= size * devices.memory * FREE:
            return size
    need = -(-facts.weight_bytes // int(devices.memory * FREE))
    what = f"{facts.source} has {facts.weight_bytes / 1e9:.0f} GB: too much for {max(allowed)} x {devices.name}"
    raise CapacityError(what, f"it takes about {need} of them: --nodes, or a quantized checkpoint")
