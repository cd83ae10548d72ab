"""Config keys and tensors that families with Kimi delta attention share.

Formulas: transformers 5.24, `models/kimi_linear`, `models/bailing_hybrid`, `models/glm5_next`.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from headstart.errors import ModelError
from headstart.formats.base import make_tensor
from headstart.kernels.ops import RawTensor
from headstart.kernels.specs import DeltaSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.kda import KDAConfig
from headstart.models import keys
from headstart.models.keys import MAX_TAPS, Config, number
from headstart.models.names import DECAY, GGUF_GATE
from headstart.models.small import Arrays

LINEAR, FULL = keys.LINEAR, keys.FULL
MAX_DIM = 256
PARTS: Mapping[str, str] = {**DECAY, ".self_attn.g_proj.": ".self_attn.gate_proj."}
"""Parts of names in files -> canonical parts."""
CONVS = tuple(f"{part}_conv1d.weight" for part in "qkv")
GGUF: Mapping[str, str] = {
    **GGUF_GATE,
    ".linear_attn.in_proj_b.": ".self_attn.b_proj.",
    ".linear_attn.norm.": ".self_attn.o_norm.",
    "blk.{i}.ssm_a": "layers.{i}.self_attn.decay_rate",
    "blk.{i}.ssm_dt.bias": "layers.{i}.self_attn.decay_bias",
}
"""Names.gguf of linear layers."""


def low_rank_mixer(config: Config, bound: float, *, full_gate: bool = False) -> KDAConfig:
    """The mixer by the keys of `linear_config`, with products as matrices of decay and (not full_gate) gate."""
    heads, dim, width = (number(config, f"linear_{key}") for key in ("num_heads", "head_dim", "conv_kernel_dim"))
    return replace(mixer(config, heads, dim, width, bound), rank=dim, full_gate=full_gate)


def mixer(config: Config, heads: int, dim: int, width: int, bound: float) -> KDAConfig:
    """The mixer of these sizes. Raises ModelError for impossible ones."""
    if dim > MAX_DIM or not 2 <= width <= MAX_TAPS:
        raise ModelError(
            f"config.json: linear attention has heads of {dim} and a convolution of {width}",
            f"heads have at most {MAX_DIM} features, a convolution is 2 to {MAX_TAPS} wide",
        )
    if bound > 0 or not math.isfinite(bound):
        raise ModelError(f"config.json: the lower bound of log decays is {bound}, but must be a number below 0")
    delta = DeltaSpec(heads, heads, dim, dim, by_channel=True)
    return KDAConfig(delta, width, keys.activation(config), bound=bound)


def bound_of(config: Config, key: str, *, safe: bool) -> float:
    """Lower bound of log decays under a config key; 0: none. safe: whether the config uses the bound."""
    value = config.get(key)
    if not safe or value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, int | float) or value >= 0:
        raise ModelError(f"config.json: {key} is {value!r}, but must be a number below 0")
    return float(value)


def linear_config(config: Config) -> Config:
    """The config with the values of its object `linear_attn_config` as top-level keys `linear_...`."""
    inner = config.get("linear_attn_config") or {}
    if not isinstance(inner, dict):
        raise ModelError("config.json: linear_attn_config is not an object")
    theirs = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads",
              "short_conv_kernel_size": "linear_conv_kernel_dim", "gate_lower_bound": "linear_lower_bound",
              "safe_gate": "linear_safe_gate", "use_full_rank_gate": "linear_full_gate"}  # fmt: skip
    known = {*theirs, "full_attn_layers", "kda_layers"}
    if unknown := sorted({*inner} - known):
        raise ModelError(f"config.json: linear_attn_config has {unknown[0]!r}", f"known: {', '.join(sorted(known))}")
    return keys.inside(config, {theirs.get(str(key), str(key)): value for key, value in inner.items()})


def kinds_of(config: Config, full: str = FULL) -> list[str] | None:
    """LINEAR or `full` for each layer, by the config's lists of layer numbers (from 1) or `layer_types`; None without
    such a key."""
    count, kinds = keys.num_layers(config), config.get("layer_types")
    if (listed := config.get("full_attn_layers")) is not None:
        linear = config.get("kda_layers") or []
        is_list = all(isinstance(each, list) for each in (listed, linear))
        if not is_list or not {*range(1, count + 1)} <= {*listed, *linear}:
            raise ModelError(f"config.json: full_attn_layers and kda_layers must name layers 1 to {count}")
        kinds = [full if i + 1 in listed else LINEAR for i in range(count)]
    if kinds is not None:
        keys.check_kinds(kinds, count, (LINEAR, full))
    return kinds


def of_gguf(config: Config) -> Config:
    """The config of a GGUF file with the lists of layer numbers: linear layers have 0 key heads there."""
    count, heads = keys.num_layers(config), config.get("num_key_value_heads")
    heads = heads if isinstance(heads, list) else [heads] * count
    full = [i + 1 for i, each in enumerate(heads) if each]
    kinds = {"full_attn_layers": full, "kda_layers": [i + 1 for i in range(count) if i + 1 not in full]}
    return keys.inside(config, {**kinds, "linear_num_heads": config.get("num_attention_heads")})


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: joins the convolutions of q, k and v."""
    ours: dict[str, RawTensor] = {}
    linear = config.mixers(KDAConfig)
    for name, tensor in tensors.items():
        layer, _, part = name.partition(".self_attn.")
        if layer not in linear:
            ours[name] = tensor
        elif part == CONVS[0]:
            parts = [tensors.get(name.replace(part, each)) for each in CONVS]
            if joined := _taps(f"{layer}.self_attn.conv", parts, linear[layer]):
                ours[joined.name] = joined
        elif part == "decay_rate":
            ours[name] = tensor.shaped(math.prod(tensor.shape))
        elif part not in CONVS:
            ours[name] = tensor
    return ours


def _taps(name: str, parts: list[RawTensor | None], config: KDAConfig) -> RawTensor | None:
    """[channels, (1,) width] of q, k and v -> [width * 3 channels], so that a tap's channels lie side by side."""
    shape = (config.inner, config.conv_width)
    if any(part is None or math.prod(part.shape) != math.prod(shape) for part in parts):
        return None  # the loader then reports the missing tensor
    taps = np.concatenate([part.float32().reshape(shape) for part in parts if part is not None]).T.reshape(-1)
    return make_tensor(name, taps.shape, "F32", np.ascontiguousarray(taps).view(np.uint8))


def restore(arrays: Arrays, config: DecoderConfig, shape: tuple[int, ...] = (-1,)) -> Arrays:
    """Family.restore: inverse of `adapt`. shape: of decay rates."""
    theirs: Arrays = {}
    linear = config.mixers(KDAConfig)
    for name, array in arrays.items():
        stem, _, part = name.partition(".self_attn.")
        if part == "decay_rate":
            theirs[name] = array.reshape(shape)
        elif part == "conv":
            taps = array.reshape(linear[stem].conv_width, 3, -1)
            theirs |= {f"{stem}.self_attn.{each}": taps[:, i].T[:, None].copy() for i, each in enumerate(CONVS)}
        else:
            theirs[name] = array
    return theirs
