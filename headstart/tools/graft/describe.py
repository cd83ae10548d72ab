"""Config of a checkpoint with a grafted head: head keys, list of unquantized modules, and FP8 blocks for the head.

FP8 uses blocks of 128 x 128, with `weight` in E4M3 and `weight_scale_inv` in float32, as in DeepSeek-V3. vLLM, SGLang
and transformers read this (`quant_method: fp8` with `weight_block_size`); no engine reads only a head in int8 or int4.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import UsageError
from headstart.formats.base import Checkpoint, Tensor, e4m3_table
from headstart.formats.json_object import read_object
from headstart.formats.quantization import quantizations, settings_of
from headstart.formats.safetensors import Planned
from headstart.formats.sizes import NESTED
from headstart.tools.export.heads import Path as KeyPath, head_keys, head_names, with_keys
from headstart.tools.export.plan import as_json

BLOCK = 128  # rows and columns of an FP8 block
LARGEST = 448.0  # largest E4M3 value
E4M3_VALUES = e4m3_table()[:127]  # finite and non-negative, ascending; the index is the code
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def excluding(quantization: Mapping[str, Any], modules: list[str]) -> dict[str, Any] | None:
    """Returns the quantization_config with `modules` excluded; None for a method without a known key for that."""
    old = any(key.startswith(("load_in_", "llm_int8_", "bnb_4bit_")) for key in quantization)  # without quant_method
    method = str(quantization.get("quant_method") or ("bitsandbytes" if old else ""))
    key = next((each.excludes[method] for each in quantizations().values() if method in each.excludes), None)
    if key is None:
        return None
    if key == "dynamic":  # rules by regular expression
        rules: dict[str, Any] = {f"-:^{name.replace('.', chr(92) + '.')}$": {} for name in modules}
        return {**quantization, key: {**(quantization.get(key) or {}), **rules}}
    if key == "extra_config":  # settings of single layers
        plain = {name: {"bits": 16, "data_type": "float"} for name in modules}
        return {**quantization, key: {**(quantization.get(key) or {}), **plain}}
    listed = list(quantization.get(key) or [])
    return {**quantization, key: listed + [name for name in modules if name not in listed]}


def check_method(quantization: Mapping[str, Any]) -> None:
    """Raises UsageError for a checkpoint whose quantization config cannot also describe FP8 blocks."""
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if quantization and (method != "fp8" or block != [BLOCK, BLOCK]):
        what = f"quantized by {method!r} (blocks {block}), and its config cannot describe a second method"
        hint = f"use it with unquantized checkpoints, or fp8 in blocks of {BLOCK} x {BLOCK}; else leave it out"
        raise UsageError(f"--quantize-head: the checkpoint is {what}", hint)


def fp8_blocks(name: str, stored: Tensor) -> list[Planned]:
    """Plans a matrix [rows, columns] as FP8 codes and float32 scales [ceil(rows / 128), ceil(columns / 128)]."""
    grid = tuple(-(-size // BLOCK) for size in stored.shape)
    return [
        Planned(name, "F8_E4M3", stored.shape, lambda: _codes(stored)),
        Planned(f"{name}_scale_inv", "F32", grid, lambda: (scale for _, scale in _slabs(stored))),
    ]


def _slabs(stored: Tensor) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Yields BLOCK rows at a time, with the scales of their blocks."""
    rows, columns = stored.shape
    for begin in range(0, rows, BLOCK):
        values = stored.span(begin, min(BLOCK, rows - begin)).float32()
        largest = np.maximum.reduceat(np.abs(values).max(axis=0), np.arange(0, columns, BLOCK))
        yield values, np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)


def _codes(stored: Tensor) -> Iterator[NDArray[Any]]:
    for values, scale in _slabs(stored):
        yield nearest_e4m3(values / np.repeat(scale, BLOCK)[: values.shape[1]])


def nearest_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Returns the codes of the nearest E4M3 values, ties to the even code; absolute values above 448 become 448."""
    middles = (E4M3_VALUES[1:] + E4M3_VALUES[:-1]) / 2
    size = np.abs(values)
    below, above = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    codes = np.where(below % 2, above, below).astype(np.uint8)  # they differ at a tie only
    return np.asarray(codes | (np.signbit(values) * np.uint8(128)), np.uint8)


MODELOPT = "hf_quant_config.json"
"""ModelOpt's file, which vLLM and TensorRT-LLM read in addition to or instead of quantization_config."""


def keys_for(target: Mapping[str, Any], base: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """Returns the head's config keys of `base`, moved to the section in which `target` describes its language model."""
    ours, theirs, keys = _level(target), _level(base), head_keys(base)
    # only keys of the language model's section move
    return {(*ours, path[-1]) if path[:-1] == theirs else path: value for path, value in keys.items()}


def _level(config: Mapping[str, Any]) -> KeyPath:
    if "hidden_size" in config:
        return ()
    return next(((key,) for key in NESTED if isinstance(inner := config.get(key), dict) and "hidden_size" in inner), ())


def modelopt_of(folder: Path) -> dict[str, Any]:
    path = folder / MODELOPT
    found = read_object(path).get("quantization") if path.exists() else None
    return {"quant_method": "modelopt", **found} if isinstance(found, dict) else {}


def modelopt_text(folder: Path, head: Sequence[str]) -> dict[str, str]:
    """Returns ModelOpt's file with the head's modules excluded, as {file name: text}; empty without such a file."""
    if not modelopt_of(folder):
        return {}
    document = read_object(folder / MODELOPT)
    listed = list(document["quantization"].get("exclude_modules") or [])
    modules = [name.removesuffix(".weight") for name in head if name.endswith(".weight") and "norm" not in name]
    listed += [name for name in modules if name not in listed]
    document["quantization"] = {**document["quantization"], "exclude_modules": listed}
    return {MODELOPT: as_json(document) + "\n"}


def describe(
    config: dict[str, Any], target: Checkpoint, planned: list[Planned], quantize: bool, notes: list[str]
) -> dict[str, Any]:
    """Returns the config with a quantization_config that lists the unquantized matrices, as engines expect. Adds a note
    if the quantization method has no such list."""
    scaled = {each.name.removesuffix("_scale_inv") for each in planned if each.name.endswith("_scale_inv")}
    modules = [each.name for each in planned if len(each.shape) == 2 and each.name.endswith(".weight")]
    alone = [name.removesuffix(".weight") for name in modules if name not in scaled]
    quantization: Mapping[str, Any] = settings_of(target.config)
    if quantize and not quantization:
        trunk = head_names(target.tensors, target.config) ^ set(target.tensors)
        matrices = [name for name in trunk if name.endswith(".weight") and len(target.tensors[name].shape) == 2]
        alone += sorted(name.removesuffix(".weight") for name in matrices)
        quantization = FP8_CONFIG
    if not quantization:
        return config
    changed = excluding(quantization, alone)
    if changed is None:
        method = quantization.get("quant_method")
        notes.append(f"quant_method {method!r} cannot exclude modules: configure the engine for an unquantized head")
        return config
    inner = config.get("text_config")
    if isinstance(inner, dict) and "quantization_config" in inner and "quantization_config" not in config:
        return with_keys(config, {("text_config", "quantization_config"): changed})
    return {**config, "quantization_config": changed}
