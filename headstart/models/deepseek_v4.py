"""DeepSeek-V4: compressed attention, residual streams, hash-routed first layers; an MTP module or a DSpark drafter.

Formula: transformers 5.23 `models/deepseek_v4`; MTP module: vLLM 0.32, `deepseek_v4/nvidia/mtp.py`. Files have
DeepSeek's own names; GGUF files have the names of llama.cpp's `conversion/deepseek.py` and no module. A module reads
all streams of the trunk; its projections of token and stream are one matrix here.

V4-Flash-0731 has a DSpark drafter (heads/block.py) in place of a module: three layers, which read the mean of the
streams after the layers `dspark_target_layer_ids`. All rows of a block see the `sliding_window` positions before it and
the whole block. Source: vLLM 0.33, `deepseek_v4/nvidia/dspark.py` and `v1/attention/backends/mla/sparse_swa.py`.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from headstart.errors import ModelError
from headstart.formats.rows import JoinedColumns
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RawTensor
from headstart.kernels.specs import CompressSpec, IndexSpec, RopeSpec, RouterSpec, StreamSpec
from headstart.layers.build import DecoderConfig, OwnDrafter
from headstart.layers.compressed import CompressedConfig, CompressorConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.moe import MoEConfig
from headstart.layers.rope import rope_spec
from headstart.models import _deepseek_vision, keys
from headstart.models.base import Family, drafter_spec
from headstart.models.keys import Config, number, real
from headstart.models.mtp import DSPARK, MTPLayout, XllmDraft
from headstart.models.names import Names
from headstart.models.small import Arrays

SLIDING, SPARSE, HEAVY = "sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"
RATES = {SPARSE: 4, HEAVY: 128}
HASHED, CHOSEN = "hash_moe", "moe"
SCORES: dict[str, Literal["softmax", "sigmoid", "softplus"]] = {
    "sqrtsoftplus": "softplus", "sigmoid": "sigmoid", "softmax": "softmax",
}  # fmt: skip
SERVED = {
    "topk_method": "noaux_tc", "swiglu_limit": 10.0, "hidden_act": "silu", "norm_topk_prob": True, "mlp_bias": False,
    "attention_bias": False, "num_key_value_heads": 1, "swiglu_limits": 10.0, "swiglu_limits_shared": 10.0,
}  # fmt: skip
DRAFTER = {"markov_head_type": "vanilla", "confidence_head_with_markov": True, "sample_from_anchor": True}
"""Keys of the DSpark drafter with one supported value."""
DRAFTER_KEYS = (
    *DRAFTER, "draft_vocab_size", "enable_confidence_head", "n_mtp_layers", "dspark_block_size", "dspark_markov_rank",
    "dspark_noise_token_id", "dspark_target_layer_ids", "dspark_n_routed_experts", "dspark_num_experts_per_tok",
)  # fmt: skip


def parse(config: Config) -> DecoderConfig:
    keys.refuse_others(config, SERVED)
    rates = _rates(config)
    mixers = {kind: _mixer(config, kind, rates) for kind in (SLIDING, SPARSE, HEAVY)}
    feeds = {kind: experts(config, hashed=kind == HASHED) for kind in (HASHED, CHOSEN)}
    streams = stream_spec(config)

    def layer(kind: str, feed: str) -> LayerConfig:
        return keys.layer(config, mixers[kind], feeds[feed], streams=streams)

    hashed = keys.feed_kinds(config, "num_hash_layers", default=3, known=(HASHED, CHOSEN))
    layers = [layer(*pair) for pair in zip(_kinds(config, rates), hashed, strict=True)]
    return with_drafter(config, layers, mixers[SLIDING], streams)


def stream_spec(config: Config) -> StreamSpec:
    count, steps = number(config, "hc_mult", default=4), number(config, "hc_sinkhorn_iters", default=20)
    return StreamSpec(count, steps, real(config, "hc_eps", 1e-6))


def with_drafter(
    config: Config, layers: Sequence[LayerConfig], mixer: CompressedConfig, streams: StreamSpec, *,
    layout: MTPLayout = DSPARK, after: int = 1,
) -> DecoderConfig:  # fmt: skip
    """The trunk of these layers, with the DSpark drafter if the config has one. mixer: of layers with a window only.
    after: 1 if the drafter reads the streams after its target layers, 0: before them."""
    feed = experts(config, hashed=False, drafter=True)
    if config.get(DSPARK.requires):  # the window before a block, and the block's first row
        mixer = replace(mixer, window=mixer.window + 1, block_window=True)
    mtp_layer = keys.layer(config, mixer, feed, streams=streams)
    made = keys.decoder(config, layers, streams=streams, mtp_layer=mtp_layer)
    if not config.get(DSPARK.requires):
        return made
    try:
        return replace(made, drafter=_drafter(config, made, layout, after))
    except ModelError as error:  # the trunk runs without it
        return replace(made, no_drafter=error.message)


def _drafter(config: Config, trunk: DecoderConfig, layout: MTPLayout, after: int) -> OwnDrafter:
    """Sizes of the DSpark drafter. Raises ModelError for wrong values and for variants."""
    if unknown := {key: config[key] for key in config if key.startswith("dspark_") and key not in DRAFTER_KEYS}:
        named = ", ".join(f"{key} {value!r}" for key, value in unknown.items())
        raise ModelError(f"config.json: {named} of the DSpark drafter is not known")
    keys.refuse_others(config, {**DRAFTER, "draft_vocab_size": trunk.vocab_size})
    ids = config.get("dspark_target_layer_ids")
    if not isinstance(ids, list) or not ids or ids != [each for each in range(trunk.num_layers) if each in ids]:
        what = f"dspark_target_layer_ids is {ids!r}, but must be ascending numbers below {trunk.num_layers}"
        raise ModelError(f"config.json: {what}")
    own = OwnDrafter(
        tap=tuple(each + after for each in ids),
        block_size=number(config, "dspark_block_size"),
        mask_token_id=number(config, "dspark_noise_token_id", least=0),
        markov_rank=number(config, "dspark_markov_rank", default=256),
        confidence=keys.flag(config, "enable_confidence_head", default=True),
    )
    count = number(config, layout.count_key, default=0, least=0) or layout.default
    drafter_spec(own, count, trunk.vocab_size, trunk.head_layer)  # checks the values
    return own


def _rates(config: Config) -> dict[str, int]:
    """Kind of layer -> number of positions that one compressed entry covers."""
    written = config.get("compress_rates") or {}
    if not isinstance(written, dict) or not {*written} <= {*RATES}:
        raise ModelError(f"config.json: compress_rates is {written!r}", f"known: {', '.join(RATES)}")
    older = {SPARSE: config.get("compress_rate_csa"), HEAVY: config.get("compress_rate_hca")}
    rates = {kind: number({"rate": older[kind] or written.get(kind)}, "rate", default=RATES[kind]) for kind in RATES}
    if min(rates.values()) < 2 or len({*rates.values()}) < 2:
        raise ModelError(f"config.json: compress_rates are {rates}, but must differ and be 2 or more")
    return rates


def _kinds(config: Config, rates: dict[str, int]) -> list[str]:
    """Kind of each layer, from its name (`layer_types`) or its ratio (`compress_ratios`)."""
    count, kinds, ratios = keys.num_layers(config), config.get("layer_types"), config.get("compress_ratios")
    if kinds is None and ratios is not None:
        by_ratio = {0: SLIDING, 1: SLIDING, **{rate: kind for each in (RATES, rates) for kind, rate in each.items()}}
        ratios = [ratios] * count if isinstance(ratios, int) else ratios  # of all layers, in a GGUF file
        if (
            not isinstance(ratios, list)
            or len(ratios) < count
            or any(not isinstance(ratio, int) or ratio not in by_ratio for ratio in ratios)
        ):
            known = ", ".join(map(str, by_ratio))
            raise ModelError(f"config.json: compress_ratios must name {count} layers, by one of {known}")
        kinds = [by_ratio[ratio] for ratio in ratios[:count]]  # ratios of MTP modules may follow
    if kinds is None:
        kinds = [HEAVY if i < 2 or i % 2 == 0 else SPARSE for i in range(count)]
    keys.check_kinds(kinds, count, (SLIDING, SPARSE, HEAVY))
    return list(kinds)


def _mixer(config: Config, kind: str, rates: dict[str, int]) -> CompressedConfig:
    made = window_mixer(config, compressed=kind != SLIDING)
    if kind == SLIDING:
        return made
    sparse, every, rope = kind == SPARSE, rates[kind], made.rope
    spec = CompressSpec(every, made.head_dim, overlap=sparse)
    made = replace(made, compressor=CompressorConfig(spec=spec, rope=rope))
    if not sparse:
        return made
    index = index_spec(config, every, rope)
    smaller = CompressorConfig(spec=CompressSpec(every, index.head_dim, overlap=True), rope=rope)
    return replace(made, index=(index, smaller))


def window_mixer(config: Config, *, compressed: bool) -> CompressedConfig:
    """Attention of a layer over its window, with the rope of layers with or without entries."""
    heads, dim, groups = (number(config, key) for key in ("num_attention_heads", "head_dim", "o_groups"))
    if heads % groups:
        raise ModelError(f"config.json: {heads} heads do not make {groups} groups (o_groups)")
    return CompressedConfig(
        num_heads=heads, head_dim=dim, query_rank=number(config, "q_lora_rank"), groups=groups,
        group_rank=number(config, "o_lora_rank"), window=number(config, "sliding_window", default=128),
        rope=_rope(config, dim, compressed=compressed),
    )  # fmt: skip


def index_spec(config: Config, every: int, rope: RopeSpec) -> IndexSpec:
    """The indexer of entries of `every` positions."""
    heads, dim, top_k = (number(config, f"index_{key}") for key in ("n_heads", "head_dim", "topk"))
    index = IndexSpec(heads, dim, top_k, every, causal=True)
    if index.head_dim < rope.rotary_dim:
        raise ModelError(f"config.json: index_head_dim is {index.head_dim}, but {rope.rotary_dim} features are rotated")
    return index


def _rope(config: Config, dim: int, *, compressed: bool) -> RopeSpec:
    """RoPE of the last features of a head. Layers with compression have another base, and YaRN without its attention
    temperature (transformers, DeepseekV4Config)."""
    written = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(written, dict):
        raise ModelError(f"config.json: rope_parameters is {written!r}, but must be an object")
    nested = {part: written.get(part) for part in ("main", "compress")}
    whole = {**written} if not any(nested.values()) else {}
    own = nested["compress" if compressed else "main"]
    if own is None:
        own = {**whole, "rope_theta": config.get("compress_rope_theta", 160000.0)} if compressed else {}
    kind = own.get("rope_type") or own.get("type")
    rotary = number(config, "qk_rope_head_dim", default=int(dim * real(config, "partial_rotary_factor", 1 / 8)))
    if rotary % 2 or not 0 < rotary <= dim:
        raise ModelError(f"config.json: {rotary} of {dim} features of a head would be rotated (qk_rope_head_dim)")
    scaling = {key: value for key, value in own.items() if key != "partial_rotary_factor"}
    if kind == "yarn":
        scaling.setdefault("attention_factor", 1.0)
    base = {"rope_theta": own.get("rope_theta") or real(config, "rope_theta", 10000.0)}
    read = {**base, "rope_parameters": scaling, "max_position_embeddings": config.get("max_position_embeddings")}
    return replace(rope_spec(read, rotary), trailing=True)


def experts(config: Config, *, hashed: bool, drafter: bool = False) -> MoEConfig:
    """Experts of a layer. drafter: of one after the trunk, for which a DSpark drafter has its own keys."""

    def own(key: str) -> int:
        return number(config, key, default=0, least=0) if drafter else 0

    scoring = config.get("scoring_func", "sqrtsoftplus")
    if not isinstance(scoring, str) or scoring not in SCORES:
        raise ModelError(f"config.json: scoring_func is {scoring!r}", f"known: {', '.join(SCORES)}")
    router = RouterSpec(
        num_experts=own("dspark_n_routed_experts")
        or number(config, "num_experts", default=0, least=0)
        or number(config, "n_routed_experts"),
        top_k=own("dspark_num_experts_per_tok") or number(config, "num_experts_per_tok"),
        scoring=SCORES[scoring],
        scale=real(config, "routed_scaling_factor", 1.5),
    )
    inner = number(config, "moe_intermediate_size")
    return keys.experts(
        config, router, inner=inner, shared=inner * number(config, "n_shared_experts", default=1, least=0),
        bias=not hashed, activation="silu_of_10", table=number(config, "vocab_size") if hashed else 0,
        image_bias=not drafter,
    )  # fmt: skip


BIAS = ".mlp.gate.e_score_correction_bias"
UNUSED = re.compile(r"mtp\..*\.gate\.image_bias")  # drafts are texts


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: joins an MTP module's two projections, and drops the router's bias in layers whose experts are
    selected by token id."""
    ours: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        if UNUSED.fullmatch(name) or (name.endswith(BIAS) and name.replace(BIAS, ".mlp.gate.table") in tensors):
            continue
        if match := re.fullmatch(r"(mtp\.\d+)\.([eh])_proj\.weight", name):
            parts = [tensors.get(f"{match[1]}.{part}_proj.weight") for part in "eh"]
            if match[2] == "e" and parts[1] is not None:
                joined = f"{match[1]}.projection.weight"
                ours[joined] = JoinedColumns(joined, (tensor, parts[1]))
            continue
        ours[name] = tensor
    return ours


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    """Family.restore: inverse of `adapt`."""
    theirs: Arrays = {}
    for name, array in arrays.items():
        if name.startswith("mtp.") and name.endswith(".projection.weight"):
            halves: Sequence[np.ndarray] = np.hsplit(array, 2)
            pairs = zip("eh", halves, strict=True)
            theirs |= {name.replace("projection", f"{part}_proj"): half for part, half in pairs}
        else:
            theirs[name] = array
    return theirs


NAMES = Names(
    {
        "embed.": "embed_tokens.",
        "head.": "lm_head.",
        "hc_head_": "streams.",
        "mtp.{i}.": "mtp.{i}.block.",
        "mtp.{i}.enorm.": "mtp.{i}.norm_embedding.",
        "mtp.{i}.hnorm.": "mtp.{i}.norm_hidden.",
        "mtp.{i}.e_proj.": "mtp.{i}.e_proj.",
        "mtp.{i}.h_proj.": "mtp.{i}.h_proj.",
        "mtp.{i}.norm.": "mtp.{i}.norm.",
        "mtp.{i}.hc_head_": "mtp.{i}.streams.",
        "mtp.{i}.main_proj.": "mtp.{i}.fuse.",
        "mtp.{i}.main_norm.": "mtp.{i}.hidden_norm.",
        "mtp.{i}.markov_head.markov_w1.": "mtp.{i}.markov.embed.",
        "mtp.{i}.markov_head.markov_w2.": "mtp.{i}.markov.out.",
        "mtp.{i}.confidence_head.proj.": "mtp.{i}.confidence.",
        "mtp.{i}.emb.": None,  # copies of the trunk's
        "mtp.{i}.head.": None,
        **dict.fromkeys(("vision.", "aligner.", "image_start", "image_end", "image_newline", "image_pad"), None),
    },
    parts={
        ".attn.": ".self_attn.",
        "compressor.norm.": "compressor.kv_norm.",
        "compressor.ape": "compressor.position_bias",
        "compressor.wgate.": "compressor.gate_proj.",
        ".wq_a.": ".q_a_proj.",
        ".wq_b.": ".q_b_proj.",
        ".wkv.": ".kv_proj.",
        ".wo_a.": ".o_a_proj.",
        ".wo_b.": ".o_b_proj.",
        ".q_norm.": ".q_a_norm.",
        ".attn_sink": ".sinks",
        ".ffn.": ".mlp.",
        ".w1.": ".gate_proj.",
        ".w2.": ".down_proj.",
        ".w3.": ".up_proj.",
        ".gate.bias_vl": ".gate.image_bias",
        ".gate.bias": ".gate.e_score_correction_bias",
        ".gate.tid2eid": ".gate.table",
        ".attn_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".hc_attn_": ".mixer_streams.",
        ".hc_ffn_": ".mlp_streams.",
    },
    gguf={".q_a_layernorm.": ".q_a_norm.", ".kv_a_layernorm.": ".kv_norm.", ".indexer.wq_b.": ".indexer.q_b_proj."},
)
SMALL: dict[str, Any] = {
    "head_dim": 16, "intermediate_size": None, "qk_rope_head_dim": 6, "q_lora_rank": 20, "num_key_value_heads": 1,
    "o_groups": 2, "o_lora_rank": 10, "sliding_window": 11, "compress_ratios": [4, 128, 0, 0],
    "compress_rates": {SPARSE: 4, HEAVY: 12}, "compress_rope_theta": 160000.0, "index_n_heads": 15,
    "index_head_dim": 10, "index_topk": 5, "hc_mult": 4, "hc_sinkhorn_iters": 6, "hc_eps": 1e-6, "num_hash_layers": 1,
    "n_routed_experts": 8, "num_experts_per_tok": 3, "n_shared_experts": 1, "moe_intermediate_size": 24,
    "routed_scaling_factor": 1.5, "num_nextn_predict_layers": 1,
}  # fmt: skip
FAMILY = Family(
    parse=parse,
    defaults={
        "max_position_embeddings": 1048576, "rms_norm_eps": 1e-6, "head_dim": 512, "q_lora_rank": 1024, "o_groups": 8,
        "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "num_experts_per_tok": 6,
        "n_routed_experts": 256, "moe_intermediate_size": 2048,
    },
    harmless={
        "intermediate_size": "all layers have experts",
        "compress_ratios": "given by layer_types",
        "num_hash_layers": "given by mlp_layer_types",
        "expert_dtype": "read with the tensors",
        "num_nextn_predict_layers": "n_mtp_layers counts the layers of a DSpark drafter",
        **dict.fromkeys(DRAFTER_KEYS, "of a DSpark drafter"),
        **dict.fromkeys(_deepseek_vision.KEYS, "of images"),
        "qk_nope_head_dim": "the rest of head_dim",
    },
    names=NAMES,
    vision=_deepseek_vision.V4,
    adapt=adapt,
    restore=restore,
    head=HeadSpec(tap="streams", recycle="streams"),
    mtp=MTPLayout(
        title="DeepSeek-V4",
        unless=DSPARK.requires,
        per_layer=("compress_ratios",),
        xllm=XllmDraft(
            architecture="DeepseekV4MtpForCausalLM", fp8_blocks=True, as_layer=True, config={"num_hash_layers": 0}
        ),
    ),
    variants=(
        replace(
            DSPARK, title="DeepSeek-V4 with DSpark", key="deepseek_v4_dspark", per_layer=("compress_ratios",)
        ),
    ),
    aliases=("deepseek4",),
    scratch={
        "num_key_value_heads": 1, "head_dim": 64, "qk_rope_head_dim": 32, "q_lora_rank": 64, "o_groups": 2,
        "o_lora_rank": 32, "sliding_window": 64, "compress_ratios": [4, 128, 4, 128, 0],
        "compress_rates": {SPARSE: 4, HEAVY: 16},
        "index_n_heads": 4, "index_head_dim": 64, "index_topk": 32, "moe_intermediate_size": 64, "n_routed_experts": 5,
        "num_experts_per_tok": 2, "tie_word_embeddings": False,
    },
    small={"model_type": "deepseek_v4", "architectures": ["DeepseekV4ForCausalLM"], **SMALL},
)  # fmt: skip
