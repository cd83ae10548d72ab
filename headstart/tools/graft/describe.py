"""What config.json and the files beside it say of a head that is put in: its keys, and that it is not quantized."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headstart.formats.base import Checkpoint
from headstart.formats.json_object import read_object
from headstart.formats.quantization import settings_of
from headstart.formats.safetensors import Planned
from headstart.formats.symbols import NESTED
from headstart.tools.export.heads import Path as KeyPath, head_keys, head_names, with_keys
from headstart.tools.export.plan import as_json
from headstart.tools.graft import quantize as fp8

MODELOPT = "hf_quant_config.json"
"""ModelOpt's own file: vLLM and TensorRT-LLM read it beside or in place of quantization_config."""


def keys_for(target: Mapping[str, Any], base: Mapping[str, Any]) -> dict[KeyPath, Any]:
    """The head's keys of `base`, at the level where `target` describes its language model."""
    ours, theirs = _level(target), _level(base)
    return {
        (*ours, path[-1]) if path[:-1] == theirs else path: value  # a wrapper's own keys stay the wrapper's
        for path, value in head_keys(base).items()
    }


def _level(config: Mapping[str, Any]) -> KeyPath:
    """Where a config describes its language model."""
    if "hidden_size" in config:
        return ()
    return next(((key,) for key in NESTED if isinstance(inner := config.get(key), dict) and "hidden_size" in inner), ())


def modelopt_of(folder: Path) -> dict[str, Any]:
    """Settings of ModelOpt's own file; empty where there is none. Raises ModelError for a damaged one."""
    path = folder / MODELOPT
    found = read_object(path).get("quantization") if path.exists() else None
    return {"quant_method": "modelopt", **found} if isinstance(found, dict) else {}


def told_beside(folder: Path, head: Sequence[str]) -> dict[str, str]:
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
    """Tell engines which matrices are not quantized."""
    scaled = {each.name.removesuffix("_scale_inv") for each in planned if each.name.endswith("_scale_inv")}
    modules = [each.name for each in planned if len(each.shape) == 2 and each.name.endswith(".weight")]
    alone = [name.removesuffix(".weight") for name in modules if name not in scaled]
    quantization: Mapping[str, Any] = settings_of(target.config)
    if quantize and not quantization:
        trunk = head_names(target.tensors, target.config) ^ set(target.tensors)
        matrices = [name for name in trunk if name.endswith(".weight") and len(target.tensors[name].shape) == 2]
        alone += sorted(name.removesuffix(".weight") for name in matrices)
        quantization = fp8.CONFIG
    if not quantization:
        return config
    told = fp8.excluding(quantization, alone)
    if told is None:
        method = quantization.get("quant_method")
        notes.append(f"quant_method {method!r}: tell the engine that the head is not quantized")
        return config
    inner = config.get("text_config")
    if isinstance(inner, dict) and "quantization_config" in inner and "quantization_config" not in config:
        return with_keys(config, {("text_config", "quantization_config"): told})
    return {**config, "quantization_config": told}
