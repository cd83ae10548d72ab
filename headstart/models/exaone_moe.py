"""EXAONE with experts (K-EXAONE).

Formula: transformers `models/exaone_moe`; MTP module: vLLM 0.32 `exaone_moe_mtp.py`: e first, a layer with an MLP and
the attention of `mtp_layer_types`, by default of the first layer.
"""

from headstart.heads.base import HeadSpec
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import FULL, SLIDING, Config
from headstart.models.mtp import MTPLayout
from headstart.models.names import OWN_MODULE, PREFIXES, Names


def parse(config: Config) -> DecoderConfig:
    config = keys.renamed(config, {"n_shared_experts": "num_shared_experts"})
    windows = keys.windows_in_turn(config, 4)
    module_kinds = config.get("mtp_layer_types") or [SLIDING if windows[0] else FULL]
    keys.check_kinds(module_kinds, len(module_kinds), (FULL, SLIDING))
    # If some layers have a window, only those have RoPE.
    mixers = {
        window: keys.attention(config, window=window, qk_norm=True, rotated=window > 0 or not any(windows))
        for window in {0, *windows}
    }
    dense, experts = keys.mlp(config), keys.sigmoid_experts(config)
    feeds = keys.feed_kinds(config, "first_k_dense_replace", "first_last_k_dense_replace", default=1)
    layers = keys.mixed_layers(config, [mixers[window] for window in windows], dense, experts, feeds=feeds)
    module_mixer = mixers[max(windows) if module_kinds[0] == SLIDING else 0]
    return keys.decoder(config, layers, mtp_layer=keys.layer(config, module_mixer, dense))


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 2048, "num_key_value_heads": 32, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 8, "routed_scaling_factor": 2.5, "moe_intermediate_size": 1024, "n_shared_experts": 1,
    },
    harmless={
        **dict.fromkeys(("first_k_dense_replace", "first_last_k_dense_replace"), "given by mlp_layer_types"),
        "is_moe_layer": "given by mlp_layer_types",
        "sliding_window_pattern": "given by layer_types",
        "layer_types": "of windows, where there are any",
        "shared_expert_intermediate_size": "the width of one times their number",
        "mtp_share_layers": "of more than one module",
        "num_shared_experts": "read under another name",
    },
    names=Names(
        {**PREFIXES, **OWN_MODULE}, parts={".mlp.e_score_correction_bias": ".mlp.gate.e_score_correction_bias"}
    ),
    head=HeadSpec(),
    mtp=MTPLayout(
        title="EXAONE-MoE", served=1, not_llama_cpp="the module is converted, but not run",
    ),
    aliases=("exaone-moe",),
    small={
        "model_type": "exaone_moe", "architectures": ["ExaoneMoeForCausalLM"], "sliding_window": 9,
        "sliding_window_pattern": 2, "moe_intermediate_size": 24, "num_experts": 7, "num_experts_per_tok": 3,
        "num_shared_experts": 1, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
    },
)  # fmt: skip
