"""GLM-4.5, 4.6, 4.7 and Air: grouped attention with partial rotary, experts chosen by sigmoids, MTP at layer N.

Formula: transformers `models/glm4_moe`; the MTP module is DeepSeek-V3's around this family's block. Engines disagree on
which vector drafts recycle: after `shared_head.norm` (SGLang, llama.cpp, transformers; the default here) or before it
(vLLM). `"mtp_recycle": "pre_norm"` in config.json chooses the latter.
"""

from __future__ import annotations

from typing import Any

from headstart.layers.build import DecoderConfig, decoder
from headstart.layers.mtp import HeadSpec
from headstart.models._family import (
    SCRATCH_EXPERTS,
    Arrays,
    Config,
    Family,
    decoder_shapes,
    parse_decoder,
    random_arrays,
    tiny_config,
    without_prefix,
)
from headstart.models._trailing import mtp_recycle, sigmoid_moe, trailing_shapes


def parse(config: Config) -> DecoderConfig:
    return parse_decoder(
        {**config, "partial_rotary_factor": config.get("partial_rotary_factor", 0.5)},
        qkv_bias=bool(config.get("attention_bias", False)),
        qk_norm=bool(config.get("use_qk_norm", False)),
        num_mtp=int(config.get("num_nextn_predict_layers") or 0),
        mtp_recycle=mtp_recycle(config),
        moe=sigmoid_moe(config, scale=1.0, groups=(1, 1), dense=1),
    )


def tiny(**changes: Any) -> tuple[dict[str, Any], Arrays]:
    defaults = {
        "model_type": "glm4_moe",
        "architectures": ["Glm4MoeForCausalLM"],
        "attention_bias": True,
        "use_qk_norm": True,
        "partial_rotary_factor": 0.5,
        "moe_intermediate_size": 24,
        "n_routed_experts": 7,
        "num_experts_per_tok": 3,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.5,
        "first_k_dense_replace": 1,
        "num_nextn_predict_layers": 1,
    }
    config = tiny_config(**{**defaults, **changes})
    sizes = parse(config)
    shapes = decoder_shapes(sizes)
    for i in range(sizes.num_mtp):
        shapes |= trailing_shapes(f"model.layers.{sizes.num_layers + i}", sizes)
    return config, random_arrays(shapes)


FAMILY = Family(
    parse=parse,
    canonical=without_prefix,
    build=decoder,
    tiny=tiny,
    head=HeadSpec(),
    trailing=True,
    aliases=("glm4moe",),  # llama.cpp's
    scratch={**SCRATCH_EXPERTS, "n_routed_experts": 8, "tie_word_embeddings": False},
)
