"""Rotary position embedding (Su et al. 2021) and its length extensions, as frequencies.

Config keys follow Hugging Face: `rope_theta`, `rope_parameters` (transformers 5) or `rope_scaling` (older files).
Formulas: transformers 5.23 `modeling_rope_utils.py`.

Two kinds depend there on the length of the text, so that one position would have several keys, and a text would depend
on how it was cut into passes. Here they depend on the context that was asked for (`CONTEXT`, `--max-model-len`), as in
vLLM and llama.cpp, and one engine has one set of frequencies for all texts:

- `longrope` (Ding et al. 2024): the long factors for a context beyond the original one, else the short ones. These are
  transformers' frequencies for texts on the same side of the original context.
- `dynamic` (NTK by length): plain within max_position_embeddings; beyond, what transformers has for a text of exactly
  that length.

Where nothing was asked for, what they say of short texts is served, and the context ends there (`longest`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.kernels.ops import RopeSpec

KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "mrope": ("mrope_section",),  # of pictures: in a text all axes have the same position
    "linear": ("factor",),
    "proportional": ("factor",),  # Gemma 4: the fast part of a whole head's frequencies, the others do not turn
    "dynamic": ("factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),  # the last are not used
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "attn_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta", "max_position_embeddings",
    ),
    "longrope": ("short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"),
    "rope_freqs": ("factors",),  # a GGUF file's: divisors of the frequencies
}  # fmt: skip
"""Kinds of scaling, and the keys of each; those of another kind are there for that kind only."""
COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "finetuned")
"""Keys of every kind."""
MOST_FEATURES = 1 << 16
CONTEXT = "_context"
"""Beside the keys of a config: the context that was asked for."""
KNOWN = frozenset(key for keys in KINDS.values() for key in keys) | {*COMMON}


def scaling_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope part of a config, with its `rope_type`. Raises ModelError for a kind or a key that is not known."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"config.json: rope_parameters is {scaling!r}, but must be an object")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(each for each in KINDS if each != "rope_freqs")
        raise ModelError(f"rope scaling type {kind!r} is not supported", f"known: {known}")
    if unknown := [key for key, value in scaling.items() if key not in KNOWN and value is not None]:
        key = unknown[0]
        raise ModelError(
            f"config.json: {key} of the rope is {scaling[key]!r}, which is not known", "remove it if unused"
        )
    outer = config.get("original_max_position_embeddings")
    original = outer or scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if kind == "mrope":
        kind = "default"
    there = {key: value for key, value in scaling.items() if value is not None}
    return {**there, "rope_type": kind, "original_max_position_embeddings": original}


def rope_spec(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The rope of a config. Raises ModelError for numbers that are none."""
    scaling = scaling_of(config)
    kind, numbers = scaling["rope_type"], _outer(config) | scaling
    theta = _number(numbers, "rope_theta", 10000.0)
    if theta <= 1:
        raise ModelError(f"config.json: rope_theta is {theta}, but must be above 1")
    share = _number(numbers, "partial_rotary_factor", 1.0)
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * share)
    if not 0 < rotary_dim <= min(head_dim, MOST_FEATURES):
        raise ModelError(
            f"config.json: {rotary_dim} of {head_dim} features would be rotated", "see partial_rotary_factor"
        )
    if kind == "dynamic":
        theta *= _ntk(scaling, config) ** (rotary_dim / max(rotary_dim - 2, 1))
    inv_freq = theta ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)
    scale = 1.0
    if kind == "linear":
        inv_freq = inv_freq / _number(scaling, "factor")
    elif kind == "proportional":
        turning = np.arange(len(inv_freq)) < int(share * head_dim // 2)
        inv_freq = np.where(turning, inv_freq / _number(scaling, "factor", 1.0), 0.0)
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling)
    elif kind == "yarn":
        inv_freq, scale = _yarn(inv_freq, scaling, config, theta, rotary_dim)
    elif kind == "longrope":
        key = "long_factor" if _beyond(scaling, config) else "short_factor"
        inv_freq, scale = inv_freq / _factors(scaling, key, inv_freq), _long_scale(scaling, config)
    elif kind == "rope_freqs":
        inv_freq = inv_freq / _factors(scaling, "factors", inv_freq)
    return RopeSpec(tuple(inv_freq.tolist()), 2 * len(inv_freq), scale)  # an odd number of dims turns one more


def rope_base(rope: RopeSpec) -> float:
    """The base of its fastest frequencies, which most kinds of scaling leave alone, or divide all alike."""
    first, second = (*rope.inv_freq, 0.0)[:2]
    return (first / second) ** (rope.rotary_dim / 2) if second else 1e4


def _outer(config: Mapping[str, Any]) -> dict[str, Any]:
    """What older files have outside the rope's own object."""
    return {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")}


def longest(config: Mapping[str, Any], length: int) -> int:
    """Positions for which the frequencies hold, of `length` that the config promises."""
    scaling = scaling_of(config)
    kind: str = scaling["rope_type"]
    asked: int | None = config.get(CONTEXT)
    if kind == "dynamic" and asked and scaling.get("alpha") is None:
        return max(length, min(asked, int(length * _number(scaling, "factor"))))
    if kind != "longrope" or _beyond(scaling, config):
        return length
    return min(length, int(_number(scaling, "original_max_position_embeddings")))


def _beyond(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Was more asked for than the original context?"""
    asked: int | None = config.get(CONTEXT)
    return asked is not None and asked > _number(scaling, "original_max_position_embeddings")


def _ntk(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """What theta is times, but for its exponent: Hunyuan's `alpha`, of any length, or by the context that was asked for
    (transformers, _compute_dynamic_ntk_parameters)."""
    if scaling.get("alpha") is not None:
        return _number(scaling, "alpha")
    length, factor = _number(config, "max_position_embeddings", 2048), _number(scaling, "factor", 1.0)
    return max(1.0, factor * (config.get(CONTEXT) or length) / length - (factor - 1))


def _number(scaling: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = scaling.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        kind = scaling.get("rope_type", "default")
        raise ModelError(f"config.json: {key} of the rope ({kind}) is {value!r}, but must be a number above 0")
    return float(value)


def _factors(scaling: Mapping[str, Any], key: str, inv_freq: np.ndarray) -> np.ndarray:
    """One divisor for each frequency."""
    values = scaling.get(key)
    if not isinstance(values, list) or len(values) != len(inv_freq):
        raise ModelError(f"config.json: {key} of the rope must be {len(inv_freq)} numbers")
    return np.array([_number({key: value}, key) for value in values])


def _llama3(inv_freq: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Llama 3.1: low frequencies divided by factor, high ones kept, a linear ramp between (Meta, llama-models)."""
    factor, low, high = (_number(scaling, key) for key in ("factor", "low_freq_factor", "high_freq_factor"))
    if high < low:
        raise ModelError(
            f"config.json: high_freq_factor of the rope is {high}, but must not be below low_freq_factor, {low}"
        )
    turns = _number(scaling, "original_max_position_embeddings") * inv_freq / (2 * math.pi)
    kept = np.clip((turns - low) / ((high - low) or 1e-30), 0, 1)  # Llama 4 has no ramp
    return inv_freq * (kept + (1 - kept) / factor)


def _stretch(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[float, float]:
    """The context of the first training, and how many times that is served: given, or what the config's limit says."""
    original = _number(scaling, "original_max_position_embeddings")
    limit = _number(config, "max_position_embeddings", original) if config.get("max_position_embeddings") else original
    return original, _number(scaling, "factor", limit / original)


def _yarn(
    inv_freq: np.ndarray, scaling: Mapping[str, Any], config: Mapping[str, Any], theta: float, rotary_dim: int
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, section 3.4): interpolate slow dims, keep fast ones; attention temperature as a scale."""
    original, factor = _stretch(scaling, config)

    def dim_of(turns: float) -> float:
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dim_of(_number(scaling, "beta_fast", 32)), dim_of(_number(scaling, "beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(len(inv_freq)) - low) / ((high - low) or 0.001), 0, 1)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp, _yarn_scale(scaling, factor)


def _yarn_scale(scaling: Mapping[str, Any], factor: float) -> float:
    """What sin and cos are multiplied by: given, a quotient of two strengths (DeepSeek), or 0.1 ln(factor) + 1. The
    last times `attn_factor`, which transformers does not know (vLLM 0.32, YaRNScalingRotaryEmbedding)."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return strength(factor, _number(scaling, "mscale")) / strength(factor, _number(scaling, "mscale_all_dim"))
    return strength(factor, 1.0) * _number(scaling, "attn_factor", 1.0)


def strength(factor: float, weight: float) -> float:
    """YaRN's sharpening for a context so many times as long."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def _long_scale(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """LongRoPE's: given, or from how many times the original context is."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    original, factor = _stretch(scaling, config)
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def half_split(rotary: int, *, interleaved: bool) -> NDArray[np.int64]:
    """Rotated features in the order of Ops.rope: the first halves of all pairs, then the second ones. `interleaved`: as
    they are, the two of a pair lie side by side."""
    order = np.arange(rotary)
    return order.reshape(-1, 2).T.reshape(-1) if interleaved else order
