"""GLM-4.5, 4.6, 4.7, Air, and the text part of GLM-4.5V and 4.6V.

Formula: transformers `models/glm4_moe`; the MTP module is DeepSeek-V3's with this family's block. Drafts recycle the
vector after `shared_head.norm` (as SGLang, llama.cpp, transformers), or with `"mtp_recycle": "pre_norm"` in config.json
the one before it (as vLLM).
"""

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import keys, mtp
from headstart.models.base import Family
from headstart.models.keys import Config, flag
from headstart.models.names import WRAPPED, Names
from headstart.models.small import SCRATCH_EXPERTS


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    mixer = keys.attention(config, qkv_bias=flag(config, "attention_bias"), qk_norm=flag(config, "use_qk_norm"))
    sparse = keys.layer(config, mixer, keys.sigmoid_experts(config))
    layers, recycle = keys.dense_or_sparse(config, mixer, sparse, listed=False), keys.mtp_recycle(config)
    return keys.decoder(config, layers, mtp_layer=sparse, mtp_recycle=recycle)


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 131072,
        "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "num_key_value_heads": 8, "num_experts_per_tok": 8,
    },
    harmless={"intermediate_size": "used only by dense layers"},
    head=HeadSpec(),
    mtp=mtp.MTPLayout(
        title="GLM-4.5, 4.6, 4.7, Air",
        xllm=mtp.XllmDraft(architecture="Glm4MoeMtpForCausalLM"),
        llama_cpp=("glm4moe",),
        llama_cpp_draft=mtp.LlamaCppDraft(
            architecture="glm4moe", pre_tokenizer="glm4", keys=mtp.LLAMA_CPP_KEYS + mtp.SIGMOID_EXPERT_KEYS,
            rotary=0.5, gating=mtp.SIGMOID,
            special={"bos": "[gMASK]", "eot": "<|user|>", "unk": "<|endoftext|>", "eom": "<|observation|>"},
        ),
    ),
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
