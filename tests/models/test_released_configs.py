"""Keys of released config.json files, of each family: every one is known."""

from __future__ import annotations

from typing import Any

import pytest
from support import family_of

from headstart.models.families import family_named

COMMON: dict[str, Any] = {
    "architectures": ["XForCausalLM"], "attention_dropout": 0.0, "bos_token_id": 151643, "eos_token_id": 151645,
    "hidden_act": "silu", "initializer_range": 0.02, "torch_dtype": "bfloat16", "transformers_version": "4.51.0",
    "use_cache": True, "tie_word_embeddings": False, "rms_norm_eps": 1e-6, "vocab_size": 151936,
    "max_position_embeddings": 32768,
}  # fmt: skip
QWEN: dict[str, Any] = {
    **COMMON, "hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28, "num_key_value_heads": 4,
    "num_hidden_layers": 28, "max_window_layers": 28, "sliding_window": 131072, "use_sliding_window": False,
    "rope_theta": 1000000.0,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    **COMMON, "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "hidden_size": 2048, "head_dim": 64,
    "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 16,
    "rope_theta": 500000.0,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **COMMON, "attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "hidden_size": 2048,
    "intermediate_size": 6144, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "rope_scaling": None, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.001,
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "full_attention_interval": 4, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
    "linear_num_value_heads": 32, "linear_value_head_dim": 128, "head_dim": 256, "partial_rotary_factor": 0.25,
}  # fmt: skip
QWEN35_TEXT: dict[str, Any] = {
    **COMMON, **LINEAR, "attention_bias": False, "attn_output_gate": True, "dtype": "bfloat16", "hidden_size": 5120,
    "intermediate_size": 17408, "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "mamba_ssm_dtype": "float32", "mlp_only_layers": [], "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False, "num_attention_heads": 24, "num_hidden_layers": 64,
    "num_key_value_heads": 4, "output_gate_type": "swish", "pad_token_id": None,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "partial_rotary_factor": 0.25, "rope_theta": 10000000,
        "rope_type": "default",
    },
}  # fmt: skip
GEMMA3_TEXT: dict[str, Any] = {
    "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
}  # fmt: skip
RELEASED: dict[str, dict[str, Any]] = {
    "SmolLM2": {
        **LLAMA, "model_type": "llama", "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None,
        "transformers.js_config": {"dtype": "q4"},
    },
    "SmolLM3-3B": {
        **LLAMA, "model_type": "smollm3", "head_dim": None, "layer_types": ["full_attention"] * 16,
        "max_window_layers": 28, "no_rope_layer_interval": 4, "no_rope_layers": [1, 1, 1, 0] * 4, "rope_scaling": None,
        "sliding_window": None, "use_sliding_window": False,
    },
    "LFM2-1.2B": {
        **COMMON, "block_auto_adjust_ff_dim": True, "block_dim": 2048, "block_ff_dim": 12288,
        "block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 256, "block_norm_eps": 1e-5,
        "block_out_init_scale": 1.0, "block_use_swiglu": True, "block_use_xavier_init": True, "conv_L_cache": 3,
        "conv_bias": False, "conv_dim": 2048, "conv_dim_out": 2048, "conv_use_xavier_init": True,
        "full_attn_idxs": [2, 5, 8, 10, 12, 14], "hidden_size": 2048, "model_type": "lfm2", "norm_eps": 1e-5,
        "num_attention_heads": 32, "num_heads": 32, "num_hidden_layers": 16, "num_key_value_heads": 8,
        "rope_theta": 1000000.0, "theta": 1000000.0, "use_pos_enc": True, "vocab_size": 65536,
    },
    "LFM2-8B-A1B": {
        **COMMON, "conv_L_cache": 3, "conv_bias": False, "hidden_size": 2048, "intermediate_size": 7168,
        "layer_types": (["conv", "conv", "full_attention", "conv"] * 6), "model_type": "lfm2_moe",
        "moe_intermediate_size": 1792, "norm_eps": 1e-5, "norm_topk_prob": True, "num_attention_heads": 32,
        "num_dense_layers": 2, "num_experts": 32, "num_experts_per_tok": 4, "num_hidden_layers": 24,
        "num_key_value_heads": 8, "rope_theta": 1000000.0, "routed_scaling_factor": 1.0, "use_expert_bias": True,
    },
    "GLM-4.7-Flash": {
        **COMMON, "attention_bias": False, "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 10240,
        "kv_lora_rank": 512, "model_type": "glm4_moe_lite", "moe_intermediate_size": 1536, "n_group": 1,
        "n_routed_experts": 64, "n_shared_experts": 1, "norm_topk_prob": True, "num_attention_heads": 20,
        "num_experts_per_tok": 4, "num_hidden_layers": 47, "num_key_value_heads": 20, "num_nextn_predict_layers": 1,
        "partial_rotary_factor": 1.0, "q_lora_rank": 768, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64,
        "rope_scaling": None, "rope_theta": 1000000, "routed_scaling_factor": 1.8, "topk_group": 1,
        "topk_method": "noaux_tc", "v_head_dim": 256,
    },
    "gpt-oss-20b": {
        **COMMON, "attention_bias": True, "experts_per_token": 4, "head_dim": 64, "hidden_size": 2880,
        "initial_context_length": 4096, "intermediate_size": 2880,
        "layer_types": ["sliding_attention", "full_attention"] * 12, "model_type": "gpt_oss", "num_attention_heads": 64,
        "num_experts_per_tok": 4, "num_hidden_layers": 24, "num_key_value_heads": 8, "num_local_experts": 32,
        "output_router_logits": False, "quantization_config": {
            "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"], "quant_method": "mxfp4",
        },
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 32.0, "original_max_position_embeddings": 4096,
            "rope_type": "yarn", "truncate": False,
        },
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
        "vocab_size": 201088,
    },
    "Llama 3.2": {
        **LLAMA, "model_type": "llama", "rope_scaling": {
            "factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
    },
    "Llama 2": {
        **LLAMA, "model_type": "llama", "_name_or_path": "meta-llama/Llama-2-7b-hf", "max_length": 4096,
        "temperature": 0.9, "top_p": 0.6, "rope_scaling": None, "pad_token_id": 0, "max_sequence_length": 2048,
    },
    "Qwen2.5": {**QWEN, "model_type": "qwen2", "use_mrope": False},
    "R1-Distill-Qwen": {**QWEN, "model_type": "qwen2", "use_mrope": False, "sliding_window": 4096},
    "Qwen3": {
        **QWEN, "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "num_attention_heads": 32,
        "num_key_value_heads": 8, "rope_scaling": None, "sliding_window": None,
    },
    "R1-0528-Qwen3-8B": {
        **QWEN, "model_type": "qwen3", "attention_bias": False, "head_dim": 128, "num_attention_heads": 32,
        "num_key_value_heads": 8, "sliding_window": None, "rope_scaling": {
            "attn_factor": 0.8782488562869419, "factor": 4.0, "original_max_position_embeddings": 32768,
            "rope_type": "yarn",
        },
    },
    "Qwen3-30B-A3B": {
        **EXPERTS, "model_type": "qwen3_moe", "max_window_layers": 48, "sliding_window": None,
        "use_sliding_window": False,
    },
    "Qwen3-Next": {
        **EXPERTS, **LINEAR, "model_type": "qwen3_next", "num_experts": 512, "num_experts_per_tok": 10,
        "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    },
    "Qwen3.6-27B": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5", "image_token_id": 248056,
        "language_model_only": False, "text_config": QWEN35_TEXT, "tie_word_embeddings": False,
        "transformers_version": "4.57.1", "video_token_id": 248057, "vision_end_token_id": 248054,
        "vision_start_token_id": 248053, "vision_config": {"depth": 27, "hidden_size": 1152},
    },
    "GLM-4.5-Air": {
        **COMMON, "attention_bias": True, "eos_token_id": [151329, 151336], "first_k_dense_replace": 1, "head_dim": 128,
        "hidden_size": 4096, "intermediate_size": 10944, "model_type": "glm4_moe", "moe_intermediate_size": 1408,
        "n_group": 1, "n_routed_experts": 128, "n_shared_experts": 1, "norm_topk_prob": True, "pad_token_id": 151329,
        "num_attention_heads": 96, "num_experts_per_tok": 8, "num_hidden_layers": 46, "num_key_value_heads": 8,
        "num_nextn_predict_layers": 1, "partial_rotary_factor": 0.5, "rope_scaling": None, "rope_theta": 1000000,
        "routed_scaling_factor": 1.0, "topk_group": 1, "use_qk_norm": False,
    },
    "DeepSeek-V3": {
        **COMMON, "attention_bias": False, "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
        "aux_loss_alpha": 0.001, "ep_size": 1, "first_k_dense_replace": 3, "hidden_size": 7168,
        "intermediate_size": 18432, "kv_lora_rank": 512, "model_type": "deepseek_v3", "moe_intermediate_size": 2048,
        "moe_layer_freq": 1, "n_group": 8, "n_routed_experts": 256, "n_shared_experts": 1, "norm_topk_prob": True,
        "num_attention_heads": 128, "num_experts_per_tok": 8, "num_hidden_layers": 61, "num_key_value_heads": 128,
        "num_nextn_predict_layers": 1, "pretraining_tp": 1, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "quantization_config": {
            "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128],
        },
        "rope_scaling": {
            "beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 4096, "type": "yarn",
        },
        "rope_theta": 10000, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "seq_aux": True,
        "topk_group": 4, "topk_method": "noaux_tc", "v_head_dim": 128,
    },
    "MiMo-7B": {
        **QWEN, "model_type": "mimo", "attention_bias": True, "head_dim": 128, "num_attention_heads": 32,
        "num_key_value_heads": 8, "num_nextn_predict_layers": 1, "use_mrope": False, "rope_scaling": None,
        "auto_map": {"AutoConfig": "configuration_mimo.MiMoConfig"},
    },
    "ERNIE-4.5-21B-A3B": {
        **COMMON, "head_dim": 128, "hidden_size": 2560, "intermediate_size": 12288, "model_type": "ernie4_5_moe",
        "moe_capacity": [64, 64, 64], "moe_gate": "topk", "moe_intermediate_size": 1536, "moe_k": 6,
        "moe_layer_interval": 1, "moe_layer_start_index": 1, "moe_num_experts": 64, "moe_num_shared_experts": 2,
        "moe_use_aux_free": True, "num_attention_heads": 20, "num_hidden_layers": 28, "num_key_value_heads": 4,
        "num_nextn_predict_layers": 1, "pad_token_id": 0, "rope_theta": 500000, "tie_word_embeddings": True,
        "use_bias": False, "use_rmsnorm": True,
    },
    "MiMo-V2-Flash": {
        **{key: COMMON[key] for key in COMMON if key != "rms_norm_eps"}, "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True, "attention_bias": False, "attention_chunk_size": 128,
        "attention_value_scale": 0.707, "auto_map": {"AutoConfig": "configuration_mimo_v2_flash.MiMoV2FlashConfig"},
        "head_dim": 192, "hidden_size": 4096, "hybrid_block_size": None, "intermediate_size": 16384,
        "hybrid_layer_pattern": ([0, 1, 1, 1, 1, 0, *[1, 1, 1, 1, 1, 0] * 7]), "layernorm_epsilon": 1e-5,
        "model_type": "mimo_v2_flash", "moe_intermediate_size": 2048, "moe_layer_freq": [0] + [1] * 47, "n_group": 1,
        "n_routed_experts": 256, "n_shared_experts": None, "norm_topk_prob": True, "num_attention_heads": 64,
        "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4, "partial_rotary_factor": 0.334,
        "quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                "weight_block_size": [128, 128]},
        "rope_theta": 5000000, "routed_scaling_factor": None, "scoring_func": "sigmoid", "sliding_window": 128,
        "sliding_window_size": 128, "swa_head_dim": 192, "swa_num_attention_heads": 64, "swa_num_key_value_heads": 8,
        "swa_rope_theta": 10000, "swa_v_head_dim": 128, "topk_group": 1, "topk_method": "noaux_tc", "v_head_dim": 128,
    },
    "Gemma 3 1B": {
        "architectures": ["Gemma3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "attn_logit_softcapping": None, "bos_token_id": 2, "cache_implementation": "hybrid", "eos_token_id": [1, 106],
        "final_logit_softcapping": None, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": 1152, "initializer_range": 0.02, "intermediate_size": 6912, "max_position_embeddings": 32768,
        "model_type": "gemma3_text", "num_attention_heads": 4, "num_hidden_layers": 26, "num_key_value_heads": 1,
        "pad_token_id": 0, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-06, "rope_local_base_freq": 10000,
        "rope_scaling": None, "rope_theta": 1000000, "sliding_window": 512, "sliding_window_pattern": 6,
        "torch_dtype": "bfloat16", "transformers_version": "4.50.0.dev0", "use_cache": True, "vocab_size": 262144,
    },
    "Gemma 3 4B": {
        "architectures": ["Gemma3ForConditionalGeneration"], "boi_token_index": 255999, "eoi_token_index": 256000,
        "eos_token_id": [1, 106], "image_token_index": 262144, "initializer_range": 0.02, "mm_tokens_per_image": 256,
        "model_type": "gemma3", "text_config": GEMMA3_TEXT, "torch_dtype": "bfloat16",
        "transformers_version": "4.50.0.dev0", "vision_config": {"hidden_size": 1152},
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RELEASED)
def test_every_key_is_known(name: str) -> None:
    config = RELEASED[name]
    sizes = family_named(config["model_type"]).read(config)
    assert sizes.num_layers == {**config, **config.get("text_config", {})}["num_hidden_layers"]
    windows = [getattr(getattr(each.mixer, "spec", None), "window", 0) for each in sizes.layers]
    assert any(windows) == name.startswith(("Gemma", "gpt-oss", "MiMo-V2"))


def test_nested_experts() -> None:
    experts = {key: EXPERTS[key] for key in ("num_experts", "num_experts_per_tok", "moe_intermediate_size")}
    inner = {**QWEN35_TEXT, **experts, "model_type": "qwen3_5_moe_text", "shared_expert_intermediate_size": 512}
    del inner["intermediate_size"]
    wrapper = {**RELEASED["Qwen3.6-27B"], "model_type": "qwen3_5_moe", "text_config": inner}
    assert family_of("qwen3_5_moe").read(wrapper).num_mtp == 1
