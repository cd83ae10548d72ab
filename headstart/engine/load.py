"""From a model's name to a loaded trunk with its head, and to the backend it runs on."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from headstart import hub
from headstart.config import EngineConfig
from headstart.core import Progress, no_progress
from headstart.engine.attach import find_head
from headstart.errors import UsageError
from headstart.formats import open_checkpoint
from headstart.formats.base import Checkpoint
from headstart.heads.base import Head
from headstart.kernels.ops import Backend
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import Decoder
from headstart.layers.weights import Weights
from headstart.models.base import Family
from headstart.models.tensors import load_decoder
from headstart.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class Model:
    """A loaded trunk: everything that does not depend on how it is run."""

    name: str
    checkpoint: Checkpoint
    family: Family
    config: DecoderConfig
    backend: Backend
    weights: Weights
    decoder: Decoder
    tokenizer: Tokenizer
    head: Head | None


def load_model(name: str | None, config: EngineConfig, progress: Progress = no_progress) -> Model:
    """Read a model by path, alias or Hub name, and the head that goes with it; `progress` counts its weights. Raises
    ModelError or UsageError."""
    choose_backend(config)  # before anything is fetched
    alias = hub.resolve_alias(name)
    checkpoint = open_checkpoint(alias.trunk)
    backend = make_backend(config, checkpoint.files)[1]
    loaded = load_decoder(checkpoint, backend, progress)
    model = Model(
        name=name or alias.name,
        checkpoint=checkpoint,
        family=loaded.family,
        config=loaded.config,
        backend=backend,
        weights=loaded.weights,
        decoder=loaded.decoder,
        tokenizer=checkpoint.load_tokenizer(),
        head=None,
    )
    return replace(model, head=find_head(model, config.head, alias.head(config.drafter)))


def make_backend(config: EngineConfig, files: tuple[Path, ...] = ()) -> tuple[str, Backend]:
    """The backend the config asks for, and why it was chosen. `files`: the checkpoint whose weights it will take.
    Raises UsageError when it cannot run here."""
    name, why = choose_backend(config)
    threads = config.threads or usable_threads()
    if name == "native":
        from headstart.kernels.native import NativeBackend  # compiled: absent where there was no compiler
        from headstart.kernels.packed_cache import PackedCache, key_of

        cache = PackedCache.open(key_of(files, config.quantization) if files else None)
        return why, NativeBackend(
            threads=threads, quantization=config.quantization, kv_dtype=config.kv_cache_dtype, cache=cache
        )
    from headstart.kernels.reference import ReferenceBackend  # torch is imported only when it is used

    return why, ReferenceBackend(device=config.device, dtype=config.dtype, threads=threads)


NATIVE = "headstart.kernels._native"


def choose_backend(config: EngineConfig) -> tuple[str, str]:
    """(backend, why) for a config. Raises UsageError for what cannot run here, naming the flag."""
    cannot = native_limits(config)
    if config.backend == "native" and cannot:
        raise UsageError(f"backend native cannot run: {cannot[0]}", cannot[1])
    if not cannot and config.backend != "reference":
        return "native", "compiled kernels, exact to the bit"
    if importlib.util.find_spec("torch") is None:
        without = "backend reference needs torch, which is not installed"
        if cannot and config.backend == "auto":
            raise UsageError(f"{cannot[0]}, and {without}", f"{cannot[1]}; or pip install 'headstart[torch]'")
        raise UsageError(without, "pip install 'headstart[torch]'")
    for flag, value in (("--quantization", config.quantization), ("--kv-cache-dtype", config.kv_cache_dtype)):
        if value is not None:
            raise UsageError(f"{flag} {value} needs the native backend", cannot[0] if cannot else "use --backend auto")
    return "reference", cannot[0] if cannot else "asked for"


def native_limits(config: EngineConfig) -> tuple[str, str] | None:
    """Why the native backend cannot run this config (and a hint); None when it can."""
    if importlib.util.find_spec(NATIVE) is None:
        return "headstart was installed without a C++ compiler", "install one, then pip install headstart again"
    if config.device != "cpu":
        return f"the device is {config.device}", "use --device cpu"
    if config.dtype != "float32":
        return f"--dtype {config.dtype} is the reference backend's", "leave --dtype out"
    if config.block_size % 16:
        return f"--block-size {config.block_size} is not a multiple of 16", "use --block-size 16"
    return None


def usable_threads() -> int:
    """Cores that affinity and the cgroup quota leave to this process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")
    if quota.exists():
        limit, period = quota.read_text().split()
        if limit != "max":
            cores = min(cores, max(1, int(limit) // int(period)))
    return cores


def free_memory() -> int:
    """Bytes that can be taken without swapping."""
    info: Mapping[str, Any] = {}
    path = Path("/proc/meminfo")
    if path.exists():
        info = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return int(str(info.get("MemAvailable", "4194304 kB")).split()[0]) * 1024
