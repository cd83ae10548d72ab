"""Gemma 3n (E2B, E4B), text part: alternating streams (AltUp), per-layer embeddings, shared KV layers.

Formula: transformers 5.23 `models/gemma3n`; GGUF names: llama.cpp `conversion/gemma.py`.
"""

import math
from dataclasses import replace
from statistics import NormalDist

from headstart.errors import ModelError
from headstart.kernels.ops import RawTensor
from headstart.layers.altup import BEGIN, END, AltUpConfig, AltUpLayerConfig
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.per_layer import PerLayerConfig
from headstart.models import _gemma, keys
from headstart.models.base import Family
from headstart.models.keys import FULL, SLIDING, Config, flag, number
from headstart.models.reading import Reading

SPARSE_LAYERS, SPARSITY = 10, 0.95  # for a config without activation_sparsity_pattern


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    _gemma.refuse_bidirectional(config)
    kinds, reads, count = keys.kinds_in_turn(config, 5), keys.by_kind(config), keys.num_layers(config)
    first = count - number(config, "num_kv_shared_layers", default=15, least=0)
    altup, cutoffs, vocab = _altup(config), _cutoffs(config, count), number(config, "vocab_size")
    table = number(config, "vocab_size_per_layer_input", default=vocab)

    def layer(index: int) -> AltUpLayerConfig:
        mlp = _gemma.mlp(config, index)
        post_block = PerLayerConfig(
            index=index, count=count, width=number(config, "hidden_size_per_layer_input", default=256),
            vocab_size=table, activation=mlp.activation, num_extra_tokens=max(vocab - table, 0),
        )  # fmt: skip
        return AltUpLayerConfig(
            mixer=_attention(reads[kinds[index]], kinds[index], _gemma.shared_layer(kinds, first, index)),
            mlp=replace(mlp, cutoff=cutoffs[index]), eps=keys.real(config, "rms_norm_eps", 1e-6), norms="sandwich",
            post_block=post_block, altup=altup,
        )  # fmt: skip

    plain = keys.layer(config, _attention(reads[FULL], FULL, None), _gemma.mlp(config, 0), norms="sandwich")
    return keys.decoder(
        reads[FULL], [layer(i) for i in range(count)],
        embedding_scale=math.sqrt(number(config, "hidden_size")),
        logit_softcap=keys.real(config, "final_logit_softcapping", 0.0), streams=altup, mtp_layer=plain,
    )  # fmt: skip


def _altup(config: Config) -> AltUpConfig:
    count = number(config, "altup_num_inputs", default=4)
    active = number(config, "altup_active_idx", default=0, least=0)
    if active >= count or count > number(config, "hidden_size"):
        raise ModelError(f"config.json: altup_active_idx is {active}, but altup_num_inputs {count}")
    scaled = flag(config, "altup_correct_scale", True)
    return AltUpConfig(count=count, active=active, rank=number(config, "laurel_rank", default=64), scaled=scaled)


def _cutoffs(config: Config, count: int) -> list[float | None]:
    """For each layer the cutoff in standard deviations above the mean below which activations become 0; None: none do.
    `activation_sparsity_pattern` has the share of a normal distribution below it, GGUF files the cutoff itself."""
    written = config.get("activation_sparsity_scale")
    if written is not None:
        found = written if isinstance(written, list) else [written] * count
        _check(found, count, "activation_sparsity_scale", math.inf)
        return [None if each == -math.inf else each for each in found]
    shares = config.get("activation_sparsity_pattern")
    if shares is None:
        sparse = SPARSE_LAYERS if count > SPARSE_LAYERS else 0
        shares = [SPARSITY] * sparse + [0.0] * (count - sparse)
    _check(shares, count, "activation_sparsity_pattern", 1)
    return [NormalDist().inv_cdf(share) if share > 0 else None for share in shares]


def _check(values: object, count: int, key: str, end: float) -> None:
    numbers = isinstance(values, list) and all(isinstance(each, int | float) and each < end for each in values)
    if not numbers or not isinstance(values, list) or len(values) != count:
        raise ModelError(f"config.json: {key} is {values!r}", f"{count} numbers below {end} are wanted, one by layer")


def _attention(config: Reading, kind: str, source_layer: int | None) -> AttentionConfig:
    window = number(config, "sliding_window", default=512, least=0)
    return _gemma.attention(config, window if kind == SLIDING else 0, source_layer)


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: drops unused K and V projections (`own_keys`), and splits llama.cpp's stacks of projections."""
    ours = _gemma.own_keys(tensors, config)
    for name in (BEGIN, END):
        if stack := ours.pop(f"{name}.weight", None):
            ours |= {f"{name}.{k}.weight": stack.part(k) for k in range(stack.shape[0])}
    return ours


FAMILY = Family(
    parse=parse,
    names=_gemma.NAMES,
    adapt=adapt,
    defaults={
        **_gemma.DEFAULTS, "vocab_size": 262400, "hidden_size": 2048, "intermediate_size": 16384,
        "num_hidden_layers": 35, "num_key_value_heads": 2, "max_position_embeddings": 32768,
        "vocab_size_per_layer_input": 262144, "final_logit_softcapping": 30.0,
    },
    harmless={
        **_gemma.HARMLESS,
        **dict.fromkeys(("altup_coef_clip", "altup_lr_multiplier"), "training only"),
        "query_pre_attn_scalar": "scores are not scaled",
        "audio_soft_tokens_per_image": "of sounds",
    },
    aliases=("gemma3n_text",),
    scratch={
        "layer_types": [SLIDING] * 3 + [FULL], "num_kv_shared_layers": 0, "sliding_window": 64, "laurel_rank": 16,
        "intermediate_size": 256, "activation_sparsity_pattern": [0.9, 0.9, 0.0, 0.0], "altup_num_inputs": 4,
        "hidden_size_per_layer_input": 32, "vocab_size_per_layer_input": 4096, "final_logit_softcapping": 30.0,
    },
    small={
        "model_type": "gemma3n_text", "architectures": ["Gemma3nForCausalLM"], "head_dim": 16, "sliding_window": 11,
        "hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": 120, "tie_word_embeddings": True,
        "final_logit_softcapping": 4.0, "num_hidden_layers": 5, "num_kv_shared_layers": 2, "laurel_rank": 6,
        "altup_num_inputs": 3, "intermediate_size": [80, 80, 72, 64, 80],
        "activation_sparsity_pattern": [0.9, 0.5, 0.0, 0.0, 0.2],
        "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
    },
)  # fmt: skip
