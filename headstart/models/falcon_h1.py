"""Falcon-H1: attention and Mamba2 side by side in every layer.

Formula: transformers 5.23 `models/falcon_h1`. In GGUF files (llama.cpp `conversion/falcon_h1.py`) the multipliers are
folded into the tensors, but for that of a tied LM head: logits are then larger by one factor.
"""

import math
from dataclasses import replace
from typing import Literal

from headstart.errors import ModelError
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.parallel import ParallelMixersConfig
from headstart.models import _mamba2, keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number, real
from headstart.models.names import PREFIXES, Names


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {"mamba_use_mlp": True})
    inner = number(config, "intermediate_size")
    activation, eps = keys.activation(config), real(config, "rms_norm_eps", 1e-5)
    attention = keys.attention(config, **keys.biases(config, own_output=True))
    # keys are read by scores only, so what multiplies them multiplies these
    scores = replace(attention.spec, scale=attention.spec.scale * real(config, "key_multiplier", 1.0))
    gate, down = _factors(config, "mlp_multipliers", 2)
    mixer = ParallelMixersConfig(
        attention=replace(attention, spec=scores),
        mamba=_mamba2.mixer(
            config,
            activation=activation,
            bias=_projection_bias(config),
            norm=_norm(config),
            input_scale=real(config, "ssm_in_multiplier", 1.0),
            scales=_factors(config, "ssm_multipliers", 5),
        ),
        attention_in=real(config, "attention_in_multiplier", 1.0),
        attention_out=real(config, "attention_out_multiplier", 1.0),
        mamba_out=real(config, "ssm_out_multiplier", 1.0),
    )
    plain = MLPConfig(inner=inner, activation=activation, bias=flag(config, "mlp_bias"))
    layer = keys.layer(config, mixer, replace(plain, gate_scale=gate, output_scale=down), eps=eps)
    return keys.decoder(
        config, [layer] * keys.num_layers(config), eps=eps, embedding_scale=real(config, "embedding_multiplier", 1.0),
        logit_scale=real(config, "lm_head_multiplier", 1.0),
        mtp_layer=keys.layer(config, keys.attention(config), MLPConfig(inner=inner), eps=eps),
    )  # fmt: skip


def _projection_bias(config: Config) -> bool:
    """True if the projections of Mamba2 have biases. Two keys must agree."""
    both = {key: flag(config, key) for key in ("mamba_proj_bias", "projectors_bias")}
    if len({*both.values()}) > 1:
        raise ModelError(f"config.json: {' and '.join(both)} differ, which is not supported", "known: both or none")
    return both["projectors_bias"]


def _norm(config: Config) -> Literal["gated", "before_gate", "none"]:
    if not flag(config, "mamba_rms_norm"):
        return "none"
    return "before_gate" if flag(config, "mamba_norm_before_gate", True) else "gated"


def _factors(config: Config, key: str, count: int) -> tuple[float, ...]:
    """The `count` multipliers under one key; 1.0 each without it."""
    declared = config.get(key)
    factors = [1.0] * count if declared is None else declared
    numbers = isinstance(factors, list) and all(
        isinstance(each, int | float) and not isinstance(each, bool) and 0 < each < math.inf for each in factors
    )
    if not numbers or len(factors) != count:
        raise ModelError(f"config.json: {key} is {declared!r}, but must be {count} numbers above 0")
    return tuple(map(float, factors))


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt. llama.cpp omits `.weight` from the name of one norm."""
    named = {f"{name}.weight" if name.endswith("layernorm") else name: tensor for name, tensor in tensors.items()}
    return _mamba2.adapt(named, config, from_gguf)


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 8192, "num_key_value_heads": 8},
    harmless={
        **_mamba2.HARMLESS,
        "mamba_norm_before_gate": "used only with the norm",
        "mlp_expansion_factor": "given by intermediate_size",
        "mamba_d_ssm": "given by the number and size of heads",
    },
    names=Names(
        {**PREFIXES, "model.final_layernorm.": "norm."},
        parts={
            **_mamba2.PARTS, ".feed_forward.": ".mlp.", ".pre_ff_layernorm.": ".post_attention_layernorm.",
        },
        gguf=_mamba2.GGUF,
    ),
    adapt=adapt,
    aliases=("falcon-h1",),
    small={
        "model_type": "falcon_h1", "architectures": ["FalconH1ForCausalLM"], "mamba_n_heads": 6, "mamba_d_head": 16,
        "mamba_d_state": 12, "mamba_n_groups": 2, "mamba_d_conv": 4, "mamba_d_ssm": 96, "mamba_rms_norm": True,
        "mamba_norm_before_gate": False, "embedding_multiplier": 3.0, "lm_head_multiplier": 0.7,
        "mlp_multipliers": [0.9, 1.2], "key_multiplier": 0.6, "attention_in_multiplier": 1.3,
        "attention_out_multiplier": 0.8, "ssm_multipliers": [0.7, 1.4, 0.9, 1.1, 0.5], "ssm_in_multiplier": 1.25,
        "ssm_out_multiplier": 0.6,
    },
    scratch={
        "mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_ssm": 256, "mamba_d_state": 32, "mamba_n_groups": 1,
        "embedding_multiplier": 1.0, "lm_head_multiplier": 1.0, "mamba_rms_norm": False,
    },
)  # fmt: skip
