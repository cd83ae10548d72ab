"""gpt-oss: attention sinks, windows in every other layer, MXFP4 experts.

Formula: transformers 5.23 `models/gpt_oss`. The router takes the softmax of the chosen experts' logits, which equals
the softmax of all, normalized among the chosen. Gate and up rows alternate in Hugging Face files, whose plain matrices
are [experts, in, out]; llama.cpp keeps them apart (`conversion/gpt_oss.py`).
"""

import re
from dataclasses import replace

import numpy as np

from headstart.formats.rows import RowSubset, Transposed
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.moe import MoEConfig
from headstart.models import keys
from headstart.models.base import Family
from headstart.models.joined import alternating, grouped_experts
from headstart.models.keys import FULL, SLIDING, Config, number
from headstart.models.names import PREFIXES, Names
from headstart.models.small import SCRATCH_EXPERTS, Arrays

SERVED = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}
YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, SERVED)
    window = number(config, "sliding_window")
    unlisted = [FULL if i % 2 else SLIDING for i in range(keys.num_layers(config))]
    attention = keys.attention(_with_rope(config), **keys.biases(config, default=True, own_output=True), sinks=True)
    sliding = replace(attention, spec=replace(attention.spec, window=window))
    experts, mixers = _experts(config), {FULL: attention, SLIDING: sliding}
    layers = {kind: keys.layer(config, mixer, experts) for kind, mixer in mixers.items()}
    return keys.decoder(config, [layers[kind] for kind in keys.layer_kinds(config, (FULL, SLIDING), unlisted)])


def _with_rope(config: Config) -> Config:
    """The config with default YaRN if it has no RoPE scaling, and with `truncate`, which GGUF files lack."""
    declared = config.get("rope_parameters") or config.get("rope_scaling")
    if config.get("model_type") != LLAMA_CPP:
        return config if declared else keys.inside(config, {"rope_parameters": YARN})
    return keys.inside(config, {"rope_scaling": {**declared, "truncate": False}}) if declared else config


def _experts(config: Config) -> MoEConfig:
    """The experts. Hugging Face's files have their width under `intermediate_size`."""
    inner = number(config, "moe_intermediate_size" if config.get("moe_intermediate_size") else "intermediate_size")
    experts = keys.softmax_experts(keys.inside(config, {"moe_intermediate_size": inner, "norm_topk_prob": True}))
    return replace(experts, activation="clamped", biases=True)


LLAMA_CPP = "gpt-oss"
EXPERTS = re.compile(r"(.*\.experts)\.(gate_up|gate|up|down)_proj(_blocks|_bias|\.bias|)")


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: splits Hugging Face's stacks of experts, and all stacks of biases, into single tensors."""
    ours: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        match = EXPERTS.fullmatch(name)
        if match is None or len(tensor.shape) < 2:
            ours[name] = tensor
            continue
        prefix, part, kind = match.groups()
        end = "bias" if "bias" in kind else "weight"
        for e in range(tensor.shape[0]):
            item = tensor.part(e) if kind else Transposed(tensor.part(e))
            whole = np.arange(item.shape[0])
            pieces = {"gate": whole[::2], "up": whole[1::2]} if part == "gate_up" else {part: whole}
            for piece, rows in pieces.items():
                ours[f"{prefix}.{e}.{piece}_proj.{end}"] = RowSubset(item, rows)
    return ours


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    """Family.restore: stacks experts as transformers does, without MXFP4."""
    theirs, experts = grouped_experts(arrays)
    for prefix, parts in experts.items():
        for kind, end in (("weight", ""), ("bias", "_bias")):
            gates, ups, downs = (parts[f"{part}_proj.{kind}"] for part in ("gate", "up", "down"))
            both = list(map(alternating, gates, ups))
            for name, each in (("gate_up", both), ("down", downs)):
                theirs[f"{prefix}.{name}_proj{end}"] = np.stack([array.T for array in each])
    return theirs


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 131072, "rope_theta": 150000.0, "num_key_value_heads": 8, "head_dim": 64,
        "rms_norm_eps": 1e-5, "num_experts_per_tok": 4, "sliding_window": 128,
    },
    harmless={
        **dict.fromkeys(("initial_context_length", "experts_per_token"), "given by another key"),
        "intermediate_size": "in a GGUF file, given by moe_intermediate_size",
        "hidden_act": "experts always have the clamped SwiGLU",
    },
    names=Names(PREFIXES, parts={".mlp.router.": ".mlp.gate."}),
    adapt=adapt,
    restore=restore,
    aliases=(LLAMA_CPP,),
    small={
        "model_type": "gpt_oss", "architectures": ["GptOssForCausalLM"], "intermediate_size": 24, "sliding_window": 12,
        "num_local_experts": 7, "num_experts_per_tok": 3, "attention_bias": True,
    },
    scratch={**SCRATCH_EXPERTS, "intermediate_size": 64, "num_local_experts": 8},
)  # fmt: skip
