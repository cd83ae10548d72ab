"""MiniMax-M3, text part: gated experts and dense layers with clamped SwiGLU; block-sparse attention.

Formula: transformers 5.24 `models/minimax_m3_vl`; MTP modules: vLLM 0.33 `minimax_m3/nvidia/mtp.py`. From the fourth
layer on, and in MTP modules, an indexer selects `index_topk_blocks` blocks of `index_block_size` positions for each KV
head, among them the row's own block (layers/indexer.py).
"""

from dataclasses import replace

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RouterSpec
from headstart.kernels.specs import IndexSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.indexer import BlockIndexerConfig
from headstart.layers.mlp import MLPConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import FULL, Config, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import ALL_NORMS, SPARSE_BLOCK, WRAPPED, Names, module_names

LLAMA_CPP = "minimax-m3"
INDEXED = "minimax_m3_sparse"
SERVED = {
    "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0, "use_gemma_norm": True,
    "qk_norm_type": "per_head", "scoring_func": "sigmoid", "use_routing_bias": True, "attention_output_gate": False,
}  # fmt: skip


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    if config.get("model_type") == LLAMA_CPP:
        config = _of_gguf(config)
    keys.refuse_others(config, SERVED)
    mixer = keys.attention(config, qk_norm=True)
    experts = keys.experts(
        config,
        RouterSpec(
            num_experts=number(config, "num_local_experts", needs="a mixture of experts"),
            top_k=number(config, "num_experts_per_tok", needs="a mixture of experts"),
            scoring="sigmoid", scale=real(config, "routed_scaling_factor", 2.0),
        ),
        inner=number(config, "intermediate_size"), bias=True, activation="clamped",
        shared=number(config, "shared_intermediate_size", default=3072, least=0),
    )  # fmt: skip
    dense = MLPConfig(inner=number(config, "dense_intermediate_size", default=12288), activation="clamped")
    flags = _indexed(config)
    indexed = replace(mixer, indexer=_indexer(config, mixer)) if any(flags) else mixer
    mixers = [indexed if each else mixer for each in flags]
    layers = keys.mixed_layers(keys.with_feed_kinds(config), mixers, dense, experts)
    return keys.decoder(config, layers, mtp_layer=keys.layer(config, indexed, experts))


def _of_gguf(config: Config) -> Config:
    """The keys of a GGUF file, in which layers with experts have an indexer. Raises ModelError."""
    keys.refuse_others(config, {"norm_topk_prob": True})
    inner, dense = number(config, "moe_intermediate_size"), number(config, "first_k_dense_replace", default=0, least=0)
    sparse = [int(i >= dense) for i in range(keys.num_layers(config))]
    return keys.inside(config, {
        "num_local_experts": config.get("num_experts"), "dense_intermediate_size": config.get("intermediate_size"),
        "intermediate_size": inner, "index_topk_blocks": config.get("index_topk"), "moe_layer_freq": sparse,
        "shared_intermediate_size": inner * number(config, "n_shared_experts", default=0, least=0),
        "sparse_attention_config": {"sparse_attention_freq": sparse},
    })  # fmt: skip


def _indexed(config: Config) -> list[bool]:
    """For each layer, whether it has an indexer, from `layer_types`, else `sparse_attention_freq`; without both none
    has. Raises ModelError for other values."""
    count, kinds, sparse = keys.num_layers(config), config.get("layer_types"), _sparse_attention(config)
    if kinds is not None:
        keys.check_kinds(kinds, count, (FULL, INDEXED))
        return [kind == INDEXED for kind in kinds]
    return keys.layer_flags(config, "sparse_attention_freq", sparse.get("sparse_attention_freq", [0] * count))


def _sparse_attention(config: Config) -> Config:
    """`sparse_attention_config`; empty if there is none, or if it is switched off."""
    sparse = config.get("sparse_attention_config")
    return sparse if isinstance(sparse, dict) and sparse.get("use_sparse_attention", True) else {}


INDEX_KEYS = {
    "sparse_num_index_heads": ("index_n_heads", 4), "sparse_index_dim": ("index_head_dim", 128),
    "sparse_block_size": ("index_block_size", 128), "sparse_topk_blocks": ("index_topk_blocks", 16),
    "sparse_local_block": ("index_local_blocks", 1),
}  # fmt: skip
"""Keys in `sparse_attention_config` -> the same outside of it, and the default."""


def _indexer(config: Config, mixer: AttentionConfig) -> BlockIndexerConfig:
    """The indexer of a layer, which is rotated like its attention. Raises ModelError for sizes that are not served."""
    sparse = _sparse_attention(config)
    keys.refuse_others(sparse, {"sparse_score_type": "max", "sparse_init_block": 0})
    heads, dim, size, blocks, local = (
        number(sparse, key, default=number(config, flat, default=default))
        for key, (flat, default) in INDEX_KEYS.items()
    )
    rotary = mixer.rope.rotary_dim if mixer.rope else 0
    for name, value, fits, known in (
        ("sparse_num_index_heads", heads, mixer.spec.num_kv_heads % heads == 0, "divisors of num_key_value_heads"),
        ("sparse_index_dim", dim, dim >= rotary, f"{rotary} (the rotated features) or more"),
        ("sparse_block_size", size, size >= 2 * heads, f"{2 * heads} (twice the heads) or more"),
        ("sparse_local_block", local, local == 1, "1"),
    ):
        if not fits:
            raise ModelError(f"config.json: {name} is {value}, which is not supported", f"known: {known}")
    spec = IndexSpec(heads, dim, blocks, size, whole=True)
    return BlockIndexerConfig(spec=spec, rope=mixer.rope, eps=real(config, "rms_norm_eps", 1e-6))


INDEX_PARTS = ("q_proj", "k_proj", "q_norm", "k_norm")
FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 524288, "rms_norm_eps": 1e-6, "rope_theta": 5e6, "num_key_value_heads": 4,
        "head_dim": 128, "partial_rotary_factor": 0.5, "num_experts_per_tok": 4,
    },
    harmless={
        "hidden_act": "always the clamped SwiGLU",
        "rotary_dim": "given by partial_rotary_factor",
        "use_qk_norm": "always so here",
        **dict.fromkeys(("sparse_attention_freq", *INDEX_KEYS, *(flat for flat, _ in INDEX_KEYS.values())),
                        "read where a layer has an indexer"),
        "sparse_disable_index_value": "indexers have no values",
        "moe_layer_freq": "in mlp_layer_types",
        "n_shared_experts": "shared_intermediate_size says their width",
        "mtp_transformer_layers": "given by num_mtp_modules",
        **dict.fromkeys(("image_token_index", "video_token_index", "projector_hidden_size", "merged_hidden_size",
                         "image_seq_length", "multimodal_projector_bias", "process_image_mode",
                         "vision_feature_select_strategy"), "of images"),
    },
    names=Names(
        {
            **WRAPPED,
            "patch_merge_mlp.": None,
            **module_names("model.mtp.layers.{i}.", block="transformer_layer."),
        },
        parts={
            **{f".self_attn.index_{part}.": f".self_attn.indexer.{part}." for part in INDEX_PARTS},
            ".block_sparse_moe.e_score": ".mlp.gate.e_score",
            **SPARSE_BLOCK,
        },
    ),
    shifted_norms=ALL_NORMS,
    head=HeadSpec(mask_first=True, recycle="pre_norm", beyond="cycle"),
    mtp=MTPLayout(
        title="MiniMax-M3", count_key="num_mtp_modules",
        not_xllm="xLLM has no draft of this type", not_llama_cpp="its converter leaves the module out",
    ),
    aliases=("minimax_m3_vl", "minimax_m3_text", "minimax_m3_vl_text", LLAMA_CPP),
    small={
        "model_type": "minimax_m3_vl_text", "architectures": ["MiniMaxM3SparseForCausalLM"], "intermediate_size": 24,
        "dense_intermediate_size": 80, "shared_intermediate_size": 20, "num_local_experts": 7,
        "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "hidden_act": "swigluoai", "rotary_dim": 4,
        "partial_rotary_factor": 0.5, "moe_layer_freq": [0, 1, 1], "num_mtp_modules": 2,
        "index_n_heads": 2, "index_head_dim": 20, "index_block_size": 4, "index_topk_blocks": 3,
        "sparse_attention_config": {"sparse_attention_freq": [0, 1, 1, 1]},
    },
)  # fmt: skip
