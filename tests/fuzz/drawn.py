"""Random configurations of every family, drawn over all keys of transformers' config class."""

import dataclasses
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

Config = dict[str, Any]
Draw = Callable[[Random, Config], Any]

KINDS: Mapping[str, str] = {
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3_moe", "qwen3_next": "qwen3_next",
    "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text", "glm4_moe": "glm4_moe", "deepseek_v3": "deepseek_v3",
    "mimo": "qwen2", "gemma3": "gemma3_text",
}  # fmt: skip
"""Our family -> transformers' model_type of the same trunk."""
LENGTH = 48
"""Tokens compared."""
LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"


def one_of(*values: Any) -> Draw:
    return lambda rng, known: rng.choice(values)


def mostly(value: Any, *others: Any, share: float = 0.75) -> Draw:
    return lambda rng, known: value if rng.random() < share else rng.choice(others)


def _layer_types(rng: Random, known: Config) -> list[str] | None:
    kinds = (LINEAR, FULL) if known["kind"] in HYBRID else (FULL, SLIDING if known.get("use_sliding_window") else FULL)
    kinds = (FULL, SLIDING) if known["kind"] in BY_KIND else kinds
    return rng.choice((None, [rng.choice(kinds) for _ in range(known["num_hidden_layers"])]))


def _experts_per_token(rng: Random, known: Config) -> int:
    count = known.get("n_routed_experts") or known["num_experts"]
    return rng.randint(1, count // known.get("n_group", 1) * known.get("topk_group", 1))


def _some_layers(rng: Random, known: Config) -> list[int] | None:
    return rng.choice((None, [], [i for i in range(known["num_hidden_layers"]) if rng.random() < 0.4]))


HYBRID = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
BY_KIND = ("gemma3_text",)
"""Kinds of layers have a rope each."""
SIZES: Mapping[str, Draw] = {
    "num_hidden_layers": one_of(1, 2, 3, 4),
    "num_attention_heads": one_of(1, 2, 3, 4, 6),
    "num_key_value_heads": lambda rng, known: rng.choice(
        [n for n in range(1, known["num_attention_heads"] + 1) if known["num_attention_heads"] % n == 0]
    ),
    "head_dim": one_of(4, 6, 8, 10, 16, 22, 32),
    "hidden_size": lambda rng, known: known["num_attention_heads"] * rng.choice((8, 12, 16, 20)),
    "n_routed_experts": one_of(4, 6, 8),
    "num_experts": one_of(1, 2, 3, 5, 8),
    "n_group": one_of(1, 2),
    "topk_group": lambda rng, known: rng.randint(1, known["n_group"]),
    "use_sliding_window": mostly(False, True),
}
"""Keys that others depend on, in this order."""
VALUES: Mapping[str, Draw] = {
    "vocab_size": one_of(97, 128, 131, 200),
    "intermediate_size": one_of(24, 37, 64, 80),
    "hidden_activation": mostly("gelu_pytorch_tanh", "gelu", "silu"),
    "query_pre_attn_scalar": one_of(8, 17, 256),
    "final_logit_softcapping": one_of(None, 3.0, 30.0),
    "attn_logit_softcapping": lambda rng, known: None,
    "use_bidirectional_attention": mostly(False, True, share=0.95),
    "hidden_act": mostly("silu", "gelu", "gelu_pytorch_tanh", "gelu_new", "relu", "relu2", "sigmoid", share=0.7),
    "max_position_embeddings": one_of(64, 128, 512, 2048),
    "initializer_range": one_of(0.02, 0.5),
    "rms_norm_eps": one_of(1e-6, 1e-5, 0.05),
    "use_cache": one_of(True, False),
    "pad_token_id": one_of(None, 0, 3),
    "bos_token_id": one_of(None, 1),
    "eos_token_id": one_of(None, 2, [2, 5]),
    "pretraining_tp": one_of(None, 1, 2),
    "tie_word_embeddings": one_of(True, False),
    "attention_bias": one_of(True, False),
    "attention_dropout": one_of(0.0, 0, 0.25),
    "mlp_bias": one_of(True, False),
    "sliding_window": one_of(None, 1, 7, 4096),
    "max_window_layers": lambda rng, known: rng.randint(0, known["num_hidden_layers"] + 1),
    "layer_types": _layer_types,
    "decoder_sparse_step": one_of(1, 2, 3),
    "moe_intermediate_size": one_of(16, 21, 40),
    "shared_expert_intermediate_size": one_of(16, 24, 37),
    "num_experts_per_tok": _experts_per_token,
    "norm_topk_prob": one_of(True, False),
    "output_router_logits": one_of(False, True),
    "router_aux_loss_coef": one_of(0.001, 0.1),
    "mlp_only_layers": _some_layers,
    "linear_conv_kernel_dim": one_of(2, 3, 4, 5),
    "linear_key_head_dim": one_of(4, 8, 12),
    "linear_value_head_dim": one_of(4, 8, 10),
    "linear_num_key_heads": one_of(1, 2),
    "linear_num_value_heads": one_of(2, 4, 6),
    "n_shared_experts": one_of(0, 1, 2),
    "routed_scaling_factor": one_of(1.0, 2.5, 0.7),
    "first_k_dense_replace": lambda rng, known: rng.randint(0, known["num_hidden_layers"]),
    "use_qk_norm": one_of(True, False),
    "num_mtp_layers": one_of(0, 0, 1),
    "kv_lora_rank": one_of(8, 24, 32),
    "q_lora_rank": one_of(None, 12, 20),
    "qk_rope_head_dim": one_of(4, 6, 8),
    "qk_nope_head_dim": one_of(6, 8, 12),
    "v_head_dim": one_of(6, 8, 10),
    "rope_interleave": mostly(True, False),
    # keys of every config class
    "output_hidden_states": one_of(False, True),
    "return_dict": one_of(True, False),
    "dtype": one_of(None, "float32", "bfloat16"),
    "chunk_size_feed_forward": mostly(0, 2),
    "is_encoder_decoder": mostly(False, True, share=0.98),
    "id2label": mostly(None, {0: "A", 1: "B", 2: "C"}),
    "label2id": lambda rng, known: None,
    "problem_type": mostly(None, "regression"),
    "transformers_version": lambda rng, known: None,
    "architectures": lambda rng, known: None,
}
"""Of each key that a config class has."""


def _rope(rng: Random, known: Config, head_dim: int) -> Config:
    """A random kind of rope with its optional keys."""
    longest = known["max_position_embeddings"]
    half = int(head_dim * known["partial"]) // 2
    original = rng.choice((16, 32, longest))
    scaled = {"factor": rng.choice((2.0, 4.0, 8))}
    kinds: tuple[Config, ...] = (
        {"rope_type": "linear", **scaled},
        {"rope_type": "dynamic", **scaled},
        {"rope_type": "yarn", **scaled, "original_max_position_embeddings": original, **_yarn_options(rng)},
        {"rope_type": "llama3", **scaled, "low_freq_factor": rng.choice((1.0, 2.0)),
         "high_freq_factor": rng.choice((4.0, 6.0)), "original_max_position_embeddings": original},
        {"rope_type": "longrope", "short_factor": [rng.uniform(1, 2) for _ in range(half)],
         "long_factor": [rng.uniform(1, 8) for _ in range(half)], "original_max_position_embeddings": 64,
         **rng.choice(({}, scaled, {"attention_factor": 1.2}))},
        {"rope_type": "proportional"},
    )  # fmt: skip
    weights = (3, 2, 4, 4, 2, 0.3) if half > 1 else (1, 0, 1, 1, 1, 0)
    rope = {"rope_type": "default"} if rng.random() < 0.4 else rng.choices(kinds, weights)[0]
    return rope | {"rope_theta": rng.choice((10000.0, 1e6, 500.0))}


def _yarn_options(rng: Random) -> Config:
    options: tuple[Config, ...] = (
        {"attention_factor": 1.3}, {"beta_fast": 8.0, "beta_slow": 2.0}, {"truncate": False}, {"mscale": 0.707},
        {"mscale": 0.707, "mscale_all_dim": 1.0}, {"mscale": 1.0, "mscale_all_dim": 1.0}, {"mscale_all_dim": 0.8},
    )  # fmt: skip
    found: Config = {}
    for option in rng.sample(options, rng.randrange(3)):
        found |= option
    return found


def config_class(family: str) -> Any:
    from transformers import AutoConfig

    return type(AutoConfig.for_model(KINDS[family]))


def draw(family: str, rng: Random) -> Config:
    """Random arguments for all keys of the family's config class."""
    keys = [each.name for each in dataclasses.fields(config_class(family))]
    known: Config = {"kind": KINDS[family]}
    for name in (*SIZES, *VALUES):
        if name in keys and name != "layer_types":
            known[name] = {**SIZES, **VALUES}[name](rng, known)
    known["layer_types"] = _layer_types(rng, known)
    if "head_dim" not in known and "kv_lora_rank" not in known and rng.random() < 0.5:
        known["head_dim"] = SIZES["head_dim"](rng, known)  # some files of such families have it nevertheless
    if "kv_lora_rank" in known:
        known["num_key_value_heads"] = rng.choice((None, known["num_attention_heads"]))  # no others in transformers
    if known.get("linear_num_value_heads", 0) % known.get("linear_num_key_heads", 1):
        known["linear_num_value_heads"] = known["linear_num_key_heads"] * 2
    known["partial"] = rng.choice((0.25, 0.5, 1.0)) if known["kind"] in (*HYBRID, "glm4_moe") else 1.0
    width = known.get("qk_rope_head_dim") or known.get("head_dim")
    width = width or known["hidden_size"] // known["num_attention_heads"]
    if int(width * known["partial"]) % 2 or int(width * known["partial"]) < 2:
        known["partial"] = 1.0
    known["rope_parameters"] = _rope(rng, known, width)
    if known["partial"] != 1.0 or known["kind"] in (*HYBRID, "glm4_moe"):
        known["rope_parameters"]["partial_rotary_factor"] = known["partial"]
    if known["kind"] in BY_KIND:
        _by_kind(rng, known)
    return {name: value for name, value in known.items() if name in (*keys, "head_dim")}


def _by_kind(rng: Random, known: Config) -> None:
    """A rope for each kind of layer, and a window."""
    full, local = known["rope_parameters"], {"rope_type": "default", "rope_theta": rng.choice((10000.0, 500.0))}
    full.pop("truncate", None)  # transformers 5.23 does not read it there
    known |= {"rope_parameters": {FULL: full, SLIDING: local}, "sliding_window": rng.choice((1, 7, 4096))}
