"""GLM-5.3-Flash, text part: Kimi delta attention, and latent attention with an indexer (DSA) of pools, in streams.

Every fourth layer has latent attention, to whole pools of positions. Nothing is rotated.

Formula: transformers 5.24 `models/glm5_next`; MTP module: vLLM 0.32, `models/glm5next`: a layer of latent attention and
experts in one stream, which reads and recycles the state after the final norm.
"""

import math
from dataclasses import replace
from typing import Any

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RawTensor
from headstart.kernels.specs import IndexSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.indexer import IndexerConfig
from headstart.layers.mla import MLAConfig
from headstart.layers.parts import MixerConfig
from headstart.models import _kda, _latent, keys
from headstart.models.base import Family
from headstart.models.deepseek_v4 import stream_spec
from headstart.models.hy_v4 import limited_activation
from headstart.models.keys import Config, flag, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import WRAPPED, Names
from headstart.models.small import Arrays

LLAMA_CPP = "glm5-next"
INDEXED = "indexed_attention"
SERVED = {"index_kpool_always_select_tail": True, "qk_rope_head_dim": 0, "attention_bias": False, "mlp_bias": False}


def parse(config: Config) -> DecoderConfig:
    gguf = config.get("model_type") == LLAMA_CPP
    config = keys.text_config(config)
    keys.refuse_others(config, SERVED | ({"swiglu_limits_shared": config.get("swiglu_limits")} if gguf else {}))
    config = _kda.of_gguf(config) if gguf else _kda.linear_config(config)
    bound = _kda.bound_of(config, "linear_lower_bound", safe=flag(config, "linear_safe_gate", True))
    linear = _kda.low_rank_mixer(config, bound)
    mixers: dict[str, MixerConfig] = {_kda.LINEAR: linear, INDEXED: _latent_mixer(config)}
    activation = limited_activation(config)
    dense = replace(keys.mlp(config), activation=activation)
    sparse = replace(keys.sigmoid_experts(config), activation=activation)
    streams = replace(stream_spec(config), weighted_end=False)
    own = [mixers[kind] for kind in _kinds(config)]
    layers = keys.mixed_layers(config, own, dense, sparse, streams=streams)
    module = keys.layer(config, mixers[INDEXED], sparse)
    return keys.decoder(config, layers, streams=streams, mtp_layer=module)


def _kinds(config: Config) -> list[str]:
    """Each fourth layer has latent attention, where no list says which."""
    count = keys.num_layers(config)
    if (kinds := config.get("layer_types")) is not None:
        if not isinstance(kinds, list):
            raise ModelError(f"config.json: layer_types is {kinds!r}, no list")
        kinds = [INDEXED if kind == _kda.FULL else kind for kind in kinds[:count]]  # a module may have one, too
        keys.check_kinds(kinds, count, (_kda.LINEAR, INDEXED))
    kinds = kinds or _kda.kinds_of(config, INDEXED) or [INDEXED if i % 4 == 3 else _kda.LINEAR for i in range(count)]
    own = config.get("indexer_types")
    if isinstance(own, list) and "shared" in [each for each, kind in zip(own, kinds, strict=False) if kind == INDEXED]:
        raise ModelError("config.json: indexer_types names shared indexers", "known: full, in layers of attention")
    return kinds


def _latent_mixer(config: Config) -> MLAConfig:
    nope = number(config, "qk_nope_head_dim", "qk_head_dim")  # the latter in GGUF files
    pool, top_k = number(config, "index_kpool"), number(config, "index_topk")
    if top_k % pool or pool < 2:
        raise ModelError(f"config.json: index_topk is {top_k}, index_kpool {pool}", "pools of 2 or more must fit in")
    index = IndexSpec(
        number(config, "index_n_heads"), number(config, "index_head_dim"), top_k // pool, pool, whole=True
    )
    return MLAConfig(
        num_heads=number(config, "num_attention_heads"), query_rank=number(config, "q_lora_rank"),
        latent=number(config, "kv_lora_rank"), nope=nope, rotary=0, value=number(config, "v_head_dim"), rope=None,
        scale=nope**-0.5, eps=real(config, "rms_norm_eps", 1e-5), indexer=IndexerConfig(spec=index, rope=None),
    )  # fmt: skip


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: the biases of a pool one after another."""
    return {
        name: each.shaped(math.prod(each.shape)) if name.endswith(".indexer.pool_bias") else each
        for name, each in _kda.adapt(tensors, config, from_gguf).items()
    }


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    """Family.restore: inverse of `adapt`."""
    assert config.mtp_layer and isinstance(config.mtp_layer.mixer, MLAConfig) and config.mtp_layer.mixer.indexer
    every = config.mtp_layer.mixer.indexer.spec.every
    return {
        name: array.reshape(every, -1) if name.endswith(".indexer.pool_bias") else array
        for name, array in _kda.restore(arrays, config).items()
    }


SMALL: dict[str, Any] = {
    "num_hidden_layers": 4, "layer_types": [_kda.LINEAR, INDEXED] * 2, "num_key_value_heads": 6, "q_lora_rank": 20,
    "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 0, "v_head_dim": 10, "head_dim": None,
    "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.5,
    "num_nextn_predict_layers": 1, "index_topk": 15, "index_kpool": 3, "index_n_heads": 12, "index_head_dim": 10,
    "linear_head_dim": 12, "linear_num_heads": 5, "linear_conv_kernel_dim": 4, "linear_lower_bound": -3.0, "hc_mult": 3,
    "hc_eps": 1e-3, "hc_sinkhorn_iters": 4,
}  # fmt: skip
FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.5, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 8, "index_topk": 2048, "index_n_heads": 32,
        "index_head_dim": 128, "index_kpool": 16, "linear_head_dim": 128, "linear_num_heads": 64,
        "linear_conv_kernel_dim": 4, "linear_lower_bound": -5.0, "first_k_dense_replace": 3,
    },
    harmless={
        **_latent.HARMLESS,
        **dict.fromkeys(("rope_theta", "rope_parameters", "rope_scaling"), "positions are not rotated"),
        **dict.fromkeys(("index_topk_freq", "index_skip_topk_offset", "index_topk_pattern"), "given by indexer_types"),
        **dict.fromkeys(("first_k_dense_replace", "full_attn_layers", "kda_layers"), "given by a list of layers"),
        "layer_norm_eps": "of the indexer's norm, 1e-6 as in DeepSeek's code",
    },
    names=Names(
        WRAPPED,
        parts={
            **_kda.PARTS,
            ".indexer.index_kpool_compress_gate": ".indexer.pool_gate",
            ".indexer.index_kpool_compress_ape": ".indexer.pool_bias",
            ".hc_attn_": ".mixer_streams.",
            ".hc_ffn_": ".mlp_streams.",
        },
        gguf={
            **_kda.GGUF,
            ".indexer.compressor.gate_proj.weight": ".indexer.pool_gate",
            ".indexer.compressor.position_bias": ".indexer.pool_bias",
        },
    ),
    adapt=adapt,
    restore=restore,
    head=HeadSpec(),
    mtp=MTPLayout(
        title="GLM-5.3-Flash", not_xllm="xLLM has no draft of this type", not_llama_cpp="its graph is not written yet"
    ),
    aliases=("glm5_next_text", LLAMA_CPP),
    small={"model_type": "glm5_next_text", "architectures": ["Glm5NextForConditionalGeneration"], **SMALL},
)  # fmt: skip
