"""Common part of DeepSeek-V3 and GLM-4.7-Flash: latent attention, sigmoid router with groups, MTP at layer N.

Formula: DeepSeek-V3 report, sections 2.1 and 2.2; transformers `models/deepseek_v3`. The two inner norms of attention
have their own epsilon, 1e-6, whatever the config says (as in DeepSeek's code).
"""

from typing import Any

from headstart.errors import ModelError
from headstart.kernels.ops import RopeSpec
from headstart.kernels.specs import IndexSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.indexer import IndexerConfig
from headstart.layers.mla import MLAConfig
from headstart.layers.rope import rope_spec, score_scale
from headstart.models import keys
from headstart.models.keys import Config, flag, number
from headstart.models.small import SCRATCH_EXPERTS

ROPE_KEYS = (
    "rope_parameters", "rope_scaling", "rope_theta", "max_position_embeddings", "original_max_position_embeddings",
)  # fmt: skip


def parse(config: Config) -> DecoderConfig:
    mixing = mixer(config)
    sparse = keys.layer(config, mixing, keys.sigmoid_experts(config))
    layers = keys.dense_or_sparse(config, mixing, sparse)
    return keys.decoder(config, layers, mtp_layer=sparse, mtp_recycle=keys.mtp_recycle(config))


def mixer(config: Config) -> MLAConfig:
    rotary = number(config, "qk_rope_head_dim")
    whole = number(config, "qk_head_dim", "head_dim", default=0, least=0)  # GGUF files say this instead
    nope = number(config, "qk_nope_head_dim", default=whole - rotary)
    if rotary % 2:
        raise ModelError(f"config.json: qk_rope_head_dim is {rotary}, but must be even")
    rope = rope_spec({key: config[key] for key in ROPE_KEYS if key in config}, rotary)
    return MLAConfig(
        num_heads=number(config, "num_attention_heads"), query_rank=number(config, "q_lora_rank", default=0, least=0),
        latent=number(config, "kv_lora_rank"), nope=nope, rotary=rotary, value=number(config, "v_head_dim"), rope=rope,
        scale=(nope + rotary) ** -0.5 * score_scale(config), interleaved=flag(config, "rope_interleave", True),
        bias=flag(config, "attention_bias"),
        indexer=_indexer(config, rope) if config.get("index_topk") is not None else None,
    )  # fmt: skip


def _indexer(config: Config, rope: RopeSpec) -> IndexerConfig:
    heads = number(config, "index_n_heads", needs="the indexer")
    dim = number(config, "index_head_dim", needs="the indexer")
    if not number(config, "q_lora_rank", default=0, least=0):
        hint = "its queries come from compressed ones"
        raise ModelError("config.json: there is an indexer, but no q_lora_rank", hint)
    if dim < rope.rotary_dim:
        raise ModelError(f"config.json: index_head_dim is {dim}, but {rope.rotary_dim} features are rotated")
    spec, interleaved = IndexSpec(heads, dim, number(config, "index_topk")), flag(config, "indexer_rope_interleave")
    return IndexerConfig(spec=spec, rope=rope, interleaved=interleaved)


HARMLESS = {
    "num_key_value_heads": "all heads share the latent",
    "intermediate_size": "used only by dense layers",
    **dict.fromkeys(("head_dim", "qk_head_dim"), "given by its parts"),
}
SMALL: dict[str, Any] = {
    "num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6,
    "head_dim": 6,  # what transformers writes: the rotated part
    "v_head_dim": 10, "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
SCRATCH: dict[str, Any] = {  # the only latent and rotary sizes that some engines run on a CPU are the released ones
    **SCRATCH_EXPERTS, "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64,
    "head_dim": 64, "v_head_dim": 32, "n_routed_experts": 8, "n_shared_experts": 1, "num_key_value_heads": 4,
    "tie_word_embeddings": False, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
}  # fmt: skip
INDEXED: dict[str, Any] = {"index_topk": 11, "index_n_heads": 12, "index_head_dim": 10}
SCRATCH_INDEXED: dict[str, Any] = {"index_topk": 64, "index_n_heads": 8, "index_head_dim": 64}
