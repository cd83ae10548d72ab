"""Kimi-K3, text part: Kimi delta attention, gated latent attention without rotary positions in every fourth layer,
experts between two matrices (LatentMoE), and attention residuals between blocks of layers.

Formula: vLLM 0.33, `models/kimi_k3` (`amd/linear.py` and `amd/kda.py` are the plainest); its text config is that of
Kimi-Linear with further keys. MTP module: DeepSeek's, without attention residuals; it reads and recycles the stream
before the final norm, and the first embedding is zero. Released checkpoints have none; their drafters (DSpark) are
checkpoints of their own.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.formats.base import make_tensor
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import SITU, Activation, RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.kda import KDAConfig
from headstart.layers.parts import MixerConfig
from headstart.layers.residual_bank import BankLayerConfig, ResidualBankConfig
from headstart.models import _kda, _latent, keys, kimi_linear
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import SPARSE_BLOCK, WRAPPED, Names

LLAMA_CPP = "kimi-k3"
SERVED = {"mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
SITU_KEYS = dict(zip(("activation_situ_beta", "activation_situ_linear_beta"), SITU, strict=True))
IN_GGUF = {
    "hidden_act": "situ", "linear_full_gate": True, "mla_use_output_gate": True, "latent_moe_use_norm": True,
}  # fmt: skip
"""What llama.cpp takes for granted."""
PARTS = {
    **SPARSE_BLOCK, **_kda.PARTS,
    ".block_sparse_moe.routed_expert_down_proj.": ".mlp.fc1_latent_proj.",
    ".block_sparse_moe.routed_expert_up_proj.": ".mlp.fc2_latent_proj.",
    ".block_sparse_moe.routed_expert_norm.": ".mlp.latent_norm.",
}  # fmt: skip
"""Parts of names in files -> canonical parts."""


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    if config.get("model_type") == LLAMA_CPP:
        config = keys.inside(_kda.of_gguf(config), IN_GGUF)
    keys.refuse_others(config, SERVED)
    activation = _activation(config)
    config = kimi_linear.with_usual_keys(keys.inside(config, {"hidden_act": "silu"}))
    if not flag(config, "use_grouped_topk", True):
        config = keys.inside(config, {"n_group": 1, "topk_group": 1})
    kinds = _kda.kinds_of(config)
    if kinds is None:
        raise ModelError("config.json: linear_attn_config names no layers", "known: full_attn_layers and kda_layers")
    bound = _kda.bound_of(config, "linear_lower_bound", safe=True)
    linear = _kda.low_rank_mixer(config, bound, full_gate=flag(config, "linear_full_gate"))
    eps = real(config, "rms_norm_eps", 1e-6)
    latent = replace(_latent.mixer(config), rope=None, eps=eps)
    if flag(config, "mla_use_output_gate"):
        latent = replace(latent, num_gates=latent.num_heads * latent.value)
    mixers: dict[str, MixerConfig] = {_kda.FULL: latent, _kda.LINEAR: linear}
    dense = replace(keys.mlp(config), activation=activation)
    width = number(config, "routed_expert_hidden_size", default=0, least=0)
    normed = width > 0 and flag(config, "latent_moe_use_norm")
    sparse = replace(
        keys.sigmoid_experts(config), activation=activation, latent=width, latent_eps=eps if normed else 0.0
    )
    layers = keys.mixed_layers(config, [mixers[kind] for kind in kinds], dense, sparse)
    bank = None
    if (every := number(config, "attn_res_block_size", default=0, least=0)) > 0:
        bank = ResidualBankConfig(every, len(layers))
        layers = [_in_bank(layer, i, bank) for i, layer in enumerate(layers)]
    module = keys.layer(config, latent, sparse)
    return keys.decoder(config, layers, streams=bank, mtp_layer=module)


def _activation(config: Config) -> Activation:
    if config.get("hidden_act") != "situ":
        return keys.activation(config)
    keys.refuse_others(config, SITU_KEYS)
    return "situ"


def _in_bank(layer: LayerConfig, index: int, bank: ResidualBankConfig) -> LayerConfig:
    return BankLayerConfig(
        mixer=layer.mixer, mlp=layer.mlp, eps=layer.eps, num_sums=bank.num_sums(index), begins=index % bank.every == 0
    )


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: decay rates of all heads. Files have one for each feature of a head; the first ones are read.
    GGUF files have the products of the two parts of a residual's score."""
    ours = dict(tensors)
    for name, tensor in tensors.items() if from_gguf else ():
        if name.endswith("_res_proj.weight"):
            size = math.prod(tensor.shape)
            norm = name.replace("_proj.", "_norm.")
            ours[name] = tensor.shaped(1, size)
            ours[norm] = make_tensor(norm, (size,), "F32", np.ones(size, np.float32).view(np.uint8))
    for prefix, mixer in config.mixers(KDAConfig).items():
        name = f"{prefix}.self_attn.decay_rate"
        if (rates := tensors.get(name)) is not None and len(rates.shape) == 1:
            ours[name] = rates.take_rows(np.arange(min(mixer.delta.num_heads, rates.shape[0])))
    return _kda.adapt(ours, config, from_gguf)


SMALL: dict[str, Any] = {
    "hidden_act": "situ", **SITU_KEYS, "attn_res_block_size": 2, "q_lora_rank": 20, "kv_lora_rank": 32,
    "qk_nope_head_dim": 12, "qk_rope_head_dim": 6, "v_head_dim": 10, "moe_intermediate_size": 24,
    "num_key_value_heads": 6, "num_hidden_layers": 4, "num_experts": 8, "num_experts_per_token": 3,
    "num_shared_experts": 2, "first_k_dense_replace": 2, "routed_scaling_factor": 1.5, "routed_expert_hidden_size": 32,
    "latent_moe_use_norm": True, "mla_use_output_gate": True, "use_grouped_topk": False,
    "num_nextn_predict_layers": 1, "linear_attn_config": {
        "full_attn_layers": [2, 4], "kda_layers": [1, 3], "head_dim": 12, "num_heads": 5,
        "short_conv_kernel_size": 4, "gate_lower_bound": -3.0, "use_full_rank_gate": True},
}  # fmt: skip
FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 1048576, "rms_norm_eps": 1e-5, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 0, "linear_conv_kernel_dim": 4,
    },
    harmless={
        **_latent.HARMLESS,
        **dict.fromkeys(("rope_theta", "rope_scaling", "rope_parameters"), "positions are not rotated"),
        **dict.fromkeys(kimi_linear.THEIRS, "given by another key"),
        **dict.fromkeys(
            ("media_placeholder_token_id", "image_placeholder", "ignore_index"), "of images, whose tensors are left out"
        ),
    },
    names=Names({**WRAPPED, "mm_projector.": None}, PARTS, gguf=_kda.GGUF),
    adapt=adapt,
    restore=_kda.restore,
    head=HeadSpec(tap="pre_norm", recycle="pre_norm", mask_first=True),
    mtp=MTPLayout(title="Kimi-K3", not_xllm="xLLM has no draft of this type", not_llama_cpp="its converter drops it"),
    aliases=(LLAMA_CPP,),
    small={"model_type": "kimi_k3", "architectures": ["KimiK3ForConditionalGeneration"], **SMALL},
)  # fmt: skip
