"""Devices: which are there, and how a model is divided over them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from headstart.errors import CapacityError, UsageError
from headstart.tools.doctor import gpus
from headstart.tools.launch.facts import Facts
from headstart.tools.launch.launcher import Parallelism
from headstart.tools.plan.formats import kv_bytes
from headstart.tools.plan.machine import HERE, find_device, parse_gpu
from headstart.tools.plan.memory import LEAST_CONTEXT, USABLE, Memory, Split, memory, memory_of_bytes

NONE = "none"


@dataclass(frozen=True)
class Devices:
    """GPUs of one node, with bytes of memory each; none: a CPU. `platform`: of plan.machine.Device."""

    count: int = 0
    memory: float = 0.0
    name: str = "CPU"
    platform: str = "cpu"


@dataclass(frozen=True, kw_only=True)
class Room:
    """What caches are asked for: `users` sequences of `context` positions; None: as much as there is."""

    context: int | None = None
    users: int | None = None
    kv: str | None = None


def here() -> Devices:
    """The GPUs of this machine, as their driver tells."""
    rows = [line.split(", ") for line in gpus()]  # name, memory in MiB, driver
    if not rows:
        return Devices()
    return Devices(len(rows), min(float(row[1].split()[0]) for row in rows) * 2**20, rows[0][0], "cuda")


def named_devices(text: str | None) -> Devices:
    """`h200x8`, `none` (a CPU), or this machine's. Raises UsageError."""
    if text in (None, HERE):
        return here()
    if text == NONE:
        return Devices()
    try:
        name, count = parse_gpu(str(text))
        device = find_device(name)
    except UsageError as error:
        raise UsageError(error.message.replace("--gpu", "--gpus"), error.hint.replace("--gpu", "--gpus")) from None
    return Devices(0 if device.platform == "cpu" else count, device.memory, device.name, device.platform)


def divide(
    facts: Facts, devices: Devices, *, nodes: int, tp: int | None, dp: int | None, room: Room = Room()
) -> tuple[Parallelism, list[str]]:
    """Tensor parallel over as few devices as hold the weights and one sequence, and as divide the attention heads; and
    what does not fit beside that. Raises UsageError or CapacityError."""
    if not devices.count:
        return _of_a_cpu(facts, nodes=nodes, tensor=tp or 1, data=dp or 1), []
    total = devices.count * nodes
    if (dp or 1) > total:
        raise UsageError(f"--dp is {dp}, but there are {total} GPUs", "a copy of the model takes one at least")
    allowed = [size for size in range(1, total // (dp or 1) + 1) if facts.attention_heads % size == 0]
    if tp is not None and tp not in allowed:
        what = f"--tp is {tp}, but must divide the {facts.attention_heads} attention heads within {total} GPUs"
        raise UsageError(what, f"choose from {', '.join(map(str, allowed))}")
    chosen = tp or (max(allowed) if nodes > 1 else _fewest(facts, devices, allowed, room))
    data = dp or 1
    notes = _lacking(facts, devices, chosen, data, room)
    if left := total - chosen * data:
        heads = facts.attention_heads
        notes.append(f"{left} of {total} GPUs stay idle: sizes must divide {heads} heads; see --tp, --dp")
    expert = chosen if facts.experts and chosen > 1 else 1
    return Parallelism(gpus=total, tensor=chosen, data=data, expert=expert, nodes=nodes), notes


def _of_a_cpu(facts: Facts, *, nodes: int, tensor: int, data: int) -> Parallelism:
    """Workers on cores of their own."""
    if nodes > 1:
        raise UsageError("--nodes is for machines with GPUs, but there are none", "describe them, as in --gpus h200x8")
    if facts.attention_heads % tensor:
        what = f"--tp is {tensor}, but must divide the {facts.attention_heads} attention heads"
        raise UsageError(what, "--dp runs copies side by side")
    return Parallelism(tensor=tensor, data=data)


def cores_of_workers(workers: int, nodes_of_memory: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Cores for each worker on a CPU; none where one worker takes all, or each has a node of memory to itself, which
    engines find themselves. Raises UsageError."""
    if workers > len(cores):
        what = f"this takes {workers} cores, one for each worker, but there are {len(cores)}"
        raise UsageError(what, "a smaller --tp, --dp or --disaggregate")
    if workers == 1 or workers == nodes_of_memory:
        return ()
    bounds = [len(cores) * number // workers for number in range(workers + 1)]
    return tuple(tuple(cores[low:high]) for low, high in pairwise(bounds))


def _fewest(facts: Facts, devices: Devices, allowed: list[int], room: Room) -> int:
    if facts.weight_bytes is None:
        return max(allowed)
    verdicts = {size: memory_of(facts, devices, size, 1, replace(room, users=1)).verdict for size in allowed}
    for wanted in ("fits", "close"):
        if fitting := [size for size in allowed if verdicts[size] == wanted]:
            return fitting[0] if wanted == "fits" else fitting[-1]
    need = -(-facts.weight_bytes // int(devices.memory * USABLE))
    what = f"{facts.source} has {facts.weight_bytes / 1e9:.0f} GB: too much for {max(allowed)} x {devices.name}"
    raise CapacityError(what, f"it takes about {need} of them: --nodes, or a quantized checkpoint")


def memory_of(facts: Facts, devices: Devices, tensor: int, data: int, room: Room) -> Memory:
    """By `plan`'s arithmetic; of a model whose sizes are not known by the bytes of its weights."""
    split = Split(device=devices.memory, tp=tensor, ep=tensor if facts.experts else 1, replicas=data)
    if facts.sized is None:
        return memory_of_bytes(facts.weight_bytes or 0, split)
    sized = facts.sized
    with suppress(UsageError):  # a type that only the engine knows
        sized = replace(sized, kv=kv_bytes(room.kv)) if room.kv else sized
    users = room.users or 1
    return memory(sized, split, room.context or LEAST_CONTEXT, users=users, weight_bytes=facts.weight_bytes)


def _lacking(facts: Facts, devices: Devices, tensor: int, data: int, room: Room) -> list[str]:
    if facts.weight_bytes is None:
        return []
    found = memory_of(facts, devices, tensor, data, room)
    if found.verdict == "fits":
        whole = facts.sized.shape.max_length if facts.sized else None
        if room.context is not None or not whole:
            return []
        full = memory_of(facts, devices, tensor, data, replace(room, context=whole, users=1))
        if full.max_batch:
            return []
        return [f"WARNING: the model's whole context of {whole:,} has no room: {full.why}: give --max-model-len"]
    if found.verdict == "too small":
        todo = "a quantized checkpoint, or more devices"
    elif room.context and not found.max_batch:
        todo = "engines may refuse to start: a shorter --max-model-len, a KV cache of fp8, or a larger share of memory"
    else:
        todo = "the others wait, or their prompts are computed again"
    return [f"WARNING: {found.why}: {todo}"]
