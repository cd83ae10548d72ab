"""Rows of the contract tests: oracles of each family, further configs, and settings of llama.cpp's tools.

A new family that transformers knows needs no row; one with MTP modules names the formulas of its module (`head`)."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

LONGROPE = {
    "rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 3.0, 5.0],
    "original_max_position_embeddings": 256,
}  # fmt: skip
EXPERTS = {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20}
SHARING = {"num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
FIVE = ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"]
LATENT = {"head_dim": 32, "num_key_value_heads": 4, "v_head_dim": 64}
ONE_INDEX_HEAD = {
    "sparse_num_index_heads": 1, "sparse_index_dim": 7, "sparse_block_size": 3, "sparse_topk_blocks": 4,
    "sparse_attention_freq": [0, 1, 1],
}  # fmt: skip
Config = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class MTPModule:
    """Names and order of the parts of an MTP module whose block is a layer of transformers; see MTPOracle."""

    block: str = "model.layers.{last}."  # prefix of the block's tensors
    layer: str = "model.layers.0."  # the prefix in a trunk of one layer
    names: Mapping[str, str] = field(default_factory=dict)  # patterns in the block -> names in the trunk's layer
    embedding_norm: str = "{block}enorm"
    hidden_norm: str = "{block}hnorm"
    projections: tuple[str, ...] = ("{block}eh_proj",)  # side by side
    hidden_first: bool = False  # the projection reads the hidden state before the embedding
    masks_first: bool = False  # the first embedding is zero
    trunk_norm: str = ""  # norm of the embeddings before the module's own
    norm: str = "{block}shared_head.norm"  # empty: none
    lm_head: str = ""  # empty: the trunk's
    reads_normed: bool = True  # the trunk's state after its final norm
    recycles_normed: bool = True
    config: Mapping[str, Any] = field(default_factory=dict)  # for one layer of the block's kind
    zeros_missing: bool = False  # the trunk's layer has more parts
    single_stream: bool = False  # a module of a trunk with residual streams has none
    mixer: str = ""  # prefix of the module's last sum of streams, in a family without a final norm


SPARSE = {"first_k_dense_replace": 0, "mlp_layer_types": ["sparse"]}
DEEPSEEK = MTPModule(config=SPARSE)
QWEN = MTPModule(
    block="mtp.layers.0.", embedding_norm="mtp.pre_fc_norm_embedding", hidden_norm="mtp.pre_fc_norm_hidden",
    projections=("mtp.fc",), norm="mtp.norm", config={"layer_types": ["full_attention"]},
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class FamilyRow:
    """Test data of one family."""

    is_relative: bool = False  # layers of other families with declared differences: no grid of its own
    trunk: str = ""  # transformers' model type of the trunk; empty: the family's name
    mtp: MTPModule | None = None
    mtp_block: int | None = None  # the layer of transformers' small model that equals an MTP module's block
    modules: tuple[int, ...] = ()  # the MTP module of each draft step, where there are several
    oracle_config: Mapping[str, Any] = field(default_factory=dict)  # keys that only the oracle reads
    has_deepseek_names: bool = False  # files have other names for DeepSeek's experts
    has_rope_by_kind: bool = False  # each kind of layer has its own rope
    is_whole: bool = False  # tested with all variants; other families share the code of ropes and activations
    excluded: tuple[str, ...] = ()  # keys that the family lacks, and variants that transformers reads differently
    variants: Mapping[str, Config] = field(default_factory=dict)  # further configs
    gguf: Mapping[str, str] = field(default_factory=dict)  # model_type -> llama.cpp's architecture
    has_gguf_rope_order: bool = False  # llama.cpp permutes rows of q and k
    llama_cpp: Mapping[str, Any] = field(default_factory=dict)  # config values that llama.cpp's tools accept
    released: Mapping[str, Any] = field(default_factory=dict)  # keys of released files that llama.cpp's converter reads
    transformers_mtp: Mapping[str, Any] | None = None  # keys for generate(use_mtp=True) as the oracle


ROWS: Mapping[str, FamilyRow] = {
    "bailing_hybrid": FamilyRow(
        mtp=replace(
            DEEPSEEK, norm="{block}final_layernorm", config={**SPARSE, "layer_types": ["full_attention"]}),
        # after the last whole group, transformers has linear layers, vLLM and llama.cpp full ones
        mtp_block=3, excluded=("num_hidden_layers",),
        llama_cpp={"num_key_value_heads": 4, "v_head_dim": 64},
        released={
            "no_kda_lora": True, "gated_attention_proj_granularity_type": "head_wise", "norm_topk_prob": True,
            "moe_shared_expert_intermediate_size": 256}),
    "bailing_moe": FamilyRow(
        is_relative=True, trunk="glm4_moe", mtp=DEEPSEEK, has_deepseek_names=True, released={"norm_topk_prob": True}),
    "cohere2": FamilyRow(
        is_relative=True,
        variants={
            "cohere2, biases": {"model_type": "cohere2", "attention_bias": True},
            "cohere": {"model_type": "cohere", "sliding_window": None, "sliding_window_pattern": None}},
        gguf={"cohere2": "cohere2"},
        # llama.cpp supports no others
        llama_cpp={"sliding_window_pattern": 4, "num_hidden_layers": 5},
        released={"rotary_pct": 1.0}),
    "cohere2_moe": FamilyRow(
        is_relative=True,
        mtp=MTPModule(
            # a layer that rotates and sees everything
            config={**SPARSE, "layer_types": ["sliding_attention"], "sliding_window": 10**6}),
        variants={
            "cohere2_moe, a softmax, no shared experts, a norm that does not center": {
                "model_type": "cohere2_moe", "rms_norm_eps": 1e-5, "expert_selection_fn": "softmax",
                "num_shared_experts": 0, "first_k_dense_replace": 2, "prefix_dense_sliding_window_pattern": 2,
                "num_hidden_layers": 4, "prefix_dense_intermediate_size": None, "num_nextn_predict_layers": 0}},
        llama_cpp={"prefix_dense_intermediate_size": 512, "intermediate_size": 256}),
    "deepseek_v3": FamilyRow(
        mtp=DEEPSEEK, mtp_block=2, oracle_config={"num_key_value_heads": None, "head_dim": 6}, transformers_mtp={},
        is_whole=True, llama_cpp=LATENT, released={"scoring_func": "sigmoid"}),
    "deepseek_v32": FamilyRow(mtp=DEEPSEEK, mtp_block=2, llama_cpp=LATENT, released={"scoring_func": "sigmoid"}),
    "deepseek_v4": FamilyRow(
        mtp=MTPModule(
            block="mtp.0.", layer="layers.0.", names={r"^layers\.0\.hc_head_": "hc_head_"},
            projections=("mtp.0.e_proj", "mtp.0.h_proj"), norm="mtp.0.norm", reads_normed=False, recycles_normed=False,
            config={"compress_ratios": [0, 0], "num_hash_layers": 0}),
        excluded=("num_key_value_heads", "attention_bias", "hidden_act", "num_hidden_layers"),
        variants={
            "wide odd heads of one key": {
                "head_dim": 23, "num_attention_heads": 3, "o_groups": 3, "index_head_dim": 11},
            "one layer with a window, odd sizes": {
                "num_hidden_layers": 1, "compress_ratios": [0, 0], "num_hash_layers": 0, "vocab_size": 97,
                "moe_intermediate_size": 37},
            "kinds by ratio, three streams": {
                "compress_ratios": [128, 4, 4, 0], "compress_rates": None, "compress_rate_csa": 5, "hc_mult": 3,
                "hc_sinkhorn_iters": 1, "scoring_func": "sigmoid"},
            "no word on kinds": {"compress_ratios": None, "num_hash_layers": None}},
        llama_cpp={
            "num_key_value_heads": 1, "o_lora_rank": 128, "index_n_heads": 64,
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128}},
        released={"norm_topk_prob": True, "swiglu_limit": 10.0, "scoring_func": "sqrtsoftplus"}),
    "deepseek_v41": FamilyRow(
        # the reading has none of these
        excluded=(
            "num_key_value_heads", "attention_bias", "hidden_act", "num_hidden_layers", "rope_scaling",
            "rope_parameters"),
        variants={
            "wide odd heads of one key": {
                "head_dim": 23, "num_attention_heads": 3, "o_groups": 3, "index_head_dim": 11},
            "three layers, three streams, no memory": {
                "num_hidden_layers": 3, "compress_ratios": [1, 1, 0], "kv_source_layer_ids": [0],
                "index_source_layer_ids": [0, 1], "candidate_source_layer_id": -1, "engram_layer_ids": [],
                "hc_mult": 3, "dspark_block_size": None}}),
    "ernie4_5": FamilyRow(
        is_relative=True, variants={"ernie4_5, biases": {"model_type": "ernie4_5", "use_bias": True}},
        gguf={"ernie4_5": "ernie4_5"}),
    "ernie4_5_moe": FamilyRow(
        mtp=MTPModule(
            block="model.mtp_block.{i}.", embedding_norm="model.mtp_emb_norm.{i}",
            hidden_norm="model.mtp_hidden_norm.{i}", projections=("model.mtp_linear_proj.{i}",), masks_first=True,
            norm="", config={"moe_layer_start_index": 1}),
        mtp_block=0, excluded=("attention_bias",),
        # the converter takes intermediate_size / KV heads as the width of shared experts
        llama_cpp={"intermediate_size": 1024}),
    "exaone4": FamilyRow(
        is_relative=True, mtp=replace(QWEN, config={"layer_types": ["sliding_attention"]}),
        variants={
            "exaone4": {"model_type": "exaone4", "num_nextn_predict_layers": 0},  # EXAONE 4.5 has one
            "exaone4, no windows": {
                "model_type": "exaone4", "num_nextn_predict_layers": 0, "sliding_window": None,
                "layer_types": ["full_attention"] * 3}},
        gguf={"exaone4": "exaone4"},
        # only the model of 64 layers has windows
        llama_cpp={"sliding_window": None, "num_nextn_predict_layers": 0}),
    "exaone_moe": FamilyRow(
        is_relative=True, mtp=replace(QWEN, config={"layer_types": ["sliding_attention"], "first_k_dense_replace": 1}),
        mtp_block=0, has_deepseek_names=True, released={"scoring_func": "sigmoid"}),
    "falcon_h1": FamilyRow(
        is_relative=True,
        variants={
            "falcon_h1, no norm, biases": {
                "model_type": "falcon_h1", "mamba_rms_norm": False, "mamba_proj_bias": True, "projectors_bias": True,
                "attention_bias": True, "mlp_bias": True, "mamba_n_groups": 1},
            "falcon_h1, norm before the gate, no multipliers": {
                "model_type": "falcon_h1", "mamba_norm_before_gate": True, "mlp_multipliers": None,
                "ssm_multipliers": None, "key_multiplier": 1.0, "ssm_in_multiplier": 1.0,
                "attention_in_multiplier": 1.0}}),
    "gemma2": FamilyRow(is_relative=True),
    "gemma3": FamilyRow(
        trunk="gemma3_text", has_rope_by_kind=True, is_whole=True,
        # the size of its tokenizer
        llama_cpp={"vocab_size": 97, "sliding_window_pattern": 6, "num_hidden_layers": 7}),
    "gemma3n": FamilyRow(
        is_relative=True, trunk="gemma3n_text",
        variants={
            # values of GGUF files
            "gemma3n": {"model_type": "gemma3n", "laurel_rank": 64, "vocab_size_per_layer_input": 131},
            "gemma3n, fewer tokens by layer, another stream, no factor": {
                "model_type": "gemma3n", "altup_active_idx": 1, "altup_correct_scale": False, "num_kv_shared_layers": 0,
                "activation_sparsity_pattern": None, "attention_bias": True, "intermediate_size": 80}},
        gguf={"gemma3n": "gemma3n"},
        llama_cpp={
            # llama.cpp has fixed softcap, cutoff and their layers, and shares keys from layer 20 on
            "final_logit_softcapping": 30.0,
            "vocab_size": 97, "vocab_size_per_layer_input": 97, "num_kv_shared_layers": 0, "altup_num_inputs": 4,
            "laurel_rank": 64, "activation_sparsity_pattern": [0.95] * 5}),
    "gemma4": FamilyRow(
        trunk="gemma4_text", has_rope_by_kind=True, is_whole=True, excluded=("rope_scaling",),
        variants={
            "shared keys, wide MLPs": {"layer_types": FIVE, **SHARING},
            "shared keys, own values": {"layer_types": FIVE, **SHARING, "attention_k_eq_v": False}, "experts": EXPERTS,
            "experts alone": {**EXPERTS, "hidden_size_per_layer_input": 0, "attention_k_eq_v": False},
            "no more than windows": {"hidden_size_per_layer_input": 0, "final_logit_softcapping": None},
            "sizes of one layer": {"per_layer_config": {"2": {"head_dim": 10, "num_key_value_heads": 3}}},
            "another table": {"vocab_size_per_layer_input": 140, "use_bidirectional_attention": "vision"}},
        llama_cpp={"vocab_size": 97, "vocab_size_per_layer_input": 97}),
    "glm": FamilyRow(
        is_relative=True, variants={"glm, no biases": {"model_type": "glm", "attention_bias": False}},
        gguf={"glm": "chatglm"}),
    "glm4": FamilyRow(is_relative=True, gguf={"glm4": "glm4"}),
    "glm4_moe": FamilyRow(mtp=DEEPSEEK, mtp_block=2, transformers_mtp={}),
    "glm4_moe_lite": FamilyRow(
        mtp=DEEPSEEK, mtp_block=2, oracle_config={"head_dim": 6}, llama_cpp=LATENT, released={"scoring_func": "sigmoid"}
    ),
    "glm5_next": FamilyRow(
        trunk="glm5_next_text",
        mtp=replace(
            DEEPSEEK, single_stream=True, config={**SPARSE, "layer_types": ["indexed_attention"], "hc_mult": 1}),
        mtp_block=3, excluded=("head_dim", "num_key_value_heads", "attention_bias", "hidden_act", "num_hidden_layers"),
        llama_cpp={
            # llama.cpp knows four streams
            "num_key_value_heads": 4, "v_head_dim": 64, "qk_rope_head_dim": 0, "linear_head_dim": 64,
            "linear_num_heads": 4, "hc_mult": 4, "first_k_dense_replace": 1},
        released={
            "mla_use_nope": True, "norm_topk_prob": True, "scoring_func": "sigmoid", "swiglu_limit": 10.0,
            "linear_attn_config": {
                "num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4, "gate_lower_bound": -3.0}}),
    "glm_moe_dsa": FamilyRow(mtp=DEEPSEEK, mtp_block=2, llama_cpp=LATENT, released={"scoring_func": "sigmoid"}),
    "gpt_oss": FamilyRow(
        llama_cpp={
            # llama.cpp rounds YaRN's ramp, the model and headstart do not: compared without
            "intermediate_size": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0}}),
    "granite": FamilyRow(
        is_relative=True,
        variants={"granite, biases": {"model_type": "granite", "attention_bias": True, "mlp_bias": True}},
        gguf={"granite": "granite"}, has_gguf_rope_order=True),
    "granitemoehybrid": FamilyRow(
        is_relative=True,
        variants={
            "granitemoehybrid, older names, rope, a dense part": {
                "model_type": "granitemoehybrid", "layer_types": ["attention", "mamba", "mamba"],
                "num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_groups": 1, "mamba_proj_bias": True,
                "mamba_conv_bias": False},
            "granitemoe": {"model_type": "granitemoe", "layer_types": None, "shared_intermediate_size": None},
            "granitemoeshared": {"model_type": "granitemoeshared", "layer_types": None}},
        llama_cpp={"intermediate_size": 256}, released={"layer_types": ["mamba", "attention", "mamba"]}),
    "hunyuan_v1_dense": FamilyRow(
        is_relative=True,
        variants={
            "hunyuan_v1_dense, alpha": {
                "model_type": "hunyuan_v1_dense", "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0},
            }},
        gguf={"hunyuan_v1_dense": "hunyuan-dense"}),
    "hy_v3": FamilyRow(
        is_relative=True, mtp=replace(DEEPSEEK, masks_first=True), mtp_block=-1, has_deepseek_names=True),
    "hy_v4": FamilyRow(
        mtp=replace(
            DEEPSEEK, block="model.mtp_layers.{i}.", norm="{block}final_layernorm", masks_first=True,
            single_stream=True, config={**SPARSE, "indexer_types": ["full"], "hc_mult": 1}),
        mtp_block=2, excluded=("attention_bias", "hidden_act"), llama_cpp=LATENT, released={"swiglu_limit": 10.0}),
    "inkling": FamilyRow(
        mtp=MTPModule(  # vLLM 0.33 models/inkling/nvidia/mtp.py; transformers leaves the trunk's norm out
            block="model.mtp.layers.{i}.transformer_block.", layer="model.llm.layers.0.", hidden_first=True, norm="",
            trunk_norm="model.llm.embed_norm", embedding_norm="model.mtp.layers.{i}.embed_norm",
            hidden_norm="model.mtp.layers.{i}.hidden_norm", projections=("model.mtp.layers.{i}.input_proj",),
            config={"local_layer_ids": [0], "dense_mlp_idx": 1}),
        trunk="inkling_text", excluded=("attention_bias", "hidden_act", "tie_word_embeddings", "rope_scaling"),
        variants={"windows alone, dense": {"local_layer_ids": [0, 1, 2, 3], "dense_mlp_idx": 4}}),
    "kimi_k3": FamilyRow(
        mtp=replace(
            DEEPSEEK, masks_first=True, reads_normed=False, recycles_normed=False,
            config={
                **SPARSE, "attn_res_block_size": None, "linear_attn_config": {
                    "full_attn_layers": [1], "kda_layers": [], "head_dim": 12, "num_heads": 5,
                    "short_conv_kernel_size": 4, "gate_lower_bound": -3.0, "use_full_rank_gate": True}}),
        excluded=("head_dim", "num_key_value_heads", "attention_bias", "hidden_act", "num_hidden_layers"),
        llama_cpp={
            "num_key_value_heads": 4, "v_head_dim": 64, "routed_expert_hidden_size": 256,
            "num_nextn_predict_layers": 0, "linear_attn_config": {
                "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 64, "num_heads": 4,
                "short_conv_kernel_size": 4, "gate_lower_bound": -3.0, "use_full_rank_gate": True}},
        released={"mla_use_nope": True, "moe_renormalize": True, "moe_router_activation_func": "sigmoid"}),
    "kimi_linear": FamilyRow(
        # all layers are listed
        excluded=("num_hidden_layers",),
        llama_cpp={
            # llama.cpp has no groups of experts and as many linear heads as others
            **LATENT, "num_expert_group": 1, "topk_group": 1, "max_position_embeddings": 512, "linear_attn_config": {
                "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 64, "num_heads": 4,
                "short_conv_kernel_size": 4}},
        released={"moe_router_activation_func": "sigmoid"}),
    "lfm2_moe": FamilyRow(released={"layer_types": ["conv", "full_attention", "conv"]}),
    "llama": FamilyRow(is_whole=True),
    "llama4": FamilyRow(
        is_relative=True, trunk="llama4_text",
        variants={
            "llama4, one expert, no norms": {
                "model_type": "llama4_text", "num_experts_per_tok": 1, "use_qk_norm": False,
                "no_rope_layers": [1, 0, 1, 0], "moe_layers": [0, 3]},
            "llama4, scaled": {
                "model_type": "llama4_text", "attn_temperature_tuning": False, "attention_bias": True,
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                    "original_max_position_embeddings": 32}}}),
    "longcat_flash": FamilyRow(
        mtp=MTPModule(
            # half of a layer
            block="model.mtp.layers.{i}.",
            embedding_norm="{block}enorm.m", hidden_norm="{block}hnorm.m", norm="model.mtp.norm", zeros_missing=True,
            config={"num_hidden_layers": 2, "num_layers": 1, "zero_expert_num": 0},
            names={
                r"(input_layernorm|post_attention_layernorm|self_attn)\.": r"\1.0.", "transformer_layer.mlp": "mlps.0",
            }),
        oracle_config={"head_dim": 6},
        variants={
            "one layer, odd sizes": {
                "num_hidden_layers": 2, "ffn_hidden_size": 37, "intermediate_size": None, "vocab_size": 97,
                "zero_expert_num": 0, "moe_topk": 3}},
        llama_cpp=LATENT),
    "mellum": FamilyRow(
        is_relative=True,
        mtp=replace(QWEN, config={"layer_types": ["sliding_attention"], "mlp_layer_types": ["sparse"]}), mtp_block=0,
        # kinds of layers of which transformers makes no rope where the trunk has none
        transformers_mtp={"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]},
        variants={
            "mellum, windows, an MLP": {
                "model_type": "mellum", "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "mlp_layer_types": ["dense", "sparse", "sparse"], "num_nextn_predict_layers": 0}},
        llama_cpp={
            # modules are not converted, all layers share a rope base, one layer must have a window
            "num_nextn_predict_layers": 0,
            "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding")],
            "rope_parameters": {
                f"{kind}_attention": {"rope_type": "default", "rope_theta": 5e4} for kind in ("sliding", "full")}}),
    "mimo": FamilyRow(
        trunk="qwen2",
        mtp=MTPModule(
            block="model.mtp_layers.{i}.", embedding_norm="{block}token_layernorm",
            hidden_norm="{block}hidden_layernorm", projections=("{block}input_proj",), norm="{block}final_layernorm",
            hidden_first=True, masks_first=True, reads_normed=False)),
    "mimo_v2_flash": FamilyRow(
        mtp=MTPModule(
            block="model.mtp.layers.{i}.", names={"pre_mlp_layernorm": "post_attention_layernorm"},
            norm="{block}final_layernorm", reads_normed=False, recycles_normed=False,
            config={"layer_types": ["sliding_attention"], "mlp_layer_types": ["dense"]}),
        modules=(0, 1, 2, 2), excluded=("rope_scaling", "rope_parameters", "num_key_value_heads"),
        llama_cpp={
            "v_head_dim": 32, "num_key_value_heads": 2, "rope_parameters": None, "rope_theta": 50000.0,
            "swa_rope_theta": 300.0, "partial_rotary_factor": 0.5, "swa_num_key_value_heads": 2},
        released={
            "swa_head_dim": 64, "swa_v_head_dim": 32, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
            "topk_method": "noaux_tc", "hybrid_layer_pattern": [0, 1, 1], "moe_layer_freq": [0, 1, 1]}),
    "minicpm": FamilyRow(
        is_relative=True, trunk="granite",
        oracle_config={
            "embedding_multiplier": 12, "residual_multiplier": 0.8082903768654761, "logits_scaling": 3.0,
            "attention_multiplier": 0.3535533905932738},
        gguf={"minicpm": "minicpm"}, has_gguf_rope_order=True),
    "minimax_m3": FamilyRow(
        trunk="minimax_m3_vl_text",
        mtp=MTPModule(
            block="model.mtp.layers.{i}.transformer_layer.", norm="model.mtp.layers.{i}.final_layernorm",
            embedding_norm="model.mtp.layers.{i}.enorm", hidden_norm="model.mtp.layers.{i}.hnorm",
            projections=("model.mtp.layers.{i}.eh_proj",), masks_first=True, recycles_normed=False,
            config={"moe_layer_freq": [1], "layer_types": ["minimax_m3_sparse"]}),
        modules=(0, 1, 0, 1), excluded=("hidden_act", "attention_bias"),
        llama_cpp={
            "intermediate_size": 256, "dense_intermediate_size": 512, "rotary_dim": 32, "index_n_heads": 2,
            "num_mtp_modules": 0},
        released={
            "n_shared_experts": 1, "scoring_func": "sigmoid", "sparse_attention_config": {
                "sparse_num_index_heads": 2, "sparse_index_dim": 128, "sparse_topk_blocks": 3, "sparse_block_size": 4,
                "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1]}},
        variants={
            "one kv head": {"num_key_value_heads": 1, "sparse_attention_config": ONE_INDEX_HEAD},
            "wide odd heads": {
                "head_dim": 22, "num_attention_heads": 3, "num_key_value_heads": 1,
                "sparse_attention_config": {**ONE_INDEX_HEAD, "sparse_index_dim": 12}}}),
    "mistral": FamilyRow(
        is_relative=True,
        variants={
            "mistral, no window": {"model_type": "mistral", "sliding_window": None},
            "ministral": {
                "model_type": "ministral", "layer_types": ["sliding_attention", "full_attention", "full_attention"]},
            "ministral3": {
                "model_type": "ministral3", "sliding_window": None,
                "rope_parameters": {
                    "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 32,
                    "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                    "llama_4_scaling_beta": 0.1}}},
        gguf={"mistral": "llama"}, has_gguf_rope_order=True),
    "mixtral": FamilyRow(
        is_relative=True, variants={"mixtral, window": {"model_type": "mixtral", "sliding_window": 9}},
        gguf={"mixtral": "llama"}, has_gguf_rope_order=True, llama_cpp={"intermediate_size": 256}),
    "muse_glimmer": FamilyRow(
        is_relative=True, trunk="muse_glimmer_text",
        variants={
            "muse_glimmer, kinds and rope by layer, as many kv heads": {
                "model_type": "muse_glimmer_text", "num_hidden_layers": 3, "layer_types": [
                    "full_attention", "sliding_attention", "full_attention"], "layer_rope_theta": [10000.0, 0, 10000.0],
                "num_key_value_heads": 6}},
        # llama.cpp knows no other
        llama_cpp={"post_norm_eps": 1e-8}),
    "nemotron_h": FamilyRow(
        mtp=MTPModule(
            block="mtp.layers.", layer="backbone.layers.", embedding_norm="mtp.layers.0.enorm",
            hidden_norm="mtp.layers.0.hnorm", projections=("mtp.layers.0.eh_proj",),
            norm="mtp.layers.1.final_layernorm", config={"hybrid_override_pattern": "*E", "num_hidden_layers": 2}),
        variants={
            "experts of whole rows, in groups": {
                "moe_latent_size": None, "n_routed_experts": 8, "n_group": 4, "topk_group": 2,
                "routed_scaling_factor": 2.5},
            "kinds as lists, all biases": {
                "hybrid_override_pattern": None, "layers_block_type": ["mamba", "mlp", "attention", "linear_attention"],
                "use_bias": True, "mlp_bias": True, "num_nextn_predict_layers": 0, "use_conv_bias": False}},
        # no MLP layers among experts
        llama_cpp={"hybrid_override_pattern": "ME*EM"}),
    "olmo2": FamilyRow(
        is_relative=True,
        variants={
            "olmo3": {"model_type": "olmo3", "sliding_window": 9, "num_hidden_layers": 4, "rope_theta": 5e5},
            "olmo3, scaled": {
                "model_type": "olmo3", "sliding_window": 9, "num_hidden_layers": 4, "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64, "attention_factor": 1.2,
                }},
            "olmo3, a rope for each kind": {
                "model_type": "olmo3", "sliding_window": 9, "num_hidden_layers": 4, "rope_theta": 5e5,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5}}}},
        gguf={"olmo2": "olmo2", "olmo3": "olmo2"}),
    "phi3": FamilyRow(
        is_relative=True,
        variants={
            "phi3, a part of each head": {"model_type": "phi3", "partial_rotary_factor": 0.75, "sliding_window": None},
            "phi3, longrope": {
                "model_type": "phi3", "partial_rotary_factor": 0.75, "rope_scaling": LONGROPE,
                "original_max_position_embeddings": 256}},
        gguf={"phi3": "phi3"},
        # which llama.cpp does not apply
        llama_cpp={"sliding_window": None}),
    "qwen2_moe": FamilyRow(
        is_relative=True,
        variants={
            "qwen2_moe, windows": {
                "model_type": "qwen2_moe", "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 2,
                "mlp_only_layers": [1]}},
        gguf={"qwen2_moe": "qwen2moe"}),
    "qwen3_5": FamilyRow(trunk="qwen3_5_text", mtp=QWEN, mtp_block=1),
    "qwen3_5_moe": FamilyRow(trunk="qwen3_5_moe_text", mtp=QWEN, mtp_block=1),
    "qwen4_exp": FamilyRow(
        trunk="qwen4_exp_text",
        mtp=replace(
            QWEN, projections=("mtp.fc_embedding", "mtp.fc_hidden"), norm="", mixer="mtp.hyper_connection_mixer.",
            reads_normed=False, config={"layer_types": ["full_attention"], "ple_layer_ids": []}),
        mtp_block=1, excluded=("attention_bias",),
        variants={
            "one stream more, silu, pairs of tokens": {
                "hc_count": 4, "output_gate_type": None, "ple_layer_ids": [1, 3], "ngram_size": 2}},
        # embeddings of n-grams are as wide as others
        llama_cpp={"ple_embed_dim": 256, "hc_lowrank": 256, "indexer_head_dim": 64, "split_ngram_parts": 2},
        released={
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5}}),
    "qwen3_moe": FamilyRow(
        # llama.cpp has experts in all layers
        llama_cpp={"mlp_only_layers": []}),
    "qwen3_next": FamilyRow(mtp=QWEN, mtp_block=1, is_whole=True),
    "seed_oss": FamilyRow(
        is_relative=True,
        variants={"seed_oss, all biases": {"model_type": "seed_oss", "attention_out_bias": True, "mlp_bias": True}},
        gguf={"seed_oss": "seed_oss"}),
    "stablelm": FamilyRow(
        is_relative=True,
        variants={
            "stablelm, both parts beside each other": {
                "model_type": "stablelm", "use_parallel_residual": True, "use_qkv_bias": False,
                "partial_rotary_factor": 0.5}},
        gguf={"stablelm": "stablelm"}),
    "step3p5": FamilyRow(
        mtp=MTPModule(
            norm="{block}transformer.shared_head.norm", lm_head="{block}transformer.shared_head.output",
            reads_normed=False, recycles_normed=False, config={"moe_layers_enum": ""}),
        mtp_block=1, modules=(0, 1, 2, 0),
        excluded=("num_key_value_heads", "num_hidden_layers", "rope_parameters", "rope linear, older key"),
        # all layers after the first ones, as released
        llama_cpp={"moe_layers_enum": "1,2", "share_expert_dim": 256},
        released={"norm_expert_weight": True}),
}  # fmt: skip
NO_ROW = FamilyRow()


def row_of(family: str) -> FamilyRow:
    return ROWS.get(family, NO_ROW)
