"""Vision tower of DeepSeek-V4-Flash-Vision-Exp and DeepSeek-V4.1: rotary rows and columns, any shape, learned rows
around and between the tokens of an image (text/image_blocks.py).

All positions of an image in V4 attend to each other, in the keys of windows; entries stay causal. In V4.1 they attend
as text does. In both, the routers of the trunk have a bias of their own for rows of images.

Formulas: DeepSeek's `inference/vision.py`, `image_processor.py` and `model.py` beside the models, as in llama.cpp's
`tools/mtmd` (`deepseek4v`) and vLLM `models/deepseek_v4`, `models/deepseek_v41`; names in projector files: llama.cpp's
`conversion/deepseek.py`.
"""

# ruff: noqa: RUF001  (the bars of DeepSeek's markers are U+FF5C)

import re
from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

from headstart.errors import ModelError
from headstart.kernels.ops import RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.rope import axial_rope
from headstart.layers.vision import MergerConfig, VisionConfig
from headstart.models import _clip, _siglip, keys
from headstart.models.base import ProjectorLayout, VisionFamily
from headstart.models.keys import Config
from headstart.models.names import Names
from headstart.text.image_blocks import BlockFormat
from headstart.text.image_prompt import ImageFormat

EPS = 1e-6  # of the tower's norms, in no config
MARKER = "<｜deepseek_image｜>"
KEYS = {
    "vision_n_layers": "num_hidden_layers", "vision_dim": "hidden_size", "vision_n_heads": "num_attention_heads",
    "vision_inter_dim": "intermediate_size", "vision_patch_size": "patch_size", "vision_rope_theta": "rope_theta",
    "vision_downsample_ratio": "downsample_ratio", "vision_max_n_token": "max_image_tokens",
    "vision_min_pixels": "min_pixels", "vision_max_wh_ratio": "max_wh_ratio",
}  # fmt: skip
"""Keys of V4's config.json -> those of V4.1's vision_config."""
COMMON = {
    "num_hidden_layers": 32, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 2816,
    "patch_size": 14, "rope_theta": 10000.0, "downsample_ratio": 3,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "deepseek_v4": {**COMMON, "max_image_tokens": 384, "min_pixels": 147456, "max_wh_ratio": 8},
    "deepseek_v41": {**COMMON, "max_image_tokens": 1024, "min_pixels": 295936, "max_wh_ratio": None},
}
"""model_type -> values of the released models."""
LEARNED = ("image_start", "image_end", "image_newline", "image_pad")
"""Learned rows in the order of text/image_blocks.py; V4.1 has no pads."""
NAMES = Names(
    {
        "vision.blocks.{i}.": "vision.layers.{i}.",
        "vision.patch_embed.proj.": "vision.patch_embedding.0.",
        "vision.norm.": "vision.merger.patch_norm.",
        "aligner.w1.": "vision.merger.up.",
        "aligner.w2.": "vision.merger.down.",
        **{name: f"vision.{name}" for name in LEARNED},
    },
    parts={
        ".norm1.": ".input_layernorm.",
        ".norm2.": ".post_attention_layernorm.",
        ".attn.wqkv.": ".self_attn.qkv_proj.",
        ".attn.wo.": ".self_attn.o_proj.",
        ".mlp.w1.": ".mlp.gate_up_proj.",
        ".mlp.w2.": ".mlp.down_proj.",
    },
)


def read(
    model_type: str, config: Config, trunk: DecoderConfig, preparation: Config
) -> tuple[VisionConfig, ImageFormat] | None:
    """VisionFamily.read."""
    if config.get("model_type") != model_type:
        return None
    written = config.get("vision_config") or {name: config[key] for key, name in KEYS.items() if key in config}
    if not isinstance(written, dict):
        raise ModelError(f"config.json: vision_config is {written!r}, but must be an object")
    read, paired = {**DEFAULTS[model_type], **written}, model_type == "deepseek_v4"
    keys.refuse_others(read, {"hidden_act": "silu"})
    hidden, patch, merge = (keys.number(read, key) for key in ("hidden_size", "patch_size", "downsample_ratio"))
    spec = _siglip.rotary_spec(read)
    rope = axial_rope(spec.head_dim, keys.real(read, "rope_theta", 1e4))
    layer = LayerConfig(
        mixer=AttentionConfig(spec=spec, rope=rope, qkv_bias=True, o_bias=True),
        mlp=MLPConfig(inner=keys.number(read, "intermediate_size")), eps=EPS,
    )  # fmt: skip
    vision = VisionConfig(
        patch_size=patch, hidden_size=hidden, layers=(layer,) * keys.num_layers(read), eps=EPS, merge=merge,
        merger=MergerConfig(name="vision.merger", patch_norm="rms", inner=trunk.hidden_size), out=trunk.hidden_size,
        learned=LEARNED if paired else LEARNED[:-1],
    )  # fmt: skip
    limits = keys.number(read, "min_pixels"), keys.number(read, "max_image_tokens", least=16)
    sizes = {"patch_size": patch, "downsample_ratio": merge, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    size = {"shortest_edge": limits[0], "longest_edge": limits[1]}
    keys.check_preparation(preparation, {**sizes, "size": size, "resample": 3})
    max_ratio = 0 if read["max_wh_ratio"] is None else keys.number(read, "max_wh_ratio")
    return vision, ImageFormat(
        min_pixels=limits[0], patch_size=patch, merge=merge, resample=3, placeholder=MARKER, marker=MARKER,
        is_bidirectional=paired, widens_windows=paired, is_marked=True,
        block=BlockFormat(max_rows=limits[1], paired=paired, max_ratio=max_ratio),
    )  # fmt: skip


def stored(name: str) -> str:
    """VisionFamily.stored: q, k and v are one matrix, and so are the two inputs of the MLP's product."""
    name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
    return re.sub(r"\.(gate|up)_proj\.", ".gate_up_proj.", name)


def adapt(tensors: dict[str, RawTensor], config: VisionConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """VisionFamily.adapt. In GGUF files the inputs of the MLP's product are apart."""
    found = _siglip.split_joined(tensors, {"qkv_proj": _siglip.QKV, "gate_up_proj": ("gate_proj", "up_proj")})
    return _siglip.patch_by_patch(_siglip.as_matrix(found, config), config, "vision.merger.up.weight")


def needed(trunk: DecoderConfig) -> list[str]:
    """VisionFamily.needed: the biases of routers."""
    return [f"layers.{i}.mlp.gate.image_bias" for i in range(trunk.num_layers)]


def read_projector(metadata: Config, tensors: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """ProjectorLayout.read. Limits of tokens and shape are not in the file."""
    written = _clip.vision_config(metadata)
    written |= {"downsample_ratio": metadata.get(_clip.SCALE_FACTOR), "min_pixels": metadata.get(_clip.MIN_PIXELS)}
    return {"vision_config": {key: each for key, each in written.items() if each is not None}}, {}


PROJECTOR = ProjectorLayout(
    model_types={"deepseek4v": "deepseek_v4"},
    names=_clip.names({
        "v.post_ln.": "vision.merger.patch_norm.", "mm.1.": "vision.merger.up.", "mm.2.": "vision.merger.down.",
        "v.image_newline": "vision.image_newline",
        **{f"v.token_embd.img_{part}": f"vision.image_{part}" for part in ("start", "end", "pad")},
    }),
    read=read_projector,
)  # fmt: skip
V41 = VisionFamily(read=partial(read, "deepseek_v41"), names=NAMES, adapt=adapt, stored=stored, needed=needed)
V4 = replace(V41, read=partial(read, "deepseek_v4"), projector=PROJECTOR, key="vision_n_layers")
