"""Reads sizes from a config.json: one name for each size, whatever key a family uses for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

NESTED = ("text_config", "llm_config", "language_config", "thinker_config", "transformer_layer_config")
"""Keys under which a config nests the config of its language model, or of its drafter's layers."""
MAX_SIZE = 2**40  # larger values of a config are ignored
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
"""Kinds of layers in `layer_types`."""
SIZE_KEYS: Mapping[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd"),
    "vocabulary": ("target_vocab_size", "vocab_size"),
    "layers": ("num_hidden_layers", "num_layers", "n_layers"),
    "inner": ("intermediate_size", "ffn_hidden_size"),
    "heads": ("num_attention_heads",),
    "kv_heads": ("num_key_value_heads", "num_attention_groups"),
    "head_dim": ("head_dim",),
    "query_rank": ("q_lora_rank",),
    "latent": ("kv_lora_rank",),
    "nope": ("qk_nope_head_dim",),
    "rotary": ("qk_rope_head_dim",),
    "value_dim": ("v_head_dim",),
    "experts": ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"),
    "expert_inner": ("moe_intermediate_size", "expert_ffn_hidden_size"),
    "shared_experts": ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts"),
    "shared_inner": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "index_heads": ("index_n_heads",),
    "index_dim": ("index_head_dim",),
    "streams": ("hc_mult", "hc_count", "hc_num_streams"),
    # of drafters
    "target_hidden": ("target_hidden_size", "backbone_hidden_size"),
    "draft_vocabulary": ("draft_vocab_size", "truncated_vocab_size"),
    "markov_rank": ("markov_rank", "dspark_markov_rank", "dspark_config.markov_rank", "dflash_config.markov_rank"),
    "taps": (
        "eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids",
        "eagle_config.eagle_aux_hidden_state_layer_ids", "dflash_config.target_layer_ids", "target_layer_ids",
        "dspark_target_layer_ids",
    ),
}  # fmt: skip
"""Name of a size -> its keys in config.json, where dots step into objects. The size of a list is its length."""


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The language model's settings, which a multimodal config nests. Nested values override outer ones."""
    text = dict(config)
    for key in NESTED:
        if isinstance(inner := config.get(key), dict):
            text |= text_config(inner) if key == "thinker_config" else inner
    return text


def lookup(config: Mapping[str, Any], key: str) -> Any:
    """The value of a key, where dots step into objects; None if it is missing."""
    value: Any = config
    for step in key.split("."):
        value = value.get(step) if isinstance(value, Mapping) else None
    return value


def first_value(config: Mapping[str, Any], keys: Iterable[str]) -> Any:
    """The value of the first of these keys that is set; None if none is. Dots are parts of keys, as in GGUF files."""
    return next((config[key] for key in keys if config.get(key) is not None), None)


def as_size(value: object) -> int | None:
    """`value` if it is an integer in [0, MAX_SIZE); the length of a list; None for anything else."""
    if isinstance(value, list):
        return len(value)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MAX_SIZE else None


def has_scaled_rope(config: Mapping[str, Any]) -> bool:
    """Whether `rope_parameters` (transformers 5) or `rope_scaling` (older files) name a kind of scaling."""
    rope = config.get("rope_scaling") or config.get("rope_parameters")
    kind = (rope.get("rope_type") or rope.get("type")) if isinstance(rope, Mapping) else None
    return kind not in (None, "default", "mrope")


class Unknown(str):
    """A size that the config does not give. It fits any number, but the same one wherever it occurs in a module.
    Arithmetic with it gives another Unknown, whose text is the formula."""

    def __mul__(self, other: object) -> Unknown:
        return Unknown(f"{other} * {self}")

    __rmul__ = __mul__

    def __add__(self, other: object) -> Unknown:
        return Unknown(f"{self} + {other}")

    __radd__ = __add__

    def __floordiv__(self, other: object) -> Unknown:
        return Unknown(f"{self} / {other}")

    def __rfloordiv__(self, other: object) -> Unknown:
        return Unknown(f"{other} / {self}")


class Sizes:
    """The sizes of one config, by the names of SIZE_KEYS. `config`: `text_config` of the given config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = text_config(config)

    def replaced(self, values: Mapping[str, Any]) -> Sizes:
        """A copy in which some config keys have other values."""
        sizes = Sizes({})
        sizes.config = {**self.config, **values}
        return sizes

    def get(self, name: str) -> int | None:
        """The size in the config, or one that follows from other sizes; None if it is unknown."""
        size = self[name]
        return size if isinstance(size, int) else None

    def __getitem__(self, name: str) -> Any:
        """The same as `get`, but with an Unknown in place of None."""
        found = (as_size(lookup(self.config, key)) for key in SIZE_KEYS[name])
        size = next((each for each in found if each is not None), None)
        return self._implied(name) if size is None else size

    def _implied(self, name: str) -> Any:
        """The default of a size that the config does not give."""
        if name in (same := {"kv_heads": "heads", "value_dim": "head_dim", "target_hidden": "hidden",
                             "draft_vocabulary": "vocabulary"}):  # fmt: skip
            return self[same[name]]
        if name == "head_dim" and self["heads"] != 0:
            return self["hidden"] // self["heads"]
        if name == "shared_inner":
            return self["expert_inner"] * self["shared_experts"]
        return 3 if name == "taps" else Unknown(name)
