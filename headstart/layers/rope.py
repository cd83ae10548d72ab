"""Rotary position embedding (Su et al. 2021) and its length extensions, as frequencies.

Config keys follow Hugging Face: `rope_theta`, `rope_parameters` (transformers 5) or `rope_scaling` (older files).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.kernels.ops import RopeSpec


def rope_spec(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The rope of a config. Raises ModelError for a scaling type that is not known."""
    scaling = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    theta = float(scaling.get("rope_theta") or config.get("rope_theta") or 10000.0)
    rotary_dim = int(head_dim * float(scaling.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1))
    inv_freq = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        scale = 1.0
    elif kind == "linear":
        inv_freq, scale = inv_freq / float(scaling["factor"]), 1.0
    elif kind == "llama3":
        inv_freq, scale = _llama3(inv_freq, scaling), 1.0
    elif kind == "yarn":
        inv_freq, scale = _yarn(inv_freq, scaling, config, theta, rotary_dim)
    else:
        raise ModelError(f"rope scaling type {kind!r} is not supported", "known: default, linear, llama3, yarn")
    return RopeSpec(tuple(inv_freq.tolist()), 2 * len(inv_freq), scale)  # an odd number of dims turns one more


def _llama3(inv_freq: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Llama 3.1: low frequencies divided by factor, high ones kept, a linear ramp between (Meta, llama-models)."""
    factor, low, high = (float(scaling[key]) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    turns = float(scaling["original_max_position_embeddings"]) * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low) / (high - low), 0, 1)
    return inv_freq * (kept + (1 - kept) / factor)


def _yarn(
    inv_freq: np.ndarray, scaling: Mapping[str, Any], config: Mapping[str, Any], theta: float, rotary_dim: int
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, section 3.4): interpolate slow dims, keep fast ones; attention temperature as a scale."""
    factor = float(scaling["factor"])
    original = float(scaling.get("original_max_position_embeddings") or config["max_position_embeddings"])

    def dim_of(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(float(scaling.get("beta_fast") or 32)), dim_of(float(scaling.get("beta_slow") or 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(len(inv_freq)) - low) / max(high - low, 0.001), 0, 1)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp, _yarn_scale(scaling, factor)


def _yarn_scale(scaling: Mapping[str, Any], factor: float) -> float:
    """What sin and cos are multiplied by: given, a quotient of two strengths (DeepSeek), or 0.1 ln(factor) + 1."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def strength(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return strength(float(scaling["mscale"])) / strength(float(scaling["mscale_all_dim"]))
    return strength(1.0)
