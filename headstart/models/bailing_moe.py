"""Ling 2 and Ring 2 (Bailing MoE V2).

Formula: inclusionAI's `modeling_bailing_moe_v2.py` (Ling-V2). MTP module: e first, a layer with experts,
`final_layernorm`, whose result is recycled.
"""

from functools import partial

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.joined import join
from headstart.models.keys import Config, flag
from headstart.models.mtp import MTPLayout
from headstart.models.names import PREFIXES, Names

LLAMA_CPP = "bailingmoe2"
SERVED = {"use_rmsnorm": True, "norm_head": False, "norm_softmax": False}
HARMLESS = {
    **dict.fromkeys(("embedding_dropout", "output_dropout"), "training only"),
    **dict.fromkeys(("router_dtype", "use_fp32_router"), "of sums, which are float32 here"),
    "max_window_layers": "no layer has a window",
    "moe_router_enable_expert_bias": "such a tensor is read wherever there is one",
    **dict.fromkeys(
        ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"),
        "the width of one times their number",
    ),
    "intermediate_size": "used only by dense layers",
}
NAMES = Names(
    {**PREFIXES, "model.word_embeddings.": "embed_tokens."},
    parts={
        ".attention.dense.": ".self_attn.o_proj.",
        ".mlp.gate.expert_bias": ".mlp.gate.e_score_correction_bias",
        ".final_layernorm.": ".shared_head.norm.",
    },
)
"""Names that Ling 2 and Ling 3 share."""


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, SERVED)
    scores = config.get("score_function")
    if config.get("model_type") != LLAMA_CPP and (scores != "sigmoid" or not flag(config, "use_qk_norm", True)):
        raise ModelError(f"config.json: score_function is {scores!r}", "known: 'sigmoid' (Ling 2 and Ring 2)")
    config = keys.renamed(config, {"n_shared_experts": "num_shared_experts"})
    mixer = keys.attention(
        config,
        qkv_bias=flag(config, "use_qkv_bias", flag(config, "attention_bias")),
        o_bias=flag(config, "use_bias", flag(config, "attention_out_bias")),
        qk_norm=True,
    )
    sparse = keys.layer(config, mixer, keys.sigmoid_experts(config))
    layers = keys.dense_or_sparse(config, mixer, sparse, listed=False)
    return keys.decoder(config, layers, mtp_layer=sparse)


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 32768, "rope_theta": 600000.0, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-6,
        "num_key_value_heads": 4, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1,
        "moe_intermediate_size": 512, "routed_scaling_factor": 1.0, "n_shared_experts": 1,
    },
    harmless={
        **HARMLESS, "rotary_dim": "given by partial_rotary_factor", "rope_interleave": "of another attention",
    },
    names=Names(
        NAMES.prefixes,
        parts={
            **NAMES.parts,
            ".attention.query_key_value.": ".self_attn.qkv_proj.",
            ".attention.query_layernorm.": ".self_attn.q_norm.",
            ".attention.key_layernorm.": ".self_attn.k_norm.",
        },
    ),
    restore=partial(join, qkv=True, gate_up=False),
    head=HeadSpec(),
    mtp=MTPLayout(title="Ling 2, Ring 2 (Bailing MoE V2)", served=1),
    aliases=("bailing_moe_v2", LLAMA_CPP),
    small={
        "model_type": "bailing_moe", "architectures": ["BailingMoeV2ForCausalLM"], "moe_intermediate_size": 24,
        "num_experts": 8, "num_experts_per_tok": 3, "num_shared_experts": 1, "routed_scaling_factor": 2.5,
        "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
        "score_function": "sigmoid", "use_qk_norm": True, "partial_rotary_factor": 0.5,
    },
)  # fmt: skip
