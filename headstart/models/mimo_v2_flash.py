"""MiMo-V2-Flash: windows with sinks, experts, three MTP modules.

Formula: transformers 5.23 `models/mimo_v2_flash`. `sliding_window_size` counts the positions before a row (as in
SGLang), llama.cpp's files count the row too. MTP modules: vLLM 0.32 `mimo_v2_mtp.py`, llama.cpp b11434 `mimo2.cpp`: e
first, a dense block with a window, `final_layernorm`. They read the stream before the trunk's final norm (as SGLang and
llama.cpp; vLLM: after it) and recycle the block's output. Draft step i runs module i; steps after the third run the
third.
"""

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.keys import FULL, SLIDING, SPARSE, Config, flag, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import PREFIXES, Names, module_names
from headstart.models.reading import Reading
from headstart.models.small import SCRATCH_EXPERTS

LLAMA_CPP = "mimo2"
BASES = {FULL: "rope_theta", SLIDING: "swa_rope_theta"}
SINKS = {"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False}
HEADS = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, {**SINKS, "attention_projection_layout": "split"})
    kinds, feeds = _kinds(config), keys.feed_kinds(keys.with_feed_kinds(config), default=1)
    gguf = config.get("model_type") == LLAMA_CPP
    ropes = keys.by_kind(config, keys.ROPES if gguf else BASES)
    firsts = {kind: kinds.index(kind) if kind in kinds else len(kinds) for kind in {*kinds, SLIDING}}
    mixers = {kind: _attention(ropes[kind], kind, index) for kind, index in firsts.items()}
    more = {"eps": real(config, "layernorm_epsilon", real(config, "rms_norm_eps", 1e-5))}
    dense = keys.mlp(config)
    experts = keys.sigmoid_experts(keys.inside(config, {"moe_layer_freq": 1})) if SPARSE in feeds else dense
    layers = keys.mixed_layers(config, [mixers[kind] for kind in kinds], dense, experts, feeds=feeds, **more)
    module, recycle = keys.layer(config, mixers[SLIDING], dense, **more), keys.mtp_recycle(config, "pre_norm")
    return keys.decoder(ropes[FULL], layers, mtp_layer=module, mtp_recycle=recycle, **more)


def _kinds(config: Config) -> list[str]:
    """SLIDING or FULL for each layer: by name, or by flags (1: sliding); else the first and each sixth are full."""
    kinds, count = config.get("layer_types"), keys.num_layers(config)
    flags = config.get("hybrid_layer_pattern")
    flags = config.get("sliding_window_pattern") if flags is None else flags
    if kinds is None and flags is not None:
        flags = flags if isinstance(flags, list) else [flags] * count
        sliding = keys.layer_flags(config, "hybrid_layer_pattern", flags)  # in a GGUF file flags of modules follow
        kinds = [SLIDING if each else FULL for each in sliding]
    if kinds is None:
        kinds = [SLIDING if i and (i + 1) % 6 else FULL for i in range(count)]
    keys.check_kinds(kinds, count, (FULL, SLIDING))
    return list(kinds)


def _attention(config: Reading, kind: str, index: int) -> AttentionConfig:
    """Attention of a kind of layers. index: the first such layer; for an MTP module a number after the last layer."""
    window = 0
    by_layer = config.get("num_key_value_heads")
    if isinstance(by_layer, list):  # a GGUF file's, with modules
        if index >= len(by_layer):
            raise ModelError(f"the file has kv heads of {len(by_layer)} layers, not of layer {index}")
        config = config.inside({"num_key_value_heads": by_layer[index]})
    elif kind == SLIDING and config.get("model_type") != LLAMA_CPP:
        twice = {"num_key_value_heads": 2 * number(config, "num_key_value_heads")}
        config = config.inside(twice | {key: config[f"swa_{key}"] for key in HEADS if config.get(f"swa_{key}")})
    if kind == SLIDING:
        before = number(config, "sliding_window_size", default=0, least=0)
        window = before + 1 if before else number(config, "sliding_window")
    return keys.attention(
        config, window=window, value_dim=number(config, "v_head_dim", default=0, least=0),
        qkv_bias=flag(config, "attention_bias"), sinks=kind == SLIDING,
        value_scale=real(config, "attention_value_scale", 1.0),
    )  # fmt: skip


NAMES = Names(
    {
        **PREFIXES,
        **module_names("model.mtp.layers.{i}."),
        "model.mtp.layers.{i}.pre_mlp_layernorm.": "mtp.{i}.block.post_attention_layernorm.",
    },
    parts={".self_attn.attention_sink_bias": ".self_attn.sinks"},
)
FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 131072, "head_dim": 192, "v_head_dim": 128, "num_key_value_heads": 4,
        "num_experts_per_tok": 8, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1, "sliding_window": 129,
        "partial_rotary_factor": 0.334, "rope_theta": 5e6, "swa_rope_theta": 1e4, "attention_value_scale": 0.707,
    },
    harmless={
        **dict.fromkeys(("attention_chunk_size", "hybrid_block_size"), "no code reads it"),
        **dict.fromkeys(("sliding_window", "swa_rope_theta", "rope_theta"), "given by another key"),
        **dict.fromkeys((f"swa_{key}" for key in HEADS), "of layers with a window, where there are any"),
        **dict.fromkeys(
            ("moe_intermediate_size", "n_routed_experts", "num_experts_per_tok", "routed_scaling_factor", "n_group",
             "topk_group", "norm_topk_prob", "scoring_func", "topk_method", "n_shared_experts"),
            "used only by experts",
        ),
    },
    names=NAMES,
    head=HeadSpec(tap="pre_norm", recycle="pre_norm", beyond="last"),
    mtp=MTPLayout(
        title="MiMo-V2 (Flash, Pro, Omni)",
        key="mimo_v2",
        released=3,
        rope="sliding",
        llama_cpp=(LLAMA_CPP,),
        not_xllm="its modules stand under model.mtp.layers and are of another formula",
    ),
    aliases=(LLAMA_CPP,),
    small={
        "model_type": "mimo_v2_flash", "architectures": ["MiMoV2FlashForCausalLM"], "head_dim": 12, "v_head_dim": 10,
        "num_key_value_heads": 1, "sliding_window": 9, "moe_intermediate_size": 24, "n_routed_experts": 7,
        "num_experts_per_tok": 3, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1, "rope_theta": None,
        "rope_parameters": {
            FULL: {"rope_type": "default", "rope_theta": 5e4, "partial_rotary_factor": 0.334},
            SLIDING: {"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.334},
        },
    },
    scratch={**SCRATCH_EXPERTS, "n_routed_experts": 8, "head_dim": 32, "v_head_dim": 32, "tie_word_embeddings": False},
)  # fmt: skip
