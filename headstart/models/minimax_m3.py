"""MiniMax-M3, text part: gated experts and dense layers with clamped SwiGLU; up to 2048 positions.

Formula: transformers 5.24 `models/minimax_m3_vl`; MTP modules: vLLM 0.33 `minimax_m3/nvidia/mtp.py`. From the fourth
layer on, an indexer selects `index_topk_blocks` blocks of `index_block_size` positions for each group of heads. As long
as a context has no more blocks than that (2048 positions), all are selected and the layers equal full attention; longer
contexts are refused, and the indexers' tensors are left out.
"""

from dataclasses import replace

from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RawTensor, RouterSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.mlp import MLPConfig
from headstart.models import keys
from headstart.models._gemma import minus_one, plus_one
from headstart.models.base import Family
from headstart.models.keys import Config, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import WRAPPED, Names
from headstart.models.small import Arrays

SERVED = {
    "swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0, "use_gemma_norm": True,
    "qk_norm_type": "per_head", "scoring_func": "sigmoid", "use_routing_bias": True, "attention_output_gate": False,
}  # fmt: skip


def parse(config: Config) -> DecoderConfig:
    config, tied = keys.text_config(config)
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
    layers = keys.mixed_layers(_sparse_from(config), [mixer] * keys.num_layers(config), dense, experts)
    decoder = keys.decoder(config, layers, tied=tied, mtp_layer=keys.layer(config, mixer, experts))
    return replace(decoder, max_length=min(decoder.max_length, _selected_length(config)))


def _sparse_from(config: Config) -> Config:
    """The config with `mlp_layer_types` where it has `moe_layer_freq` (1: experts)."""
    flags = config.get("moe_layer_freq")
    if not isinstance(flags, list) or config.get("mlp_layer_types") is not None:
        return config
    kinds = [keys.SPARSE if each else keys.DENSE for each in flags[: keys.num_layers(config)]]
    return keys.inside(config, {"mlp_layer_types": kinds})


def _selected_length(config: Config) -> int:
    """Number of positions whose blocks are all selected."""
    told = config.get("sparse_attention_config")
    sparse: Config = told if isinstance(told, dict) else {}
    size = number(sparse, "sparse_block_size", default=number(config, "index_block_size", default=128))
    return size * number(sparse, "sparse_topk_blocks", default=number(config, "index_topk_blocks", default=16))


PARTS = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
"""An expert's matrices in files -> canonical."""


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: canonical names of the experts' matrices, and norms that multiply by 1 + w."""
    ours: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.removesuffix(".weight").rpartition(".")
        ours[f"{stem}.{PARTS[part]}.weight" if part in PARTS else name] = tensor
    return plus_one(ours, config, from_gguf)


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    """Family.restore: inverse of `adapt`."""
    theirs: Arrays = {}
    for name, array in minus_one(arrays, config).items():
        for file, part in PARTS.items():
            name = name.replace(f".{part}.", f".{file}.") if ".experts." in name else name
        theirs[name] = array
    return theirs


LEFT = ("index_q_proj.", "index_k_proj.", "index_q_norm.", "index_k_norm.", "indexer.")
"""Tensors of indexers, under `self_attn`."""
MODULE = "model.mtp.layers.{i}."
FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 524288, "rms_norm_eps": 1e-6, "rope_theta": 5e6, "num_key_value_heads": 4,
        "head_dim": 128, "partial_rotary_factor": 0.5, "num_experts_per_tok": 4,
    },
    harmless={
        "hidden_act": "always the clamped SwiGLU",
        "rotary_dim": "partial_rotary_factor says it",
        "use_qk_norm": "always so here",
        "layer_types": "all positions are selected up to the longest context",
        **dict.fromkeys(
            ("sparse_attention_config", "index_n_heads", "index_head_dim", "index_local_blocks"),
            "of indexers, which select all positions up to the longest context",
        ),
        "moe_layer_freq": "in mlp_layer_types",
        "n_shared_experts": "shared_intermediate_size says their width",
        **dict.fromkeys(("mtp_transformer_layers", "use_mtp"), "num_mtp_modules says it"),
        **dict.fromkeys(("image_token_index", "video_token_index", "projector_hidden_size", "merged_hidden_size",
                         "image_seq_length", "multimodal_projector_bias", "process_image_mode",
                         "vision_feature_layer", "vision_feature_select_strategy"), "of images"),
    },
    names=Names(
        {
            **WRAPPED,
            **dict.fromkeys(("patch_merge_mlp.", "model.patch_merge_mlp."), None),
            **{f"model.layers.{{i}}.self_attn.{name}": None for name in LEFT},
            **{f"{MODULE}transformer_layer.self_attn.{name}": None for name in LEFT},
            f"{MODULE}enorm.": "mtp.{i}.norm_embedding.",
            f"{MODULE}hnorm.": "mtp.{i}.norm_hidden.",
            f"{MODULE}eh_proj.": "mtp.{i}.projection.",
            f"{MODULE}final_layernorm.": "mtp.{i}.norm.",
            f"{MODULE}transformer_layer.": "mtp.{i}.block.",
        },
        parts={
            ".block_sparse_moe.e_score": ".mlp.gate.e_score",
            ".block_sparse_moe.gate.": ".mlp.gate.",
            ".block_sparse_moe.experts.": ".mlp.experts.",
            ".block_sparse_moe.shared_experts.": ".mlp.shared_experts.",
        },
    ),
    adapt=adapt,
    restore=restore,
    head=HeadSpec(mask_first=True, recycle="pre_norm", beyond="cycle"),
    mtp=MTPLayout(
        title="MiniMax-M3", norm="1+w", count_key="num_mtp_modules",
        not_xllm="xLLM has no draft of this type", not_llama_cpp="its converter leaves the module out",
    ),
    aliases=("minimax_m3_vl", "minimax_m3_text", "minimax_m3_vl_text"),
    small={
        "model_type": "minimax_m3_vl_text", "architectures": ["MiniMaxM3SparseForCausalLM"], "intermediate_size": 24,
        "dense_intermediate_size": 80, "shared_intermediate_size": 20, "num_local_experts": 7,
        "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "hidden_act": "swigluoai", "rotary_dim": 4,
        "partial_rotary_factor": 0.5, "moe_layer_freq": [0, 1, 1], "num_mtp_modules": 2,
    },
)  # fmt: skip
