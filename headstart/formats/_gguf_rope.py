"""Rope keys of a GGUF file -> `rope_theta`, `partial_rotary_factor` and `rope_scaling` of a config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.gguf_names import ROPE_KEYS, SCALING_NEUTRAL as NEUTRAL

LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What every Llama 3.1 to 3.3 uses; its GGUF files hold the resulting factors only."""


def rope_config(
    metadata: Mapping[str, Any], tensors: Mapping[str, Tensor], config: Mapping[str, Any]
) -> dict[str, Any]:
    """The rope part of the config; `config` has model_type, head_dim and perhaps rope_theta."""
    arch, head_dim = config["model_type"], config.get("head_dim")
    theta = config.get("rope_theta", 10000.0)
    if not isinstance(theta, int | float) or not 0 < theta < math.inf:
        raise ModelError(f"{arch}.rope.freq_base is {theta!r}, but must be above 0", "convert the model again")
    rope: dict[str, Any] = {"rope_theta": theta}
    rotary = metadata.get(f"{arch}.rope.dimension_count")
    if rotary is not None and not isinstance(rotary, int):
        raise ModelError(f"{arch}.rope.dimension_count is {rotary!r}, but must be a number", "convert the model again")
    if "kv_lora_rank" not in config and isinstance(head_dim, int):  # latent attention has the rotated part apart
        rope["partial_rotary_factor"] = rotary / head_dim if isinstance(rotary, int) else 1.0
    if by_length := _by_length(metadata, arch, tensors):
        return rope | {"rope_scaling": by_length}
    scaling = _declared(metadata, f"{arch}.rope.scaling.")
    factors = tensors.get("rope_freqs.weight")
    if factors is not None and factors.here:
        divisors = _from_factors(factors.float32(), float(theta))
        if divisors and scaling:
            raise ModelError(f"{arch}.rope.scaling.type is {scaling['rope_type']!r}, but rope_freqs scales too")
        scaling = scaling or divisors
    return rope | ({"rope_scaling": scaling} if scaling else {})


def _by_length(metadata: Mapping[str, Any], arch: str, tensors: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """LongRoPE: divisors for texts within the original context and for longer ones, and what sin and cos are times."""
    both = [tensors.get(f"rope_factors_{length}.weight") for length in ("short", "long")]
    if not all(each is not None and each.here for each in both):
        return None
    short, long = (each.float32().tolist() for each in both if each is not None)
    found = {
        "attention_factor": metadata.get(f"{arch}.rope.scaling.attn_factor"),
        "original_max_position_embeddings": metadata.get(f"{arch}.rope.scaling.original_context_length"),
    }
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **found}


def _declared(metadata: Mapping[str, Any], prefix: str) -> dict[str, Any] | None:
    kind = metadata.get(f"{prefix}type", "linear" if f"{prefix}factor" in metadata else "none")
    if not isinstance(kind, str):
        raise ModelError(f"{prefix}type is {kind!r}, but must be a word", "convert the model again")
    for key, neutral in NEUTRAL.items():
        if metadata.get(prefix + key, neutral[0]) not in neutral:
            raise ModelError(f"{prefix}{key} is {metadata[prefix + key]}, which is not supported", f"known: {neutral}")
    scaling = {name: metadata[prefix + key] for key, name in ROPE_KEYS.items() if prefix + key in metadata}
    if multiplier := metadata.get(f"{prefix}yarn_log_multiplier"):  # 0.1 * mscale_all_dim, and mscale is the same
        scaling["mscale"] = scaling["mscale_all_dim"] = 10 * float(multiplier)
    return {"rope_type": kind, **scaling} if kind != "none" and scaling else None


def _from_factors(factors: NDArray[np.float32], theta: float) -> dict[str, Any] | None:
    """The llama3 scaling whose divisors of the frequencies are `factors` [rotary_dim / 2]; None when all are 1.

    Factors that are not Llama 3.1's are taken as they are."""
    if factors.size == 0 or np.all(factors == 1):
        return None
    largest = float(factors.max())
    inv_freq = theta ** (-np.arange(factors.size, dtype=np.float64) / factors.size)
    turns = LLAMA3["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    low, high = LLAMA3["low_freq_factor"], LLAMA3["high_freq_factor"]
    kept = np.clip((turns - low) / (high - low), 0, 1)
    if largest >= 1 and np.allclose(factors, 1 / (kept + (1 - kept) / largest), rtol=1e-4):
        return {"rope_type": "llama3", "factor": largest, **LLAMA3}
    return {"rope_type": "rope_freqs", "factors": factors.tolist()}
