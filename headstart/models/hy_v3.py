"""Hunyuan 3 (Hy3).

Formula: transformers `models/hy_v3`; MTP module: vLLM 0.32 `hy_v3_mtp.py`, llama.cpp b11434 `hy-v3.cpp`: e first, the
first one masked (vLLM), a layer with experts, `final_layernorm`, whose result is recycled.
"""

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config
from headstart.models.mtp import MTPLayout
from headstart.models.names import Names

SERVED = {"moe_router_use_sigmoid": True, "moe_router_enable_expert_bias": True, "qk_norm": True, "use_cla": False}

OWN_KEYS = {
    "n_shared_experts": "num_shared_experts", "norm_topk_prob": "route_norm",
    "routed_scaling_factor": "router_scaling_factor", "moe_intermediate_size": "expert_hidden_dim",
}  # fmt: skip
"""Usual key -> the family's own."""


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, SERVED)
    config = keys.renamed(config, OWN_KEYS)
    mixer = keys.attention(config, **keys.biases(config), qk_norm=True)
    sparse = keys.layer(config, mixer, keys.sigmoid_experts(config))
    return keys.decoder(config, keys.dense_or_sparse(config, mixer, sparse), mtp_layer=sparse)


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 11158840.0, "num_key_value_heads": 8,
        "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "n_shared_experts": 1, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.826, "head_dim": 128, "n_group": 1, "topk_group": 1,
    },
    harmless={
        **dict.fromkeys(
            ("enable_moe_fp32_combine", "enable_lm_head_fp32", "enable_attention_fp32_softmax", "use_grouped_mm"),
            "of sums, which are float32 here",
        ),
        **dict.fromkeys(("moe_intermediate_size", "first_k_dense_replace"), "given by another key"),
        "shared_expert_intermediate_size": "the width of one times their number",
        "intermediate_size": "used only by dense layers",
    },
    names=Names(
        parts={
            ".mlp.expert_bias": ".mlp.gate.e_score_correction_bias",
            ".mlp.router.gate.": ".mlp.gate.",
            ".mlp.shared_mlp.": ".mlp.shared_experts.",
            ".final_layernorm.": ".shared_head.norm.",
        }
    ),
    head=HeadSpec(mask_first=True),
    mtp=MTPLayout(title="Hunyuan hy_v3", llama_cpp=("hy_v3",)),
    small={
        "model_type": "hy_v3", "architectures": ["HYV3ForCausalLM"], "moe_intermediate_size": 24, "num_experts": 7,
        "num_experts_per_tok": 3, "num_shared_experts": 1, "router_scaling_factor": 1.5, "route_norm": True,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    },
)  # fmt: skip
