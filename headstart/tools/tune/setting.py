"""What `headstart tune` has found, where `serve` and `launch` look for it: one file per machine, model and settings."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from headstart import hub
from headstart.config import AUTO, Depth, EngineConfig
from headstart.errors import CapacityError, UsageError
from headstart.kernels.backend import choose
from headstart.machine import threads

WEIGHTS = ("*.safetensors", "*.gguf", "config.json")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """`speedup`: against plain decoding, [point, low, high]; of `workload` at `concurrency` requests at a time."""

    drafter: str
    depth: Depth
    workload: str
    concurrency: tuple[int, ...]
    speedup: tuple[float, float, float]

    @property
    def pays(self) -> bool:
        return self.drafter != "none"

    def __str__(self) -> str:
        point, low, high = self.speedup
        gain, where = f"{point:.2f}x ({low:.2f} to {high:.2f})", ", ".join(map(str, self.concurrency))
        where = f"{self.workload}, {where} at a time"
        if not self.pays:
            return f"drafting does not pay here: at best {gain} of plain decoding ({where})"
        return f"drafter {self.drafter}, depth {self.depth}: {gain} plain ({where})"

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Self:
        """Raises KeyError, TypeError or ValueError for what `keep` has not written."""
        depth = document["depth"] if document["depth"] == AUTO else int(document["depth"])
        point, low, high = (float(value) for value in document["speedup"])
        concurrency = tuple(int(value) for value in document["concurrency"])
        drafter, workload = str(document["drafter"]), str(document["workload"])
        return cls(drafter=drafter, depth=depth, workload=workload, concurrency=concurrency, speedup=(point, low, high))


def path_of(model: str | None, config: EngineConfig) -> Path:
    """Where the setting for a model on this machine is kept; nothing is fetched. Raises UsageError for a model that is
    not there."""
    known = {
        "model": identity_of(model),
        "head": config.head,
        "engine": [choose(config).name, config.device, config.dtype, config.quantization, config.kv_cache_dtype],
        "threads": config.threads or threads().usable,
    }
    return hub.record_path("tuned", known)


def identity_of(model: str | None) -> Any:
    """A name on the Hub stands for itself."""
    if model is not None and hub.repo_of(model) is not None:
        return model
    trunk = hub.resolve_alias(model).trunk
    files = [trunk] if trunk.is_file() else sorted(path for pattern in WEIGHTS for path in trunk.glob(pattern))
    return [(path.name, stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]]


def kept_setting(model: str | None, config: EngineConfig) -> Setting | None:
    """The setting that was found for this model here, if there is one."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, UsageError):
        return Setting.of(json.loads(path_of(model, config).read_text("utf-8")))
    return None


def keep(model: str | None, config: EngineConfig, setting: Setting) -> Path:
    """Raises CapacityError when it cannot be written."""
    path = path_of(model, config)
    try:
        hub.keep_record(path, asdict(setting))
    except OSError as error:
        raise CapacityError(f"cannot write {path}: {error.strerror}", "HEADSTART_CACHE names another folder") from None
    return path
