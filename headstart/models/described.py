"""Families that the engine cannot run, with their sizes and the missing feature, for `plan`, `launch` and `inspect`.

`read_common` reads their configs, and those of unknown families, by the keys that most config.json files share.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headstart.formats.sizes import SIZE_KEYS
from headstart.heads.base import HeadSpec
from headstart.kernels.ops import RopeSpec
from headstart.kernels.specs import DeltaSpec, IndexSpec, RouterSpec, StreamSpec
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.delta import DeltaConfig
from headstart.layers.indexer import BlockIndexerConfig, IndexerConfig
from headstart.layers.kda import KDAConfig
from headstart.layers.mla import MLAConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig
from headstart.layers.parts import MixerConfig
from headstart.models import _mamba2, keys, mimo_v2_flash
from headstart.models.base import Family
from headstart.models.described_mtp import LAYOUTS
from headstart.models.keys import FULL, LINEAR, SLIDING, SPARSE, Config, flag, number
from headstart.models.mtp import INDEXER_KEYS

MAMBA = "mamba"
NO_ROPE = RopeSpec((), 0)
ACTIVE_EXPERTS = ("num_experts_per_tok", "top_k_experts", "num_experts_per_token", "moe_topk", "moe_top_k", "moe_k")
SHARED_WIDTHS = (
    "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size",
    "share_expert_dim",
)  # fmt: skip
FIRST_SPARSE = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
SPARSE_STEPS = ("interleave_moe_layer_step", "decoder_sparse_step", "moe_layer_interval")
UNGATED = ("relu2", "relu", "gelu_ungated")  # values of `mlp_hidden_act` for an MLP without gate_proj


def read_common(config: Config) -> DecoderConfig:
    """Sizes and layers by the keys that most families share. Raises ModelError for missing or impossible sizes."""
    config = keys.text_config(config)
    count, hidden = keys.num_layers(config), number(config, "hidden_size")
    num_streams = number(config, "hc_mult", "hc_count", "hc_num_streams", default=1)
    streams = StreamSpec(num_streams, 0, 0.0) if num_streams > 1 else None
    kinds, sparse = _kinds(config, count), _sparse_layers(config, count)
    mixers: dict[str, MixerConfig] = {kind: _mixer(config, kind, hidden) for kind in {*kinds}}
    feeds = {each: _experts(config) if each else _mlp(config) for each in {*sparse}}
    layers = [
        LayerConfig(mixer=mixers[kind], mlp=feeds[each], eps=1e-6, streams=streams)
        for kind, each in zip(kinds, sparse, strict=True)
    ]
    for index, source in _index_sources(config, count).items():
        mixer = layers[index].mixer
        if isinstance(mixer, MLAConfig) and mixer.indexer:
            layers[index] = replace(layers[index], mixer=mixer.sharing(source))
    attending = [layer for layer in layers if layer.mixer.attention_spec and not layer.mixer.attention_spec.window]
    last = (attending or layers)[-1]
    return keys.decoder(
        config, layers, eps=1e-6, max_length=number(config, "max_position_embeddings", default=2048),
        mtp_layer=LayerConfig(mixer=last.mixer, mlp=layers[-1].mlp, eps=1e-6, streams=streams),
    )  # fmt: skip


def _object(config: Config, key: str) -> dict[str, Any]:
    """The object under a key of the config; empty if there is none."""
    inner = config.get(key)
    return inner if isinstance(inner, dict) else {}


def _kinds(config: Config, count: int) -> list[str]:
    """Kind of each layer: FULL, SLIDING, LINEAR, MAMBA, or another word of `layer_types`, which is treated as FULL."""
    every, group = (number(config, key, default=0, least=0) for key in ("full_attention_interval", "layer_group_size"))
    linear = _object(config, "linear_attn_config")
    if isinstance(kinds := config.get("layer_types"), list) and len(kinds) >= count:
        return [str(kind) for kind in kinds[:count]]
    if isinstance(full := linear.get("full_attn_layers"), list):  # counted from 1
        return [FULL if i + 1 in full else LINEAR for i in range(count)]
    if every or group:
        return [LINEAR if (i + 1) % (every or group) else FULL for i in range(count)]
    windows = keys.windows(config) if "use_sliding_window" in config else keys.windows_in_turn(config)
    return [SLIDING if window else FULL for window in windows]


def _mixer(config: Config, kind: str, hidden: int) -> MixerConfig:
    if kind == MAMBA:
        return _mamba2.mixer(config)
    if kind == LINEAR:
        return _linear(config, hidden)
    window = number(config, "sliding_window") if kind == SLIDING else 0
    if config.get("kv_lora_rank"):
        return _latent(config)
    heads = number(config, "num_attention_heads")
    groups = number(config, "num_key_value_heads", "num_attention_groups", default=heads)
    attention = keys.attention(
        keys.inside(config, {"num_key_value_heads": groups}),
        window=window,
        value_dim=number(config, "v_head_dim", default=0, least=0),
        gated=flag(config, "attn_output_gate", config.get("linear_num_value_heads") is not None),
        rotated=False,
    )
    return attention if window else replace(attention, indexer=_block_indexer(config))


def _block_indexer(config: Config) -> BlockIndexerConfig | None:
    """The indexer of attention over selected blocks of positions, as in MiniMax-M3; None without one."""
    own = {**config, **_object(config, "sparse_attention_config")}
    heads = number(own, "sparse_num_index_heads", "indexer_n_heads", default=0, least=0)
    heads = heads or (number(own, "index_n_heads", default=0, least=0) if own.get("index_topk_blocks") else 0)
    if not heads:
        return None
    blocks = number(own, "sparse_topk_blocks", "index_topk_blocks", default=1)
    size = number(own, "sparse_block_size", "index_block_size", "indexer_budget")
    dim = number(own, "sparse_index_dim", "index_head_dim", "indexer_head_dim")
    return BlockIndexerConfig(spec=IndexSpec(heads, dim, blocks * size), rope=None, eps=1e-6)


def _linear(config: Config, hidden: int) -> MixerConfig:
    """Gated DeltaNet if the config has its keys; else Kimi delta attention with low-rank decays and gates. The state of
    lightning attention has the same size."""
    value_heads = number(config, "linear_num_value_heads", default=0, least=0)
    if value_heads:
        sizes = (
            number(config, key) for key in ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim")
        )
        key_heads, key_dim, value_dim = sizes
        delta = DeltaSpec(key_heads, value_heads, key_dim, value_dim)
        return DeltaConfig(delta, number(config, "linear_conv_kernel_dim", default=4))
    own = {**config, **_object(config, "linear_attn_config")}
    heads = number(own, "num_heads", "linear_num_heads", "num_attention_heads")
    dim = number(own, "linear_head_dim", "head_dim", default=hidden // heads)
    width = number(config, "linear_conv_kernel_dim", "short_conv_kernel_size", default=4)
    return KDAConfig(DeltaSpec(heads, heads, dim, dim, by_channel=True), width, rank=dim)


def _latent(config: Config) -> MLAConfig:
    indexed = config.get("index_topk") is not None
    heads, dim, top_k = (number(config, key, default=None if indexed else 1) for key in INDEXER_KEYS)
    spec = IndexSpec(heads, dim, top_k) if indexed else None
    return MLAConfig(
        num_heads=number(config, "num_attention_heads"), query_rank=number(config, "q_lora_rank", default=0, least=0),
        latent=number(config, "kv_lora_rank"), nope=number(config, "qk_nope_head_dim"),
        rotary=number(config, "qk_rope_head_dim", least=0), value=number(config, "v_head_dim"), rope=NO_ROPE, scale=1.0,
        indexer=IndexerConfig(spec=spec, rope=NO_ROPE) if spec else None,
    )  # fmt: skip


def _index_sources(config: Config, count: int) -> dict[int, int]:
    """Layer without its own indexer -> the earlier layer whose selection it uses."""
    kinds = config.get("indexer_types") or config.get("index_topk_pattern")
    every = number(config, "index_topk_freq", default=1)
    offset = number(config, "index_skip_topk_offset", default=2, least=0)
    own = [str(each)[:1] in "fF" for each in kinds] if isinstance(kinds, str | list) else []
    own = own if len(own) >= count else [max(i - offset + 1, 0) % every == 0 for i in range(count)]
    return {i: max((j for j in range(i) if own[j]), default=0) for i in range(1, count) if not own[i]}


def _sparse_layers(config: Config, count: int) -> list[bool]:
    """For each layer, whether it has experts."""
    if not _num_experts(config):
        return [False] * count
    for key, word in (("mlp_layer_types", SPARSE), ("moe_layer_freq", 1)):
        if isinstance(kinds := config.get(key), list) and len(kinds) >= count:
            return [kind == word for kind in kinds[:count]]
    listed = config.get("mlp_only_layers")
    dense = listed if isinstance(listed, list) else []
    first, step = number(config, *FIRST_SPARSE, default=0, least=0), number(config, *SPARSE_STEPS, default=1)
    return [i >= first and (i + 1) % step == 0 and i not in dense for i in range(count)]


def _num_experts(config: Config) -> int:
    return number(config, *SIZE_KEYS["experts"], default=0, least=0)


def _mlp(config: Config) -> MLPConfig:
    inner = number(config, "dense_intermediate_size", "intermediate_size_mlp", "intermediate_size", "ffn_hidden_size")
    return MLPConfig(inner=inner, gated=config.get("mlp_hidden_act") not in UNGATED)


def _experts(config: Config) -> MoEConfig:
    router = RouterSpec(num_experts=_num_experts(config), top_k=number(config, *ACTIVE_EXPERTS))
    inner = number(config, "moe_intermediate_size", "expert_ffn_hidden_size", "intermediate_size")
    shared = inner * number(config, *SIZE_KEYS["shared_experts"], default=0, least=0)
    return keys.experts(
        config, router, inner=inner, shared=number(config, *SHARED_WIDTHS, default=shared, least=0), activation="silu",
        gated=config.get("mlp_hidden_act") not in UNGATED, latent=number(config, "moe_latent_size", default=0, least=0),
    )  # fmt: skip


def _family(unsupported: str, *aliases: str) -> Family:
    return Family(parse=read_common, head=HeadSpec(), aliases=aliases, unsupported=unsupported)


_FAMILIES: Mapping[str, Family] = {
    "dots3_note": _family("latent attention with windows", "dots3_note_text", "dots3note"),
    "glm_ocr": _family("rotary positions of several axes", "glm_ocr_text"),
    "mamba2": _family("Mamba2 layers"),
    "mimo_v2": Family(
        parse=lambda config: mimo_v2_flash.parse(keys.inside(config, {"attention_projection_layout": "split"})),
        head=HeadSpec(),
        defaults=mimo_v2_flash.FAMILY.defaults,
        aliases=("mimo_v2_pro", "mimo_v2_omni"),
        unsupported="projections fused in the order of several devices, and images (MiMo-V2.5, Pro, Omni)",
    ),
    "minicpm3": _family("MiniCPM3's latent attention"),
    "nemotron_h_puzzle": _family("layers of several sizes (Puzzle)"),
    "pangu_ultra_moe": _family("norms on both sides of latent attention"),
    "phimoe": _family("sparse-mixer routing"),
}
DESCRIBED: Mapping[str, Family] = {name: replace(each, mtp=LAYOUTS.get(name)) for name, each in _FAMILIES.items()}
"""model_type -> a family that the engine cannot run; `Family.unsupported` names the missing feature."""
UNKNOWN = _family("a family file")  # for a config.json of any other model_type
