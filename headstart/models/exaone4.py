"""EXAONE 4, and the text part of EXAONE 4.5.

Norms after each part; 32B has windows in three of four layers, and rotary positions in those only. Formula:
transformers `models/exaone4`; MTP module: vLLM 0.32 `exaone4_5_mtp.py`: e first, a layer like the first.
"""

from dataclasses import replace

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import Config
from headstart.models.mtp import MTPLayout
from headstart.models.names import OWN_MODULE, WRAPPED, Names


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    windows = keys.windows_in_turn(config, 4)
    rotated = [window > 0 for window in windows] if any(windows) else []
    sizes = keys.stack(config, windows=windows, rotated=rotated, mixer={"qk_norm": True}, layers={"norms": "post"})
    return replace(sizes, mtp_layer=sizes.layers[0])


FAMILY = Family(
    parse=parse,
    defaults={"max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    harmless={
        "sliding_window_pattern": "given by layer_types",
        "use_qk_norm": "q and k are normed in every file",
        "layer_types": "of windows, where there are any",
        "mtp_share_layers": "of more than one module",
    },
    names=Names({**WRAPPED, **OWN_MODULE}),
    head=HeadSpec(),
    mtp=MTPLayout(title="EXAONE-4.5", key="exaone4_5", served=1),
    aliases=("exaone4_5", "exaone4_5_text"),
    small={
        "model_type": "exaone4", "architectures": ["Exaone4ForCausalLM"], "sliding_window": 9,
        "sliding_window_pattern": 2, "num_nextn_predict_layers": 1,
    },
)  # fmt: skip
