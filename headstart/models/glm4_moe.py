"""GLM-4.5, 4.6, 4.7, Air and the text part of GLM-4.5V, 4.6V: grouped attention with partial rotary, experts chosen by
sigmoids, MTP at layer N.

Formula: transformers `models/glm4_moe`; the MTP module is DeepSeek-V3's around this family's block. Engines disagree on
which vector drafts recycle: after `shared_head.norm` (SGLang, llama.cpp, transformers; the default here) or before it
(vLLM). `"mtp_recycle": "pre_norm"` in config.json chooses the latter.
"""

from __future__ import annotations

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag
from headstart.models.names import WRAPPED, Names
from headstart.models.small import SCRATCH_EXPERTS


def parse(config: Config) -> DecoderConfig:
    config, tied = keys.text_config(config)
    mixer = keys.attention(
        config,
        qkv_bias=flag(config, "attention_bias"),
        qk_norm=flag(config, "use_qk_norm"),
    )
    sparse = keys.layer(config, mixer, keys.sigmoid_experts(config))
    return keys.decoder(
        config,
        keys.after_dense(config, mixer, sparse),
        num_mtp=keys.num_mtp(config),
        mtp_layer=sparse,
        mtp_recycle=keys.mtp_recycle(config),
        tied=tied,
    )


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 8, "num_experts_per_tok": 8,
    },
    harmless={"intermediate_size": "of dense layers, where there are any"},
    head=HeadSpec(),
    trailing=True,
    names=Names(WRAPPED),
    aliases=("glm4moe", "glm4v_moe", "glm4v_moe_text"),
    small={
        "model_type": "glm4_moe", "architectures": ["Glm4MoeForCausalLM"], "attention_bias": True, "use_qk_norm": True,
        "partial_rotary_factor": 0.5, "moe_intermediate_size": 24, "n_routed_experts": 7, "num_experts_per_tok": 3,
        "n_shared_experts": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    },
    scratch={**SCRATCH_EXPERTS, "n_routed_experts": 8, "tie_word_embeddings": False},
)  # fmt: skip
