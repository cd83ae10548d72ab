"""Cohere's Command R, R7B, A.

Attention and MLP read one centering norm. Layers with windows have interleaved rotary positions, full layers have none.
Formula: transformers `models/cohere2`; `models/cohere` (Command R) has no windows, and may norm q and k.
"""

from headstart.errors import ModelError
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, real

EARLIER = ("cohere", "command-r")


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {"use_parallel_block": True, "use_gated_activation": True, "rotary_pct": 1.0})
    eps = real(config, "layer_norm_eps", 1e-5)
    if flag(config, "use_qk_norm"):
        raise ModelError("config.json: use_qk_norm is true: norms with a weight for each head are not supported")
    windows: list[int] = []
    if config["model_type"] not in EARLIER:
        windows = keys.windows_in_turn(config, 4)
    return keys.stack(
        config, windows=windows, rotated=[window > 0 for window in windows], mixer=keys.biases(config),
        layers={"norms": "parallel", "centered": True, "eps": eps}, logit_scale=real(config, "logit_scale", 0.0625),
        centered=True, eps=eps,
    )  # fmt: skip


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 8192, "tie_word_embeddings": True},
    harmless={
        "order_of_interleaved_layers": "given by layer_types", "layer_switch": "given by sliding_window_pattern",
        "position_embedding_type": "positions are rotated", "use_embedding_sharing": "given by tie_word_embeddings",
        "use_parallel_embedding": "of training", "sliding_window_pattern": "given by layer_types",
        "sliding_window": "of layers with windows, where there are any", "model_max_length": "of the tokenizer",
    },
    interleaved_files=True,
    aliases=EARLIER,
    small={
        "model_type": "cohere2", "architectures": ["Cohere2ForCausalLM"], "sliding_window": 9,
        "sliding_window_pattern": 2, "layer_norm_eps": 1e-5, "logit_scale": 1.25, "tie_word_embeddings": True,
    },
)  # fmt: skip
