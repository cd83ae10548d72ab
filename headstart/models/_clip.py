"""Vision towers in llama.cpp's projector files (mmproj-*.gguf): metadata keys and tensor names.

Keys and names: gguf 0.19 `constants.py`, `tensor_mapping.py`. Changes to tensors: llama.cpp `conversion/`.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.formats.gguf_file import GgufFile, read, written_number
from headstart.kernels.ops import RawTensor
from headstart.models.keys import Config
from headstart.models.names import Names
from headstart.wording import option

PARTS = {
    ".ln1.": ".input_layernorm.", ".ln2.": ".post_attention_layernorm.", ".attn_out.": ".self_attn.o_proj.",
    **{f".attn_{part}.": f".self_attn.{part}_proj." for part in ("qkv", "q", "k", "v")},
    **{f".ffn_{part}.": f".mlp.{part}_proj." for part in ("gate", "up", "down")},
}  # fmt: skip
PREFIXES = {
    "v.blk.{i}.": "vision.layers.{i}.",
    "v.patch_embd.": "vision.patch_embedding.0.",
    "v.patch_embd.weight.1": "vision.patch_embedding.1.weight",
    "v.position_embd.": "vision.position_embedding.",
}
KEYS = {
    "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size", "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads", "attention.layer_norm_epsilon": "layer_norm_eps",
    "projection_dim": "out_hidden_size", "image_size": "image_size", "patch_size": "patch_size",
    "spatial_merge_size": "spatial_merge_size", "window_size": "window_size",
}  # fmt: skip
"""Metadata keys after `clip.vision.` -> keys of vision_config."""
STATISTICS = ("image_mean", "image_std")  # after `clip.vision.`, and in preprocessor_config.json
SCALE_FACTOR = "clip.vision.projector.scale_factor"
MIN_PIXELS, MAX_PIXELS = (f"clip.vision.image_{name}_pixels" for name in ("min", "max"))


def names(merger: Mapping[str, str | None], parts: Mapping[str, str] = MappingProxyType({})) -> Names:
    """Tensor names of a tower; `merger`: those of its merger and norms; `parts`: its own parts of layers."""
    return Names({**PREFIXES, **merger}, parts={**PARTS, **parts})


def open_projector(path: Path) -> GgufFile:
    """Opens a projector file. Raises ModelError for a damaged file and for one without a vision tower."""
    file = read(path)
    plain = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in file.metadata.items()}
    file = replace(file, metadata=plain)
    if file.metadata.get("general.architecture") != "clip" or projector_type(file) is None:
        raise ModelError(f"{path} has no vision tower", "name the model's mmproj file: " + option("mmproj", "FILE"))
    return file


def projector_type(file: GgufFile) -> str | None:
    found = (file.metadata.get(f"clip.{part}projector_type") for part in ("vision.", ""))
    return next((each for each in found if isinstance(each, str)), None)


def vision_config(metadata: Config, **renamed: str) -> dict[str, Any]:
    """The keys of vision_config. renamed: Hugging Face's usual key -> the model's own."""
    present = {name: metadata[f"clip.vision.{key}"] for key, name in KEYS.items() if f"clip.vision.{key}" in metadata}
    written = {renamed.get(name, name): written_number(value) for name, value in present.items()}
    acts = {"clip.use_gelu": "gelu_pytorch_tanh", "clip.use_silu": "silu"}
    return written | {"hidden_act": next((act for key, act in acts.items() if metadata.get(key)), "quick_gelu")}


def statistics(metadata: Config) -> dict[str, Any]:
    """The keys of preprocessor_config.json for the values of pixels."""
    found = {key: metadata.get(f"clip.vision.{key}") for key in STATISTICS}
    return {key: [written_number(each) for each in value] for key, value in found.items() if isinstance(value, list)}


def deep_layers(metadata: Config) -> list[int]:
    """Layers whose outputs a merger reads."""
    return [i for i, is_deep in enumerate(metadata.get("clip.vision.is_deepstack_layers", ())) if is_deep]


def canonical_tensors(file: GgufFile, table: Names) -> dict[str, RawTensor]:
    """The file's tensors under canonical names, those of deep mergers numbered in their order."""
    deep = {layer: i for i, layer in enumerate(deep_layers(file.metadata))}
    return _swap_misnamed(dict(_renamed(file, table, deep)))


def _renamed(file: GgufFile, table: Names, deep: Mapping[int, int]) -> Iterator[tuple[str, RawTensor]]:
    for theirs, tensor in file.tensors.items():
        number = re.sub(r"(?<=^v\.deepstack\.)\d+", lambda match: str(deep.get(int(match[0]), match[0])), theirs)
        if (name := table.canonical(number)) is not None:
            yield name, tensor


def _swap_misnamed(tensors: dict[str, RawTensor]) -> dict[str, RawTensor]:
    """Older files call the two matrices of an MLP without a gate by each other's name."""
    norm = tensors.get("vision.layers.0.input_layernorm.weight")
    down = tensors.get("vision.layers.0.mlp.down_proj.weight")
    if norm is None or down is None or down.shape[0] == norm.shape[0] or down.shape[-1] != norm.shape[0]:
        return tensors
    other = {"up": "down", "down": "up"}
    return {re.sub(r"\.mlp\.(up|down)_", lambda m: f".mlp.{other[m[1]]}_", name): t for name, t in tensors.items()}
