"""DeepSeek-V3 and R1: latent attention, experts chosen by sigmoids in groups, MTP at layer N.

Formula: DeepSeek-V3 report, sections 2.1 and 2.2; transformers `models/deepseek_v3`. The two inner norms of attention
have their own epsilon, 1e-6, whatever the config says (as in DeepSeek's code).
"""

from __future__ import annotations

import math
from typing import Any

from headstart.errors import ModelError
from headstart.kernels.ops import AttentionSpec
from headstart.layers.build import DecoderConfig, decoder
from headstart.layers.mla import MLAConfig
from headstart.layers.mtp import HeadSpec
from headstart.layers.rope import rope_spec
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

ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings")
SPARSE_KEYS = ("index_topk", "index_n_heads")


def parse(config: Config) -> DecoderConfig:
    if found := next((key for key in SPARSE_KEYS if config.get(key)), None):
        raise ModelError(f"config.json: {found} means sparse attention (DeepSeek-V3.2), which is not supported")
    mla = _mla(config)
    width = max(mla.value, mla.rotary)
    heads = AttentionSpec(mla.num_heads, mla.num_heads, width, width**-0.5)
    return parse_decoder(
        {**config, "num_key_value_heads": mla.num_heads, "head_dim": mla.rotary, "partial_rotary_factor": 1.0},
        attention=heads,
        num_mtp=int(config.get("num_nextn_predict_layers") or 0),
        mtp_recycle=mtp_recycle(config),
        moe=sigmoid_moe(config, scale=2.5, groups=(8, 4), dense=3),
        mla=mla,
    )


def _mla(config: Config) -> MLAConfig:
    try:
        heads = int(config["num_attention_heads"])
        rotary = int(config["qk_rope_head_dim"])
        whole = int(config.get("qk_head_dim") or config.get("head_dim") or 0)  # GGUF files say this instead
        nope = int(config.get("qk_nope_head_dim") or whole - rotary)
        latent, value = int(config["kv_lora_rank"]), int(config["v_head_dim"])
        rank = int(config.get("q_lora_rank") or 0)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: {error} is missing or not a number", "is this a model directory?") from None
    if min(heads, nope, rotary, latent, value) < 1 or rotary % 2 or rank < 0:
        raise ModelError("config.json: sizes of the latent attention must be positive, qk_rope_head_dim even")
    return MLAConfig(
        num_heads=heads,
        query_rank=rank,
        latent=latent,
        nope=nope,
        rotary=rotary,
        value=value,
        rope=rope_spec({key: config[key] for key in ROPE_KEYS if key in config}, rotary),
        scale=(nope + rotary) ** -0.5 * _temperature(config),
        interleaved=bool(config.get("rope_interleave", True)),
        bias=bool(config.get("attention_bias", False)),
    )


def _temperature(config: Config) -> float:
    """YaRN's sharpening of the softmax, squared since it is meant for q and k each."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind, all_dim = scaling.get("rope_type") or scaling.get("type") or "default", scaling.get("mscale_all_dim")
    if kind == "default" or not all_dim or float(scaling["factor"]) <= 1:
        return 1.0
    return float((0.1 * float(all_dim) * math.log(float(scaling["factor"])) + 1) ** 2)


def tiny(**changes: Any) -> tuple[dict[str, Any], Arrays]:
    defaults = {
        "model_type": "deepseek_v3",
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_key_value_heads": 6,
        "q_lora_rank": 20,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 6,
        "head_dim": 6,  # what transformers writes: the rotated part
        "v_head_dim": 10,
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_shared_experts": 2,
        "n_group": 4,
        "topk_group": 2,
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


SCRATCH = {
    **SCRATCH_EXPERTS, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "head_dim": 64, "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_key_value_heads": 4,
    "tie_word_embeddings": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
"""The only latent and rotary sizes that some engines run on a CPU are the released ones."""
FAMILY = Family(
    parse=parse,
    canonical=without_prefix,
    build=decoder,
    tiny=tiny,
    head=HeadSpec(),
    trailing=True,
    aliases=("deepseek2",),  # llama.cpp's
    scratch=SCRATCH,
)
