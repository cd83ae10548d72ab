"""EXAONE 4: norms behind each part, q and k normed; in the larger one windows in three of four layers, and positions in
those only.

Formula: transformers `models/exaone4`.
"""

from __future__ import annotations

from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config


def parse(config: Config) -> DecoderConfig:
    windows = keys.windows_in_turn(config, 4)
    rotated = [window > 0 for window in windows] if any(windows) else []
    return keys.stack(config, windows=windows, rotated=rotated, mixer={"qk_norm": True}, layer={"norms": "post"})


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    harmless={
        "sliding_window_pattern": "layer_types says it",
        "use_qk_norm": "q and k are normed in every file",
        "layer_types": "of windows, where there are any",
    },
    small={
        "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "sliding_window": 9,
        "sliding_window_pattern": 2,
    },
)  # fmt: skip
