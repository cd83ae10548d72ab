"""Qwen3 with experts (30B-A3B, 235B-A22B): Qwen3's attention, experts chosen by a softmax. No native MTP."""

from __future__ import annotations

from typing import Any

from headstart.errors import ModelError
from headstart.kernels.ops import RouterSpec
from headstart.layers.build import DecoderConfig, decoder
from headstart.layers.moe import MoEConfig
from headstart.models._family import (
    SCRATCH_EXPERTS,
    Arrays,
    Config,
    Family,
    decoder_shapes,
    parse_decoder,
    random_arrays,
    tiny_config,
    without_prefix,
)


def parse(config: Config) -> DecoderConfig:
    attention_bias = bool(config.get("attention_bias", False))
    return parse_decoder(
        {"head_dim": 128, **config}, qkv_bias=attention_bias, o_bias=attention_bias, qk_norm=True, moe=_experts(config)
    )


def _experts(config: Config) -> MoEConfig:
    try:
        step, layers = int(config.get("decoder_sparse_step") or 1), int(config["num_hidden_layers"])
        router = RouterSpec(
            num_experts=int(config.get("num_experts") or config["num_local_experts"]),
            top_k=int(config["num_experts_per_tok"]),
            normalize=bool(config.get("norm_topk_prob", False)),
        )
        inner = int(config["moe_intermediate_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: {error} is missing or not a number") from None
    if not 0 < router.top_k <= router.num_experts:
        raise ModelError(f"config.json: a token cannot take {router.top_k} of {router.num_experts} experts")
    named = config.get("mlp_only_layers") or ()
    return MoEConfig(
        router=router, inner=inner, dense=frozenset(i for i in range(layers) if i in named or (i + 1) % step)
    )


def tiny(**changes: Any) -> tuple[dict[str, Any], Arrays]:
    defaults = {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "head_dim": 16,
        "rope_theta": 1e6,
        "moe_intermediate_size": 24,
        "num_experts": 7,
        "num_experts_per_tok": 3,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }
    config = tiny_config(**{**defaults, **changes})
    return config, random_arrays(decoder_shapes(parse(config)))


FAMILY = Family(
    parse=parse,
    canonical=without_prefix,
    build=decoder,
    tiny=tiny,
    aliases=("qwen3moe",),  # llama.cpp's
    scratch={**SCRATCH_EXPERTS, "num_experts": 8, "mlp_only_layers": []},
)
