"""DeepSeek-V4.1: layers share compressed entries and selections, memories of n-grams.

Layers with a `compress_ratios` of 0 read a window only. `kv_source_layer_ids` names the layers that make entries, of 2
positions or of 1, and index keys of them; later layers read the pools of the last source before them.
`index_source_layer_ids` names the layers that select entries; later layers use the last selection. The indexers after
`candidate_source_layer_id` select within its best `candidate_topk_blocks` blocks of `candidate_block_size` entries.
DSpark drafts as in V4, from the streams before its target layers.

Formula: transformers `models/deepseek_v41` (0a2080b4), whose caches are rounded to FP8 and FP4 (here they are not);
vLLM 0.33 `models/deepseek_v41`: names of tensors, DSpark (`nvidia/dspark.py`).
"""

from dataclasses import replace
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.formats.rows import row_parts
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RawTensor
from headstart.kernels.specs import CandidateSpec, CompressSpec, NGramSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.compressed import CompressedConfig, CompressorConfig
from headstart.layers.ngram import NGramMemoryConfig, primes_from
from headstart.models import _deepseek_vision, deepseek_v4, keys
from headstart.models.base import Family
from headstart.models.deepseek_v4 import experts, stream_spec, window_mixer, with_drafter
from headstart.models.keys import Config, number
from headstart.models.mtp import DSPARK
from headstart.models.names import Names
from headstart.models.small import Arrays

LAYOUT = replace(DSPARK, title="DeepSeek-V4.1", count_key="num_nextn_predict_layers", per_layer=("compress_ratios",))
SEED, LAST_BIT = 10007, 1 << 63  # of factors of hashes
MAX_NGRAM, MAX_HEADS = 16, 256


def parse(config: Config) -> DecoderConfig:
    has_images = bool(config.get(_deepseek_vision.V41.key))
    config = keys.text_config(config)
    keys.refuse_others(config, {**deepseek_v4.SERVED, "gate_temp": 1.0})
    streams = replace(stream_spec(config), weighted_end=False, delayed=True)
    feed, memories = experts(config, hashed=False), _memories(config, streams.count, has_images)
    window = replace(window_mixer(config, compressed=False), head_norm=False)
    layers = [
        keys.layer(config, mixer, feed, streams=streams, memory=memories.get(index))
        for index, mixer in enumerate(_mixers(config, window))
    ]
    return with_drafter(config, layers, window, streams, layout=LAYOUT, after=0)


def _mixers(config: Config, window: CompressedConfig) -> list[CompressedConfig]:
    """The mixer of each layer."""
    count, ratios = keys.num_layers(config), config.get("compress_ratios")
    if not isinstance(ratios, list) or len(ratios) < count or any(each not in (0, 1, 2) for each in ratios):
        raise ModelError(f"config.json: compress_ratios must name {count} layers, by 0, 1 or 2")
    sources, selecting = (_layer_ids(config, f"{kind}_source_layer_ids", count) for kind in ("kv", "index"))
    if not sources <= selecting:
        raise ModelError("config.json: index_source_layer_ids must name all of kv_source_layer_ids")
    plain, candidates = replace(window_mixer(config, compressed=True), head_norm=False), _candidates(config, selecting)
    mixers: list[CompressedConfig] = []
    source = -1
    for layer, every in enumerate(ratios[:count]):  # those of DSpark's layers may follow
        source = layer if layer in sources else source
        if every and (source < 0 or ratios[source] != every):
            raise ModelError(f"config.json: layer {layer} needs a layer before it in kv_source_layer_ids, of its ratio")
        if not every:
            if layer in selecting:
                raise ModelError(f"config.json: layer {layer} selects entries, but its compress_ratios is 0")
            mixers.append(window)
            continue
        spec = CompressSpec(every, plain.head_dim)
        index = replace(deepseek_v4.index_spec(config, every, plain.rope), candidates=candidates.get(layer))
        own = replace(
            plain, compressor=CompressorConfig(spec=spec, rope=plain.rope, biased=False), index=(index, None),
            selects=layer in selecting,
        )  # fmt: skip
        mixers.append(own if source == layer else replace(own, source_layer=source))
    return mixers


def _layer_ids(config: Config, key: str, count: int) -> set[int]:
    """Layers under a key; those after the last layer of the model are left out."""
    ids = config.get(key) or []
    if not isinstance(ids, list) or any(not isinstance(each, int) or each < 0 for each in ids):
        raise ModelError(f"config.json: {key} is {ids!r}", "known: a list of layers, counted from 0")
    return {each for each in ids if each < count}


def _candidates(config: Config, selecting: set[int]) -> dict[int, CandidateSpec]:
    """Index of a layer -> its part in the selection among candidates."""
    source, ratios = number(config, "candidate_source_layer_id", default=-1, least=-1), config["compress_ratios"]
    layers = [source, *sorted(each for each in selecting if each > source)]
    if source < 0 or len(layers) == 1:
        return {}
    if source not in selecting or len({ratios[each] for each in layers}) > 1:
        what = f"config.json: candidate_source_layer_id is {source}, with compress_ratios of {ratios}"
        raise ModelError(what, "known: a layer of index_source_layer_ids, of the ratio of all later ones")
    sizes = number(config, "candidate_topk_blocks"), number(config, "candidate_block_size")
    return {each: CandidateSpec(*sizes, source=each == source) for each in layers}


def _memories(config: Config, streams: int, has_images: bool) -> dict[int, NGramMemoryConfig]:
    """Index of a layer -> its memory (hashes: see layers/ngram.py)."""
    ids = sorted(_layer_ids(config, "engram_layer_ids", keys.num_layers(config)))
    if not ids:
        return {}
    vocab, numbers = number(config, "vocab_size"), number(config, "engram_compressed_vocab_size")
    longest, heads = number(config, "engram_max_ngram_size", least=2), number(config, "engram_n_heads")
    base, end = number(config, "engram_vocab_size"), number(config, "engram_pad_token_id", "engram_pad_id", least=0)
    if longest > MAX_NGRAM or heads > MAX_HEADS or vocab >= 1 << 24 or base >= 1 << 32 or end >= vocab:
        what = f"config.json: engram_max_ngram_size is {longest}, with {heads} heads of {base} over {vocab} tokens"
        raise ModelError(what, f"known: up to {MAX_NGRAM}, {MAX_HEADS} heads, below 2^32 and 2^24 tokens")
    heads *= longest - 1
    sizes = primes_from(base, len(ids) * heads)
    parts = [sizes[i * heads : (i + 1) * heads] for i in range(len(ids))]
    rows = config.get("engram_num_embeddings") or [sum(each) for each in parts]
    is_list = isinstance(rows, list) and all(isinstance(each, int) for each in rows)
    if not is_list or len(rows) != len(ids) or any(count < sum(each) for count, each in zip(rows, parts, strict=True)):
        raise ModelError(f"config.json: engram_num_embeddings is {rows!r}", f"hashes reach {[*map(sum, parts)]}")
    found, width = {}, number(config, "engram_head_dim")
    for layer, own, count in zip(ids, parts, rows, strict=True):
        spec = NGramSpec(_factors(layer, longest, numbers), own, end, cuts=False)
        found[layer] = NGramMemoryConfig(
            spec=spec, rows=count, width=width, streams=streams, normalized=(vocab, numbers), images=has_images
        )
    return found


def _factors(layer: int, longest: int, numbers: int) -> tuple[int, ...]:
    """Odd factors below 2^63 / numbers."""
    bound = max(1, (LAST_BIT - 1) // numbers // 2)
    drawn = np.random.default_rng(SEED * layer).integers(0, bound, longest)
    return tuple(2 * int(each) + 1 for each in drawn)


JOINED = ".memory.kv_proj.weight"
FLAT = (".memory.key_norm.weight", ".memory.query_norm.weight")


def adapt(tensors: dict[str, RawTensor], config: DecoderConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """Family.adapt: as DeepSeek-V4's, and splits keys and values of memories."""
    ours: dict[str, RawTensor] = {}
    hidden = config.hidden_size
    for name, tensor in deepseek_v4.adapt(tensors, config, from_gguf).items():
        if name.endswith(JOINED):
            stem, num_keys = name.removesuffix("kv_proj.weight"), tensor.shape[0] - hidden
            ours |= row_parts(tensor, {f"{stem}key_proj.weight": num_keys, f"{stem}value_proj.weight": hidden})
        else:
            ours[name] = tensor.shaped(config.num_streams * hidden) if name.endswith(FLAT) else tensor
    return ours


def restore(arrays: Arrays, config: DecoderConfig) -> Arrays:
    """Family.restore: inverse of `adapt`."""
    theirs: Arrays = {}
    for name, array in arrays.items():
        if name.endswith(".memory.key_proj.weight"):
            value = arrays[name.replace("key_proj", "value_proj")]
            theirs[name.replace("key_proj", "kv_proj")] = np.concatenate((array, value))
        elif not name.endswith(".memory.value_proj.weight"):
            theirs[name] = array.reshape(config.num_streams, -1) if name.endswith(FLAT) else array
    return theirs


NAMES = Names(
    {
        "mtp.{i}.markov_head.embed.": "mtp.{i}.markov.embed.",
        "mtp.{i}.markov_head.head.": "mtp.{i}.markov.out.",
        **deepseek_v4.NAMES.prefixes,
    },
    parts={
        ".indexer.wk.": ".indexer.k_proj.",
        ".engram.embed.": ".memory.embed_tokens.",
        ".engram.wkv.": ".memory.kv_proj.",
        ".engram.q_weight": ".memory.query_norm.weight",
        ".engram.k_weight": ".memory.key_norm.weight",
        **deepseek_v4.NAMES.parts,
    },
)
SMALL: dict[str, Any] = {
    **deepseek_v4.SMALL, "compress_rates": None, "num_hash_layers": None, "num_nextn_predict_layers": 2,
    "num_hidden_layers": 6, "compress_ratios": [0, 2, 2, 1, 1, 1, 0, 0], "kv_source_layer_ids": [1, 3],
    "index_source_layer_ids": [1, 3, 5], "candidate_source_layer_id": 3, "candidate_topk_blocks": 4,
    "candidate_block_size": 3, "engram_layer_ids": [0, 2], "engram_vocab_size": 60, "engram_max_ngram_size": 4,
    "engram_n_heads": 2, "engram_head_dim": 12, "engram_pad_token_id": 4, "engram_compressed_vocab_size": 88,
    "rms_norm_eps": 1e-20, "n_routed_experts": 5, "dspark_block_size": 5, "dspark_markov_rank": 48,
    "dspark_noise_token_id": 130, "dspark_target_layer_ids": [0, 1], "dspark_n_routed_experts": 4,
    "dspark_num_experts_per_tok": 2,
}  # fmt: skip
FAMILY = Family(
    parse=parse,
    defaults={
        **deepseek_v4.FAMILY.defaults, "rms_norm_eps": 1e-20, "q_lora_rank": 1280, "index_n_heads": 32,
        "n_routed_experts": 384, "moe_intermediate_size": 2304, "engram_vocab_size": 16000000,
        "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256, "engram_pad_token_id": 2,
        "engram_compressed_vocab_size": 99092, "candidate_topk_blocks": 2048, "candidate_block_size": 8,
    },
    harmless={
        **deepseek_v4.FAMILY.harmless,
        **dict.fromkeys(("candidate_topk_blocks", "candidate_block_size"), "used only by a later indexer"),
        **dict.fromkeys(
            ("engram_vocab_size", "engram_num_embeddings", "engram_max_ngram_size", "engram_n_heads", "engram_head_dim",
             "engram_pad_token_id", "engram_pad_id", "engram_compressed_vocab_size"), "used only by memories"),
    },
    names=NAMES,
    vision=_deepseek_vision.V41,
    adapt=adapt,
    restore=restore,
    head=HeadSpec(tap="streams", recycle="streams"),
    mtp=LAYOUT,
    aliases=("deepseek_v41_text",),
    scratch={
        **deepseek_v4.FAMILY.scratch, "compress_rates": None, "num_hidden_layers": 4, "compress_ratios": [0, 2, 2, 1],
        "kv_source_layer_ids": [1, 3], "index_source_layer_ids": [1, 3], "engram_layer_ids": [],
        "dspark_block_size": None,
    },
    small={"model_type": "deepseek_v41_text", "architectures": ["DeepseekV41ForCausalLM"], **SMALL},
)  # fmt: skip
