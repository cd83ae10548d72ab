"""Tables from tensor names and metadata keys of GGUF files to canonical names and Hugging Face's config keys."""

import re
from collections.abc import Iterable, Mapping

from headstart.errors import ModelError
from headstart.params import recommended_names

_GATED = {"norm": "hc_norm", "down": "input_mix_weight_down", "up": "input_mix_weight_up"}  # of residual streams
_TOP: Mapping[str, str] = {
    "token_embd.weight": "embed_tokens.weight",
    "output_norm.weight": "norm.weight",
    "output_norm.bias": "norm.bias",
    "token_embd_norm.weight": "norm.weight",  # its name in files of models with short convolutions (LFM2)
    "output.weight": "lm_head.weight",
    "output.scale": "lm_head.scale",
    "rope_freqs.weight": "rope_freqs.weight",
    "per_layer_token_embd.weight": "embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "per_layer_model_projection.weight",
    "output_hc_fn.weight": "streams.fn",
    "output_hc_base.weight": "streams.base",
    "output_hc_scale.weight": "streams.scale",
    **{f"output_hc_{theirs}.weight": f"streams.{ours}.weight" for theirs, ours in _GATED.items()},
    "per_layer_proj_norm.weight": "per_layer_projection_norm.weight",
    "output_res_score.weight": "output_attn_res_proj.weight",
    "altup_proj.weight": "altup_projections.weight",  # [streams - 1, H, H]
    "altup_unembd_proj.weight": "altup_unembed_projections.weight",
}

_BLOCK: Mapping[str, str] = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sinks.weight": "self_attn.sinks",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
    **{f"ssm_conv1d_{part}": f"self_attn.{part}_conv1d" for part in "qkv"},  # Kimi delta attention
    **{f"ssm_{part}": f"self_attn.{part}_proj" for part in ("f_a", "f_b", "g_a", "g_b")},
    "ssm_g": "self_attn.gate_proj",
    "attn_res_score": "self_attention_res_proj",
    "ffn_res_score": "mlp_res_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.out_proj": "conv.out_proj",
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
    "attn_k_b": "self_attn.k_b_proj",  # [heads, latent, nope]
    "attn_v_b": "self_attn.v_b_proj",  # [heads, value, latent]
    "attn_kv": "self_attn.kv_proj",
    "attn_output_a": "self_attn.o_a_proj",
    "attn_output_b": "self_attn.o_b_proj",
    **{
        f"{theirs}_compressor_{part}": f"{ours}.compressor.{name}"
        for theirs, ours in (("attn", "self_attn"), ("indexer", "self_attn.indexer"))
        for part, name in (
            ("kv", "kv_proj"),
            ("gate", "gate_proj"),
            ("norm", "kv_norm"),
            ("ape.weight", "position_bias"),
        )
    },
    **{
        f"hc_{theirs}_{part}.weight": f"{ours}.{part}"
        for theirs, ours in (("attn", "mixer_streams"), ("ffn", "mlp_streams"))
        for part in ("fn", "base", "scale")
    },
    **{
        f"{theirs}_{part}": f"{ours}.{name}"
        for theirs, ours in (("hc_attn", "mixer_streams"), ("hc_ffn", "mlp_streams"), ("nextn.hc_head", "streams"))
        for part, name in {**_GATED, "inject": "block_inject_weight"}.items()
    },
    **{f"ple_{part}": f"memory.{part}_proj" for part in ("key", "value")},
    **{f"ple_norm_{part}": f"memory.{part}_norm" for part in ("key", "query", "conv")},
    "ple_conv1d": "memory.conv1d",
    "ffn_gate_tid2eid.weight": "mlp.gate.table",
    "indexer.attn_q_b": "self_attn.indexer.wq_b",
    "indexer.attn_k": "self_attn.indexer.wk",
    "indexer.k_norm": "self_attn.indexer.k_norm",
    "indexer.proj": "self_attn.indexer.weights_proj",
    **{f"indexer.{part}": f"self_attn.indexer.{part}" for part in ("q_proj", "k_proj", "q_norm")},
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "exp_probs_b": "mlp.gate.e_score_correction_bias",  # Hunyuan 3, without suffix
    "exp_probs_b_vl.bias": "mlp.gate.image_bias",
    "exp_probs_b.bias": "mlp.gate.e_score_correction_bias",  # other models; the canonical name has no suffix
    "ffn_routed_down": "mlp.fc1_latent_proj",
    "ffn_routed_up": "mlp.fc2_latent_proj",
    "ffn_routed_norm": "mlp.latent_norm",
    "ffn_latent_down": "mlp.fc1_latent_proj",
    "ffn_latent_up": "mlp.fc2_latent_proj",
    "ffn_gate_exps": "mlp.experts.gate_proj",  # [experts, out, in]
    "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj",
    "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
    "ffn_up_shexp": "mlp.shared_experts.up_proj",
    "ffn_down_shexp": "mlp.shared_experts.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "layer_output_scale.weight": "layer_scalar",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_correct_scale.weight": "altup.correct_output_scale",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "ffn_gate_up_exps.weight": "mlp.experts.gate_up_proj",
    "nextn.eh_proj": "eh_proj",
    "nextn.embed_tokens": "embed_tokens",
    "nextn.enorm": "enorm",
    "nextn.hnorm": "hnorm",
    "nextn.shared_head_head": "shared_head.head",
    "layer_output_norm": "shared_head.norm",  # in MTP modules of MiMo-V2
    "nextn.shared_head_norm": "shared_head.norm",
}

_EXPERTS: Mapping[str, float | None] = {
    "norm_topk_prob": False, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "n_shared_experts": 0,
    "first_k_dense_replace": 0,
}  # fmt: skip
IMPLIED: Mapping[str, Mapping[str, float | None]] = {
    "glm4moe": {
        "norm_topk_prob": False, "routed_scaling_factor": 1.0, "n_shared_experts": 0, "first_k_dense_replace": 0,
    },
    "deepseek2": {
        "norm_topk_prob": False, "expert_gating_func": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
        "n_shared_experts": 0, "first_k_dense_replace": 0,
    },
    **dict.fromkeys(("exaone-moe", "bailingmoe2", "bailingmoe3", "deepseek32", "glm-dsa"), _EXPERTS),
    "glm5-next": {**_EXPERTS, "swiglu_limits": 0},
    "hy_v4": {**_EXPERTS, "swiglu_limits": 0},
    # gguf._config derives mlp_layer_types from the tensors
    "hy_v3": {**_EXPERTS, "n_shared_experts": 1, "mlp_layer_types": None},
    "qwen3moe": {"norm_topk_prob": True},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2moe": {"norm_topk_prob": True, "routed_scaling_factor": 1.0, "first_k_dense_replace": 0},
    "gemma3": {"query_pre_attn_scalar": 0, "sliding_window": 0},
    "qwen3vl": {"mrope_interleaved": True},
    "gemma2": {"query_pre_attn_scalar": 0},
    "step35": {"norm_topk_prob": False},
    "gemma4": {"rope_parameters": None},
    "cohere2moe": {"expert_selection_fn": None, "expert_gating_func": 2, "norm_topk_prob": False},
    "falcon-h1": {"mamba_norm_before_gate": False},
    "mimo2": {"attention_value_scale": 1.0, "v_head_dim": 0},  # 0: values are as wide as keys
}  # fmt: skip
"""Architecture -> config keys and the values that llama.cpp assumes if the file does not set them."""

KEYS: Mapping[str, str] = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.key_length_swa": "head_dim_sliding",
    "attention.shared_kv_layers": "num_kv_shared_layers",
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "altup.active_idx": "altup_active_idx",
    "altup.num_inputs": "altup_num_inputs",
    "activation_sparsity_scale": "activation_sparsity_scale",
    "attention.q_lora_rank": "q_lora_rank",
    "attention.kv_lora_rank": "kv_lora_rank",
    "attention.key_length_mla": "qk_head_dim",  # width of a head's key; key_length is then that of the cached latent
    "attention.value_length_mla": "v_head_dim",
    "attention.indexer.head_count": "index_n_heads",
    "attention.indexer.key_length": "index_head_dim",
    "attention.indexer.top_k": "index_topk",
    "attention.indexer.types": "indexer_types",
    "attention.indexer.block_size": "index_block_size",
    "attention.indexer.local_blocks": "index_local_blocks",
    "attention.indexer.kpool": "index_kpool",
    "attention.indexer.kpool_select_tail": "index_kpool_always_select_tail",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_eps",
    "attention.scale": "attention_multiplier",
    "attention.value_scale": "attention_value_scale",
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.sliding_window": "sliding_window",
    "attention.sliding_window_pattern": "sliding_window_pattern",
    "attention.causal": "is_causal",
    "rope.scale_linear": "scale_linear",
    "use_parallel_residual": "parallel_attn",
    "logit_scale": "logit_scale",
    "final_logit_softcapping": "final_logit_softcapping",
    "attn_logit_softcapping": "attn_logit_softcapping",
    "rope.freq_base": "rope_theta",
    "rope.scaling.finetuned": "rope_finetuned",
    "rope.freq_base_swa": "rope_local_base_freq",
    "context_length": "max_position_embeddings",
    "nextn_predict_layers": "num_nextn_predict_layers",
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "moe_latent_size": "moe_latent_size",
    "expert_latent_length": "routed_expert_hidden_size",
    "expert_shared_count": "n_shared_experts",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
    "expert_weights_scale": "routed_scaling_factor",
    "expert_weights_norm": "norm_topk_prob",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "expert_gating_func": "expert_gating_func",
    "leading_dense_block_count": "first_k_dense_replace",
    "moe_every_n_layers": "moe_every_n_layer",
    "swiglu_clamp_exp": "swiglu_limits",
    "swiglu_clamp_shexp": "swiglu_limits_shared",
    "interleave_moe_layer_step": "interleave_moe_layer_step",
    "attention.output_group_count": "o_groups",
    "attention.output_lora_rank": "o_lora_rank",
    "attention.compress_rope_freq_base": "compress_rope_theta",
    "attention.compress_ratios": "compress_ratios",
    "hyper_connection.count": "hc_mult",
    "hyper_connection.sinkhorn_iterations": "hc_sinkhorn_iters",
    "hyper_connection.epsilon": "hc_eps",
    "hyper_connection.magnitude": "hc_magnitude",
    "hyper_connection.low_rank": "hc_lowrank",
    "ple.layers": "ple_layers",
    "ple.ngram_size": "ngram_size",
    "ple.heads_per_ngram": "heads_per_ngram",
    "ple.conv_kernel": "ple_conv_kernel_size",
    "ple.eos_token_id": "ple_eos_token_id",
    "ple.layer_multipliers": "ple_layer_multipliers",
    "ple.head_offsets": "ple_head_offsets",
    "ple.head_vocab_sizes": "ple_head_vocab_sizes",
    "hash_layer_count": "num_hash_layers",
    "shortconv.l_cache": "conv_L_cache",
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.time_step_rank": "linear_num_value_heads",
    "ssm.inner_size": "linear_inner_size",
    "full_attention_interval": "full_attention_interval",
    "kda.head_dim": "linear_head_dim",
    "kda.gate_lower_bound": "linear_lower_bound",
    "kda.safe_gate": "linear_safe_gate",
    "attn_res.block_size": "attn_res_block_size",
    "activation.situ_beta": "activation_situ_beta",
    "activation.situ_linear_beta": "activation_situ_linear_beta",
    "attention.recurrent_layers": "recurrent_layers",
}
"""Metadata keys after `{arch}.` -> config.json keys."""

FOUND: Mapping[str, str] = {
    **dict.fromkeys(
        ("attention_bias", "attention_out_bias", "mlp_bias", "use_qk_norm", "mamba_rms_norm"),
        "are there such tensors? all are taken",
    ),
    "rope_finetuned": "how the model was trained",
    "attention_k_eq_v": "are there tensors of values?",
    "expert_gating_func": "of sigmoids, where it is not the family's own",
    "num_nextn_predict_layers": "which blocks are modules; those need not be used",
}
"""Config keys that gguf.py derives and that a family need not read -> the reason."""
HARMLESS: Mapping[str, str] = {
    "vocab_size": "given by the embedding",
    "rope.dimension_sections": "read with the rope's keys",
    "n_deepstack_layers": "read with the vision tower",
    "pooling_type": "of embeddings",
    "ple.image_token_id": "of images",
    "embedding_length_out": "all residual streams",
    "tensor_data_layout": "how the file was made",
    "attention.value_length": "read with the heads",
    "attention.value_length_swa": "that of a key",
    "rope.dimension_count_swa": "all of a head",
    "rope.dimension_count": "read with the rope's keys",
}
"""Metadata keys after `{arch}.` that are ignored -> the reason."""
ROPE_KEYS: Mapping[str, str] = {
    "factor": "factor",
    "original_context_length": "original_max_position_embeddings",
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
"""Metadata keys after `{arch}.rope.scaling.` -> keys of `rope_scaling`."""


SCALING_NEUTRAL: Mapping[str, tuple[float, ...]] = {"attn_factor": (1.0,), "yarn_ext_factor": (1.0, -1.0)}
"""Metadata keys after `{arch}.rope.scaling.` -> the only values that are supported; they have no effect."""
SCALING = ("type", "yarn_log_multiplier", *ROPE_KEYS, *SCALING_NEUTRAL)
SAMPLING = {name: f"general.sampling.{name}" for name in recommended_names()} | {
    "temperature": "general.sampling.temp", "repetition_penalty": "general.sampling.penalty_repeat",
}  # fmt: skip
"""Fields of generation_config.json -> metadata keys."""


def canonical_names(names: Iterable[str]) -> dict[str, str]:
    """GGUF name -> canonical name, for all tensors of a file; names outside the tables stay. Raises ModelError if two
    tensors get the same name."""
    names = list(names)
    post_norms = {name for name in names if ".post_attention_norm" in name}
    renamed: dict[str, str] = {}
    taken: dict[str, str] = {}
    for name in names:
        new = _canonical(name, post_norms)
        if new in taken:
            raise ModelError(f"tensors {taken[new]} and {name} both mean {new}", "convert the model again")
        renamed[name], taken[new] = new, name
    return renamed


def _canonical(name: str, post_norms: set[str]) -> str:
    match = re.fullmatch(r"blk\.(\d+)\.(.+?)((?:\.weight|\.bias|\.scale)?)", name)
    if not match:
        return _TOP.get(name, name)
    layer, stem, suffix = match.groups()
    # If a layer has a norm after attention, ffn_norm is not that norm but a further one before the MLP.
    if stem == "ffn_norm" and f"blk.{layer}.post_attention_norm{suffix}" in post_norms:
        return f"layers.{layer}.pre_feedforward_layernorm{suffix}"
    if stem + suffix in _BLOCK:
        return f"layers.{layer}.{_BLOCK[stem + suffix]}"
    return f"layers.{layer}.{_BLOCK[stem]}{suffix}" if stem in _BLOCK else name


_BACK = {ours: theirs for theirs, ours in _BLOCK.items()}  # of two GGUF names for one tensor the later one
_BACK["self_attn.gate_proj"] = "attn_gate"  # models/step3p5.py gives linear_attn.in_proj_z this name


def gguf_name(name: str) -> str | None:
    """The GGUF name of a canonical name; None if the tables have none."""
    if top := next((theirs for theirs, ours in _TOP.items() if ours == name), None):
        return top
    match = re.fullmatch(r"layers\.(\d+)\.(.+?)((?:\.weight|\.bias)?)", name)
    if not match:
        return None
    layer, stem, suffix = match.groups()
    known = _BACK.get(stem + suffix) or (_BACK[stem] + suffix if stem in _BACK else None)
    return known and f"blk.{layer}.{known}"
