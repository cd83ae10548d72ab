"""Spellings of one configuration: defaults left out, older names, keys of other programs, a wrapper; and unsupported
keys that change the model, which must be refused by name."""

from random import Random
from typing import Any

from tests.fuzz.drawn import FULL, SLIDING, Config, config_class

HARMLESS: tuple[Config, ...] = (
    {"torch_dtype": "bfloat16"}, {"auto_map": {"AutoConfig": "configuration_x.XConfig"}}, {"_name_or_path": "a/b"},
    {"temperature": 0.7, "top_p": 0.9, "do_sample": True}, {"transformers_version": "4.51.0"}, {"num_labels": 3},
    {"_attn_implementation_autoset": True}, {"torchscript": False}, {"output_attentions": True}, {"use_bfloat16": True},
    {"return_dict_in_generate": False}, {"pruned_heads": {}}, {"sep_token_id": None}, {"quantization_config": None},
    {"unsloth_version": "2025.1"}, {"tie_last_hidden_states": True},
)  # fmt: skip
"""What released files have beside the model's own keys."""
HOSTILE: tuple[Config, ...] = (
    {"logit_scale": 0.5}, {"final_logit_softcapping": 30.0}, {"attn_logit_softcapping": 50.0}, {"qk_layernorm": True},
    {"embedding_multiplier": 2.0}, {"residual_multiplier": 0.5}, {"attention_multiplier": 0.1}, {"no_rope_layers": [0]},
    {"per_layer_config": {"0": {"intermediate_size": 24}}}, {"layer_norm_eps": 0.1}, {"clip_qkv": 1.0},
    {"rope_parameters.spread": 2.0}, {"alibi": True}, {"attention_sink_size": 4}, {"expand_ratio": 3},
    {"is_decoder": False, "cross_attention_hidden_size": 8}, {"quantization_config": {"quant_method": "made_up"}},
)  # fmt: skip


def respelled(family: str, written: Config, rng: Random) -> tuple[Config, str]:
    """A config.json equivalent to the one written by transformers, and the key that must be refused, if any."""
    config = dict(written)
    if rng.random() < 0.6:
        defaults = config_class(family)().to_dict()
        keep = {"model_type", "rope_parameters", "layer_types", "eos_token_id", "bos_token_id"}
        for name in [name for name in config if name in defaults and config[name] == defaults[name]]:
            if name not in keep and rng.random() < 0.6:
                del config[name]
    by_kind = SLIDING in config["rope_parameters"]
    if "sliding_window" in config and not config.get("use_sliding_window") and not by_kind:
        config["sliding_window"] = rng.choice((None, 7, 4096))  # released files state unused windows
    rope: Any = config["rope_parameters"]
    if rng.random() < 0.5:
        rope = config.pop("rope_parameters")
        if by_kind:  # transformers does not accept `type` there
            config |= {**_older(dict(rope[FULL])), "rope_local_base_freq": rope[SLIDING]["rope_theta"]}
        else:
            config |= _older(dict(rope), rng)
    for extra in rng.sample(HARMLESS, rng.randrange(4)):
        config |= extra
    if rng.random() > 0.06:
        return config, ""
    hostile = rng.choice(HOSTILE)
    name = next(iter(hostile))
    if "." in name:
        config["rope_parameters"] = {**rope, name.partition(".")[2]: 2.0}
        return config, name.partition(".")[2]
    return config | hostile, name


def _older(rope: Config, rng: Random | None = None) -> Config:
    """rope_parameters in the keys of transformers 4; without `rng` in the newest of them."""
    outside = {name: rope.pop(name) for name in ("rope_theta", "partial_rotary_factor") if name in rope}
    if rope["rope_type"] == "default":
        return outside | (rng.choice(({}, {"rope_scaling": None})) if rng else {})
    if rng and rng.random() < 0.5 and rope["rope_type"] in ("linear", "dynamic", "yarn"):
        rope["type"] = rope.pop("rope_type")
    return outside | {"rope_scaling": rope}


def wrapped(family: str, config: Config) -> Config:
    """The config as the text part of a multimodal model."""
    outside = {"tie_word_embeddings", "architectures", "transformers_version"}
    inner = {name: value for name, value in config.items() if name not in outside}
    return {
        "model_type": family, "architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": inner,
        "tie_word_embeddings": config.get("tie_word_embeddings", False), "image_token_id": 90, "video_token_id": 91,
        "vision_start_token_id": 92, "vision_end_token_id": 93,
        "vision_config": {"depth": 1, "hidden_size": 8, "hidden_act": "gelu_pytorch_tanh"},
    }  # fmt: skip
