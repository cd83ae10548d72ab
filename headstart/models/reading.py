"""Nothing of a config is ignored in silence: every key is read, known to change nothing, or refused by name."""

from collections.abc import Iterator, Mapping
from copy import copy
from typing import Any

from headstart.errors import ModelError
from headstart.models.mtp import count_keys
from headstart.params import recommended_names

_FILES = "which files and programs wrote it"
_TRAINING = "training only"
_OUTPUTS = "what a call returns beside logits"
_GENERATION = "how to generate: generation_config.json says it"
_TOKENS = "ids that the tokenizer and generation_config.json say"
_CLASSES = "names of classes, for models that classify"
_WEIGHTS = "read with the tensors (formats/quantization.py)"
_REASONS: Mapping[str, tuple[str, ...]] = {
    _FILES: (
        "architectures", "auto_map", "transformers_version", "name_or_path", "model_name", "unsloth_version",
        "unsloth_fixed", "custom_pipelines", "tokenizer_class", "processor_class", "finetuning_task",
        "task_specific_params", "torch_dtype", "dtype", "torchscript", "use_bfloat16", "tf_legacy_loss", "pruned_heads",
        "transformers.js_config", "license", "language", "tags",
    ),
    _TRAINING: (
        "initializer_range", "initializer_factor", "attention_dropout", "hidden_dropout", "embd_pdrop", "resid_pdrop",
        "attn_pdrop", "dropout", "router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_jitter_noise",
        "gradient_checkpointing", "use_grad_checkpoint", "label_smoothing", "mtp_loss_scaling_factor",
    ),
    _OUTPUTS: (
        "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "use_cache",
        "tie_last_hidden_states", "use_return_dict", "attn_implementation", "experts_implementation", "use_flash_attn",
    ),
    _GENERATION: (
        *recommended_names(), "max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample",
        "early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "typical_p", "top_h", "length_penalty",
        "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids",
        "num_return_sequences", "output_scores", "return_dict_in_generate", "forced_bos_token_id",
        "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens",
        "begin_suppress_tokens", "renormalize_logits", "encoder_repetition_penalty", "use_mtp",
        "speculative_decoding", "cache_implementation", "prompt_lookup_num_tokens", "assistant_confidence_threshold",
        "num_assistant_tokens", "num_assistant_tokens_schedule", "trust_remote_code",
    ),
    _TOKENS: (
        "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "mask_token_id", "unk_token_id",
        "decoder_start_token_id", "bos_token", "eos_token", "pad_token", "unk_token", "image_token_id",
        "video_token_id", "vision_start_token_id", "vision_end_token_id", "audio_token_id", "prefix",
        "image_start_token_id", "image_end_token_id", "video_start_token_id", "video_end_token_id",
    ),
    _CLASSES: ("id2label", "label2id", "num_labels", "problem_type", "classifier_dropout", "classifier_bias"),
    "the same numbers in slices": ("pretraining_tp", "chunk_size_feed_forward", "ep_size", "tp_size"),
    "of a picture or sound tower, whose tensors are left out": (
        "vision_config", "audio_config", "language_model_only", "visual", "vision_feature_layer",
    ),
    "read by its own part": ("model_type", "mtp_recycle", "text_config"),
    _WEIGHTS: ("quantization_config", "quantization", "compression_config", "weight_block_size"),
}  # fmt: skip
HARMLESS: Mapping[str, str] = {name: reason for reason, names in _REASONS.items() for name in names}
"""Keys that change nothing of a forward pass, of any family and at any value, and why."""
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
"""Keys of variants -> values that choose none, where a family does not read them."""
WANTED = "if the model's output does not depend on it, take it out; if it does, this model is not served"


class Reading(Mapping[str, Any]):
    """A config that knows which of its keys were read. `defaults`: what holds where a key is not there."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._parts: tuple[Mapping[str, Any], ...] = (config,)  # the first that has a key says it
        self._defaults = defaults
        self._used: set[str] = set()
        self._all = [config]

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
        """With the keys of an object inside, which hold before the others."""
        both = copy(self)
        both._parts = (inner, *self._parts)
        self._all.append(inner)
        return both

    def check(self, harmless: Mapping[str, str], where: str) -> None:
        """Raises ModelError, naming every key that nobody has read and that may change what the model says. `harmless`:
        keys that the family knows to change nothing, and why."""
        unread = ((key, value) for part in self._all for key, value in part.items() if key not in self._used)
        strange = [f"{key} is {_short(value)}" for key, value in unread if not _says_nothing(key, value, harmless)]
        if strange:
            them = "which are" if len(strange) > 1 else "which is"
            raise ModelError(f"{where}: {', '.join(strange)}, {them} not known for {self['model_type']} models", WANTED)


def _says_nothing(key: str, value: Any, harmless: Mapping[str, str]) -> bool:
    private = key.startswith("_")  # of the program that wrote it
    known = key in HARMLESS or key in harmless
    neutral = (0,) if key in count_keys() else NEUTRAL.get(key, ())
    return value is None or private or known or value in neutral


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
