"""Llama 4, text part: chunked attention with rotary positions, full layers without.

Formula: transformers 5.23 `models/llama4`. A row sees its chunk of 8192 positions from the chunk's beginning; queries
of full layers are scaled by position. Queries and keys are normed after the rope, without a weight. The router's
sigmoid scales an expert's input. GGUF files (llama.cpp b11434, `llama4.cpp`) do not say the chunk, the temperature, the
turn of full layers and the norm, which only models of 128 experts lack.
"""

from dataclasses import replace
from functools import partial

from headstart.errors import ModelError
from headstart.kernels.ops import AttentionTemperature, RouterSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.joined import stacked_experts, transposed_experts
from headstart.models.keys import FULL, Config, flag, number, real
from headstart.models.names import WRAPPED, Names
from headstart.models.small import SCRATCH_EXPERTS

CHUNKED = "chunked_attention"
WITHOUT_NORM = 128


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    rotated = keys.rotated_layers(config, config.get("no_rope_layers") or None)
    kinds = keys.layer_kinds(config, (CHUNKED, FULL), [CHUNKED if each else FULL for each in rotated])
    sparse = _sparse(config, len(rotated))
    written = config.get("moe_intermediate_size")  # a GGUF file's
    if written:
        keys.refuse_others(config, {"sliding_window": None})  # 0: no chunks
    inner = number(config, "moe_intermediate_size" if written else "intermediate_size")
    width = number(config, "intermediate_size" if written else "intermediate_size_mlp")
    dense = MLPConfig(inner=width, activation=keys.activation(config))
    experts = _experts(config, inner) if any(sparse) else dense
    normed = number(config, "num_experts") != WITHOUT_NORM if written else flag(config, "use_qk_norm", True)
    layers = [
        keys.layer(config, _attention(config, kind, turns, normed=normed), experts if each else dense)
        for kind, turns, each in zip(kinds, rotated, sparse, strict=True)
    ]
    return keys.decoder(config, layers)


def _sparse(config: Config, count: int) -> list[bool]:
    """For each layer, whether it has experts: if listed in `moe_layers`, else each `interleave_moe_layer_step`th."""
    listed, step = config.get("moe_layers"), number(config, "interleave_moe_layer_step", default=1)
    if listed is not None and not (isinstance(listed, list) and all(isinstance(each, int) for each in listed)):
        raise ModelError(f"config.json: moe_layers is {listed!r}, but must be a list of layers")
    return [(i + 1) % step == 0 if listed is None else i in listed for i in range(count)]


def _attention(config: Config, kind: str, rotated: bool, *, normed: bool) -> AttentionConfig:
    chunk = number(config, "attention_chunk_size", default=8192) if kind == CHUNKED else 0
    mixer = keys.attention(config, chunk=chunk, **keys.biases(config))
    if rotated:
        return replace(mixer, qk_norm=normed, qk_norm_after_rope=True, qk_norm_unweighted=True)
    every, strength = number(config, "floor_scale", default=8192), real(config, "attn_scale", 0.1)
    tuned = bool(config.get("attn_temperature_tuning", True))  # a number in older files
    return replace(mixer, rope=None, temperature=AttentionTemperature(every, strength, ahead=1) if tuned else None)


def _experts(config: Config, inner: int) -> MoEConfig:
    router = RouterSpec(
        num_experts=number(config, "num_local_experts", "num_experts", default=16),
        top_k=number(config, "num_experts_per_tok", default=1), scoring="sigmoid", normalize=False, scales_inputs=True,
    )  # fmt: skip
    return keys.experts(config, router, inner=inner, shared=inner)


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 131072, "num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
    },
    harmless={
        **dict.fromkeys(("boi_token_index", "eoi_token_index", "image_token_index"), "of images"),
        **dict.fromkeys(("no_rope_layer_interval", "interleave_moe_layer_step"), "given by another key"),
        **dict.fromkeys(("floor_scale", "attn_scale", "attn_temperature_tuning"), "of full layers, if there are any"),
        **dict.fromkeys(("attention_chunk_size", "use_qk_norm"), "of chunked layers, if there are any"),
        **dict.fromkeys(("num_local_experts", "num_experts_per_tok"), "used only by experts"),
        "intermediate_size_mlp": "used only by dense layers",
        "for_llm_compressor": "of other programs",
    },
    names=Names(
        WRAPPED,
        parts={".feed_forward.router.": ".mlp.gate.", ".feed_forward.shared_expert.": ".mlp.shared_experts.",
               ".feed_forward.": ".mlp."},
    ),
    adapt=transposed_experts,
    restore=partial(stacked_experts, transposed=True),
    interleaved_files=True,
    aliases=("llama4_text",),
    small={
        "model_type": "llama4_text", "architectures": ["Llama4ForCausalLM"], "num_hidden_layers": 4,
        "intermediate_size": 24, "intermediate_size_mlp": 40, "num_local_experts": 5, "num_experts_per_tok": 2,
        "interleave_moe_layer_step": 2, "attention_chunk_size": 16, "floor_scale": 8, "attn_scale": 0.3,
    },
    scratch={**SCRATCH_EXPERTS, "num_local_experts": 8, "num_experts_per_tok": 1, "intermediate_size": 64},
)  # fmt: skip
