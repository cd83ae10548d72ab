"""Common part of families with Mamba2 layers: config keys and tensor names of Hugging Face and GGUF files.

Formulas: transformers 5.23, `models/granitemoehybrid`, `models/nemotron_h`, `models/falcon_h1`; values in GGUF files:
llama.cpp's `conversion/mamba.py`.
"""

import math
from collections.abc import Mapping
from typing import Any

from headstart.errors import ModelError
from headstart.kernels.ops import RawTensor
from headstart.kernels.specs import ScanSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.mamba2 import Mamba2Config
from headstart.models import keys
from headstart.models.keys import MAX_TAPS, Config, flag, number

MAMBA, FULL = keys.LINEAR, keys.FULL
KINDS = {"mamba": MAMBA, "mamba2": MAMBA, "attention": FULL}  # kinds of layers as older files call them
MAX_FEATURES = 1 << 16
PARTS: Mapping[str, str] = {
    ".conv1d.": ".conv.", ".dt_bias": ".step_bias", ".A_log": ".decay_rate", ".mamba.D": ".mamba.skip",
}  # fmt: skip
"""Hugging Face's names in a Mamba2 layer -> canonical names."""
GGUF: Mapping[str, str] = {
    **{f".linear_attn.{part}.": f".mamba.{part}." for part in ("norm", "out_proj")},
    **{
        f"blk.{{i}}.ssm_{theirs}": f"layers.{{i}}.mamba.{ours}"
        for theirs, ours in (
            ("in.", "in_proj."), ("conv1d.", "conv."), ("dt.bias", "step_bias"), ("a", "decay_rate"), ("d", "skip")
        )
    },
}  # fmt: skip
"""Names.gguf of Mamba2 layers."""
VECTORS = (".mamba.decay_rate", ".mamba.skip", ".mamba.norm.weight")
HARMLESS: Mapping[str, str] = {
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), "the same numbers in pieces"),
    **dict.fromkeys(("mamba_expand", "expand"), "given by the number and size of heads"),
    **dict.fromkeys(("use_mamba_kernels", "mamba_ssm_cache_dtype", "mamba_ssm_dtype"), "states are float32 here"),
    **dict.fromkeys(("time_step_min", "time_step_max", "time_step_floor", "time_step_rank", "init_method",
                     "rescale_prenorm_residual", "residual_in_fp32"), "training only"),
    "linear_inner_size": "given by the number and size of heads",
    "num_logits_to_keep": "how to generate",
}  # fmt: skip


def mixer(config: Config, **switches: Any) -> Mamba2Config:
    """Mamba2Config by the keys of any of these families. switches: further fields of Mamba2Config."""
    heads = number(config, "mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", needs="Mamba2")
    groups = number(config, "mamba_n_groups", "n_groups", "linear_num_key_heads", default=1)
    state = number(config, "mamba_d_state", "ssm_state_size", "linear_key_head_dim", needs="Mamba2")
    width = number(config, "mamba_d_conv", "conv_kernel", "linear_conv_kernel_dim", default=4)
    size = _head_dim(config, heads)
    most = max(heads, groups, state, size)
    if heads % groups or most > MAX_FEATURES or not 2 <= width <= MAX_TAPS:
        raise ModelError(
            f"config.json: Mamba2 has {heads} heads of {size} in {groups} groups, states of {state} and a convolution "
            f"of {width}",
            f"heads must be a multiple of groups, a convolution 2 to {MAX_TAPS} wide",
        )
    _check_limit(config.get("time_step_limit"))
    return Mamba2Config(
        scan=ScanSpec(groups, heads, state, size), conv_width=width, norm_groups=groups,
        conv_bias=flag(config, "mamba_conv_bias", flag(config, "use_conv_bias", True)), **switches,
    )  # fmt: skip


def _head_dim(config: Config, heads: int) -> int:
    declared = config.get("mamba_d_head") or config.get("mamba_head_dim")
    if declared not in (None, "auto"):
        return number({"mamba_d_head": declared}, "mamba_d_head")
    inner = number(config, "mamba_d_ssm", "linear_inner_size", default=0, least=0)
    inner = inner or number(config, "mamba_expand", "expand", default=2) * number(config, "hidden_size")
    if inner % heads:
        raise ModelError(f"config.json: {heads} heads do not part the {inner} columns of Mamba2")
    return inner // heads


def _check_limit(limit: object) -> None:
    """Raises ModelError unless step sizes are limited by 0 and infinity (in transformers 5 an object) or not at all."""
    ends = limit if isinstance(limit, list | tuple) else [0.0, math.inf]
    ends = [float(each["__float__"]) if isinstance(each, dict) and "__float__" in each else each for each in ends]
    if ends != [0.0, math.inf]:
        raise ModelError(f"config.json: time_step_limit is {limit!r}, which is not supported", "known: 0 to infinity")


def kinds(config: Config, declared: object, known: tuple[str, ...] = (MAMBA, FULL)) -> list[str]:
    """Kind of each layer, under transformers 5's names. Raises ModelError for kinds that are not `known`."""
    named = [KINDS.get(str(kind), str(kind)) for kind in declared] if isinstance(declared, list) else declared
    keys.check_kinds(named, keys.num_layers(config), known)
    assert isinstance(named, list)
    return named


def adapt(tensors: Mapping[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: vectors, which are matrices in GGUF files."""
    return {
        name: tensor.shaped(math.prod(tensor.shape)) if name.endswith(VECTORS) and len(tensor.shape) == 2 else tensor
        for name, tensor in tensors.items()
    }
