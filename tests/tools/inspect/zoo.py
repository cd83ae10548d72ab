"""Synthetic checkpoints of every family with MTP heads: safetensors headers over sparse files.

The config keys of a family and some names of its released tensors are handwritten here, unless family_rows.py has
them. The other tensors are those of the family's tiny model. For families that are only described, they are the
declared ones.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from headstart.formats.base import BITS, strip_wrapper
from headstart.formats.sizes import Sizes
from headstart.formats.tensor_parts import MTP, part_of
from headstart.models.families import FoundFamily, find_mtp_family, mtp_families
from headstart.models.mtp import MTPLayout, count_keys

Tensors = dict[str, tuple[str, tuple[int, ...]]]
H, V, N = 32, 96, 4
SIZES = {
    "hidden_size": H, "vocab_size": V, "num_hidden_layers": N, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 40, "max_position_embeddings": 512,
}  # fmt: skip
MLA = {"q_lora_rank": 12, "kv_lora_rank": 20, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
MOE = {
    "n_routed_experts": 3, "n_shared_experts": 1, "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
}  # fmt: skip
DSA = {"index_n_heads": 3, "index_head_dim": 4, "index_topk": 8}
QWEN_MOE = {"num_experts": 3, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 28}
NEXTN = "num_nextn_predict_layers"
V4 = {
    "model_type": "deepseek_v4", **MOE, "q_lora_rank": 12, "hc_mult": 2, "o_groups": 2, "o_lora_rank": 6,
    "num_key_value_heads": 1, "index_head_dim": 6, "compress_ratios": [4, 128, 0, 0, 0, 0, 0],
}  # fmt: skip
DSPARK = {
    "dspark_block_size": 5, "dspark_noise_token_id": 3, "dspark_markov_rank": 6, "dspark_target_layer_ids": [2, 3],
}  # fmt: skip


@dataclass(frozen=True)
class SyntheticFamily:
    """A family's checkpoint. `config`: keys beside those of the tiny model. `names`: some handwritten MTP tensors that
    `inspect` must expect. `key`: count key of the config (None: the family has none). `nested`: config key of the
    language model. `wrapper`: prefix of tensor names."""

    config: dict[str, Any]
    names: dict[str, tuple[int, ...]]
    key: str | None = NEXTN
    count: int = 1
    nested: str = ""
    wrapper: str = "model."
    renamed: Mapping[str, str] = field(
        default_factory=dict
    )  # for described families: declared name -> name in the checkpoint


def deepseek(kind: str, **more: Any) -> SyntheticFamily:
    names = {"model.layers.4.eh_proj.weight": (H, 2 * H), "model.layers.4.shared_head.norm.weight": (H,)}
    options = {name: more.pop(name) for name in ("key", "nested", "wrapper") if name in more}
    if wrapper := options.get("wrapper"):
        names = {name.replace("model.", wrapper, 1): shape for name, shape in names.items()}
    return SyntheticFamily({"model_type": kind, **MLA, **MOE, **more}, names, **options)


def qwen(kind: str, fc: str = "mtp.fc.weight", **more: Any) -> SyntheticFamily:
    options = {name: more.pop(name) for name in ("key", "nested", "names") if name in more}
    names = options.pop("names", {fc: (H, 2 * H), "mtp.layers.0.self_attn.q_proj.weight": (64, H)})
    return SyntheticFamily(
        {"model_type": kind, **more}, names, wrapper="", **{"key": "mtp_num_hidden_layers", **options}
    )


ZOO: dict[str, SyntheticFamily] = {
    "deepseek_v3": deepseek("deepseek_v3"),
    "deepseek_v32": deepseek("deepseek_v32", **DSA),
    "deepseek_v41": SyntheticFamily(
        {**V4, **DSPARK, "model_type": "deepseek_v41", "compress_ratios": [0, 2, 2, 1], "engram_layer_ids": []},
        {
            "mtp.0.main_proj.weight": (H, 2 * H), "mtp.1.attn.wo_a.weight": (12, 16),
            "mtp.2.markov_head.head.weight": (V, 6), "mtp.2.confidence_head.proj.weight": (1, H + 6)},
        count=3, nested="text_config", wrapper=""),
    "deepseek_v4_dspark": SyntheticFamily(
        {**V4, **DSPARK},
        {
            "mtp.0.main_proj.weight": (H, 2 * H), "mtp.0.main_norm.weight": (H,), "mtp.1.attn.wo_a.weight": (12, 16),
            "mtp.2.hc_head_fn": (2, 2 * H), "mtp.2.markov_head.markov_w2.weight": (V, 6),
            "mtp.2.confidence_head.proj.weight": (1, H + 6)},
        key="n_mtp_layers", count=3, wrapper=""),
    "deepseek_v4": SyntheticFamily(
        V4,
        {"mtp.0.e_proj.weight": (H, H), "mtp.0.hc_head_fn": (2, 2 * H), "mtp.0.attn.wo_a.weight": (12, 16)}, wrapper="",
    ),
    "glm4_moe": SyntheticFamily(
        {"model_type": "glm4_moe", **MOE, "use_qk_norm": True},
        {"model.layers.4.eh_proj.weight": (H, 2 * H), "model.layers.4.self_attn.q_norm.weight": (8,)}),
    "glm_moe_dsa": deepseek("glm_moe_dsa", indexer_types=["full"] * 4, **DSA),
    "glm5_next": deepseek(
        "glm5_next", nested="text_config", wrapper="model.language_model.", **{**DSA, "qk_rope_head_dim": 0},
        index_kpool=2),
    "glm_ocr": SyntheticFamily({"model_type": "glm_ocr"}, {"model.language_model.layers.4.enorm.weight": (H,)},
                      nested="text_config", wrapper="model.language_model."),
    "qwen3_next": qwen("qwen3_next", key=None, **QWEN_MOE),
    "qwen3_5": qwen("qwen3_5", nested="text_config"),
    "qwen3_5_moe": qwen("qwen3_5_moe", nested="text_config", **QWEN_MOE),
    "qwen4_exp": qwen(
        "qwen4_exp", names={"mtp.fc_embedding.weight": (H, H), "mtp.pre_fc_norm_hidden.weight": (4 * H,)},
        nested="text_config", hc_count=4, **QWEN_MOE),
    "mimo": SyntheticFamily(
        {"model_type": "mimo"},
        {"model.mtp_layers.0.input_proj.weight": (H, 2 * H), "model.mtp_layers.0.token_layernorm.weight": (H,)}),
    "mimo_v2": SyntheticFamily(
        {"model_type": "mimo_v2_flash", "swa_num_key_value_heads": 1, "v_head_dim": 6, "swa_v_head_dim": 6},
        {"model.mtp.layers.2.self_attn.k_proj.weight": (8, H), "model.mtp.layers.0.self_attn.v_proj.weight": (6, H)},
        key=None, count=3),
    "step3p5": SyntheticFamily(
        {"model_type": "step3p5", "layer_types": ["full_attention"] * 7},
        {"model.layers.6.transformer.shared_head.output.weight": (V, H), "model.layers.5.eh_proj.weight": (H, 2 * H)},
        count=3, renamed={"shared_head.head.": "transformer.shared_head.output."}),
    "longcat_flash": SyntheticFamily({"model_type": "longcat_flash", **MLA, "ffn_hidden_size": 40},
                            {"model.mtp.layers.0.enorm.m.weight": (H,), "model.mtp.norm.weight": (H,)}, key=None),
    "exaone4_5": qwen("exaone4_5", key=NEXTN, nested="text_config", names={"mtp.norm.weight": (H,)}),
    "hy_v4": SyntheticFamily(
        {"model_type": "hy_v4", **MLA, **MOE, **DSA, "indexer_types": ["full"] * 4},
        {"model.mtp_layers.0.final_layernorm.weight": (H,)}),
    "bailing_hybrid": SyntheticFamily(
        {"model_type": "bailing_hybrid", **MLA, "num_experts": 3, "moe_intermediate_size": 24, "n_group": 1,
         "topk_group": 1, "num_experts_per_tok": 2, "short_conv_kernel_size": 4},
        {"model.layers.4.attention.dense.weight": (H, 40), "model.layers.4.final_layernorm.weight": (H,)},
        renamed={"self_attn.o_proj.": "attention.dense.", "self_attn.": "attention."}),
    "pangu_ultra_moe": deepseek("pangu_ultra_moe"),
    "minimax_m3": SyntheticFamily(
        {"model_type": "minimax_m3_vl", "moe_layer_freq": [0, 1, 1, 1]},
        {"language_model.model.mtp.layers.1.transformer_layer.self_attn.q_proj.weight": (H, H)},
        key="num_mtp_modules", count=2, nested="text_config", wrapper="language_model.model."),
    "inkling": SyntheticFamily(
        {"model_type": "inkling_model"},
        {"model.mtp.layers.0.input_proj.weight": (H, 2 * H), "model.mtp.layers.0.embed_norm.weight": (H,)},
        key="mtp_config.num_nextn_predict_layers"),
    "kimi_k3": deepseek(
        "kimi_k3", nested="text_config", wrapper="language_model.model.", n_routed_experts=None, num_experts=3),
    "dots3_note": SyntheticFamily({"model_type": "dots3_note"},
                         {"model.mtp.embed_tokens.weight": (V, H), "model.layers.4.eh_proj.weight": (H, 2 * H)}, None),
}  # fmt: skip


def derived(name: str, layout: MTPLayout) -> SyntheticFamily:
    """A supported family, with the first and last MTP tensor of its tiny model; family_rows.MTPModule has all names."""
    entry = SyntheticFamily({"model_type": name}, {}, layout.count_key, wrapper="")
    found = {name: shape for name, (_, shape) in heads(entry).items()}
    return replace(entry, names=dict([*found.items()][:: len(found) - 1]))


def family_of(entry: SyntheticFamily) -> FoundFamily:
    return find_mtp_family(entry.config)


def text_of(entry: SyntheticFamily) -> dict[str, Any]:
    """Config keys of the language model without the count key."""
    family = family_of(entry).family
    small = {} if family.unsupported else family.tiny_config()
    return {key: value for key, value in {**small, **SIZES, **entry.config}.items() if key not in count_keys()}


def config_of(entry: SyntheticFamily, count: int | None = None) -> dict[str, Any]:
    """config.json with `count` as the value of the count key (None: as released)."""
    text = text_of(entry)
    key = entry.key or NEXTN
    if entry.key or count is not None:
        target = text
        *path, last = key.split(".")
        for step in path:
            inner = {**target.get(step, {})}
            target[step] = inner
            target = inner
        target[last] = entry.count if count is None else count
    if not entry.nested:
        return text
    return {"model_type": text["model_type"], entry.nested: {**text, "model_type": f"{text['model_type']}_text"}}


def trunk(entry: SyntheticFamily) -> Tensors:
    wrapper = entry.wrapper or "model."
    tensors: Tensors = {f"{wrapper}embed_tokens.weight": ("BF16", (V, H)), "lm_head.weight": ("BF16", (V, H))}
    for layer in range(N):
        tensors[f"{wrapper}layers.{layer}.self_attn.q_proj.weight"] = ("BF16", (H, H))
        tensors[f"{wrapper}layers.{layer}.mlp.up_proj.weight"] = ("BF16", (40, H))
    return tensors | {f"{wrapper}norm.weight": ("BF16", (H,))}


def heads(entry: SyntheticFamily) -> Tensors:
    """The MTP tensors of a complete checkpoint."""
    found = family_of(entry)
    if not found.layout.tensors:  # a supported family: the MTP tensors of its tiny model
        _, arrays = found.family.tiny(**text_of(entry), **{NEXTN: entry.count})
        layers = int(text_of(entry)["num_hidden_layers"])
        return {
            entry.wrapper + strip_wrapper(name) if entry.wrapper else name: ("BF16", array.shape)
            for name, array in arrays.items()
            if part_of(name, layers) == MTP
        }
    tensors: Tensors = {}
    for module in range(entry.count):
        shapes = found.layout.tensors(Sizes(config_of(entry)), module, N + module, ())
        for declared, dims in shapes.items():
            if not declared.startswith("?"):
                name = declared
                for ours, theirs in entry.renamed.items():
                    name = name.replace(f".{ours}", f".{theirs}")
                shape = tuple(size if isinstance(size, int) and size else 16 for size in dims)
                tensors[entry.wrapper + name] = ("BF16", shape)
    return tensors


def write(folder: Path, config: Mapping[str, Any], tensors: Tensors, shards: int = 1) -> Path:
    """A checkpoint directory with these headers and sparse data."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    files = ["model.safetensors"] if shards == 1 else [f"model-{i}.safetensors" for i in range(shards)]
    for index, file in enumerate(files):
        write_file(folder / file, {name: tensors[name] for name in names[index::shards]})
    if shards > 1:
        weight_map = {name: files[index % shards] for index, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def write_file(path: Path, tensors: Tensors) -> Path:
    header, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        size = math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    return path


ZOO |= {name: derived(name, layout) for name, layout in mtp_families().items() if name not in ZOO}
