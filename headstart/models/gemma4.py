"""Gemma 4 (E2B, E4B, 12B, 26B-A4B, 31B): per-layer embeddings, shared KV layers, an MLP beside experts.

Its assistant is a checkpoint of its own (heads/assistant.py). Formula: transformers 5.23 `models/gemma4`; GGUF names:
llama.cpp `conversion/gemma.py`.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headstart.errors import ModelError
from headstart.kernels.ops import RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.parallel import ParallelMoEConfig
from headstart.layers.per_layer import PerLayerConfig
from headstart.models import _gemma, _gemma4_vision, keys
from headstart.models.base import Family
from headstart.models.keys import FULL, SLIDING, Config, flag, number
from headstart.models.reading import Reading

OWN = ("head_dim", "num_key_value_heads")  # what `per_layer_config` may say of a layer


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    _gemma.refuse_bidirectional(config, "vision")
    unified = str(config["model_type"]).startswith("gemma4_unified")
    kinds = [*keys.kinds_in_turn(config, 6)[:-1], FULL]
    window = number(config, "sliding_window", default=1024 if unified else 512, least=0)
    width = number(config, "hidden_size_per_layer_input", default=0 if unified else 256, least=0)
    table = number(config, "vocab_size_per_layer_input", default=number(config, "vocab_size"))
    if width and table < number(config, "vocab_size"):
        what = f"config.json: vocab_size_per_layer_input is {table}, less than vocab_size {config['vocab_size']}"
        raise ModelError(what, "every token needs a row of the per-layer embeddings")
    count, reads = len(kinds), keys.by_kind(config)
    first = count - number(config, "num_kv_shared_layers", default=0, least=0)

    def layer(i: int) -> LayerConfig:
        activation = keys.activation(config)
        post_block = PerLayerConfig(index=i, count=count, width=width, vocab_size=table, activation=activation)
        read = reads[kinds[i]].inside(_own(config, kinds[i], i))
        mixer = _attention(read, kinds[i], window, _gemma.shared_layer(kinds, first, i))
        more = {"post_block": post_block if width else None, "has_layer_scalar": True}
        return _layer(config, mixer, _mlp(config, i, i >= first), **more)

    plain = _attention(reads[FULL].inside(_own(config, FULL, count - 1)), FULL, window, None)
    return keys.decoder(
        reads[FULL],
        [layer(i) for i in range(count)],
        embedding_scale=math.sqrt(number(config, "hidden_size")),
        logit_softcap=keys.real(config, "final_logit_softcapping", 0.0),
        mtp_layer=keys.layer(config, plain, _mlp(config, 0, False), norms="sandwich"),
    )


def _own(config: Reading, kind: str, index: int) -> Mapping[str, Any]:
    """Config keys of one layer that override the common ones: from `per_layer_config` (newer files), else by kind."""
    declared = config.get("per_layer_config")
    if declared is not None:
        own = declared.get(str(index), {}) if isinstance(declared, dict) else None
        if not isinstance(own, dict) or set(own) - set(OWN):
            raise ModelError(f"config.json: per_layer_config is {declared!r}", f"known are {', '.join(OWN)} of a layer")
        return own
    by_layer = config.get("num_key_value_heads")  # a GGUF file's
    if isinstance(by_layer, list) and len(by_layer) <= index:
        raise ModelError(f"the file has kv heads of {len(by_layer)} layers, not of layer {index}")
    own = {"num_key_value_heads": by_layer[index]} if isinstance(by_layer, list) else {}
    if config.get("head_dim_sliding") is not None:  # a GGUF file's, where head_dim is that of full layers
        return own | ({"head_dim": config["head_dim_sliding"]} if kind == SLIDING else {})
    heads = config.get("num_global_key_value_heads")
    if kind == SLIDING:
        return own
    own["head_dim"] = number(config, "global_head_dim", default=512)
    return own | ({"num_key_value_heads": heads} if heads and flag(config, "attention_k_eq_v") else {})


def _attention(config: Reading, kind: str, window: int, source_layer: int | None) -> AttentionConfig:
    same = flag(config, "attention_k_eq_v") and kind == FULL
    mixer = _gemma.attention(config, window if kind == SLIDING else 0, source_layer, keys_are_values=same)
    is_causal = kind == FULL and _gemma4_vision.attends_ahead(config)
    return replace(mixer, spec=replace(mixer.spec, causal=True)) if is_causal else mixer


def _mlp(config: Reading, index: int, shared: bool) -> MLPConfig:
    mlp = _gemma.mlp(config, index)
    double = flag(config, "use_double_wide_mlp") and shared
    return MLPConfig(inner=2 * mlp.inner, activation=mlp.activation) if double else mlp


def _layer(config: Reading, mixer: AttentionConfig, mlp: MLPConfig, **more: Any) -> LayerConfig:
    count = number(config, "num_experts", default=0, least=0)
    if not flag(config, "enable_moe_block", count > 0):
        return keys.layer(config, mixer, mlp, norms="sandwich", **more)
    top = config.get("top_k_experts") or config.get("num_experts_per_tok")
    experts = keys.softmax_experts(config.inside({"num_experts_per_tok": top, "norm_topk_prob": True}))
    both = ParallelMoEConfig(mlp=mlp, experts=experts, eps=keys.real(config, "rms_norm_eps", 1e-6))
    return keys.layer(config, mixer, both, norms="open", **more)


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: drops unused K and V projections (`own_keys`). GGUF names have the experts inside the MLP."""
    ours = {}
    for name, tensor in _gemma.own_keys(tensors, config).items():
        layer = name.partition(".self_attn.")[0]
        if from_gguf:
            name = re.sub(r"\.mlp\.gate\.weight$", ".router.proj.weight", name).replace(".mlp.experts.", ".experts.")
            if f"{layer.removesuffix('.mlp.experts.down_proj.weight')}.mlp.experts.gate_up_proj" in tensors:
                name = name.replace("experts.down_proj.weight", "experts.down_proj")
        ours[name] = tensor
    return ours


FAMILY = Family(
    vision=_gemma4_vision.VISION,
    parse=parse,
    names=_gemma.NAMES,
    adapt=adapt,
    defaults={
        **_gemma.DEFAULTS, "vocab_size": 262144, "num_hidden_layers": 30, "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
        },
    },
    harmless={
        **_gemma.HARMLESS,
        **dict.fromkeys(("vocab_size_per_layer_input",), "of per-layer embeddings, where there are any"),
        **dict.fromkeys(
            ("num_experts", "top_k_experts", "num_experts_per_tok", "moe_intermediate_size"),
            "used only by experts",
        ),
        **dict.fromkeys(
            ("global_head_dim", "num_global_key_value_heads", "per_layer_config"), "of full layers, each in one of them"
        ),
    },
    aliases=("gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    small={
        "model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "head_dim": 16, "sliding_window": 11,
        "global_head_dim": 24, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "tie_word_embeddings": True,
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 131, "final_logit_softcapping": 4.0,
    },
)  # fmt: skip
