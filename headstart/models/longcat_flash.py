"""LongCat-Flash: shortcut-connected and identity experts.

A layer has two latent attentions and two MLPs; each half is a layer here, and the first has the experts' shortcut.
Formula: transformers 5.23 `models/longcat_flash`; MTP module: vLLM 0.32 `longcat_flash_mtp.py`. Queries and latents are
scaled by sqrt(hidden size / rank): queries in the scale of scores, latents in their norm's weight.
"""

import math
import re
from dataclasses import replace

from headstart.errors import ModelError
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RawTensor, RouterSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.mla import MLAConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig
from headstart.models import _latent, keys
from headstart.models.base import Family
from headstart.models.keys import Config, flag, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import PREFIXES, Names
from headstart.models.small import Arrays

SERVED = {"zero_expert_type": "identity", "attention_method": "MLA", "router_bias": False, "norm_topk_prob": False}


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, SERVED)
    count = _num_layers(config)
    mixer, mlp = _mixer(config), _mlp(config)
    dense = keys.layer(config, mixer, mlp)
    first = replace(dense, shortcut=_experts(config))
    return keys.decoder(config, [first, dense] * count, mtp_layer=dense, mtp_recycle=keys.mtp_recycle(config))


def _num_layers(config: Config) -> int:
    """Number of layers of two halves: `num_layers`, or half of transformers' `num_hidden_layers`."""
    declared = config.get("num_hidden_layers")
    if config.get("num_layers") is None:
        halves = keys.num_layers(config)
    else:
        halves = keys.num_layers({"num_hidden_layers": 2 * number(config, "num_layers")})
    if halves % 2 or declared not in (None, halves, halves // 2):
        raise ModelError(f"config.json: num_hidden_layers is {declared}, but must be twice num_layers")
    return halves // 2


def _mixer(config: Config) -> MLAConfig:
    """Latent attention with scores and latents scaled by sqrt(hidden size / rank)."""
    mixer = _latent.mixer(config)
    if not mixer.query_rank:
        raise ModelError("config.json: q_lora_rank is missing", "LongCat-Flash has queries of low rank")
    hidden = number(config, "hidden_size")
    queries = flag(config, "mla_scale_q_lora", True)
    latents = flag(config, "mla_scale_kv_lora", True)
    of_queries = math.sqrt(hidden / mixer.query_rank) if queries else 1.0
    of_latents = math.sqrt(hidden / mixer.latent) if latents else 1.0
    return replace(mixer, scale=mixer.scale * of_queries, latent_scale=of_latents)


def _mlp(config: Config) -> MLPConfig:
    return keys.mlp(keys.inside(config, {"intermediate_size": number(config, "ffn_hidden_size", "intermediate_size")}))


def _experts(config: Config) -> MoEConfig:
    own, identity = number(config, "n_routed_experts"), number(config, "zero_expert_num", default=0, least=0)
    router = RouterSpec(
        num_experts=own + identity, top_k=number(config, "moe_topk", "num_experts_per_tok"), normalize=False,
        scale=real(config, "routed_scaling_factor", 1.0), num_identity=identity,
    )  # fmt: skip
    inner = number(config, "expert_ffn_hidden_size", "moe_intermediate_size")
    return keys.experts(config, router, inner=inner, bias=True)


HALF = re.compile(r"layers\.(\d+)\.(self_attn|mlps|input_layernorm|post_attention_layernorm)\.([01])\.(.*)")
EXPERTS = re.compile(r"layers\.(\d+)\.mlp\.(.*)")
OURS = re.compile(r"layers\.(\d+)\.(self_attn|mlp|shortcut|input_layernorm|post_attention_layernorm)\.(.*)")
ROUTER = {"router.classifier.weight": "gate.weight", "router.e_score": "gate.e_score"}


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: renames the halves of layer i to layers 2 i and 2 i + 1."""
    return {_ours(name): tensor for name, tensor in tensors.items()}


def _ours(name: str) -> str:
    if half := HALF.fullmatch(name):
        layer, part, which, rest = half.groups()
        return f"layers.{2 * int(layer) + int(which)}.{'mlp' if part == 'mlps' else part}.{rest}"
    if experts := EXPERTS.fullmatch(name):
        rest = experts[2]
        for theirs, ours in ROUTER.items():
            rest = rest.replace(theirs, ours)
        return f"layers.{2 * int(experts[1])}.shortcut.{rest}"
    return name


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    """Family.restore: inverse of `adapt`."""
    return {_theirs(name): array for name, array in arrays.items()}


def _theirs(name: str) -> str:
    match = OURS.fullmatch(name)
    if match is None:
        return name
    layer, which = divmod(int(match[1]), 2)
    part, rest = match[2], match[3]
    if part == "shortcut":
        for theirs, ours in ROUTER.items():
            rest = theirs + rest.removeprefix(ours) if rest.startswith(ours) else rest
        return f"layers.{layer}.mlp.{rest}"
    return f"layers.{layer}.{'mlps' if part == 'mlp' else part}.{which}.{rest}"


FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 1e7,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "moe_topk": 12, "zero_expert_num": 256, "routed_scaling_factor": 6.0, "n_routed_experts": 512,
    },
    harmless=_latent.HARMLESS,
    names=Names(
        {
            **PREFIXES,
            "model.mtp.layers.{i}.enorm.m.": "mtp.{i}.norm_embedding.",
            "model.mtp.layers.{i}.hnorm.m.": "mtp.{i}.norm_hidden.",
            "model.mtp.layers.{i}.eh_proj.": "mtp.{i}.projection.",
            "model.mtp.layers.{i}.transformer_layer.mlp.": "mtp.{i}.block.mlp.",
            "model.mtp.layers.{i}.": "mtp.{i}.block.",
            "model.mtp.norm.": "mtp.0.norm.",
            "model.mtp.embed_tokens.": None,  # a copy of the trunk's
        }
    ),
    adapt=adapt,
    restore=restore,
    head=HeadSpec(),
    mtp=MTPLayout(
        title="LongCat-Flash", default=1, not_llama_cpp="its converter does not know the type",
    ),
    small={
        "model_type": "longcat_flash", "architectures": ["LongcatFlashForCausalLM"], "num_hidden_layers": 4,
        "ffn_hidden_size": 80, "q_lora_rank": 20, "kv_lora_rank": 32, "qk_nope_head_dim": 12, "qk_rope_head_dim": 6,
        "head_dim": 6, "v_head_dim": 10, "num_key_value_heads": 6, "expert_ffn_hidden_size": 24, "n_routed_experts": 7,
        "zero_expert_num": 4, "moe_topk": 4, "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 1,
    },
    scratch={
        "q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64, "head_dim": 64,
        "v_head_dim": 32, "num_key_value_heads": 4, "ffn_hidden_size": 256, "expert_ffn_hidden_size": 64,
        "n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 2, "tie_word_embeddings": False,
    },
)  # fmt: skip
