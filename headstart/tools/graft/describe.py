"""Config of a checkpoint with a grafted head: its keys, what is not quantized, and FP8 blocks for the head.

FP8 is in blocks of 128 x 128: `weight` in E4M3 and `weight_scale_inv` in float32, as in DeepSeek-V3. vLLM, SGLang and
transformers read that (`quant_method: fp8` with `weight_block_size`); no engine reads an int8 or int4 head alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import UsageError
from headstart.formats.base import Checkpoint, Tensor, make_tensor
from headstart.formats.json_object import read_object
from headstart.formats.quantization import quantizations, settings_of
from headstart.formats.safetensors import Planned
from headstart.formats.sizes import NESTED
from headstart.tools.export.heads import Path as KeyPath, head_keys, head_names, with_keys
from headstart.tools.export.plan import as_json

BLOCK = 128
LARGEST = 448.0
FP8_CONFIG = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [BLOCK, BLOCK]}


def excluding(quantization: Mapping[str, Any], modules: list[str]) -> dict[str, Any] | None:
    """quantization_config with `modules` left alone; None for a method that has no known way to say so."""
    old = any(key.startswith(("load_in_", "llm_int8_", "bnb_4bit_")) for key in quantization)  # names no method
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
    """Raises UsageError for a checkpoint whose config cannot describe FP8 blocks beside what it has."""
    method, block = quantization.get("quant_method"), quantization.get("weight_block_size")
    if quantization and (method != "fp8" or block != [BLOCK, BLOCK]):
        what = f"quantized by {method!r} (blocks {block}), and its config has no room for a second method"
        hint = f"it goes with unquantized checkpoints and with fp8 in blocks of {BLOCK} x {BLOCK}; else leave it out"
        raise UsageError(f"--quantize-head: the checkpoint is {what}", hint)


def fp8_blocks(name: str, stored: Tensor) -> list[Planned]:
    """A matrix [rows, columns] as codes and scales [ceil(rows / 128), ceil(columns / 128)]."""
    grid = tuple(-(-size // BLOCK) for size in stored.shape)
    return [
        Planned(name, "F8_E4M3", stored.shape, lambda: _codes(stored)),
        Planned(f"{name}_scale_inv", "F32", grid, lambda: (scale for _, scale in _slabs(stored))),
    ]


def _slabs(stored: Tensor) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """128 rows at a time, and the scale of each of its blocks."""
    rows, columns = stored.shape
    for begin in range(0, rows, BLOCK):
        values = stored.span(begin, min(BLOCK, rows - begin)).float32()
        largest = np.maximum.reduceat(np.abs(values).max(axis=0), np.arange(0, columns, BLOCK))
        yield values, np.where(largest > 0, largest / LARGEST, 1).astype(np.float32)


def _codes(stored: Tensor) -> Iterator[NDArray[Any]]:
    for values, scale in _slabs(stored):
        yield nearest_e4m3(values / np.repeat(scale, BLOCK)[: values.shape[1]])


@cache
def _e4m3_values() -> NDArray[np.float32]:
    """The finite FP8 (E4M3) sizes, ascending: code i is the i-th. `nearest_e4m3` rounds a head's weights to them."""
    return make_tensor("", (127,), "F8_E4M3", np.arange(127, dtype=np.uint8)).float32()


def nearest_e4m3(values: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Codes of the nearest numbers, ties to the even code; sizes above 448 become 448."""
    sizes = _e4m3_values()
    middles = (sizes[1:] + sizes[:-1]) / 2
    size = np.abs(values)
    below, above = np.searchsorted(middles, size, "left"), np.searchsorted(middles, size, "right")
    codes = np.where(below % 2, above, below).astype(np.uint8)  # they differ at a tie only
    return np.asarray(codes | (np.signbit(values) * np.uint8(128)), np.uint8)


MODELOPT = "hf_quant_config.json"
"""ModelOpt's own file: vLLM and TensorRT-LLM read it beside or in place of quantization_config."""


def keys_for(target: Mapping[str, Any], base: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """The head's keys of `base`, at the level where `target` describes its language model."""
    ours, theirs, keys = _level(target), _level(base), head_keys(base)
    # a wrapper's own keys stay the wrapper's
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
    """ModelOpt's own file with the head's modules left alone; nothing where there is none."""
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
    """Returns the config with the matrices that are not quantized listed, as engines read it."""
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
        notes.append(f"quant_method {method!r}: tell the engine that the head is not quantized")
        return config
    inner = config.get("text_config")
    if isinstance(inner, dict) and "quantization_config" in inner and "quantization_config" not in config:
        return with_keys(config, {("text_config", "quantization_config"): changed})
    return {**config, "quantization_config": changed}
