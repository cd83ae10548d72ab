"""Hunyuan 4 (HY-V4): latent attention with sinks, gates and shared indexers (DSA), in streams that are not mixed.

Formula: transformers 5.24 `models/hy_v4`, but rotary pairs are neighbours, as vLLM 0.33 and llama.cpp b11434 read the
released weights; transformers rotates halves of the same rows. MTP module: vLLM 0.33 `hy_v4/nvidia/mtp.py`: one stream,
an indexer of its own, experts; the state after `final_layernorm` is recycled. `num_nextn_predict_layers` is 1 or 2 for
one module.
"""

from dataclasses import replace
from typing import Any

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.kernels.specs import StreamSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.mla import MLAConfig
from headstart.models import _latent, glm_moe_dsa, keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import GGUF_GATE, Names, module_names

SERVED = {"enable_ihc": True, "attention_bias": False, "soft_logits_capping": False}
LIMIT = 10.0


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, SERVED)
    if (kinds := config.get("layer_types")) is not None:
        keys.check_kinds(kinds, keys.num_layers(config), ("indexed_attention",))
    count = number(config, "hc_mult", default=4)
    streams = StreamSpec(count, 0, real(config, "hc_eps", 1e-6), real(config, "hc_magnitude", 2.0), mixed=False)
    latent = _mixer(config)
    mixers = [latent.sharing(source) for source in glm_moe_dsa.indexer_sources(config)]
    dense, sparse = keys.mlp(config), keys.sigmoid_experts(config)
    limited = replace(sparse, activation=limited_activation(config), shared_activation=sparse.activation)
    layers = keys.mixed_layers(config, mixers, dense, limited, streams=streams)
    return keys.decoder(config, layers, streams=streams, mtp_layer=keys.layer(config, latent, limited))


def limited_activation(config: Config) -> Any:
    """Activation of routed experts, whose inputs are clamped to `swiglu_limit` (0: not clamped). Raises ModelError for
    another limit or activation than the kernels have."""
    limit = config.get("swiglu_limits", config.get("swiglu_limit", LIMIT))  # the former in GGUF files
    if not limit:
        return keys.activation(config)
    if limit != LIMIT or keys.activation(config) != "silu":
        what = f"config.json: swiglu_limit is {limit!r} with {keys.activation(config)}"
        raise ModelError(what, f"known: {LIMIT:g} with silu, or 0")
    return "silu_of_10"


def _mixer(config: Config) -> MLAConfig:
    paired = flag(config, "rope_interleave", True)
    latent = _latent.mixer(keys.inside(config, {"rope_interleave": paired, "indexer_rope_interleave": paired}))
    if latent.indexer is None:
        raise ModelError("config.json: index_topk is missing", "all layers of HY-V4 select positions")
    eps = real(config, "rms_norm_eps", 1e-5)
    indexer = replace(latent.indexer, trailing=True, eps=eps)
    return replace(latent, indexer=indexer, sinks=True, num_gates=latent.num_heads * latent.value)


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 262144, "rms_norm_eps": 1e-5, "routed_scaling_factor": 2.827, "n_group": 1,
        "topk_group": 1, "n_shared_experts": 1, "num_experts_per_tok": 8, "index_topk": 2048, "index_n_heads": 16,
        "index_head_dim": 128, "index_topk_freq": 4, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "first_k_dense_replace": 1,
    },
    harmless={
        **_latent.HARMLESS,
        "learnable_sink_init": "training only",
        **dict.fromkeys(("enable_lm_head_fp32", "head_dtype"), "of sums, which are float32 here"),
        "mtp_quant_algo": "given by the tensors",
        "index_share_for_mtp_iteration": "of drafts: here every draft step chooses for itself",
    },
    names=Names(
        {
            "model.": "", "lm_head.": "lm_head.", "model.hc_head.hc_head_": "streams.",
            "model.hc_head.hc_": "streams.", **module_names("model.mtp_layers.{i}."),
        },
        parts={
            ".hc_attn_layer.hc_pre.hc_": ".mixer_streams.",
            ".hc_mlp_layer.hc_pre.hc_": ".mlp_streams.",
            ".hc_attn_layer.hc_": ".mixer_streams.",
            ".hc_mlp_layer.hc_": ".mlp_streams.",
            ".self_attn.learnable_sink_param": ".self_attn.sinks",
            ".self_attn.linear_gate.": ".self_attn.gate_proj.",
        },
        gguf=GGUF_GATE,
    ),
    head=HeadSpec(mask_first=True),
    mtp=MTPLayout(
        title="Hunyuan hy_v4", spare=1, served=1, max_modules=1,
        not_xllm="xLLM has no draft of this type", not_llama_cpp="its converter leaves the module out",
    ),
    small={
        "model_type": "hy_v4", "architectures": ["HYV4ForCausalLM"], **_latent.SMALL, **_latent.INDEXED,
        "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "num_nextn_predict_layers": 1,
        "indexer_types": ["full", "shared", "full"], "hc_mult": 3, "hc_magnitude": 1.5, "hc_eps": 1e-3,
        "rope_interleave": False,  # as in transformers' class
    },
)  # fmt: skip
