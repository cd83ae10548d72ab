"""Finds unknown config keys: a key that is neither read nor known to change nothing raises ModelError with its name."""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

from headstart.errors import ModelError, quoted
from headstart.models.mtp import count_keys
from headstart.params import recommended_names

_REASONS: Mapping[str, tuple[str, ...]] = {
    "names of the files and programs that wrote the config": (
        "architectures", "auto_map", "transformers_version", "name_or_path", "model_name", "unsloth_version",
        "unsloth_fixed", "custom_pipelines", "tokenizer_class", "processor_class", "finetuning_task",
        "task_specific_params", "torch_dtype", "dtype", "torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads",
        "transformers.js_config", "license", "language", "tags",
    ),
    "the mask of a model that drafts in one pass (heads/draft_model.py)": ("pard_token", "ptd_token_id"),
    "training only": (
        "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop",
        "attn_pdrop", "dropout", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise",
        "gradient_checkpointing", "use_grad_checkpoint", "label_smoothing", "mtp_loss_scaling_factor",
    ),
    "additional results of transformers' forward call": (
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
        "tie_last_hidden_states", "use_return_dict", "attn_implementation", "experts_implementation", "use_flash_attn",
    ),
    "generation settings, which are read from generation_config.json": (
        *recommended_names(), "max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample",
        "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "typical_p", "top_h", "length_penalty",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
        "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens", "renormalize_logits", "encoder_repetition_penalty", "use_mtp",
        "speculative_decoding", "cache_implementation", "prompt_lookup_num_tokens", "assistant_confidence_threshold",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "trust_remote_code",
    ),
    "token ids, which are read from the tokenizer and generation_config.json": (
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id",
        "decoder_start_token_id", "bos_token", "eos_token", "pad_token", "unk_token", "image_token_id",
        "video_token_id", "vision_start_token_id", "vision_end_token_id", "audio_token_id", "prefix",
        "image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id",
    ),
    "names of classes, for models that classify": (
        "id2label", "label2id", "num_labels", "problem_type", "classifier_dropout", "classifier_bias",
    ),
    "the same computation in slices": ("pretraining_tp", "chunk_size_feed_forward", "ep_size", "tp_size"),
    "a vision or audio part, whose tensors are not loaded": (
        "vision_config", "audio_config", "language_model_only", "visual", "vision_feature_layer",
    ),
    "read elsewhere in headstart": ("model_type", "mtp_recycle", "text_config"),
    "read with the tensors (formats/quantization.py)": (
        "quantization_config", "quantization", "compression_config", "weight_block_size",
    ),
}  # fmt: skip
HARMLESS: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}
"""Config key -> why it changes no forward pass, in any family and at any value."""
NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        ("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder", "use_sliding_window",
         "attention_bias", "attention_out_bias", "mlp_bias", "use_qk_norm", "attention_k_eq_v", "mamba_rms_norm",
         "alibi", "parallel_attn", "attn_output_gate", "use_mla"),
        (False,),
    ),
    **dict.fromkeys(("logit_scale", "embedding_multiplier", "residual_multiplier", "logits_scaling"), (1,)),
    **dict.fromkeys(("num_experts", "num_experts_per_tok", "moe_intermediate_size", "n_shared_experts",
                     "shared_expert_intermediate_size", "first_k_dense_replace", "sliding_window"), (0,)),
    **dict.fromkeys(("n_group", "topk_group", "routed_scaling_factor", "scale_linear"), (0, 1)),
    "is_causal": (True,), "per_layer_config": ({},), "scale_emb": (1,), "sliding_window_pattern": (0, 1),
    "recurrent_layers": (0, []), "mlp_only_layers": ([],), "decoder_sparse_step": (1,), "full_attention_interval": (1,),
}  # fmt: skip
"""Keys that select a variant -> values that select none and are harmless if the family does not read the key."""
WANTED = "if the model's output does not depend on it, remove it; if it does, headstart cannot run this model"


class Reading(Mapping[str, Any]):
    """A config that records which of its keys were read. defaults: values of missing keys."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._parts: tuple[Mapping[str, Any], ...] = (config,)  # in order of precedence
        self._defaults = defaults
        self._used: set[str] = set()  # keys read so far, shared with copies from `inside`
        self._all = [config]  # all parts, shared with copies from `inside`

    def __getitem__(self, key: str) -> Any:
        self._used.add(key)
        for part in (*self._parts, self._defaults):
            if key in part:
                return part[key]
        raise KeyError(key)

    def __iter__(self) -> Iterator[str]:
        return iter({key: None for part in (*self._parts, self._defaults) for key in part})

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def inside(self, inner: Mapping[str, Any]) -> "Reading":
        """A copy in which the keys of `inner`, an object inside the config, take precedence."""
        both = copy(self)
        both._parts = (inner, *self._parts)
        self._all.append(inner)
        return both

    def check(self, harmless: Mapping[str, str], where: str) -> None:
        """Raises ModelError naming all keys that were not read and may change the model's output. harmless: further
        keys that change nothing -> the reason. where: file name for the error."""
        unread = ((key, value) for part in self._all for key, value in part.items() if key not in self._used)
        strange = [f"{key} is {quoted(value)}" for key, value in unread if not _is_harmless(key, value, harmless)]
        if strange:
            them = "which are" if len(strange) > 1 else "which is"
            raise ModelError(f"{where}: {', '.join(strange)}, {them} not known for {self['model_type']} models", WANTED)


def _is_harmless(key: str, value: Any, harmless: Mapping[str, str]) -> bool:
    private = key.startswith("_")  # bookkeeping of the program that wrote the file
    known = key in HARMLESS or key in harmless
    neutral = (0,) if key in count_keys() else NEUTRAL.get(key, ())
    return value is None or private or known or value in neutral
