"""Mellum 2: windows and experts.

Formula: transformers 5.23 `models/mellum`, its MTP module in `modeling_layers.py`: e first, a layer of
`mtp_layer_types` and `mtp_mlp_layer_types`.
"""

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import DENSE, FULL, SLIDING, SPARSE, Config, number
from headstart.models.mtp import MTPLayout
from headstart.models.names import OWN_MODULE, PREFIXES, Names


def parse(config: Config) -> DecoderConfig:
    ropes = keys.by_kind(config)
    window = number(config, "sliding_window", default=0, least=0)
    mixers = {
        kind: keys.attention(ropes[kind], window=window if kind == SLIDING else 0, **keys.biases(config), qk_norm=True)
        for kind in (FULL, SLIDING)
    }
    num_modules = max(keys.num_mtp(config), 1)
    module_kinds = config.get("mtp_layer_types") or [SLIDING]
    module_feeds = config.get("mtp_mlp_layer_types") or [SPARSE]
    keys.check_kinds(module_kinds, num_modules, (FULL, SLIDING))
    keys.check_kinds(module_feeds, num_modules, (DENSE, SPARSE))
    kinds, feeds = [*keys.kinds_in_turn(config, 1), module_kinds[0]], [*keys.feed_kinds(config), module_feeds[0]]
    experts = keys.softmax_experts(config)
    dense = keys.mlp(config) if DENSE in feeds else experts
    layers = keys.mixed_layers(config, [mixers[kind] for kind in kinds], dense, experts, feeds=feeds)
    return keys.decoder(ropes[FULL], layers[:-1], mtp_layer=layers[-1])


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 131072, "head_dim": 128, "num_key_value_heads": 4, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "sliding_window": 1024, "rope_theta": 5e5, "rope_local_base_freq": 1e4,
    },
    harmless={
        "intermediate_size": "used only by dense layers",
        "use_sliding_window": "given by layer_types",
        **dict.fromkeys(("mtp_layer_types", "mtp_mlp_layer_types"), "of a module, where there is one"),
    },
    names=Names({**PREFIXES, **OWN_MODULE}),
    head=HeadSpec(),
    mtp=MTPLayout(title="Mellum", count_key="num_mtp_layers", served=1),
    small={
        "model_type": "mellum", "architectures": ["MellumForCausalLM"], "head_dim": 16, "sliding_window": 9,
        "moe_intermediate_size": 24, "num_experts": 7, "num_experts_per_tok": 3, "rope_theta": None,
        "num_nextn_predict_layers": 1, "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e4}, SLIDING: {"rope_type": "default", "rope_theta": 300.0},
        },
    },
)  # fmt: skip
