"""What a model family declares. One file per family here; its name is the `model_type` of config.json."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.kernels.ops import AttentionSpec, RawTensor
from headstart.layers.build import DecoderConfig, Weights, mtp_module
from headstart.layers.decoder import Decoder
from headstart.layers.mla import mla_shapes
from headstart.layers.mlp import GatedMLP
from headstart.layers.moe import moe_shapes
from headstart.layers.mtp import HeadSpec, MTPHead
from headstart.layers.rope import rope_spec

Config = Mapping[str, Any]
Arrays = dict[str, NDArray[np.float32]]

SCRATCH: Mapping[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
"""About a million parameters, in sizes that other engines take too: heads of 32, widths that 32 divides."""
SCRATCH_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}


@dataclass(frozen=True, kw_only=True)
class Family:
    """`parse`: config.json -> sizes. `canonical`: a Hugging Face tensor name -> ours (None: not the model's).
    `build`: weights -> trunk. `tiny`: a random small model (config.json content, Hugging Face tensors) for tests; its
    keyword arguments change keys of the config.
    `head`: how the native MTP modules of a checkpoint work; `trailing`: they are the layers after the trunk's.
    `interleaved_rope`: GGUF files hold the q and k rows of this family in llama.cpp's interleaved order. `adapt`: what
    tensors under canonical names need beside their names (tensors, sizes, from a GGUF file?). `aliases`: other names of
    the family: a wrapper's text part, llama.cpp's. `scratch`: keys of the config that
    `train --from-scratch` trains, beside those of SCRATCH."""

    parse: Callable[[Config], DecoderConfig]
    canonical: Callable[[str], str | None]
    build: Callable[[Weights, DecoderConfig], Decoder]
    tiny: Callable[..., tuple[dict[str, Any], Arrays]]
    head: HeadSpec | None = None
    trailing: bool = False
    interleaved_rope: bool = False
    adapt: Callable[[dict[str, RawTensor], DecoderConfig, bool], dict[str, RawTensor]] | None = None
    aliases: tuple[str, ...] = ()
    scratch: Mapping[str, Any] = field(default_factory=dict)


def parse_decoder(config: Config, **switches: Any) -> DecoderConfig:
    """The keys that decoder families share; `switches`: fields of DecoderConfig. Raises ModelError naming a missing or
    impossible one."""
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        kv_heads = int(config.get("num_key_value_heads") or heads)
        head_dim = int(config.get("head_dim") or hidden // heads)
        sizes: dict[str, Any] = {
            "vocab_size": int(config["vocab_size"]),
            "hidden_size": hidden,
            "intermediate_size": int(config["intermediate_size"]),
            "num_layers": int(config["num_hidden_layers"]),
            "max_length": int(config.get("max_position_embeddings") or 2048),
        }
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"config.json: {error} is missing or not a number", "is this a model directory?") from None
    if min(*sizes.values(), heads, kv_heads, head_dim) < 1 or heads % kv_heads:
        raise ModelError(f"config.json: sizes must be positive, {heads} query heads a multiple of {kv_heads} kv heads")
    if config.get("use_sliding_window") and config.get("sliding_window"):
        raise ModelError("config.json: sliding-window attention is not supported for this family yet")
    attention = switches.pop("attention", AttentionSpec(heads, kv_heads, head_dim, head_dim**-0.5))
    return DecoderConfig(
        **sizes,
        attention=attention,
        rope=rope_spec(config, head_dim),
        eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=bool(config.get("tie_word_embeddings", False)),
        **switches,
    )


def without_prefix(name: str) -> str | None:
    """`model.layers.0...` -> `layers.0...`; `lm_head.weight` stays."""
    if name.endswith("rotary_emb.inv_freq"):
        return None
    return name.removeprefix("model.")


def native_head(family: Family, weights: Weights, config: DecoderConfig) -> MTPHead | None:
    """The MTP modules inside the checkpoint; None when the config promises none or the file holds none."""
    if family.head is None or not config.num_mtp or not weights.has("mtp.0.projection.weight"):
        return None
    present = sum(weights.has(f"mtp.{i}.projection.weight") for i in range(config.num_mtp))
    if present < config.num_mtp:
        raise ModelError(
            f"config.json promises {config.num_mtp} MTP modules, but {weights.source} holds {present}",
            f"lower the number in config.json to {present}",
        )
    drafting = Weights(weights.tensors, weights.backend, weights.source, drafts=True, on_take=weights.on_take)
    modules = [mtp_module(drafting, f"mtp.{i}", config) for i in range(config.num_mtp)]
    weights.used |= drafting.used
    spec = replace(family.head, num_modules=len(modules), recycle=config.mtp_recycle or family.head.recycle)
    return MTPHead(spec, modules)


def tiny_config(**changes: Any) -> dict[str, Any]:
    """config.json of a small model that still has grouped heads, several layers and odd sizes; `changes` win."""
    return {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 131,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": 2,
        "bos_token_id": 1,
        **changes,
    }


def random_arrays(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    """Matrices ~ N(0, 1 / in), so that logits are of order 1 to 10; norm weights near 1."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        scaled = values / np.sqrt(shape[-1]) if len(shape) == 2 else values * 0.1 + (1 if "norm" in name else 0)
        arrays[name] = scaled.astype(np.float32)
    return arrays


def block_shapes(prefix: str, config: DecoderConfig, index: int | None = None) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of one decoder block; `index` as in build.decoder_layer."""
    hidden, attn, mlp = config.hidden_size, f"{prefix}.self_attn", f"{prefix}.mlp"
    sparse = config.moe if config.moe and index not in config.moe.dense else None
    return {
        f"{prefix}.input_layernorm.weight": (hidden,),
        f"{prefix}.post_attention_layernorm.weight": (hidden,),
        **(mla_shapes(attn, hidden, config.mla) if config.mla else _attention_shapes(attn, config)),
        **(moe_shapes(mlp, hidden, sparse) if sparse else GatedMLP.shapes(mlp, hidden, config.intermediate_size)),
        **({} if config.mla else _attention_extras(attn, config)),
        **({} if sparse or not config.mlp_bias else _mlp_biases(mlp, config)),
    }


def _attention_shapes(attn: str, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, spec = config.hidden_size, config.attention
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        f"{attn}.q_proj.weight": (q_size, hidden),
        f"{attn}.k_proj.weight": (kv_size, hidden),
        f"{attn}.v_proj.weight": (kv_size, hidden),
        f"{attn}.o_proj.weight": (hidden, q_size),
        **({f"{attn}.gate_proj.weight": (q_size, hidden)} if config.gated_attention else {}),
    }


def _attention_extras(attn: str, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Biases and norms."""
    spec = config.attention
    shapes: dict[str, tuple[int, ...]] = {}
    q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    if config.qkv_bias:
        shapes |= {f"{attn}.{n}_proj.bias": (size,) for n, size in (("q", q_size), ("k", kv_size), ("v", kv_size))}
        if config.gated_attention:
            shapes[f"{attn}.gate_proj.bias"] = (q_size,)
    if config.o_bias:
        shapes[f"{attn}.o_proj.bias"] = (config.hidden_size,)
    if config.qk_norm:
        shapes |= {f"{attn}.{n}_norm.weight": (spec.head_dim,) for n in "qk"}
    return shapes


def _mlp_biases(mlp: str, config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    hidden, inner = config.hidden_size, config.intermediate_size
    return {f"{mlp}.{n}_proj.bias": (size,) for n, size in (("gate", inner), ("up", inner), ("down", hidden))}


def decoder_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face names and shapes of a whole trunk."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    for i in range(config.num_layers):
        shapes |= block_shapes(f"model.layers.{i}", config, i)
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tied:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes
