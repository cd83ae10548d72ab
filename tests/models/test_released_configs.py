"""Configs with the keys of released models of each family: they run, or one line names the missing feature."""

from pathlib import Path
from typing import Any

import pytest

from headstart.formats.base import Checkpoint
from headstart.models.described import DESCRIBED
from headstart.models.families import family_named
from headstart.tools.inspect.run import runs_here

COMMON: dict[str, Any] = {
    "architectures": ["XForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "tie_word_embeddings": False, "rms_norm_eps": 1e-5, "vocab_size": 32768,
    "max_position_embeddings": 32768, "rope_theta": 1e6, "hidden_size": 4096, "intermediate_size": 14336,
    "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
}  # fmt: skip
"""Only keys matter, and what chooses a way of computing: sizes are any."""
LLAMA: dict[str, Any] = {
    **COMMON, "model_type": "llama", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "head_dim": 64,
}  # fmt: skip
QWEN: dict[str, Any] = {**COMMON, "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False}
EXPERTS: dict[str, Any] = {
    **COMMON, "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_experts": 128, "num_experts_per_tok": 8,
    "output_router_logits": False, "rope_scaling": None, "router_aux_loss_coef": 0.001,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "head_dim": 256, "partial_rotary_factor": 0.25,
}  # fmt: skip
QWEN35_TEXT: dict[str, Any] = {
    **COMMON, **LINEAR, "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 8, "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "output_gate_type": "swish",
    "mtp_use_dedicated_embeddings": False, "pad_token_id": None, "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default"},
}  # fmt: skip
FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
YARN = {"beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 4096, "type": "yarn"}
MISTRAL: dict[str, Any] = {**COMMON, "model_type": "mistral", "sliding_window": None}
PHI: dict[str, Any] = {
    **COMMON, "model_type": "phi3", "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
    "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "original_max_position_embeddings": 4096,
    "hidden_size": 3072, "intermediate_size": 8192, "num_key_value_heads": 32, "pad_token_id": 32000,
    "rope_scaling": None, "sliding_window": 262144, "rope_theta": 10000.0,
}  # fmt: skip
EXAONE: dict[str, Any] = {**COMMON, "model_type": "exaone4", "head_dim": 128, "sliding_window_pattern": "LLLG"}
COHERE: dict[str, Any] = {
    **COMMON, "model_type": "cohere2", "attention_bias": False, "head_dim": 128, "layer_norm_eps": 1e-5,
    "layer_switch": 4, "logit_scale": 0.25, "order_of_interleaved_layers": "local_attn_first", "pad_token_id": 0,
    "position_embedding_type": "rope_gptj", "rope_scaling": None, "rotary_pct": 1.0, "sliding_window": 4096,
    "sliding_window_pattern": 4, "use_embedding_sharing": True, "use_gated_activation": True,
    "use_parallel_block": True, "use_parallel_embedding": True, "cache_implementation": "hybrid",
}  # fmt: skip
SCALED = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
INTERLEAVED = (["sliding_attention"] * 3 + ["full_attention"]) * 8
GRANITE: dict[str, Any] = {
    **COMMON, "model_type": "granite", "attention_bias": False, "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0, "logits_scaling": 16.0, "mlp_bias": False, "residual_multiplier": 0.22,
    "rope_scaling": None,
}  # fmt: skip
GRANITE_HYBRID: dict[str, Any] = {
    **GRANITE, "model_type": "granitemoehybrid", "init_method": "mup", "intermediate_size": 512, "mlp_bias": None,
    "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(32)], "mamba_chunk_size": 256,
    "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_n_groups": 1, "mamba_n_heads": 128, "mamba_proj_bias": False, "normalization_function": "rmsnorm",
    "num_experts_per_tok": 6, "num_local_experts": 64, "output_router_logits": False, "position_embedding_type": "nope",
    "router_aux_loss_coef": 0.01, "shared_intermediate_size": 1024, "time_step_limit": [0.0, {"__float__": "Infinity"}],
}  # fmt: skip
NEMOTRON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"], "model_type": "nemotron_h", "attention_bias": False,
    "attention_dropout": 0.0, "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"}, "bos_token_id": 1,
    "chunk_size": 128, "conv_kernel": 4, "eos_token_id": 2, "expand": 2, "head_dim": 128, "hidden_dropout": 0.0,
    "hidden_size": 2688, "initializer_range": 0.02, "intermediate_size": 1856,
    "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "layer_norm_epsilon": 1e-5,
    "mamba_head_dim": 64, "mamba_hidden_act": "silu", "mamba_num_heads": 64, "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32", "max_position_embeddings": 262144, "mlp_bias": False, "mlp_hidden_act": "relu2",
    "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712, "n_group": 1, "n_groups": 8,
    "n_routed_experts": 128, "n_shared_experts": 1, "norm_eps": 1e-5, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts_per_tok": 6, "num_hidden_layers": 52, "num_key_value_heads": 2, "num_logits_to_keep": 1,
    "pad_token_id": 0, "partial_rotary_factor": 1.0, "rescale_prenorm_residual": True, "residual_in_fp32": False,
    "rope_theta": 10000, "routed_scaling_factor": 2.5, "sliding_window": None, "ssm_state_size": 128,
    "tie_word_embeddings": False, "time_step_floor": 0.0001, "time_step_limit": [0.0, float("inf")],
    "time_step_max": 0.1, "time_step_min": 0.001, "topk_group": 1, "torch_dtype": "bfloat16", "use_bias": False,
    "use_cache": True, "use_conv_bias": True, "use_mamba_kernels": True, "vocab_size": 131072,
}  # fmt: skip
SEES: dict[str, Any] = {
    "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652, "vision_end_token_id": 151653,
    "vision_config": {"depth": 27, "hidden_size": 1152}, "tie_word_embeddings": False, "transformers_version": "4.57.0",
}  # fmt: skip
MROPE = {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"}
VL_TEXT: dict[str, Any] = {**COMMON, "attention_bias": False, "head_dim": 128, "rope_scaling": MROPE}
VL_EXPERTS = {
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_experts": 128, "num_experts_per_tok": 8,
}  # fmt: skip
LATENT: dict[str, Any] = {
    **COMMON, "attention_bias": False, "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "moe_intermediate_size": 2048, "moe_layer_freq": 1, "n_group": 8,
    "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 128,
    "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128, "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid", "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128, "vocab_size": 129280,
    "rope_scaling": {**YARN, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0},
}  # fmt: skip
INDEXED = {"index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048}
KIMI: dict[str, Any] = {
    **LATENT, "model_type": "kimi_k2", "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "n_group": 1,
    "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
    "pretraining_tp": 1, "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "seq_aux": True, "topk_group": 1,
    "rope_scaling": {**LATENT["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 32.0},
}  # fmt: skip
GLM5: dict[str, Any] = {
    **LATENT, **INDEXED, "model_type": "glm_moe_dsa", "head_dim": 64, "hidden_size": 6144, "index_n_heads": 32,
    "indexer_rope_interleave": True, "intermediate_size": 12288, "n_group": 1, "num_attention_heads": 64,
    "num_hidden_layers": 78, "num_key_value_heads": 64, "pretraining_tp": 1, "q_lora_rank": 2048, "qk_head_dim": 256,
    "qk_nope_head_dim": 192, "rope_interleave": True, "rope_scaling": None, "rope_theta": None, "topk_group": 1,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}, "v_head_dim": 256, "vocab_size": 154880,
}  # fmt: skip
RUN: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {
        "architectures": ["Llama4ForConditionalGeneration"], "boi_token_index": 200080, "eoi_token_index": 200081,
        "image_token_index": 200092, "model_type": "llama4", "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        "vision_config": {"model_type": "llama4_vision_model"}, "text_config": {
            **COMMON, "_attn_implementation_autoset": True, "attention_bias": False, "attention_chunk_size": 8192,
            "attn_scale": 0.1, "attn_temperature_tuning": True, "floor_scale": 8192, "for_llm_compressor": False,
            "head_dim": 128, "hidden_size": 5120, "interleave_moe_layer_step": 1, "intermediate_size": 8192,
            "intermediate_size_mlp": 16384, "model_type": "llama4_text", "no_rope_layers": [],
            "num_attention_heads": 40, "num_experts_per_tok": 1, "num_hidden_layers": 48, "num_local_experts": 16,
            "output_router_logits": False,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3"},
            "router_aux_loss_coef": 0.001, "router_jitter_noise": 0.0, "use_qk_norm": True}},
    "stepfun-ai/Step-3.5-Flash": {
        **{key: COMMON[key] for key in COMMON if key not in ("num_key_value_heads", "rope_theta")},
        "att_impl_type": "GQA", "attention_other_setting": {
            "attention_type": "sliding_attention", "head_dim": 128, "num_attention_groups": 8,
            "num_attention_heads": 48, "true_head_dim": 128},
        "head_dim": 128, "layer_types": ["full_attention", *["sliding_attention"] * 3] * 8 + ["sliding_attention"] * 3,
        "max_seq_len": 262144, "model_type": "step3p5", "moe_every_n_layer": 1, "moe_intermediate_size": 1280,
        "moe_layer_offset": 0, "moe_layers_enum": ",".join(map(str, range(3, 32))), "moe_num_experts": 288,
        "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "moe_top_k": 8, "need_fp32_gate": True,
        "norm_expert_weight": True, "num_attention_groups": 8, "num_nextn_predict_layers": 3,
        "partial_rotary_factors": [0.5, 1.0, 1.0, 1.0] * 8 + [1.0] * 3,
        "rope_theta": [5e6, 1e4, 1e4, 1e4] * 8 + [1e4] * 3,
        "rope_scaling": {
            "factor": 2.0, "high_freq_factor": 32.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 131072, "rope_type": "llama3"},
        "share_expert_dim": 1280, "sink": False, "sliding_window": 512, "use_head_wise_attn_gate": True,
        "swiglu_limits": [0.0] * 30 + [7, 7, 0.0, 0.0, 0.0], "swiglu_limits_shared": [0.0] * 31 + [16, 0.0, 0.0, 0.0],
        "use_mfa": False, "use_moe": True, "use_moe_router_bias": True, "use_qk_norm": True, "use_rope_layers": [],
        "yarn_only_types": ["full_attention"], "zero_centered": True},
    "stepfun-ai/Step-5-Preview": {  # from StepFun's configuration class
        "att_impl_type": "GQA", "attention_bias": False, "fp32_residual_connection": True, "head_dim": 192,
        "hidden_size": 4096, "intermediate_size": 13824, "max_position_embeddings": 524288, "model_type": "step5",
        "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 23 + ["sliding_attention"] * 3,
        "moe_intermediate_size": 1536, "moe_layer_list": list(range(3, 91)), "moe_num_experts": 352,
        "moe_router_activation": "sigmoid", "moe_router_scaling_factor": 3.0, "moe_top_k": 8, "need_fp32_gate": True,
        "norm_dtype": "float32", "norm_expert_weight": True, "num_attention_groups": 4, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 92, "num_nextn_predict_layers": 3,
        "partial_rotary_factors": [*[1.0] * 3, 1 / 3] * 23 + [1.0] * 3, "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0, "high_freq_factor": 32.0, "low_freq_factor": 1.0,
            "original_max_position_embeddings": 65536, "rope_type": "llama3"},
        "rope_theta": [*[1e4] * 3, 5e6] * 23 + [1e4] * 3, "share_expert_dim": 1536, "sliding_window": 512,
        "sparse_config": {
            "apply_to_layer_types": ["full_attention"], "attention_impl": "sparse_gqa", "enabled": True,
            "compression_method": "csa_block_compress", "num_provider_groups": 4, "proxy_dim": 256,
            "region_block_size": 8, "sparse_indexer_num_heads": 16, "topk": 512},
        "swiglu_limits": [0.0] * 88 + [7.0] * 3 + [0.0] * 4, "swiglu_limits_shared": [0.0] * 95,
        "use_head_wise_attn_gate": True, "use_moe": True, "use_moe_router_bias": True, "use_rope_layers": [],
        "vocab_size": 128896, "yarn_only_types": ["full_attention"], "zero_centered": True},
    "google/gemma-2-9b-it": {
        **COMMON, "attention_bias": False, "attn_logit_softcapping": 50.0, "cache_implementation": "hybrid",
        "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_act": "gelu_pytorch_tanh", "model_type": "gemma2",
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "sliding_window": 4096,
        "sliding_window_size": 4096, "tie_word_embeddings": True},
    "google/gemma-3n-E2B-it": {
        "architectures": ["Gemma3nForConditionalGeneration"], "audio_config": {}, "model_type": "gemma3n",
        "audio_soft_tokens_per_image": 188, "audio_token_id": 262273, "boa_token_id": 256000, "boi_token_id": 255999,
        "eoa_token_id": 262272, "eoi_token_id": 262144, "eos_token_id": [1, 106], "image_token_id": 262145,
        "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.53.0",
        "vision_config": {"architecture": "mobilenetv5_300m_enc"}, "vision_soft_tokens_per_image": 256, "text_config": {
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "altup_active_idx": 0, "altup_coef_clip": 120.0,
            "altup_correct_scale": True, "altup_lr_multiplier": 1.0, "altup_num_inputs": 4, "attention_bias": False,
            "attention_dropout": 0.0, "final_logit_softcapping": 30.0, "head_dim": 256, "hidden_size": 2048,
            "hidden_activation": "gelu_pytorch_tanh", "hidden_size_per_layer_input": 256, "initializer_range": 0.02,
            "intermediate_size": [8192] * 30, "laurel_rank": 64, "max_position_embeddings": 32768,
            "layer_types": ["full_attention" if i % 5 == 4 else "sliding_attention" for i in range(30)],
            "model_type": "gemma3n_text", "num_attention_heads": 8, "num_hidden_layers": 30, "num_key_value_heads": 2,
            "num_kv_shared_layers": 10, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06,
            "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0, "sliding_window": 512,
            "torch_dtype": "bfloat16", "use_cache": True, "vocab_size": 262400, "vocab_size_per_layer_input": 262144},
    },
    "CohereLabs/North-Mini-Code-1.0": {
        **COMMON, "model_type": "cohere2_moe", "attention_bias": False, "expert_selection_fn": "sigmoid",
        "first_k_dense_replace": 1, "head_dim": 128, "hidden_size": 2048, "intermediate_size": 768,
        "layer_norm_eps": 1e-5, "layer_types": ["full_attention", *INTERLEAVED, *INTERLEAVED[:16]], "logit_scale": 1.0,
        "norm_topk_prob": False, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 49,
        "num_key_value_heads": 4, "num_shared_experts": 0, "prefix_dense_intermediate_size": 3072,
        "prefix_dense_sliding_window_pattern": 1, "shared_expert_combination_strategy": "average",
        "sliding_window": 4096, "sliding_window_pattern": 4, "use_qk_norm": False, "tie_word_embeddings": True},
    "stabilityai/stablelm-2-zephyr-1_6b": {
        **{key: value for key, value in COMMON.items() if key != "rms_norm_eps"}, "hidden_dropout": 0.0,
        "layer_norm_eps": 1e-5, "model_type": "stablelm", "partial_rotary_factor": 0.25, "rope_theta": 10000,
        "qk_layernorm": False, "use_parallel_residual": False, "use_qkv_bias": True},
    "Qwen/Qwen3-VL-30B-A3B-Instruct": {
        **SEES, "model_type": "qwen3_vl_moe", "text_config": {
            **VL_TEXT, **VL_EXPERTS, "model_type": "qwen3_vl_moe_text"}},
    "Qwen/Qwen2.5-VL-7B-Instruct": {
        **COMMON, "model_type": "qwen2_5_vl", "max_window_layers": 28, "sliding_window": 32768,
        "use_sliding_window": False, "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "vision_token_id": 151654, **{key: SEES[key] for key in ("image_token_id", "video_token_id", "vision_config")},
    },
    "zai-org/GLM-4.1V-9B-Thinking": {
        "model_type": "glm4v", "image_token_id": 151343, "video_token_id": 151344, "vision_config": {"depth": 24},
        "image_start_token_id": 151339, "image_end_token_id": 151340, "video_start_token_id": 151341,
        "video_end_token_id": 151342, "text_config": {
            **COMMON, "model_type": "glm4v_text", "attention_bias": True, "partial_rotary_factor": 0.5,
            "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]}}},
    "deepseek-ai/DeepSeek-V3.2": {
        **LATENT, **INDEXED, "model_type": "deepseek_v32", "quantization_config": {**FP8, "scale_fmt": "ue8m0"}},
    "moonshotai/Kimi-K2.5": {
        "architectures": ["KimiK25ForConditionalGeneration"], "bos_token_id": 163584, "dtype": "bfloat16",
        "eos_token_id": 163585, "ignore_index": -100, "media_placeholder_token_id": 163605, "model_type": "kimi_k25",
        "pad_token_id": 163839, "tie_word_embeddings": False, "use_unified_vision_chunk": True,
        "video_placeholder": "<|kimi_k25_video_placeholder|>", "vision_config": {"mm_hidden_size": 1152},
        "text_config": {**KIMI, "quantization_config": {
            "config_groups": {"group_0": {
                "input_activations": None, "output_activations": None, "targets": ["Linear"],
                "weights": {
                    "actorder": None, "block_structure": None, "dynamic": False, "group_size": 32, "num_bits": 4,
                    "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": True, "type": "int",
                }}},
            "format": "pack-quantized", "ignore": ["lm_head", "re:.*self_attn.*"], "kv_cache_scheme": None,
            "quant_method": "compressed-tensors", "quantization_status": "compressed"}}},
    "a Ling 3 of 8B": {
        **COMMON, "model_type": "bailing_hybrid", "embedding_dropout": 0.0,
        "expert_swiglu_limit_list": None, "first_k_dense_replace": 1, "group_norm_size": 1, "head_dim": 128,
        "gated_attention_proj_granularity_type": "head_wise", "kda_lower_bound": -5, "kda_safe_gate": True,
        "kv_lora_rank": 512, "layer_group_size": 4, "linear_silu": True, "max_window_layers": 20,
        "moe_intermediate_size": 512, "moe_router_enable_expert_bias": True, "mtp_use_kda": False, "n_group": 8,
        "moe_shared_expert_intermediate_size": 512, "no_kda_lora": True, "norm_topk_prob": True, "num_experts": 128,
        "num_experts_per_tok": 8, "num_kv_heads_for_linear_attn": 0, "num_nextn_predict_layers": 0,
        "num_shared_experts": 1, "output_dropout": 0.0, "partial_rotary_factor": 0.5, "q_lora_rank": 256,
        "qk_head_dim": 192, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_interleave": True, "rotary_dim": 64,
        "rope_parameters": {"partial_rotary_factor": 0.5, "rope_theta": 6000000, "rope_type": "default"},
        "routed_scaling_factor": 2.5, "router_dtype": "fp32", "score_function": "sigmoid", "scoring_func": "sigmoid",
        "scale_router_input": False, "seq_aux": True, "short_conv_kernel_size": 4, "topk_group": 4,
        "topk_method": "noaux_tc", "use_bias": False, "use_kda_lora": False, "use_mla_nope": False, "use_nGPT": False,
        "use_qk_norm": True, "use_qkv_bias": False, "v_head_dim": 128, "value_norm": False, "up_proj_norm": False},
    "moonshotai/Kimi-Linear-48B-A3B-Instruct": {
        **COMMON, "model_type": "kimi_linear", "first_k_dense_replace": 1, "head_dim": 72, "kv_lora_rank": 512,
        "linear_attn_config": {
            "full_attn_layers": [2], "kda_layers": [1], "head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4},
        "num_hidden_layers": 2, "mla_use_nope": True, "model_max_length": 1048576, "moe_intermediate_size": 1024,
        "moe_layer_freq": 1, "moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_expert_group": 1,
        "num_experts": 256, "num_experts_per_token": 8, "num_nextn_predict_layers": 0, "num_shared_experts": 1,
        "q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rope_scaling": None,
        "routed_scaling_factor": 2.446, "topk_group": 1, "use_grouped_topk": True, "v_head_dim": 128},
    "thinkingmachines/Inkling-Small": {
        "architectures": ["InklingForConditionalGeneration"], "model_type": "inkling_mm_model",
        "audio_config": {"model_type": "inkling_audio_model"}, "vision_config": {"model_type": "inkling_vision_model"},
        "mtp_config": {"num_nextn_predict_layers": 8, "chain_hidden_post_norm": True}, "text_config": {
            "model_max_length": 1048576, "torch_dtype": "bfloat16", "hidden_size": 4096, "num_hidden_layers": 3,
            "vocab_size": 201024, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "d_rel": 16,
            "rel_extent": 1024, "q_bias": False, "o_bias": False, "log_scaling_n_floor": 128000,
            "log_scaling_alpha": 0.1, "rms_norm_eps": 1e-06, "use_embed_norm": True, "local_layer_ids": [0, 1],
            "dense_mlp_idx": 2, "use_sconv": True, "sconv_kernel_size": 4, "unpadded_vocab_size": 200058,
            "logits_mup_width_multiplier": 16.0, "final_logit_softcapping": None, "swa_head_dim": 128,
            "swa_num_attention_heads": 32, "swa_num_key_value_heads": 8, "sliding_window_size": 512,
            "n_routed_experts": 256, "num_experts_per_tok": 6, "n_shared_experts": 2, "shared_expert_sink": True,
            "dense_intermediate_size": 16384, "intermediate_size": 2048, "route_scale": 8.0, "use_gate_bias": True,
            "gate_activation": "sigmoid", "norm_after_topk": True, "use_global_scale": True}},
    "moonshotai/Kimi-K3": {
        "architectures": ["KimiK3ForConditionalGeneration"], "model_type": "kimi_k3", "ignore_index": -100,
        "image_placeholder": "<|kimi_image_placeholder|>", "media_placeholder_token_id": 163605, "pad_token_id": 163839,
        "tie_word_embeddings": False, "vision_config": {"model_type": "kimi_k3_vision"}, "text_config": {
            **COMMON, "model_type": "kimi_linear", "activation_situ_beta": 4.0, "activation_situ_linear_beta": 25.0,
            "attn_res_block_size": 12, "first_k_dense_replace": 1, "hidden_act": "situ", "hidden_size": 7168,
            "intermediate_size": 33792, "kv_lora_rank": 512, "latent_moe_use_norm": True, "linear_attn_config": {
                "full_attn_layers": [2], "kda_layers": [1], "gate_lower_bound": -5.0, "head_dim": 128, "num_heads": 96,
                "short_conv_kernel_size": 4, "use_full_rank_gate": True},
            "max_position_embeddings": 1048576, "mla_use_nope": True, "mla_use_output_gate": True,
            "moe_intermediate_size": 3072, "moe_layer_freq": 1, "moe_renormalize": True,
            "moe_router_activation_func": "sigmoid", "num_attention_heads": 96, "num_expert_group": 1,
            "num_experts": 896, "num_experts_per_token": 16, "num_hidden_layers": 2, "num_key_value_heads": 96,
            "num_nextn_predict_layers": 0, "num_shared_experts": 2, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64, "rms_norm_eps": 1e-5, "routed_expert_hidden_size": 3584,
            "routed_scaling_factor": 1.0, "topk_group": 1, "topk_method": "noaux_tc", "use_grouped_topk": False,
            "v_head_dim": 128, "vocab_size": 163840}},
    "zai-org/GLM-5.2": {
        **GLM5, "index_share_for_mtp_iteration": True, "index_skip_topk_offset": 3, "index_topk_freq": 4,
        "index_topk_pattern": None, "moe_router_dtype": "float32",
        "indexer_types": ["full" if i < 2 or i % 4 == 2 else "shared" for i in range(78)]},
    "tiiuae/Falcon-H1-1.5B-Instruct": {
        **COMMON, "model_type": "falcon_h1", "attention_bias": False, "attention_in_multiplier": 1.0,
        "attention_out_multiplier": 0.9375, "attn_layer_indices": None, "embedding_multiplier": 5.656854249492381,
        "head_dim": 128, "hidden_size": 2048, "intermediate_size": 4096, "key_multiplier": 0.39062499999999994,
        "lm_head_multiplier": 0.0390625, "mamba_chunk_size": 128, "mamba_conv_bias": True, "mamba_d_conv": 4,
        "mamba_d_head": 64, "mamba_d_ssm": 3072, "mamba_d_state": 256, "mamba_expand": 2, "mamba_n_groups": 1,
        "mamba_n_heads": 48, "mamba_norm_before_gate": False, "mamba_proj_bias": False, "mamba_rms_norm": False,
        "mamba_use_mlp": True, "mlp_bias": False, "mlp_expansion_factor": 8, "mlp_multipliers": [0.88, 0.5859375],
        "num_attention_heads": 8, "num_hidden_layers": 24, "num_key_value_heads": 2, "num_logits_to_keep": 1,
        "projectors_bias": False, "rope_scaling": None, "rope_theta": 1e11, "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [0.35, 0.25, 0.177, 0.5, 0.35], "ssm_out_multiplier": 0.23570226039551587,
        "time_step_floor": 0.0001, "time_step_max": 0.1, "time_step_min": 0.001, "time_step_rank": "auto"},
    "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": NEMOTRON,
    "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16": {
        **NEMOTRON, "hidden_size": 4096, "mamba_num_heads": 128, "moe_latent_size": 1024, "n_routed_experts": 512,
        "num_experts_per_tok": 22, "moe_intermediate_size": 2688, "moe_shared_expert_intermediate_size": 5376,
        "moe_shared_expert_overlap": False, "num_nextn_predict_layers": 1, "mtp_hybrid_override_pattern": "*E",
        "hybrid_override_pattern": "MEMEMEM*EMEMEMEM*EMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEMEM*EMEMEMEM"
        "*EMEMEMEME", "num_hidden_layers": 88,
    },
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": {
        **{key: value for key, value in NEMOTRON.items() if "expert" not in key and "topk" not in key},
        "n_group": None, "moe_intermediate_size": None, "routed_scaling_factor": None, "hidden_size": 4480,
        "intermediate_size": 15680, "mamba_head_dim": 80, "mamba_num_heads": 128, "num_attention_heads": 40,
        "hybrid_override_pattern": "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-", "num_hidden_layers": 56,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-5},
    "ibm-granite/granite-4.0-h-tiny": GRANITE_HYBRID,
    "ibm-granite/granite-4.0-micro": {
        **GRANITE_HYBRID, "layer_types": ["attention"] * 32, "position_embedding_type": "rope", "num_local_experts": 0,
        "num_experts_per_tok": 0, "shared_intermediate_size": 8192, "intermediate_size": 8192},
    "ibm-granite/granite-3.1-3b-a800m-instruct": {
        **GRANITE, "model_type": "granitemoe", "intermediate_size": 512, "mlp_bias": None, "num_local_experts": 40,
        "num_experts_per_tok": 8, "output_router_logits": False, "router_aux_loss_coef": 0.001},
    "mistralai/Mistral-7B-Instruct-v0.3": MISTRAL,
    "mistralai/Ministral-8B-Instruct-2410": {**MISTRAL, "head_dim": 128, "sliding_window": 32768},
    "mistralai/Mistral-Small-3.2-24B-Instruct-2506": {
        "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
        "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral"}, "vision_feature_layer": -1, "torch_dtype": "bfloat16",
        "text_config": {**MISTRAL, "head_dim": 128, "hidden_size": 5120}},
    "mistralai/Ministral-3-8B-Instruct-2512": {
        "model_type": "mistral3", "vision_config": {"model_type": "pixtral"}, "text_config": {
            **MISTRAL, "model_type": "ministral3", "head_dim": 128, "rope_parameters": {
                "type": "yarn", "rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "original_max_position_embeddings": 16384, "max_position_embeddings": 262144,
                "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}}},
    "mistralai/Mixtral-8x7B-Instruct-v0.1": {
        **MISTRAL, "model_type": "mixtral", "num_experts_per_tok": 2, "num_local_experts": 8,
        "output_router_logits": False, "router_aux_loss_coef": 0.02},
    "Qwen/Qwen1.5-MoE-A2.7B-Chat": {
        **COMMON, "model_type": "qwen2_moe", "decoder_sparse_step": 1, "max_window_layers": 21,
        "moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts": 60, "num_experts_per_tok": 4,
        "output_router_logits": False, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632,
        "sliding_window": 32768, "use_sliding_window": False},
    "meituan-longcat/LongCat-Flash-Chat": {
        **{key: value for key, value in COMMON.items() if key not in ("intermediate_size", "num_hidden_layers")},
        "attention_bias": False, "attention_method": "MLA", "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12288,
        "hidden_size": 6144, "kv_lora_rank": 512, "mla_scale_kv_lora": True, "mla_scale_q_lora": True,
        "model_type": "longcat_flash", "moe_topk": 12, "n_routed_experts": 512, "num_attention_heads": 64,
        "num_layers": 28, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "routed_scaling_factor": 6.0, "router_bias": False, "v_head_dim": 128, "zero_expert_num": 256,
        "zero_expert_type": "identity"},
    "deepseek-ai/DeepSeek-V4-Flash": {
        **{key: value for key, value in COMMON.items() if key != "intermediate_size"}, "attention_bias": False,
        "compress_ratios": [0, 0, *[4, 128] * 20, 4, 0], "compress_rope_theta": 160000, "expert_dtype": "fp4",
        "hc_eps": 1e-6, "hc_mult": 4, "hc_sinkhorn_iters": 20, "head_dim": 512, "index_head_dim": 128,
        "index_n_heads": 64, "index_topk": 512, "model_type": "deepseek_v4", "moe_intermediate_size": 2048,
        "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 6, "num_hash_layers": 3, "num_hidden_layers": 43, "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1, "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1024, "qk_rope_head_dim": 64,
        "quantization_config": {**FP8, "scale_fmt": "ue8m0"}, "rope_scaling": {**YARN, "factor": 16},
        "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128, "swiglu_limit": 10.0,
        "topk_method": "noaux_tc"},
    "deepseek-ai/DeepSeek-V4.1-Flash": {
        "architectures": ["DeepseekV41ForCausalLM"], "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
        "image_token_id": 129264, "model_type": "deepseek_v41", "dtype": "bfloat16", "tie_word_embeddings": False,
        "quantization_config": {
            **FP8, "scale_fmt": "ue8m0", "weight_block_size": [32, 32], "expert_dtype": "fp4",
            "mtp_experts_start_layer": 40},
        "vision_config": {"model_type": "deepseek_v41_vision", "num_hidden_layers": 32}, "text_config": {
            "attention_bias": False, "attention_dropout": 0.0, "candidate_block_size": 8,
            "candidate_source_layer_id": 20, "candidate_topk_blocks": 2048,
            "compress_ratios": [0] * 2 + [2] * 18 + [1] * 20 + [0] * 3, "compress_rope_theta": 160000,
            "dspark_block_size": 5, "dspark_markov_rank": 256, "dspark_n_routed_experts": 128,
            "dspark_noise_token_id": 128799, "dspark_num_experts_per_tok": 3, "dspark_target_layer_ids": [37, 38, 39],
            "engram_compressed_vocab_size": 99092, "engram_head_dim": 256, "engram_layer_ids": [1, 14],
            "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_num_embeddings": [384006168, 384016682],
            "engram_pad_token_id": 2, "engram_vocab_size": 16000000, "hc_eps": 1e-06, "hc_mult": 4,
            "hc_sinkhorn_iters": 20, "head_dim": 512, "hidden_act": "silu", "hidden_size": 5120,
            "index_head_dim": 128, "index_n_heads": 32, "index_source_layer_ids": [2, 8, 14, 20, 24, 28, 32, 36],
            "index_topk": 512, "initializer_range": 0.02, "kv_source_layer_ids": [2, 8, 14, 20],
            "max_position_embeddings": 1048576, "model_type": "deepseek_v41_text", "moe_intermediate_size": 2304,
            "n_routed_experts": 384, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 64,
            "num_experts_per_tok": 6, "num_hidden_layers": 40, "num_key_value_heads": 1, "num_nextn_predict_layers": 3,
            "o_groups": 8, "o_lora_rank": 1024, "q_lora_rank": 1280, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-20,
            "rope_scaling": {**YARN, "original_max_position_embeddings": 65536, "factor": 16}, "rope_theta": 10000,
            "routed_scaling_factor": 1.5, "scoring_func": "sqrtsoftplus", "sliding_window": 128, "swiglu_limit": 10.0,
            "topk_method": "noaux_tc", "use_cache": True, "vocab_size": 129280}},
    "microsoft/Phi-3.5-mini-instruct": {**PHI, "rope_scaling": {**SCALED, "type": "longrope"}},
    "microsoft/Phi-4-mini-instruct": {
        **PHI, "partial_rotary_factor": 1.0, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False,
        "mlp_bias": False, "rope_scaling": SCALED},
    "microsoft/phi-4": {**PHI, "sliding_window": None, "hidden_size": 5120, "num_attention_heads": 40,
                        "num_key_value_heads": 10, "rope_theta": 250000},
    "allenai/OLMo-2-1124-7B-Instruct": {
        **COMMON, "model_type": "olmo2", "attention_bias": False, "num_key_value_heads": 32, "rope_scaling": None},
    "allenai/Olmo-3-7B-Instruct": {
        **COMMON, "model_type": "olmo3", "attention_bias": False, "layer_types": INTERLEAVED, "sliding_window": 4096,
        "rope_scaling": {
            "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 8192, "beta_fast": 32.0,
            "beta_slow": 1.0, "attention_factor": 1.2079441541679836}},
    "zai-org/GLM-4-9B-0414": {
        **COMMON, "model_type": "glm4", "attention_bias": False, "head_dim": 128, "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5, "eos_token_id": [151329, 151336], "pad_token_id": 151329},
    "zai-org/glm-4-9b-chat-hf": {
        **COMMON, "model_type": "glm", "attention_bias": True, "head_dim": 128, "num_key_value_heads": 2},
    "ByteDance-Seed/Seed-OSS-36B-Instruct": {
        **COMMON, "model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False, "head_dim": 128,
        "mlp_bias": False, "residual_dropout": 0.1, "pretraining_tp": 1, "rope_scaling": {"rope_type": "default"}},
    "LGAI-EXAONE/EXAONE-4.0-32B": {**EXAONE, "layer_types": INTERLEAVED, "sliding_window": 4096},
    "LGAI-EXAONE/EXAONE-4.0-1.2B": {
        **EXAONE, "layer_types": ["full_attention"] * 32, "sliding_window": None, "sliding_window_pattern": None},
    "CohereLabs/c4ai-command-r7b-12-2024": COHERE,
    "CohereLabs/c4ai-command-r-v01": {
        **{key: COHERE[key] for key in (*COMMON, "attention_bias", "layer_norm_eps", "pad_token_id")},
        "model_type": "cohere", "logit_scale": 0.0625, "model_max_length": 131072, "use_qk_norm": False},
    "tencent/Hunyuan-7B-Instruct": {
        **COMMON, "model_type": "hunyuan_v1_dense", "attention_bias": False, "attention_head_dim": 128,
        "head_dim": 128, "use_qk_norm": True, "use_cla": False, "eod_token_id": 127967, "mlp_bias": False,
        "rope_scaling": {
            "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            "type": "dynamic"}},
    "baidu/ERNIE-4.5-0.3B-PT": {
        **COMMON, "model_type": "ernie4_5", "head_dim": 128, "use_bias": False, "tie_word_embeddings": True},
    "openbmb/MiniCPM-2B-sft-bf16": {
        **COMMON, "model_type": "minicpm", "scale_emb": 12, "dim_model_base": 256, "scale_depth": 1.4,
        "rope_scaling": None},
    "Qwen/Qwen2.5-7B-Instruct-AWQ": {
        **COMMON, "model_type": "qwen2", "max_window_layers": 28, "sliding_window": 131072,
        "use_sliding_window": False, "quantization_config": {
            "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
            "zero_point": True}},
    "HuggingFaceTB/SmolLM2-135M-Instruct": {
        **LLAMA, "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"}},
    "HuggingFaceTB/SmolLM3-3B": {
        **LLAMA, "model_type": "smollm3", "head_dim": None, "layer_types": ["full_attention"] * 32,
        "max_window_layers": 28, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 8, "rope_scaling": None,
        "sliding_window": None, "use_sliding_window": False},
    "meta-llama/Llama-3.2-1B": {
        **LLAMA, "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3"}},
    "meta-llama/Llama-2-7b-hf": {
        **LLAMA, "_name_or_path": "meta-llama/Llama-2-7b-hf", "max_length": 4096, "temperature": 0.9, "top_p": 0.6,
        "rope_scaling": None, "pad_token_id": 0, "max_sequence_length": 2048},
    "LiquidAI/LFM2-1.2B": {
        **{key: value for key, value in COMMON.items() if key not in ("intermediate_size", "rms_norm_eps")},
        "block_auto_adjust_ff_dim": True, "block_dim": 4096, "block_ff_dim": 12288, "block_ffn_dim_multiplier": 1.0,
        "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5, "block_out_init_scale": 1.0,
        "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False,
        "conv_dim": 4096, "conv_dim_out": 4096, "conv_use_xavier_init": True, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
        "model_type": "lfm2", "norm_eps": 1e-5, "num_heads": 32, "theta": 1000000.0, "use_pos_enc": True},
    "LiquidAI/LFM2-8B-A1B": {
        **{key: value for key, value in COMMON.items() if key != "rms_norm_eps"}, "conv_L_cache": 3,
        "conv_bias": False, "layer_types": (["conv", "conv", "full_attention", "conv"] * 8), "model_type": "lfm2_moe",
        "moe_intermediate_size": 1792, "norm_eps": 1e-5, "norm_topk_prob": True, "num_dense_layers": 2,
        "num_experts": 32, "num_experts_per_tok": 4, "routed_scaling_factor": 1.0, "use_expert_bias": True},
    "openai/gpt-oss-20b": {
        **COMMON, "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "initial_context_length": 4096,
        "layer_types": ["sliding_attention", "full_attention"] * 16, "model_type": "gpt_oss", "num_experts_per_tok": 4,
        "num_local_experts": 32, "output_router_logits": False, "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4"},
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "rope_type": "yarn", "truncate": False,
                         "original_max_position_embeddings": 4096},
        "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0},
    "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B": {**QWEN, "model_type": "qwen2", "use_mrope": False},
    "deepseek-ai/DeepSeek-R1-0528-Qwen3-8B": {
        **QWEN, "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "sliding_window": None,
        "rope_scaling": {"attn_factor": 0.8782488562869419, "factor": 4.0, "original_max_position_embeddings": 32768,
                         "rope_type": "yarn"}},
    "Qwen/Qwen3-30B-A3B": {
        **EXPERTS, "model_type": "qwen3_moe", "max_window_layers": 48, "sliding_window": None,
        "use_sliding_window": False},
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        **EXPERTS, **LINEAR, "model_type": "qwen3_next", "shared_expert_intermediate_size": 512},
    "Qwen/Qwen3.6-27B": {
        **SEES, "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "language_model_only": False, "text_config": QWEN35_TEXT},
    "Qwen/Qwen3.6-35B-A3B": {
        **SEES, "model_type": "qwen3_5_moe", "text_config": {
            **{key: value for key, value in QWEN35_TEXT.items() if key != "intermediate_size"},
            "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 512,
            **{key: EXPERTS[key] for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}}},
    "Qwen/Qwen3.8-Flash-Next": {
        **SEES, "architectures": ["Qwen4ExpForConditionalGeneration"], "model_type": "qwen4_exp", "text_config": {
            **{key: value for key, value in QWEN35_TEXT.items() if key != "intermediate_size"},
            "model_type": "qwen4_exp_text", "output_gate_type": "sigmoid", "num_experts": 512,
            "num_experts_per_tok": 10, "moe_intermediate_size": 640, "shared_expert_intermediate_size": 640,
            "hc_count": 4, "hc_lowrank": 320,
            "indexer_budget": 2048, "indexer_compress_ratio": 4, "indexer_head_dim": 128, "indexer_kv_heads": 1,
            "indexer_n_heads": 4, "ple_conv_kernel_size": 4, "ple_embed_dim": 2560, "ple_layer_ids": [2],
            "heads_per_ngram": 8, "make_ngram_vocab_size_divisible_by": 128, "ngram_size": 3,
            "ngram_vocab_size_base": 20000000, "split_ngram_parts": 128, "mtp": {
                "hybrid": True, "layer_types": ["full_attention"], "num_hidden_layers": 1, "rope_theta": 10000000}}},
    "zai-org/GLM-4.5-Air": {
        **COMMON, "attention_bias": True, "first_k_dense_replace": 1, "head_dim": 128, "model_type": "glm4_moe",
        "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1,
        "norm_topk_prob": True, "pad_token_id": 151329, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 0.5, "rope_scaling": None, "routed_scaling_factor": 1.0, "topk_group": 1,
        "use_qk_norm": False},
    "zai-org/GLM-4.7-Flash": {
        **{key: LATENT[key] for key in LATENT if key not in ("ep_size", "moe_layer_freq", "scoring_func")},
        "model_type": "glm4_moe_lite", "n_group": 1, "topk_group": 1, "partial_rotary_factor": 1.0,
        "rope_scaling": None},
    "deepseek-ai/DeepSeek-V3": {
        **LATENT, "model_type": "deepseek_v3", "aux_loss_alpha": 0.001, "pretraining_tp": 1, "seq_aux": True,
        "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "quantization_config": FP8},
    "XiaomiMiMo/MiMo-7B-RL": {
        **QWEN, "model_type": "mimo", "attention_bias": True, "head_dim": 128, "num_nextn_predict_layers": 1,
        "use_mrope": False, "rope_scaling": None, "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"}},
    "XiaomiMiMo/MiMo-V2-Flash": {
        **{key: COMMON[key] for key in COMMON if key != "rms_norm_eps"}, "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True, "attention_bias": False, "attention_chunk_size": 128,
        "attention_value_scale": 0.707, "auto_map": {"AutoConfig": "configuration_mimo_v2_flash.MiMoV2FlashConfig"},
        "head_dim": 192, "hybrid_block_size": None, "hybrid_layer_pattern": [0, 1, 1, 1] * 8,
        "layernorm_epsilon": 1e-5, "model_type": "mimo_v2_flash", "moe_intermediate_size": 2048,
        "moe_layer_freq": [0] + [1] * 31, "n_group": 1, "n_routed_experts": 256, "n_shared_experts": None,
        "norm_topk_prob": True, "num_experts_per_tok": 8, "num_key_value_heads": 4, "partial_rotary_factor": 0.334,
        "quantization_config": FP8, "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128,
        "sliding_window_size": 128, "swa_head_dim": 192, "swa_num_attention_heads": 32, "swa_num_key_value_heads": 8,
        "swa_rope_theta": 10000, "swa_v_head_dim": 128, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
    },
    "baidu/ERNIE-4.5-21B-A3B-PT": {
        **COMMON, "head_dim": 128, "model_type": "ernie4_5_moe", "moe_capacity": [64, 64, 64], "moe_gate": "topk",
        "moe_intermediate_size": 1536, "moe_k": 6, "moe_layer_interval": 1, "moe_layer_start_index": 1,
        "moe_num_experts": 64, "moe_num_shared_experts": 2, "moe_use_aux_free": True, "num_nextn_predict_layers": 1,
        "pad_token_id": 0, "use_bias": False, "use_rmsnorm": True},
    "google/gemma-3-1b-it": {
        **COMMON, "attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "eos_token_id": [1, 106], "final_logit_softcapping": None, "head_dim": 256, "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh", "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000,
        "rope_scaling": None, "sliding_window": 512, "sliding_window_pattern": 6},
    "google/gemma-3-4b-it": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "torch_dtype": "bfloat16", "vision_config": {"hidden_size": 1152}, "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}},
}  # fmt: skip
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "nvidia/NVIDIA-Nemotron-Labs-3-Puzzle-75B-A9B-BF16": (
        {"model_type": "nemotron_h_puzzle"}, "layers of several sizes (Puzzle)"),
    "two MTP modules": ({**NEMOTRON, "num_nextn_predict_layers": 2}, "2 MTP modules of full_attention, moe"),
    "XiaomiMiMo/MiMo-V2.5": ({"model_type": "mimo_v2"}, "projections fused in the order of several devices"),
    "inclusionAI/Ring-2.5": ({"model_type": "bailing_hybrid", "linear_silu": False}, "lightning attention (Ling 2.5)"),
    "openbmb/MiniCPM3-4B": ({"model_type": "minicpm3"}, "MiniCPM3's latent attention"),
    "microsoft/Phi-3.5-MoE-instruct": ({"model_type": "phimoe"}, "sparse-mixer routing"),
    "CohereLabs/c4ai-command-r-plus": (
        {**COHERE, "model_type": "cohere", "use_qk_norm": True, "sliding_window": None}, "use_qk_norm is true"),
    "openbmb/MiniCPM4.1-8B": ({**COMMON, "model_type": "minicpm", "sparse_config": {"topk": 64}}, "sparse_config"),
    "stabilityai/stablelm-2-12b-chat": (
        {**COMMON, "model_type": "stablelm", "qk_layernorm": True}, "norms with a weight for each head"),
    "tencent/Hunyuan-A13B-Instruct": (
        {**COMMON, "model_type": "hunyuan_v1_dense", "num_experts": 64}, "Hunyuan with experts"),
}  # fmt: skip


def result_of(config: dict[str, Any]) -> dict[str, Any]:
    return runs_here(Checkpoint(Path("model"), "safetensors", config, {}, canonical_names=False))


@pytest.mark.parametrize("name", RUN)
def test_released_configs_run(name: str) -> None:
    found = result_of(RUN[name])
    assert bool(found.pop("vision", None)) == ("vision_config" in RUN[name])
    assert found.pop("max_length") > 0
    assert found == {"runs": True, "why": "", "fix": "", "widened": None}


@pytest.mark.parametrize(
    ("name", "has_window"),
    [("google/gemma-3-1b-it", True), ("google/gemma-3-4b-it", True), ("openai/gpt-oss-20b", True),
     ("XiaomiMiMo/MiMo-V2-Flash", True), ("Qwen/Qwen3-30B-A3B", False), ("XiaomiMiMo/MiMo-7B-RL", False),
     ("deepseek-ai/DeepSeek-R1-Distill-Qwen-7B", False), ("HuggingFaceTB/SmolLM3-3B", False)],
)  # fmt: skip
def test_unused_windows_are_ignored(name: str, has_window: bool) -> None:
    config = RUN[name]
    sizes = family_named(config["model_type"]).read(config)
    assert sizes.num_layers == {**config, **config.get("text_config", {})}["num_hidden_layers"]
    assert any(getattr(getattr(each.mixer, "spec", None), "window", 0) for each in sizes.layers) is has_window


@pytest.mark.parametrize("name", REFUSED)
def test_missing_features_are_named_in_one_line(name: str) -> None:
    config, reason = REFUSED[name]
    found = result_of(config)
    assert not found["runs"] and reason in found["why"] and "\n" not in found["why"]
    assert (config["model_type"] in DESCRIBED) == ("headstart launch" in found["fix"])
