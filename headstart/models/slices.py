"""Cuts a smaller model out of a checkpoint of nested models (`--slice`): the first channels, heads and experts.

Rule: Star Elastic (arXiv 2605.07182) sorts embedding channels, attention and Mamba heads, experts and their channels by
importance; a smaller model takes the first ones of each, of heads the first of each group. Norms stay as they are:
Megatron-LM's `megatron/elastification` gives masked channels the norm of the remaining ones.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from headstart import hub
from headstart.core import Int64
from headstart.errors import ModelError, UsageError
from headstart.files import user_path
from headstart.formats.base import Checkpoint, Tensor
from headstart.formats.cut import cut
from headstart.formats.json_object import read_object
from headstart.formats.safetensors import CONFIG
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.mamba2 import Mamba2Config
from headstart.layers.mlp import MLPConfig
from headstart.layers.moe import MoEConfig
from headstart.models.families import all_families
from headstart.models.tensors import find_family, read_config
from headstart.wording import option

Levels = Mapping[str, int]
"""Config key -> size of the nested parts of a dimension, as groups, heads of a group, columns of a head."""

AXES: Mapping[str, tuple[str, ...]] = {
    r"embed_tokens|lm_head": ("vocabulary", "hidden"),
    r"norm|.*layernorm|mtp\.\d+\.norm\w*": ("hidden",),
    r".*\.projection": ("hidden", "hidden hidden"),
    r".*\.self_attn\.q_proj": ("queries", "hidden"),
    r".*\.self_attn\.[kv]_proj": ("keys", "hidden"),
    r".*\.self_attn\.o_proj": ("hidden", "queries"),
    r".*\.mamba\.in_proj": ("inner inner states states heads", "hidden"),
    r".*\.mamba\.conv": ("inner states states",),
    r".*\.mamba\.(decay_rate|skip|step_bias)": ("heads",),
    r".*\.mamba\.norm": ("inner",),
    r".*\.mamba\.out_proj": ("hidden", "inner"),
    r".*\.mlp\.up_proj": ("mlp", "hidden"),
    r".*\.mlp\.down_proj": ("hidden", "mlp"),
    r".*\.mlp\.gate": ("experts", "hidden"),
    r".*\.experts\.\d+\.up_proj": ("expert", "latent"),
    r".*\.experts\.\d+\.down_proj": ("latent", "expert"),
    r".*\.shared_experts\.up_proj": ("shared", "hidden"),
    r".*\.shared_experts\.down_proj": ("hidden", "shared"),
    r".*\.fc1_latent_proj": ("latent", "hidden"),
    r".*\.fc2_latent_proj": ("hidden", "latent"),
}
"""Canonical name without its last word -> dimensions of rows and of columns; several lie one after the other."""
EQUAL = ("vocab_size", "head_dim", "ssm_state_size")  # sizes that are never cut
SCALES = ("weight_scale", "weight_scale_inv")  # last words of tensors with a value for several rows or columns
WORDS = ("weight", "bias", "e_score_correction_bias", "decay_rate", "skip", "step_bias", *SCALES)


def sliced(checkpoint: Checkpoint, name: str | None) -> Checkpoint:
    """The model of a config inside a checkpoint. name: a config.json, its folder or a Hub repo; None: the whole model.
    Raises UsageError for a config of no smaller model of the checkpoint, ModelError for tensors that are not cut."""
    if name is None:
        return checkpoint
    family, path = find_family(checkpoint), _config_file(name)
    if not family.nested or checkpoint.canonical_names:
        kind = "GGUF files" if checkpoint.canonical_names else f"{checkpoint.config['model_type']} models"
        known = ", ".join(name for name, each in all_families().items() if each.nested)
        raise UsageError(option("slice") + f": {kind} are not cut", f"known are safetensors of {known}")
    config = read_object(path)
    try:
        if config.get("model_type") != (model_type := checkpoint.config["model_type"]):
            raise ModelError(f"model_type is {config.get('model_type')!r}, the model's is {model_type!r}")
        sizes = family.read(config)
        kept = _kept(read_config(checkpoint, family), sizes)
    except ModelError as error:
        what = option("slice") + f": {path} is no slice of {checkpoint.name}: {error.message}"
        raise UsageError(what, error.hint or "give the config.json of a smaller model inside this one") from None
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        canonical = family.names.canonical(name)
        if canonical and not _left_out(canonical, sizes, kept):
            tensors[name] = _cut(tensor, canonical, kept)
    stored = {key: checkpoint.config[key] for key in ("quantization_config",) if key in checkpoint.config}
    files = (*checkpoint.files, path)  # the config is a part of the model's identity in caches
    return replace(checkpoint, config=config | stored, tensors=tensors, files=files, stray={})


def _config_file(name: str) -> Path:
    path = user_path(name)
    if not path.exists() and hub.is_repo(name):
        return hub.config_file(name)
    path = path / CONFIG if path.is_dir() else path
    if not path.is_file():
        raise UsageError(
            option("slice") + f": {path} is not a file", "give the config.json of the smaller model, or its folder"
        )
    return path


def _levels(config: DecoderConfig) -> dict[str, Levels]:
    """The levels of each dimension of AXES."""
    found: dict[str, Levels] = {"vocabulary": {"vocab_size": config.vocab_size}}
    found["hidden"] = {"hidden_size": config.hidden_size}
    for layer in (*config.layers, *([config.head_layer] if config.num_mtp else [])):
        mixer, mlp = layer.mixer, layer.mlp
        if isinstance(mixer, AttentionConfig):
            groups, size = {"num_key_value_heads": mixer.spec.num_kv_heads}, {"head_dim": mixer.spec.head_dim}
            each = {"num_attention_heads / num_key_value_heads": mixer.spec.num_heads // mixer.spec.num_kv_heads}
            found |= {"keys": groups | size, "queries": groups | each | size}
        elif isinstance(mixer, Mamba2Config):
            scan, groups = mixer.scan, {"n_groups": mixer.scan.num_groups}
            heads = groups | {"mamba_num_heads / n_groups": scan.num_heads // scan.num_groups}
            found |= {"heads": heads, "inner": heads | {"mamba_head_dim": scan.head_dim}}
            found["states"] = groups | {"ssm_state_size": scan.state_dim}
        if isinstance(mlp, MLPConfig):
            found["mlp"] = {"intermediate_size": mlp.inner}
        elif isinstance(mlp, MoEConfig):
            found["experts"] = {"n_routed_experts": mlp.router.num_experts}
            found["expert"] = {"moe_intermediate_size": mlp.inner}
            found["shared"] = {"moe_shared_expert_intermediate_size": mlp.shared}
            found["latent"] = {"moe_latent_size": mlp.latent} if mlp.latent else found["hidden"]
    return found


def _kept(model: DecoderConfig, smaller: DecoderConfig) -> dict[str, tuple[int, Int64]]:
    """Dimension -> (its size in the model, indices that stay). Raises ModelError if `smaller` is no slice."""
    kinds = [[(type(layer.mixer), type(layer.mlp)) for layer in each.layers] for each in (smaller, model)]
    if kinds[0] != kinds[1]:
        raise ModelError("its layers are of other kinds, or of another number")
    kept, smaller_levels = {}, _levels(smaller)
    for name, levels in _levels(model).items():
        sizes = smaller_levels.get(name, levels)
        for key, size in levels.items():
            if (given := sizes.get(key)) is None or given > size or (key in EQUAL and given != size):
                raise ModelError(f"{key} is {given}, the model's is {size}")
        size = prod(levels.values())
        grid = np.arange(size).reshape(*levels.values())
        kept[name] = size, grid[tuple(map(slice, sizes.values()))].reshape(-1)
    return kept


def _left_out(name: str, smaller: DecoderConfig, kept: Mapping[str, tuple[int, Int64]]) -> bool:
    """Whether a tensor belongs to an expert or an MTP module that the slice does not have. name: its canonical name."""
    if name.startswith("mtp.") and not smaller.num_mtp:
        return True
    expert = re.search(r"\.experts\.(\d+)\.", name)
    return expert is not None and int(expert[1]) >= len(kept["experts"][1])


def _cut(tensor: Tensor, name: str, kept: Mapping[str, tuple[int, Int64]]) -> Tensor:
    """A tensor with the rows and columns that stay. name: its canonical name. Raises ModelError."""
    if prod(tensor.shape) == 1:  # a scale of the whole matrix
        return tensor
    axes = next((axes for pattern, axes in AXES.items() if re.fullmatch(rf"({pattern})(\.\w+)?", name)), None)
    if axes is None or name.rpartition(".")[2] not in WORDS:
        raise ModelError(
            option("slice") + f": {tensor.name} is of no kind that is cut", "known are BF16, FP8 and NVFP4 weights"
        )
    indices: list[Int64 | None] = []
    for axis, stored in zip(axes, tensor.shape, strict=False):
        sizes, parts = zip(*(kept[each] for each in axis.split()), strict=True)
        starts = np.cumsum([0, *sizes])
        places = np.concatenate([start + each for start, each in zip(starts, parts, strict=False)])
        indices.append(None if len(places) == starts[-1] else _stored(tensor, name, stored, int(starts[-1]), places))
    if all(each is None for each in indices):
        return tensor
    rows = indices[0] if indices[0] is not None else np.arange(tensor.shape[0])
    return cut(tensor, rows, indices[1] if len(indices) > 1 else None)


def _stored(tensor: Tensor, name: str, stored: int, size: int, places: Int64) -> Int64 | None:
    """Indices of the `stored` values of an axis of `size` columns, of which `places` stay. A value belongs to one
    column, or to a group of them. None: the axis is not cut. Raises ModelError."""
    if stored == size:
        return places
    if stored == 1:  # a scale of the whole row
        return None
    grouped = tensor.dtype == "U8" or name.endswith(SCALES)
    group = size // stored if grouped and size % stored == 0 else 0
    groups = places.reshape(-1, group) if group and len(places) % group == 0 else None
    if groups is None or (groups[:, 0] % group).any() or (np.diff(groups, axis=1) != 1).any():
        what = option("slice") + f": {tensor.name} has {stored} values for {size} columns, of which {len(places)} stay"
        raise ModelError(what, "groups of columns with one scale are cut as a whole only")
    return groups[:, 0] // group
