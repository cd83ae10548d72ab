"""`model.safetensors.index.json`: which shard holds which tensor."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePath
from typing import TypeVar

from headstart.errors import ModelError
from headstart.formats._header import AGAIN

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
T = TypeVar("T")


def weight_map_of(index: Mapping[str, object], where: str) -> dict[str, str]:
    """Tensor name -> shard's file name. ModelError for another shape, or for a shard outside the checkpoint."""
    found = index.get("weight_map")
    if not isinstance(found, dict) or not all(isinstance(file, str) for file in found.values()):
        raise ModelError(f"{where} has no weight_map from tensor names to file names", AGAIN)
    for file in set(found.values()):
        if PurePath(file).name != file:
            raise ModelError(f"{where} names the shard {file!r}, which is not a plain file name", AGAIN)
    return found


def missing_shard(where: str, file: str) -> ModelError:
    return ModelError(f"{where} names the shard {file}, which is missing", "download the model again")


def pick(weight_map: Mapping[str, str], shards: Mapping[str, Mapping[str, T]], where: str) -> dict[str, T]:
    """The tensors that the index names, by name. ModelError for one that its shard does not hold."""
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise ModelError(f"{where} says tensor {name} is in {file}, but it is not", AGAIN)
    return {name: shards[file][name] for name, file in weight_map.items()}


def join(shards: Mapping[str, Mapping[str, T]], where: str) -> dict[str, T]:
    """The tensors of files without an index, by name. ModelError for a name in two files."""
    found: dict[str, T] = {}
    for file, tensors in shards.items():
        if twice := found.keys() & tensors.keys():
            raise ModelError(f"tensor {min(twice)} is in {file} and in another file of {where}", "keep one of them")
        found.update(tensors)
    return found
