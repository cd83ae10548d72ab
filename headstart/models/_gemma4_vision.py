"""Gemma 4's vision tower (E2B, E4B, 26B-A4B, 31B): rotary columns and rows, any shape, averages of its patches.

Formula: transformers 5.24 `models/gemma4`; preparation: `image_processing_pil_gemma4.py`. Changes to tensors in GGUF
files: llama.cpp `conversion/gemma.py`; attention of GGUF models: `tools/mtmd/mtmd.cpp`.
"""

import math
import re
from collections.abc import Collection
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.formats.rows import RowSubset
from headstart.kernels.ops import AttentionSpec, RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.linear import BOUNDS
from headstart.layers.rope import axial_rope
from headstart.layers.vision import CHANNELS, MergerConfig, VisionConfig
from headstart.models import _clip, _siglip, keys
from headstart.models.base import ProjectorLayout, VisionFamily
from headstart.models.keys import Config
from headstart.models.names import Names
from headstart.text.image_prompt import ImageFormat

DEFAULTS: dict[str, Any] = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 16, "num_attention_heads": 12, "head_dim": 64,
    "hidden_activation": "gelu_pytorch_tanh", "pooling_kernel_size": 3, "patch_size": 16,
}  # fmt: skip
"""Hugging Face's defaults of Gemma4VisionConfig."""
TOWER = "model.vision_tower."
MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
NAMES = Names(
    {
        f"{TOWER}encoder.layers.{{i}}.": "vision.layers.{i}.",
        f"{TOWER}patch_embedder.input_proj.": "vision.patch_embedding.0.",
        f"{TOWER}patch_embedder.position_embedding_table": "vision.position_embedding.weight",
        f"{TOWER}std_bias": "vision.merger.shift",
        f"{TOWER}std_scale": "vision.merger.scale",
        "model.embed_vision.embedding_projection.": "vision.merger.projection.",
    },
    parts={f".{part}_proj.linear.weight": f".{part}_proj.weight" for part in MATRICES},
)


def attends_ahead(config: Config) -> bool:
    """Whether the rows of an image attend to each other, which they do in layers with a window only. GGUF files do not
    say it; among the published models those without per-layer embeddings have it."""
    if config.get("head_dim_sliding") is not None:
        return not config.get("hidden_size_per_layer_input")
    return config.get("use_bidirectional_attention") == "vision"


def read(config: Config, trunk: DecoderConfig, preparation: Config) -> tuple[VisionConfig, ImageFormat] | None:
    """VisionFamily.read."""
    written = config.get("vision_config")
    if not isinstance(written, dict) or config.get("model_type") != "gemma4":
        return None
    written = keys.filled(written, DEFAULTS)
    text = keys.text_config(config)
    patch, merge = keys.number(written, "patch_size"), keys.number(written, "pooling_kernel_size")
    needed = {"patch_size": patch, "pooling_kernel_size": merge, "do_resize": True, "do_rescale": True}
    keys.check_preparation(preparation, needed)
    num_tokens = keys.number(preparation, "max_soft_tokens", default=280)
    plain = {"image_mean": (0.0,) * 3, "image_std": (1.0,) * 3}
    mean, std = keys.image_statistics(preparation if keys.flag(preparation, "do_normalize") else plain)
    return _tower(written, num_tokens * merge, trunk), ImageFormat(
        max_pixels=num_tokens * (merge * patch) ** 2, is_filled=True, patch_size=patch, merge=merge,
        resample=keys.number(preparation, "resample", default=3, least=0),
        # The tower reads 2 x - 1.
        mean=tuple(one + 0.5 * other for one, other in zip(mean, std, strict=True)), std=tuple(0.5 * s for s in std),
        placeholder="<|image|>", marker="<|image|>", begin="<|image>", end="<image|>",
        token_id=keys.number(text, "pad_token_id", default=0, least=0),  # whose per-layer embedding the rows take
        is_bidirectional=attends_ahead(text),
    )  # fmt: skip


def _tower(config: dict[str, Any], num_positions: int, trunk: DecoderConfig) -> VisionConfig:
    """num_positions: patches in a row or a column of the largest image."""
    hidden, heads = keys.number(config, "hidden_size"), keys.number(config, "num_attention_heads")
    kv_heads, dim = keys.number(config, "num_key_value_heads", default=heads), keys.number(config, "head_dim")
    rope = config.get("rope_parameters") or {}
    kind = rope.get("rope_type", "axial") if isinstance(rope, dict) else rope
    if dim % 4 or heads % kv_heads or kind not in ("axial", "default"):
        what = f"config.json: {heads} and {kv_heads} heads of {dim} features and rope {kind!r} in the vision tower"
        raise ModelError(what, "heads need a multiple of 4 features")
    bias = keys.flag(config, "attention_bias")
    layer = keys.layer(
        config,
        AttentionConfig(
            spec=AttentionSpec(heads, kv_heads, dim, 1.0), qkv_bias=bias, o_bias=bias, qk_norm=True, v_norm=True,
            rope=axial_rope(dim, keys.real(rope, "rope_theta", 100.0), axes=(2, 1)),
        ),
        keys.mlp(config),
        norms="sandwich",
    )  # fmt: skip
    return VisionConfig(
        patch_size=keys.number(config, "patch_size"), patch_bias=False, hidden_size=hidden, eps=layer.eps,
        axis_positions=num_positions, layers=(layer,) * keys.num_layers(config),
        merge=keys.number(config, "pooling_kernel_size"), out=trunk.hidden_size,
        clips=keys.flag(config, "use_clipped_linears"),
        merger=MergerConfig(
            name="vision.merger", averaged=True, factor=math.sqrt(hidden), norm="unweighted",
            standardized=keys.flag(config, "standardize"),
        ),
    )  # fmt: skip


def adapt(tensors: dict[str, RawTensor], config: VisionConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """VisionFamily.adapt. Stored are the channels of a pixel side by side (not in GGUF files), the two halves of a
    head, of columns and of rows, each with its own rotary pairs, and positions beyond those of the largest image."""
    spec, patch = config.spec, config.patch_size
    halves = np.arange(spec.head_dim).reshape(2, 2, -1).transpose(1, 0, 2).reshape(-1)
    found = _siglip.as_matrix(tensors, config)
    for name, tensor in found.items():
        if match := re.search(r"\.([qk])_(proj|norm)\.(weight|bias)$", name):
            count = 1 if match[2] == "norm" else spec.num_heads if match[1] == "q" else spec.num_kv_heads
            rows = (np.arange(count)[:, None] * spec.head_dim + halves).reshape(-1)
            found[name] = RowSubset(tensor, rows)
    if not from_gguf:
        name = "vision.patch_embedding.0.weight"
        order = np.arange(config.patch_width).reshape(patch, patch, CHANNELS).transpose(2, 0, 1).reshape(-1)
        found[name] = found[name].transposed().take_rows(order).transposed()
    name, used = "vision.position_embedding.weight", config.axis_positions
    stored = math.prod(found[name].shape[:-1]) // 2
    if used > stored:
        raise ModelError(f"{found[name].name} has {stored} columns of patches", f"{used} are needed: max_soft_tokens")
    table = found[name].shaped(2 * stored, config.hidden_size)
    found[name] = table.take_rows(np.concatenate((np.arange(used), stored + np.arange(used))))
    return {name: each for name, each in found.items() if config.clips or not name.endswith(BOUNDS)}


def read_projector(metadata: Config, tensors: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """ProjectorLayout.read."""
    written = {**DEFAULTS, **_clip.vision_config(metadata, layer_norm_eps="rms_norm_eps")}
    merge = keys.number(metadata, _clip.SCALE_FACTOR, default=DEFAULTS["pooling_kernel_size"])
    pixels = keys.number(metadata, _clip.MAX_PIXELS, default=0, least=0)
    written |= {
        "head_dim": keys.number(written, "hidden_size") // keys.number(written, "num_attention_heads"),
        "pooling_kernel_size": merge,
        "standardize": "v.std_bias" in tensors,
        "use_clipped_linears": any(name.startswith("v.") and name.endswith(BOUNDS) for name in tensors),
    }
    token = (merge * keys.number(written, "patch_size")) ** 2  # pixels
    return {"vision_config": written}, {"max_soft_tokens": pixels // token} if pixels else {}


PROJECTOR = ProjectorLayout(
    model_types={"gemma4v": "gemma4"},
    names=_clip.names(
        {
            "v.std_bias": "vision.merger.shift", "v.std_scale": "vision.merger.scale",
            "mm.input_projection.": "vision.merger.projection.",
        },
        {
            ".ln2.": ".pre_feedforward_layernorm.", ".attn_post_norm.": ".post_attention_layernorm.",
            ".ffn_post_norm.": ".post_feedforward_layernorm.", ".attn_q_norm.": ".self_attn.q_norm.",
            ".attn_k_norm.": ".self_attn.k_norm.",
        },
    ),
    read=read_projector,
)  # fmt: skip
VISION = VisionFamily(read=read, names=NAMES, adapt=adapt, projector=PROJECTOR)
