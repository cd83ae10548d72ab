"""Which directory keeps an engine's blocks (--kv-spill), and the names of what it keeps: another model, head, version,
instruction path or type of keys is another name, so that what is found has the bits that would be computed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from headstart import __version__, hub
from headstart.cache.memory import KVMemory
from headstart.cache.parts import STATE, TRUNK, Part
from headstart.config import EngineConfig
from headstart.engine.load import Model
from headstart.engine.runner import Runner
from headstart.layers.fingerprint import weights_fingerprint
from headstart.layers.network import Opened

if TYPE_CHECKING:
    from headstart.cache.spill import Spill

GB = 10**9
RECORDS = "digests"
"""Folder of the user cache that keeps the digests of files, which take seconds to make."""


def open_spill(runner: Runner, memory: KVMemory, model: Model, config: EngineConfig) -> Spill | None:
    """The store behind the pools of an engine, where the config names one. Raises UsageError."""
    if config.kv_spill is None or not config.enable_prefix_caching:
        return None
    from headstart.cache.spill import Spill  # with its workers and files: few want them
    from headstart.cache.store import BlockStore

    store = BlockStore(Path(config.kv_spill).expanduser(), int(config.kv_spill_gb * GB))
    parts = named_parts(runner, model, config)
    return Spill(store, memory.pool, memory.states, parts, config.block_size)


def named_parts(runner: Runner, model: Model, config: EngineConfig) -> dict[int, Part]:
    """What is kept of a block, by number. Of a head the name holds its own files too; the text never depends on it."""
    backend, pools = model.backend, runner.stored()
    about = [__version__, backend.fingerprint(), _weights_name(model), repr(model.config), config.block_size]
    tap = repr(getattr(runner.trunk.network, "tap", None))
    names = {TRUNK: [*about, "trunk", tap], STATE: [*about, "state"]}
    for opened in runner.opened:
        names[opened.index] = [*about, "beside", *_head_name(model, opened)]
    return {
        number: Part(_digest(names[number]), backend, each, 1 if number == STATE else config.block_size)
        for number, each in pools.items()
    }


def _head_name(model: Model, opened: Opened) -> list[object]:
    network, head = opened.network, model.head
    shape = [repr(list(network.kv_specs)), network.first_position, opened.index]
    if head is None:
        return shape
    path = Path(head.source)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    return [*shape, repr(head.spec), files_digest(files) if path.exists() else head.source]


def _weights_name(model: Model) -> str:
    files = model.checkpoint.files
    return files_digest(files) if files else weights_fingerprint(model.weights.tensors)


def files_digest(files: Iterable[Path]) -> str:
    """Of the bytes of these files, in this order, wherever they lie; remembered as long as they do not change."""
    files = list(files)
    record = hub.record_path(RECORDS, {"files": hub.stamps(files)})
    with suppress(OSError, ValueError, KeyError, TypeError):
        return str(json.loads(record.read_bytes())["digest"])
    whole = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            whole.update(hashlib.file_digest(file, "sha256").digest())
    with suppress(OSError):  # it is made again the next time
        hub.keep_record(record, {"digest": whole.hexdigest()})
    return whole.hexdigest()


def _digest(about: object) -> str:
    return hashlib.blake2b(json.dumps(about).encode(), digest_size=16).hexdigest()
