"""Synthetic checkpoints for exporters: sharded safetensors directories and an independent reader."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from headstart.formats.base import Tensor, make_tensor
from headstart.formats.safetensors import Array, save

Raw = tuple[str, tuple[int, ...], bytes]


def tensor(dtype: str, *shape: int, seed: int = 0) -> Array:
    """A random tensor with finite values of a dtype."""
    rng = np.random.default_rng([seed, *shape])
    if dtype == "F32":
        return rng.standard_normal(shape).astype(np.float32)
    if dtype == "BF16":
        return (rng.standard_normal(shape).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16), dtype
    if dtype == "I8":
        return rng.integers(-128, 128, shape).astype(np.int8)
    low, high = {"F8_E4M3": (0, 0x7F), "F8_E8M0": (120, 135)}[dtype]
    return rng.integers(low, high, shape).astype(np.uint8), dtype


def as_tensors(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Arrays as tensors of a float32 file."""
    return {
        name: make_tensor(name, array.shape, "F32", np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8))
        for name, array in arrays.items()
    }


MIMO = {"model_type": "mimo", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
NORM = {"model.norm.weight": tensor("BF16", 8)}


def mimo_head(width: int) -> dict[str, Array]:
    """The tensors of a MiMo module that exporters read. Most of its bytes are in one matrix."""
    vectors = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
    head = {f"model.mtp_layers.0.{name}.weight": tensor("BF16", 8) for name in vectors}
    return head | {"model.mtp_layers.0.input_proj.weight": tensor("BF16", width, 2 * width)}


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Array], shards: int = 3, index: bool = True
) -> Path:
    """Writes a directory with tensors distributed to shards in turn, so that neighbours are in different files."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: names[i % shards] for i, name in enumerate(tensors)}
    for file in names:
        save(folder / file, {name: tensors[name] for name in tensors if weight_map[name] == file}, {"format": "pt"})
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read_raw(file: Path) -> dict[str, Raw]:
    """dtype, shape and bytes of each tensor, read without headstart's code."""
    data = file.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    return {
        name: (entry["dtype"], tuple(entry["shape"]), data[8 + size :][slice(*entry["data_offsets"])])
        for name, entry in header.items()
        if name != "__metadata__"
    }


def raw(array: Array) -> Raw:
    """The result of `read_raw` for a tensor stored unchanged."""
    bits, dtype = array if isinstance(array, tuple) else (array, {"float32": "F32", "int8": "I8"}[array.dtype.name])
    return dtype, bits.shape, bits.tobytes()
