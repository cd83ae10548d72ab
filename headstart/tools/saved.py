"""Saved results in the user cache: settings of `headstart tune` and heads of `headstart adapt`."""

import contextlib
import hashlib
import json
import logging
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from headstart import hub, registry
from headstart.config import Depth, EngineConfig
from headstart.errors import CapacityError, ModelError, UsageError
from headstart.files import atomic_folder
from headstart.formats import adapter
from headstart.heads.files import read_head
from headstart.kernels.backend import select_backend
from headstart.machine import thread_count
from headstart.models.shipped_heads import shipped_heads_at

WEIGHTS = ("*.safetensors", "*.gguf", "config.json")
FACTS = "adapted.json"
HEAD_FILES = ("config.json", "model.safetensors")
WORK = ".work"  # suffix of the folder with the files of an unfinished head
Saved = TypeVar("Saved")
log = logging.getLogger("headstart.tools")


def _read(kind: type[Saved], path: Path) -> Saved:
    """Reads a JSON file as an object of type `kind`. Raises OSError, or ValueError for other content."""
    data = path.read_bytes()
    from pydantic import TypeAdapter  # slow to import, and often there is no file

    return TypeAdapter(kind).validate_json(data)


# Settings of `headstart tune`: one for each machine, model and set of engine options.


@dataclass(frozen=True, kw_only=True)
class TunedSetting:
    drafter: str
    depth: Depth
    workload: str
    concurrency: tuple[int, ...]  # requests at a time that were measured
    speedup: tuple[float, float, float]  # against plain decoding: estimate, and the 95 % interval's low and high

    @property
    def pays(self) -> bool:
        return self.drafter != "none"

    def __str__(self) -> str:
        point, low, high = self.speedup
        gain = f"{point:.2f}x ({low:.2f} to {high:.2f})"
        where = f"{self.workload}, {', '.join(map(str, self.concurrency))} at a time"
        if not self.pays:
            return f"drafting does not pay here: at best {gain} of plain decoding ({where})"
        return f"drafter {self.drafter}, depth {self.depth}: {gain} plain ({where})"


def setting_path(model: str | None, config: EngineConfig) -> Path:
    """Returns the file of the tuned setting for a model, these engine options and this machine. Raises UsageError for
    a model that does not exist."""
    backend = select_backend(config).name
    engine = [backend, config.device, config.dtype, config.rounding, config.kv_cache_dtype]
    usable = thread_count(config.threads)
    known = {"model": identity_of(model), "head": config.head, "engine": engine, "threads": usable}
    return hub.record_path("tuned", known)


def identity_of(model: str | None) -> Any:
    """Returns a JSON value that identifies a model: its name on the Hub, or names, sizes and times of its files."""
    if model is not None and hub.repo_of(model) is not None:
        return model
    trunk = hub.resolve(model)
    files = [trunk] if trunk.is_file() else sorted(path for pattern in WEIGHTS for path in trunk.glob(pattern))
    return [(path.name, stat.st_size, stat.st_mtime_ns) for path in files for stat in [path.stat()]]


def load_setting(model: str | None, config: EngineConfig) -> TunedSetting | None:
    with contextlib.suppress(OSError, ValueError, UsageError):
        return _read(TunedSetting, setting_path(model, config))
    return None


def save_setting(model: str | None, config: EngineConfig, setting: TunedSetting) -> Path:
    path = setting_path(model, config)
    try:
        hub.save_record(path, asdict(setting))
    except OSError as error:
        raise CapacityError(f"cannot write {path}: {error.strerror}", "HEADSTART_CACHE names another folder") from None
    return path


# Heads of `headstart adapt`: one for each model, LoRA adapter and kind.


@dataclass(frozen=True, kw_only=True)
class AdaptedHead:
    kind: str
    date: str
    base: str  # digest of the shipped head that was trained further; empty: another head
    before: float  # acceptance length on held-out records, with the head before
    after: float  # and with this head

    def __str__(self) -> str:
        return f"acceptance length {self.before:.2f} -> {self.after:.2f} on your records, {self.date}"


def _adapted() -> Path:
    return hub.cache_dir() / "adapted"


def folder_of(model: str | None, lora: str = "") -> Path:
    """Returns the folder of a model's adapted heads; `lora`: digest of the adapter that they draft for."""
    known = json.dumps([identity_of(model), lora] if lora else identity_of(model), default=str)
    return _adapted() / hashlib.sha256(known.encode()).hexdigest()[:24]


def find_adapted_head(model: str | None, config: EngineConfig) -> tuple[Path, AdaptedHead] | None:
    """Returns the folder and facts of the adapted head that replaces the model's own. None if there is none, the user
    named a head, or `config` does not draft with a head. Skips damaged or outdated heads.

    An engine has one drafter for all requests. With one LoRA adapter, a head that was adapted to it comes first; with
    several, the model's is used. Raises UsageError for a model that is unknown or cannot be downloaded."""
    kinds = registry.available("heads")
    if config.head is not None or config.depth == 0 or config.drafter not in ("auto", "mixed", *kinds):
        return None
    if not _adapted().is_dir():  # most often, and the digest of an adapter reads all of its files
        return None
    roots = [folder_of(model, each) for each in dict.fromkeys((adapter_of(config), ""))]
    if not any(root.is_dir() for root in roots):
        return None
    shipped = shipped_heads_at(hub.resolve(model))
    wanted = [config.drafter] if config.drafter in kinds else list(shipped)[:1] or kinds
    for folder in (root / kind for root in roots for kind in wanted):
        kind = folder.name
        try:
            adapted = _read(AdaptedHead, folder / FACTS)
            if not adapted.base or (kind in shipped and digest_of(shipped[kind]) == adapted.base):
                read_head(folder)
                return folder, adapted
        except ModelError as error:
            log.warning("the adapted head is not used: %s; headstart adapt --forget removes it", error.message)
        except (OSError, ValueError):
            continue
    return None


def adapter_of(config: EngineConfig) -> str:
    """Returns the digest of an engine's only LoRA adapter; empty with none, several, or one that cannot be read."""
    with contextlib.suppress(ModelError, OSError):
        if len(config.adapters) == 1:
            return adapter.digest_of(Path(config.adapters[0][1]))
    return ""


def digest_of(head: Path) -> str:
    """Returns the digest of a head's config.json, which identifies its training. Raises OSError."""
    return hashlib.sha256((head / "config.json").read_bytes()).hexdigest()[:24]


def save_head(folder: Path, head: Path, adapted: AdaptedHead) -> None:
    """Copies an adapted head into `folder`, atomically. Raises CapacityError if it cannot be written."""
    with atomic_folder(folder) as aside:
        for name in HEAD_FILES:
            shutil.copyfile(head / name, aside / name)
        (aside / FACTS).write_text(json.dumps(asdict(adapted), indent=1) + "\n", "utf-8")
        aside.chmod(0o700)


def forget(model: str | None, kind: str | None, lora: str = "") -> tuple[list[str], list[str]]:
    """Removes adapted heads of a kind (None: all), and unfinished ones, of the model or of one of its adapters (see
    `folder_of`). Returns the kinds of both. Raises CapacityError if a folder cannot be removed."""
    root = folder_of(model, lora)
    names = sorted(path.name for path in root.iterdir()) if root.is_dir() else []
    wanted = [name for name in names if kind is None or name.removesuffix(WORK).split(".")[0] == kind]
    for name in wanted:
        try:
            shutil.rmtree(root / name)
        except OSError as error:
            raise CapacityError(f"cannot remove {root / name}: {error.strerror}", "is it yours?") from None
    unfinished = [name.removesuffix(WORK) for name in wanted if name.endswith(WORK)]
    return [name for name in wanted if "." not in name], unfinished
