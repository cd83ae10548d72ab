"""Rotary position embedding (Su et al. 2021) and its length extensions, as frequencies.

Config keys are Hugging Face's: `rope_theta`, `rope_parameters` (transformers 5) or `rope_scaling` (older files).
Formulas: transformers 5.23 `modeling_rope_utils.py`.

In transformers two kinds depend on the length of the text; one position would then have several keys, and a text would
depend on its division into passes. Here, as in vLLM and llama.cpp, they depend on the requested context (`CONTEXT`,
`--max-model-len`), and an engine has one set of frequencies:

- `longrope` (Ding et al. 2024): long factors for a context beyond the original one, else short factors.
- `dynamic` (NTK by length): unscaled within max_position_embeddings; beyond it the frequencies that transformers has
  for a text as long as the requested context.

Without a requested context the frequencies are those of short texts, and the context ends there (`max_rope_length`).
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart import exact
from headstart.errors import ModelError
from headstart.kernels.ops import RopeSpec

KINDS: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "mrope": ("mrope_section",),  # positions of several axes, which are equal in a text
    "linear": ("factor",),
    "proportional": ("factor",),  # Gemma 4: only the fast part of a whole head's frequencies rotates
    "dynamic": ("factor", "alpha", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"),  # the last are not used
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "attn_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate", "llama_4_scaling_beta", "max_position_embeddings",
    ),
    "longrope": ("short_factor", "long_factor", "factor", "original_max_position_embeddings", "attention_factor"),
    "rope_freqs": ("factors",),  # a GGUF file's: divisors of the frequencies
}  # fmt: skip
"""Kinds of scaling, and the keys that each may have."""
COMMON = ("rope_type", "type", "rope_theta", "partial_rotary_factor", "mrope_section", "mrope_interleaved", "finetuned")
"""Keys of every kind."""
MAX_FEATURES = 1 << 16
CONTEXT = "_context"  # pseudo key of a config: the requested context length (--max-model-len)
KNOWN = frozenset(key for keys in KINDS.values() for key in keys) | {*COMMON}


def scaling_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rope part of a config, with its `rope_type`. Raises ModelError for an unknown kind or key."""
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(scaling, dict):
        raise ModelError(f"config.json: rope_parameters is {scaling!r}, but must be an object")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if not isinstance(kind, str) or kind not in KINDS:
        known = ", ".join(each for each in KINDS if each != "rope_freqs")
        raise ModelError(f"rope scaling type {kind!r} is not supported", f"known: {known}")
    if unknown := [key for key, value in scaling.items() if key not in KNOWN and value is not None]:
        key = unknown[0]
        what = f"config.json: {key} of the rope is {scaling[key]!r}, which is not known"
        raise ModelError(what, "remove it if unused")
    outer = config.get("original_max_position_embeddings")
    original = outer or scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings")
    if kind == "mrope":
        kind = "default"
    present = {key: value for key, value in scaling.items() if value is not None}
    return {**present, "rope_type": kind, "original_max_position_embeddings": original}


def rope_spec(config: Mapping[str, Any], head_dim: int) -> RopeSpec:
    """The rope of a config. Raises ModelError for impossible values."""
    scaling = scaling_of(config)
    kind = scaling["rope_type"]
    numbers = {key: config.get(key) for key in ("rope_theta", "partial_rotary_factor")} | scaling
    theta = _number(numbers, "rope_theta", 10000.0)
    if theta <= 1:
        raise ModelError(f"config.json: rope_theta is {theta}, but must be above 1")
    share = _number(numbers, "partial_rotary_factor", 1.0)
    rotary_dim = head_dim if kind == "proportional" else int(head_dim * share)
    if not 0 < rotary_dim <= min(head_dim, MAX_FEATURES):
        what = f"config.json: {rotary_dim} of {head_dim} features would be rotated"
        raise ModelError(what, "see partial_rotary_factor")
    if kind == "dynamic":
        theta *= exact.power(_ntk(scaling, config), rotary_dim / max(rotary_dim - 2, 1))
    inv_freq = np.array(exact.geometric(theta, rotary_dim))
    scale = 1.0
    if kind == "linear":
        inv_freq = inv_freq / _number(scaling, "factor")
    elif kind == "proportional":
        is_rotated = np.arange(len(inv_freq)) < int(share * head_dim // 2)
        inv_freq = np.where(is_rotated, inv_freq / _number(scaling, "factor", 1.0), 0.0)
    elif kind == "llama3":
        inv_freq = _llama3(inv_freq, scaling)
    elif kind == "yarn":
        inv_freq, scale = _yarn(inv_freq, scaling, config, theta, rotary_dim)
    elif kind == "longrope":
        key = "long_factor" if _exceeds_original(scaling, config) else "short_factor"
        inv_freq, scale = inv_freq / _factors(scaling, key, inv_freq), _long_scale(scaling, config)
    elif kind == "rope_freqs":
        inv_freq = inv_freq / _factors(scaling, "factors", inv_freq)
    axes = _axes(scaling.get("mrope_section"), bool(scaling.get("mrope_interleaved", config.get("mrope_interleaved"))))
    # an odd number of dims rotates one more
    return RopeSpec(tuple(inv_freq.tolist()), 2 * len(inv_freq), scale, axes=axes if len(axes) == len(inv_freq) else ())


def _axes(sections: Any, interleaved: bool) -> tuple[int, ...]:
    """RopeSpec.axes of M-RoPE, whose `sections` are the numbers of frequencies on each axis; none if they are not three
    numbers. `interleaved`: the axes take turns, and the first one has the rest (Qwen3-VL)."""
    is_right = isinstance(sections, list) and len(sections) == 3 and all(type(each) is int for each in sections)
    if not is_right or not 0 < sum(sections) <= MAX_FEATURES or min(sections) < 0:
        return ()
    if not interleaved:
        return tuple(np.repeat(range(3), sections).tolist())
    return tuple(i % 3 if i < 3 * sections[i % 3] else 0 for i in range(sum(sections)))


def axial_rope(dim: int, theta: float, axes: tuple[int, int] = (1, 2)) -> RopeSpec:
    """The rope of heads whose two halves of frequencies, which are equal, turn by two axes (see RopeSpec.axes)."""
    quarter = dim // 4
    frequencies = tuple((theta ** (-np.arange(quarter) / quarter)).tolist())
    return RopeSpec(frequencies * 2, dim, axes=(axes[0],) * quarter + (axes[1],) * quarter)


def rope_base(rope: RopeSpec) -> float:
    """The base, from the two fastest frequencies, which most kinds of scaling keep or divide by one number."""
    first, second = (*rope.inv_freq, 0.0)[:2]
    return (first / second) ** (rope.rotary_dim / 2) if second else 1e4


def unscaled_base(rope: RopeSpec, head_dim: int) -> float | None:
    """The base of a rope that rotates whole heads with unscaled frequencies; None for other ropes."""
    base = rope_base(rope)
    plain = base ** (-np.arange(0, head_dim, 2) / head_dim)
    whole = rope.rotary_dim == head_dim and rope.scale == 1
    return base if whole and np.allclose(rope.inv_freq, plain, rtol=1e-6, atol=0) else None


def score_scale(config: Mapping[str, Any]) -> float:
    """YaRN's factor on scores of latent attention: the square of mscale, which applies to q and to k."""
    scaling = scaling_of(config)
    if scaling["rope_type"] == "default" or not scaling.get("mscale_all_dim"):
        return 1.0
    return _mscale(float(scaling["factor"]), float(scaling["mscale_all_dim"])) ** 2


def max_rope_length(config: Mapping[str, Any], length: int) -> int:
    """Positions for which the frequencies are valid; `length`: max_position_embeddings."""
    scaling = scaling_of(config)
    kind: str = scaling["rope_type"]
    requested: int | None = config.get(CONTEXT)
    if kind == "dynamic" and requested and scaling.get("alpha") is None:
        return max(length, min(requested, int(length * _number(scaling, "factor"))))
    if kind != "longrope" or _exceeds_original(scaling, config):
        return length
    return min(length, int(_number(scaling, "original_max_position_embeddings")))


def _exceeds_original(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """True if the requested context is longer than the original one."""
    requested: int | None = config.get(CONTEXT)
    return requested is not None and requested > _number(scaling, "original_max_position_embeddings")


def _ntk(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """Factor of theta before its exponent: Hunyuan's `alpha`, or by the requested context (transformers,
    _compute_dynamic_ntk_parameters)."""
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
        what = f"high_freq_factor of the rope is {high}, but must not be below low_freq_factor, {low}"
        raise ModelError(f"config.json: {what}")
    turns = _number(scaling, "original_max_position_embeddings") * inv_freq / (2 * math.pi)
    unscaled = np.clip((turns - low) / ((high - low) or 1e-30), 0, 1)  # Llama 4 has no ramp
    return inv_freq * (unscaled + (1 - unscaled) / factor)


def _extension(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[float, float]:
    """(original context, its extension: `factor`, or max_position_embeddings / original)."""
    original = _number(scaling, "original_max_position_embeddings")
    limit = _number(config, "max_position_embeddings", original) if config.get("max_position_embeddings") else original
    return original, _number(scaling, "factor", limit / original)


def _yarn(
    inv_freq: np.ndarray, scaling: Mapping[str, Any], config: Mapping[str, Any], theta: float, rotary_dim: int
) -> tuple[np.ndarray, float]:
    """YaRN (Peng et al. 2023, section 3.4): interpolate slow dims, keep fast ones; attention temperature as a scale."""
    original, factor = _extension(scaling, config)

    def dim_of(turns: float) -> float:
        return rotary_dim * exact.log(original / (turns * 2 * math.pi)) / (2 * exact.log(theta))

    low, high = dim_of(_number(scaling, "beta_fast", 32)), dim_of(_number(scaling, "beta_slow", 1))
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    ramp = np.clip((np.arange(len(inv_freq)) - low) / ((high - low) or 0.001), 0, 1)
    return inv_freq * (1 - ramp) + inv_freq / factor * ramp, _yarn_scale(scaling, factor)


def _yarn_scale(scaling: Mapping[str, Any], factor: float) -> float:
    """Factor of sin and cos: `attention_factor`, a quotient of two mscales (DeepSeek), or (0.1 ln(factor) + 1) *
    `attn_factor` (vLLM 0.32, YaRNScalingRotaryEmbedding)."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return _mscale(factor, _number(scaling, "mscale")) / _mscale(factor, _number(scaling, "mscale_all_dim"))
    return _mscale(factor, 1.0) * _number(scaling, "attn_factor", 1.0)


def _mscale(factor: float, weight: float) -> float:
    """YaRN's attention temperature for a context `factor` times as long: 0.1 weight ln(factor) + 1."""
    return 0.1 * weight * exact.log(factor) + 1 if factor > 1 else 1.0


def _long_scale(scaling: Mapping[str, Any], config: Mapping[str, Any]) -> float:
    """LongRoPE's factor of sin and cos: `attention_factor`, or by the extension of the context."""
    if scaling.get("attention_factor") is not None:
        return _number(scaling, "attention_factor")
    original, factor = _extension(scaling, config)
    return math.sqrt(1 + exact.log(factor) / exact.log(original)) if factor > 1 else 1.0


def half_split(rotary: int, *, interleaved: bool) -> NDArray[np.int64]:
    """Indices of the rotated features in the order of Ops.rope: first features of all pairs, then second ones.
    `interleaved`: the file stores the two features of a pair next to each other."""
    order = np.arange(rotary)
    return order.reshape(-1, 2).T.reshape(-1) if interleaved else order
