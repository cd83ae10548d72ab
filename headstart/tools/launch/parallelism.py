"""Devices of a launch, and the division of a model over them."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise

from headstart.errors import CapacityError, ParameterError, UsageError
from headstart.tools.doctor import installed_gpus
from headstart.tools.launch.model_facts import ModelFacts
from headstart.tools.launch.spec import Parallelism
from headstart.tools.plan import shape
from headstart.tools.plan.machine import HERE, find_device, parse_gpu

NONE = "none"


@dataclass(frozen=True)
class NodeDevices:
    """The GPUs of one node."""

    count: int = 0  # 0: a CPU
    memory: float = 0.0  # bytes of each
    name: str = "CPU"
    platform: str = "cpu"  # of plan.machine.Device


@dataclass(frozen=True, kw_only=True)
class CacheRequest:
    """Requested size of the KV cache."""

    context: int | None = None  # positions of a sequence; None: the model's context
    users: int | None = None  # sequences at a time; None: as many as fit
    kv: str | None = None  # dtype; None: the engine's default


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Where a model runs, and the sizes that the user chose."""

    devices: NodeDevices
    nodes: int = 1
    tp: int | None = None
    dp: int | None = None
    cache: CacheRequest = CacheRequest()


def here() -> NodeDevices:
    """Returns the GPUs of this machine, as their driver reports them."""
    gpus = installed_gpus()
    if not gpus:
        return NodeDevices()
    mib = min(float(each.total.removesuffix("MiB")) for each in gpus)
    return NodeDevices(len(gpus), mib * 2**20, gpus[0].name, "cuda")


def named_devices(text: str | None) -> NodeDevices:
    """Returns the devices of `h200x8`, `none` (a CPU), or this machine. Raises UsageError."""
    if text in (None, HERE):
        return here()
    if text == NONE:
        return NodeDevices()
    try:
        name, count = parse_gpu(str(text))
        device = find_device(name)
    except ParameterError as error:
        raise error.renamed("--gpus") from None
    return NodeDevices(0 if device.platform == "cpu" else count, device.memory, device.name, device.platform)


def divide(facts: ModelFacts, hardware: Hardware) -> tuple[Parallelism, list[str]]:
    """Returns the parallelism, and notes about memory for the user. Without --tp, tensor parallelism uses the fewest
    devices that divide the attention heads and hold the weights and one sequence. Raises UsageError for impossible
    sizes, CapacityError if the weights do not fit."""
    devices, tp, data, heads = hardware.devices, hardware.tp, hardware.dp or 1, facts.attention_heads
    if not devices.count:
        return _divide_cpu(facts, hardware), []
    total = devices.count * hardware.nodes
    if data > total:
        raise UsageError(f"--dp is {data}, but there are {total} GPUs", "a copy of the model takes one at least")
    allowed = [size for size in range(1, total // data + 1) if heads % size == 0]
    if tp is not None and tp not in allowed:
        what = f"--tp is {tp}, but must divide the {heads} attention heads within {total} GPUs"
        raise UsageError(what, f"choose from {', '.join(map(str, allowed))}")
    tensor = tp or (max(allowed) if hardware.nodes > 1 else _fewest(facts, devices, allowed, hardware.cache))
    notes = _memory_notes(facts, devices, tensor, data, hardware.cache)
    if left := total - tensor * data:
        notes.append(f"{left} of {total} GPUs stay idle: sizes must divide {heads} heads; see --tp, --dp")
    expert = tensor if facts.experts and tensor > 1 else 1
    return Parallelism(gpus=total, tensor=tensor, data=data, expert=expert, nodes=hardware.nodes), notes


def _divide_cpu(facts: ModelFacts, hardware: Hardware) -> Parallelism:
    tensor, heads = hardware.tp or 1, facts.attention_heads
    if hardware.nodes > 1:
        raise UsageError("--nodes is for machines with GPUs, but there are none", "describe them, as in --gpus h200x8")
    if heads % tensor:
        what = f"--tp is {tensor}, but must divide the {heads} attention heads"
        raise UsageError(what, "--dp runs copies side by side")
    return Parallelism(tensor=tensor, data=hardware.dp or 1)


def cores_of_workers(num_workers: int, num_numa_nodes: int, cores: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Returns the cores of each worker on a CPU. Empty for one worker, or one per NUMA node: engines bind those
    themselves. Raises UsageError for more workers than cores."""
    if num_workers > len(cores):
        what = f"this takes {num_workers} cores, one for each worker, but there are {len(cores)}"
        raise UsageError(what, "a smaller --tp, --dp or --disaggregate")
    if num_workers in (1, num_numa_nodes):
        return ()
    bounds = [len(cores) * number // num_workers for number in range(num_workers + 1)]
    return tuple(tuple(cores[low:high]) for low, high in pairwise(bounds))


def _fewest(facts: ModelFacts, devices: NodeDevices, allowed: list[int], cache: CacheRequest) -> int:
    if facts.weight_bytes is None:
        return max(allowed)
    verdicts = {size: memory_of(facts, devices, size, 1, replace(cache, users=1)).verdict for size in allowed}
    for verdict in ("fits", "close"):
        if fitting := [size for size in allowed if verdicts[size] == verdict]:
            return fitting[0] if verdict == "fits" else fitting[-1]
    need = -(-facts.weight_bytes // int(devices.memory * shape.USABLE))
    what = f"{facts.source} has {facts.weight_bytes / 1e9:.0f} GB: too much for {max(allowed)} x {devices.name}"
    raise CapacityError(what, f"it takes about {need} of them: --nodes, or a quantized checkpoint")


def memory_of(
    facts: ModelFacts, devices: NodeDevices, tensor: int, data: int, cache: CacheRequest
) -> shape.MemoryEstimate:
    """Estimates memory with the arithmetic of `headstart plan`; for a model of unknown sizes from its weights only."""
    split = shape.Split(device=devices.memory, tp=tensor, ep=tensor if facts.experts else 1, replicas=data)
    if facts.sized is None:
        return shape.MemoryEstimate(device=devices.memory, weights=(facts.weight_bytes or 0) / tensor, replicas=data)
    sized = facts.sized
    with suppress(UsageError):  # a dtype that only the engine knows
        sized = replace(sized, kv=shape.kv_bytes(cache.kv)) if cache.kv else sized
    context = cache.context or shape.MIN_CONTEXT
    return shape.estimate_memory(sized, split, context, users=cache.users or 1, weight_bytes=facts.weight_bytes)


def _memory_notes(facts: ModelFacts, devices: NodeDevices, tensor: int, data: int, cache: CacheRequest) -> list[str]:
    if facts.weight_bytes is None:
        return []
    found = memory_of(facts, devices, tensor, data, cache)
    if found.verdict == "fits":
        whole = facts.sized.shape.max_length if facts.sized else None
        if cache.context is not None or not whole:
            return []
        full = memory_of(facts, devices, tensor, data, replace(cache, context=whole, users=1))
        if full.max_batch:
            return []
        return [f"WARNING: the model's whole context of {whole:,} has no room: {full.reason}: give --max-model-len"]
    if found.verdict == "too small":
        todo = "a quantized checkpoint, or more devices"
    elif cache.context and not found.max_batch:
        todo = "engines may refuse to start: a shorter --max-model-len, a KV cache of fp8, or a larger share of memory"
    else:
        todo = "the others wait, or their prompts are computed again"
    return [f"WARNING: {found.reason}: {todo}"]
