"""StableLM (3B, 2 1.6B, Zephyr).

StableLM 2 12B, whose heads have a norm weight each, is refused. Formula: transformers 5.23 `models/stablelm`.
"""

from typing import Any

from headstart.errors import ModelError
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, real


def parse(config: Config) -> DecoderConfig:
    if flag(config, "qk_layernorm") or flag(config, "use_qk_norm"):
        raise ModelError("config.json: qk_layernorm is true: norms with a weight for each head are not supported")
    bias = flag(config, "use_qkv_bias") or flag(config, "attention_bias")
    parallel = flag(config, "use_parallel_residual") or flag(config, "parallel_attn")
    norm: dict[str, Any] = {"centered": True, "biased": True, "eps": real(config, "layer_norm_eps", 1e-5)}
    norms = "parallel" if parallel else "pre"
    return keys.stack(config, mixer={"qkv_bias": bias}, layers={"norms": norms, **norm}, **norm)


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 4096, "partial_rotary_factor": 0.25, "num_key_value_heads": 32},
    harmless={
        "rope_pct": "given by partial_rotary_factor", "norm_eps": "given by layer_norm_eps",
        "rotary_scaling_factor": "of another implementation",
        "rms_norm_eps": "given by layer_norm_eps",
    },
    small={
        "model_type": "stablelm", "architectures": ["StableLmForCausalLM"], "layer_norm_eps": 1e-5,
        "use_qkv_bias": True, "partial_rotary_factor": 0.25, "head_dim": 8,
    },
)  # fmt: skip
