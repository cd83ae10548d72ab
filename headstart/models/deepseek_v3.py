"""DeepSeek-V3 and R1, Kimi-K2, the text part of Kimi-K2.5 and K2.6.

Formula: models/_latent.py; Kimi-K2.5: transformers 5.23 `models/kimi_k25`, whose text_config is a deepseek_v3.
"""

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import _latent, keys
from headstart.models.base import Family
from headstart.models.keys import Config
from headstart.models.mtp import INDEXER_KEYS, MTPLayout, XllmDraft
from headstart.models.names import WRAPPED, Names


def parse(config: Config) -> DecoderConfig:
    return _latent.parse(keys.text_config(config))


FAMILY = Family(
    parse=parse,
    names=Names({**WRAPPED, "mm_projector.": None}),
    defaults={
        "max_position_embeddings": 4096,
        "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "n_shared_experts": 1, "first_k_dense_replace": 3,
        "num_experts_per_tok": 8,
    },
    harmless={
        **_latent.HARMLESS, "ignore_index": "training only",
        **dict.fromkeys(
            ("media_placeholder_token_id", "use_unified_vision_chunk", "video_placeholder", "projection_hidden_size",
             "projection_layer_norm_eps"),
            "of images, whose tensors are left out",
        ),
    },
    head=HeadSpec(),
    mtp=MTPLayout(
        title="DeepSeek-V3, R1, Kimi-K2",
        vllm_eagle=True,
        xllm=XllmDraft(
            architecture="DeepseekMTPForCausalLM", fp8_blocks=True, variants=dict.fromkeys(INDEXER_KEYS, "deepseek_v32")
        ),
        llama_cpp=("deepseek2",),
        not_llama_cpp="its converter drops the module",
    ),
    aliases=("deepseek2", "kimi_k2", "kimi_k25"),  # the first is llama.cpp's, of GLM-4.7-Flash too
    small={"model_type": "deepseek_v3", "architectures": ["DeepseekV3ForCausalLM"], **_latent.SMALL},
    scratch=_latent.SCRATCH,
)  # fmt: skip
