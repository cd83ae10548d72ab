"""Qwen3.8-Flash-Next (Qwen4-Exp), text part: gated DeltaNet and QSA layers in gated streams, memories of n-grams.

Attention layers have an indexer of blocks (layers/indexer.py), some DeltaNet layers a memory (layers/ngram.py).

Formula: transformers 5.24 `models/qwen4_exp`; MTP module: vLLM 0.33 `qwen4_exp/nvidia/mtp.py`: an attention layer over
all streams of the trunk, whose norm is one; without a final norm. Its two projections are one matrix here.
"""

import itertools
import re
from dataclasses import replace
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.formats.rows import JoinedColumns, JoinedRows, row_parts
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RawTensor
from headstart.kernels.specs import IndexSpec, NGramSpec, StreamSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.indexer import BlockIndexerConfig
from headstart.layers.ngram import NGramMemoryConfig, hash_factors, primes_from
from headstart.models import _gated_delta, keys
from headstart.models.base import Family
from headstart.models.keys import FULL, LINEAR, Config, number, real
from headstart.models.mtp import MTPLayout
from headstart.models.names import Names
from headstart.models.small import Arrays

LLAMA_CPP = "qwen4exp"
INDEXED = ("indexed_attention", "qwen_sparse_attention", FULL)  # names of one kind of layers
GATES = {"sigmoid": True, "silu": False, "swish": False}
LAYER_SEED = 10007  # added to the seed for each further memory
TAPS, MAX_NGRAM, MAX_HEADS = "ple_conv_kernel_size", 16, 256


def parse(config: Config) -> DecoderConfig:
    gguf = config.get("model_type") == LLAMA_CPP
    config = keys.text_config(config)
    config = _of_gguf(config) if gguf else keys.inside(config, {"recurrent_layers": None})
    keys.refuse_others(config, {"mtp_use_dedicated_embeddings": False, "hc_per_branch_norm": True})
    if isinstance(module := config.get("mtp"), dict):
        theta = (config.get("rope_parameters") or {}).get("rope_theta")
        keys.refuse_others(module, {"hybrid": True, "layer_types": [FULL], "num_hidden_layers": 1, "rope_theta": theta})
    if not isinstance(gate := config.get("output_gate_type") or config.get("hidden_act"), str) or gate not in GATES:
        raise ModelError(f"config.json: output_gate_type is {gate!r}", f"known: {', '.join(GATES)}")
    attention = _gated_delta.gated_attention(config)
    attention = replace(attention, indexer=_indexer(config, attention))
    delta = replace(_gated_delta.delta(config, tiled=gguf), sigmoid_gate=GATES[gate])
    streams = StreamSpec(
        number(config, "hc_count", default=4, least=2), 0, 0.0, mixed=False,
        gate_rank=number(config, "hc_lowrank", default=320),
    )  # fmt: skip
    feed = keys.softmax_experts(config, shared=number(config, "shared_expert_intermediate_size"))
    plain = keys.layer(config, attention, feed, norms="none", streams=streams)
    layers, memories = [], (_stored_memories if gguf else _memories)(config, streams.count)
    for index, kind in enumerate(_kinds(config)):
        if kind != LINEAR and index in memories:
            raise ModelError(f"config.json: ple_layer_ids names layer {index + 1}", "known: layers of linear attention")
        linear: LayerConfig = replace(plain, mixer=delta, memory=memories.get(index))
        layers.append(linear if kind == LINEAR else plain)
    return keys.decoder(config, layers, streams=streams, mtp_layer=plain, final_norm=False)


def _of_gguf(config: Config) -> Config:
    """The keys of a GGUF file."""
    ratios = {*_listed(config, "compress_ratios")} - {0}
    return keys.inside(config, {
        "output_gate_type": "sigmoid", "hc_count": config.get("hc_mult"),
        "indexer_n_heads": config.get("index_n_heads"), "indexer_head_dim": config.get("index_head_dim"),
        "indexer_budget": config.get("index_topk"),
        "indexer_compress_ratio": ratios.pop() if len(ratios) == 1 else None,  # one of all layers that have any
    })  # fmt: skip


def _listed(config: Config, key: str) -> list[int]:
    """A list of whole numbers in a GGUF file, which gguf.py reads as one number if they are equal."""
    value = config.get(key, [])
    listed = value if isinstance(value, list) else [value]
    if not all(isinstance(each, int) for each in listed):
        raise ModelError(f"{key} is {listed!r}, but must be whole numbers", "convert the model again")
    return listed


def _kinds(config: Config) -> list[str]:
    kinds = config.get("layer_types")
    if isinstance(kinds, list):
        kinds = [FULL if kind in INDEXED else kind for kind in kinds]
    return _gated_delta.layer_types(keys.inside(config, {"layer_types": kinds}))


def _indexer(config: Config, attention: AttentionConfig) -> BlockIndexerConfig | None:
    """The indexer of an attention layer; None where the config has none."""
    if config.get("indexer_n_heads") is None:
        return None
    keys.refuse_others(config, {"indexer_kv_heads": 1})
    heads, dim, budget, every = (
        number(config, f"indexer_{key}", needs="QSA") for key in ("n_heads", "head_dim", "budget", "compress_ratio")
    )
    rotary = attention.rope.rotary_dim if attention.rope else 0
    if budget % every or every < 2 or dim < rotary:
        what = f"config.json: the indexer has a budget of {budget} in blocks of {every}, and {heads} heads of {dim}"
        raise ModelError(what, f"known: whole blocks of 2 or more, heads of {rotary} (the rotated features) or more")
    return BlockIndexerConfig(
        spec=IndexSpec(heads, dim, budget // every, every, whole=True), rope=attention.rope, pools=True,
        eps=real(config, "rms_norm_eps", 1e-6),
    )  # fmt: skip


def _memories(config: Config, streams: int) -> dict[int, NGramMemoryConfig]:
    """Index of a layer -> its memory (hashes: see layers/ngram.py)."""
    ids, count = config.get("ple_layer_ids") or [], keys.num_layers(config)
    if not isinstance(ids, list) or any(isinstance(each, bool) or each not in range(1, count + 1) for each in ids):
        raise ModelError(f"config.json: ple_layer_ids is {ids!r}", f"known: a list of numbers from 1 to {count}")
    if not ids:
        return {}
    vocab, longest = number(config, "vocab_size"), number(config, "ngram_size", default=3, least=2)
    heads = (longest - 1) * number(config, "heads_per_ngram", default=8)
    width, rest = divmod(number(config, "ple_embed_dim", default=number(config, "hidden_size")), heads)
    base = number(config, "ngram_vocab_size_base", default=20_000_000)
    if rest or heads > MAX_HEADS or base >= 1 << 32:
        what = f"config.json: {heads} heads of {base} rows"
        raise ModelError(what, f"known: up to {MAX_HEADS} that divide ple_embed_dim, below 2^32 rows")
    sizes, layers = primes_from(base, len({*ids}) * heads), sorted({*ids})
    seed, ends = number(config, "seed", default=1234, least=0), config.get("eos_token_id")
    end = number({"eos_token_id": ends[0] if isinstance(ends, list) and ends else ends}, "eos_token_id", least=0)
    padding, found = number(config, "make_ngram_vocab_size_divisible_by", default=128), {}
    for index, layer in enumerate(layers):
        own = sizes[index * heads : (index + 1) * heads]
        spec = NGramSpec(hash_factors(vocab, longest, seed + LAYER_SEED * index), own, end)
        found[layer - 1] = _memory(config, spec, streams, -(-sum(own) // padding) * padding, width)
    return found


def _stored_memories(config: Config, streams: int) -> dict[int, NGramMemoryConfig]:
    """`_memories` of a GGUF file, which has one table, and the numbers that hashes are made of."""
    if not (layers := _listed(config, "ple_layers")):
        return {}
    factors, sizes, offsets = (
        _listed(config, f"ple_{key}") for key in ("layer_multipliers", "head_vocab_sizes", "head_offsets")
    )
    longest, rows = number(config, "ngram_size", least=2), number(config, "vocab_size_per_layer_input")
    heads, most = (longest - 1) * number(config, "heads_per_ngram"), (1 << 63) // number(config, "vocab_size")
    counts = (len(layers), len(factors), len(sizes)) == (1, longest, heads) and heads <= MAX_HEADS
    if not counts or offsets != [0, *itertools.accumulate(sizes)][:-1] or sum(sizes) > rows:
        what = f"layers {layers} read {heads} hashes by {factors} to {sizes} of {rows} rows from {offsets}"
        raise ModelError(what, "convert the model again")
    if min(sizes) < 1 or not 0 <= min(factors) <= max(factors) < most:
        raise ModelError(f"hashes by {factors} to {sizes} rows", f"known: factors below {most}, a row or more")
    spec = NGramSpec(tuple(factors), tuple(sizes), number(config, "ple_eos_token_id", least=0))
    return {layers[0]: _memory(config, spec, streams, rows, number(config, "hidden_size_per_layer_input"))}


def _memory(config: Config, spec: NGramSpec, streams: int, rows: int, width: int) -> NGramMemoryConfig:
    taps, vocab = number(config, TAPS, default=4, least=2), number(config, "vocab_size")
    if spec.longest > MAX_NGRAM or taps > MAX_NGRAM or vocab >= 1 << 24:
        what = f"config.json: ngram_size is {spec.longest}, {TAPS} {taps}, over {vocab} tokens"
        raise ModelError(what, f"known: up to {MAX_NGRAM}, below 2^24 tokens")
    return NGramMemoryConfig(spec=spec, rows=rows, width=width, streams=streams, taps=taps, dilation=spec.longest)


SHARD = re.compile(r"(.*\.memory\.embed_tokens)\.shard_(\d+)\.weight")
UNREAD = re.compile(
    r".*\.memory\.ple_embedding\.(layer_multipliers|ngram_heads_\w+|hashstats_\w+|token_lookup)"
    r"|(mtp\.\d\.)?streams\.block_inject.*"
)
"""Computed here from the config, or without use."""
FUSED = ("fc_embedding", "fc_hidden")
INDEXER = ".self_attn.indexer.index_qk_proj.weight"


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: joins the parts of tables and an MTP module's projections, splits those of indexers."""
    ours: dict[str, RawTensor] = {}
    memory = next((i for i, layer in enumerate(config.layers) if layer.memory), None)
    shards: dict[str, dict[int, RawTensor]] = {}
    for name, tensor in tensors.items():
        stem, _, part = name.removesuffix(".weight").rpartition(".")
        if match := SHARD.fullmatch(name):
            shards.setdefault(f"{match[1]}.weight", {})[int(match[2])] = tensor
        elif name == "embed_tokens_per_layer.weight" and memory is not None:
            ours[f"layers.{memory}.memory.embed_tokens.weight"] = tensor
        elif from_gguf and name.endswith(".memory.conv1d.weight") and len(tensor.shape) == 2:
            ours[name] = tensor.shaped(tensor.shape[0], 1, tensor.shape[1])
        elif name.endswith(INDEXER):
            ours |= _indexer_parts(stem, tensor, config)
        elif part == FUSED[0] and (other := tensors.get(f"{stem}.{FUSED[1]}.weight")) is not None:
            joined = f"{stem}.projection.weight"
            ours[joined] = JoinedColumns(joined, (tensor, other))
        elif part not in FUSED and not UNREAD.fullmatch(name):
            ours[name] = tensor
    for name, parts in shards.items():
        ours[name] = JoinedRows(name, tuple(parts[index] for index in sorted(parts)))
    return _gated_delta.adapt(ours, config, from_gguf)


def _indexer_parts(stem: str, tensor: RawTensor, config: DecoderConfig) -> dict[str, RawTensor]:
    spec = _spec(config)
    queries = spec.num_heads * spec.head_dim
    if tensor.shape[0] != queries + spec.head_dim:
        return {f"{stem}.q_proj.weight": tensor}  # the loader reports the wrong shape
    return {**row_parts(tensor, {f"{stem}.q_proj.weight": queries, f"{stem}.k_proj.weight": spec.head_dim})}


def _spec(config: DecoderConfig) -> IndexSpec:
    assert config.mtp_layer and isinstance(config.mtp_layer.mixer, AttentionConfig) and config.mtp_layer.mixer.indexer
    return config.mtp_layer.mixer.indexer.spec


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    """Family.restore: inverse of `adapt`."""
    theirs: Arrays = {}
    for name, array in _gated_delta.restore(arrays, config, joined=False).items():
        stem, _, part = name.removesuffix(".weight").rpartition(".")
        if stem.endswith(".indexer") and part in ("q_proj", "k_proj"):
            if part == "q_proj":
                theirs[f"{stem}.index_qk_proj.weight"] = np.concatenate((array, arrays[f"{stem}.k_proj.weight"]))
        elif part == "projection":
            theirs |= {f"{stem}.{name}.weight": half for name, half in zip(FUSED, np.hsplit(array, 2), strict=True)}
        else:
            theirs[name] = array
    return theirs


NAMES = Names(
    {
        **_gated_delta.NAMES.prefixes,
        "model.hyper_connection_mixer.": "streams.",
        "mtp.hyper_connection_mixer.": "mtp.{i}.streams.",
        **{f"mtp.{part}.": f"mtp.{{i}}.{part}." for part in FUSED},
    },
    parts={
        **_gated_delta.NAMES.parts,
        ".attn_hyper_connection.": ".mixer_streams.",
        ".mlp_hyper_connection.": ".mlp_streams.",
        ".ple.ple_embedding.ngram_embedding.": ".memory.embed_tokens.",
        ".ple.": ".memory.",
        **{f".norm_{part}.": f".{part}_norm." for part in ("key", "query", "conv")},
        **{f".indexer.{part}_layernorm.": f".indexer.{part}_norm." for part in "qk"},
    },
    gguf=_gated_delta.NAMES.gguf,
)
SMALL: dict[str, Any] = {
    **_gated_delta.SMALL, **_gated_delta.SMALL_EXPERTS, "output_gate_type": "sigmoid", "hc_count": 3, "hc_lowrank": 10,
    "ple_layer_ids": [1], "ple_embed_dim": 24, "ple_conv_kernel_size": 3, "ngram_size": 3, "heads_per_ngram": 2,
    "ngram_vocab_size_base": 60, "make_ngram_vocab_size_divisible_by": 16, "indexer_n_heads": 12, "indexer_kv_heads": 1,
    "indexer_head_dim": 14, "indexer_budget": 12, "indexer_compress_ratio": 3, "mtp_num_hidden_layers": 1,
}  # fmt: skip
FAMILY = Family(
    parse=parse,
    defaults={**_gated_delta.DEFAULTS, "num_key_value_heads": 2, "num_experts_per_tok": 10},
    harmless={
        **_gated_delta.HARMLESS,
        "split_ngram_parts": "given by the tensors",
        "ple_embedding_dtype": "given by the tensors",
        **dict.fromkeys(
            ("ple_embed_dim", "ple_conv_kernel_size", "ngram_size", "heads_per_ngram", "ngram_vocab_size_base", "seed",
             "make_ngram_vocab_size_divisible_by", "indexer_kv_heads", "indexer_head_dim", "indexer_budget",
             "indexer_compress_ratio"), "used only by memories and indexers"),
    },
    names=NAMES,
    shifted_norms=_gated_delta.SHIFTED_NORMS,
    adapt=adapt,
    restore=restore,
    whole_in_gguf=(".projection.weight", ".indexer.q_proj.weight", ".indexer.k_proj.weight"),
    head=HeadSpec(tap="streams", recycle="streams", output_norm=False, joint_norm=True),
    mtp=MTPLayout(
        title="Qwen3.8-Flash-Next", count_key="mtp_num_hidden_layers", served=1,
        llama_cpp=(LLAMA_CPP,), concat="sum", not_xllm="xLLM has no draft of this type",
    ),
    aliases=("qwen4_exp_text", LLAMA_CPP),
    small={"model_type": "qwen4_exp_text", "architectures": ["Qwen4ExpForCausalLM"], **SMALL},
    scratch={
        **_gated_delta.SCRATCH_WITH_EXPERTS, "hc_count": 4, "hc_lowrank": 32, "ple_embed_dim": 64,
        "ngram_vocab_size_base": 1000, "indexer_n_heads": 4, "indexer_head_dim": 32, "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
)  # fmt: skip
