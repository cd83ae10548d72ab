"""OLMo 2 and OLMo 3 (dense).

Norms after each part, q and k normed over all heads. OLMo 3 has windows in three of four layers, whose rope is never
scaled. Formula: transformers `models/olmo2`, `models/olmo3`.
"""

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config

WINDOWED = "olmo3"


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    windows = [0] * keys.num_layers(config)
    if config["model_type"] == WINDOWED or config.get("sliding_window_pattern") is not None:
        windows = keys.windows_in_turn(config, 4)
    declared = config.get("rope_parameters")
    both = declared if isinstance(declared, dict) else {}  # transformers 5 says one for each kind
    ropes = {kind: both.get(kind) for kind in (keys.FULL, keys.SLIDING)}
    full = config.inside({"rope_parameters": ropes[keys.FULL]}) if any(ropes.values()) else config
    return keys.stack(
        full, windows=windows, windowed=config.inside({"rope_parameters": ropes[keys.SLIDING], "rope_scaling": None}),
        mixer={**keys.biases(config), "qk_norm": True, "qk_norm_over_heads": True}, layers={"norms": "post"},
    )  # fmt: skip


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 2048, "rms_norm_eps": 1e-5},
    harmless={
        "sliding_window": "of layers with windows, where there are any",
        "use_qk_norm": "q and k are normed in every file",
    },
    aliases=(WINDOWED,),
    small={"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "head_dim": None},
)
