"""Hunyuan (0.5B to 7B, dense).

Llama's layers with q and k normed after the rope. Formula: transformers `models/hunyuan_v1_dense`.
"""

from headstart.errors import ModelError
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number
from headstart.models.names import PREFIXES, Names


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {"use_cla": False, "use_mixed_mlp_moe": False, "add_classification_head": False})
    if (experts := number(config, "num_experts", default=1, least=0)) > 1:
        raise ModelError(f"config.json: num_experts is {experts}: Hunyuan with experts is not supported")
    norms = {"qk_norm": flag(config, "use_qk_norm", True), "qk_norm_after_rope": True}
    return keys.stack(
        config, mixer=keys.biases(config) | norms, feed_forward=keys.mlp(config, bias=flag(config, "mlp_bias"))
    )


FAMILY = Family(
    parse=parse,
    names=Names(PREFIXES, {"query_layernorm": "q_norm", "key_layernorm": "k_norm"}),
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    harmless={
        **dict.fromkeys(("cla_share_factor", "attention_head_dim"), "of variants that are refused; given by head_dim"),
        **dict.fromkeys(("eod_token_id", "im_start_id", "im_end_id", "text_start_id"), "ids of tokens"),
        "use_rotary_pos_emb": "positions are rotated", "norm_type": "RMS norms",
    },
    aliases=("hunyuan-dense",),  # llama.cpp's
    small={"model_type": "hunyuan_v1_dense", "architectures": ["HunYuanDenseV1ForCausalLM"], "use_qk_norm": True},
)  # fmt: skip
