"""Vision towers of Qwen2.5-VL, Qwen3-VL and Qwen3.5: config keys, tensor names and how images are prepared.

Formulas: transformers 5.24 `models/qwen2_5_vl`, `qwen3_vl`, `qwen3_5`; preparation: `image_processing_pil_qwen2_vl.py`.
"""

import re
from collections.abc import Collection
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.kernels.ops import RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.rope import axial_rope
from headstart.layers.vision import CHANNELS, MergerConfig, VisionConfig
from headstart.models import _clip, _siglip, keys
from headstart.models.base import ProjectorLayout, VisionFamily
from headstart.models.keys import Config
from headstart.models.names import Names
from headstart.text.image_prompt import ImageFormat

EPS, ROPE_BASE = 1e-6, 10000.0  # in no config
COMMON = {"in_channels": CHANNELS, "spatial_merge_size": 2, "temporal_patch_size": 2}
QWEN3 = {
    **COMMON, "depth": 27, "hidden_size": 1152, "hidden_act": "gelu_pytorch_tanh", "intermediate_size": 4304,
    "num_heads": 16, "patch_size": 16, "out_hidden_size": 3584, "num_position_embeddings": 2304,
}  # fmt: skip
DEEP = {**QWEN3, "deepstack_visual_indexes": [8, 16, 24]}
DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {
        **COMMON, "depth": 32, "hidden_size": 3584, "hidden_act": "silu", "intermediate_size": 3420, "num_heads": 16,
        "patch_size": 14, "window_size": 112, "out_hidden_size": 3584, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl": DEEP, "qwen3_vl_moe": DEEP, "qwen3_5": QWEN3, "qwen3_5_moe": QWEN3,
}  # fmt: skip
"""model_type of a checkpoint -> Hugging Face's defaults of its vision_config."""
PREPARATION = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}, "resample": 3,
}  # fmt: skip
"""Defaults of preprocessor_config.json."""
NAMES = Names(
    {
        "model.visual.blocks.{i}.": "vision.layers.{i}.",
        "model.visual.patch_embed.proj.": "vision.patch_embedding.0.",
        "model.visual.pos_embed.": "vision.position_embedding.",
        "model.visual.merger.norm.": "vision.merger.patch_norm.",
        "model.visual.merger.ln_q.": "vision.merger.patch_norm.",
        "model.visual.merger.linear_fc1.": "vision.merger.up.",
        "model.visual.merger.linear_fc2.": "vision.merger.down.",
        "model.visual.merger.mlp.0.": "vision.merger.up.",
        "model.visual.merger.mlp.2.": "vision.merger.down.",
        "model.visual.deepstack_merger_list.{i}.norm.": "vision.deep.{i}.norm.",
        "model.visual.deepstack_merger_list.{i}.linear_fc1.": "vision.deep.{i}.up.",
        "model.visual.deepstack_merger_list.{i}.linear_fc2.": "vision.deep.{i}.down.",
    },
    parts={
        ".norm1.": ".input_layernorm.",
        ".norm2.": ".post_attention_layernorm.",
        ".attn.qkv.": ".self_attn.qkv_proj.",
        ".attn.proj.": ".self_attn.o_proj.",
        ".mlp.linear_fc1.": ".mlp.up_proj.",
        ".mlp.linear_fc2.": ".mlp.down_proj.",
    },
)


def read(config: Config, trunk: DecoderConfig, preparation: Config) -> tuple[VisionConfig, ImageFormat] | None:
    """VisionFamily.read."""
    written, defaults = config.get("vision_config"), DEFAULTS.get(str(config.get("model_type")))
    if not isinstance(written, dict) or defaults is None:
        return None
    ropes = [each.mixer.rope for each in trunk.layers if isinstance(each.mixer, AttentionConfig)]
    if not any(rope is not None and rope.axes for rope in ropes):
        what = "config.json: mrope_section of the rope must be three numbers, and their sum half the rotated features"
        raise ModelError(what, "without it positions in an image are unknown")
    vision = _tower(keys.filled(written, defaults), trunk)
    return vision, _format({**PREPARATION, **preparation}, vision)


def _tower(config: dict[str, Any], trunk: DecoderConfig) -> VisionConfig:
    keys.refuse_others(config, {"in_channels": CHANNELS, "in_chans": CHANNELS, "out_hidden_size": trunk.hidden_size})
    hidden, merge, patch = (keys.number(config, key) for key in ("hidden_size", "spatial_merge_size", "patch_size"))
    spec, is_windowed = _siglip.rotary_spec(config, "num_heads"), "window_size" in config
    gated = config["hidden_act"] == "silu"
    layer = LayerConfig(
        mixer=AttentionConfig(spec=spec, rope=axial_rope(spec.head_dim, ROPE_BASE), qkv_bias=True, o_bias=True),
        mlp=MLPConfig(
            inner=keys.number(config, "intermediate_size"), activation=keys.activation(config), gated=gated, bias=True
        ),
        eps=EPS, centered=not gated, biased=not gated,
    )  # fmt: skip
    depth, inner = keys.num_layers(config, "depth"), hidden * merge**2
    deep, whole = (_layers(config, key, depth) for key in ("deepstack_visual_indexes", "fullatt_block_indexes"))
    if len(deep) > len(trunk.layers):
        raise ModelError(f"config.json: {len(deep)} deepstack_visual_indexes for {len(trunk.layers)} layers")
    positions = round(keys.number(config, "num_position_embeddings", default=0, least=0) ** 0.5)
    return VisionConfig(
        patch_size=patch, frames=keys.number(config, "temporal_patch_size"), patch_bias=not gated, hidden_size=hidden,
        positions=positions, layers=(layer,) * depth, eps=EPS, merge=merge, out=trunk.hidden_size, whole=whole,
        window=max(1, keys.number(config, "window_size") // merge // patch) if is_windowed else 0,
        merger=MergerConfig(name="vision.merger", patch_norm="rms" if gated else "layer", inner=inner),
        deep=tuple((at, MergerConfig(name=f"vision.deep.{i}", norm="layer", inner=inner)) for i, at in enumerate(deep)),
    )  # fmt: skip


def _layers(config: dict[str, Any], key: str, depth: int) -> tuple[int, ...]:
    """A list of layers of the tower; empty if it is absent."""
    found = config.get(key, [])
    if not isinstance(found, list) or not all(type(each) is int and 0 <= each < depth for each in found):
        raise ModelError(f"config.json: {key} is {found!r}, but must be numbers of layers below {depth}")
    return tuple(found)


def _format(config: dict[str, Any], vision: VisionConfig) -> ImageFormat:
    """How preprocessor_config.json prepares an image."""
    sizes = {"patch_size": vision.patch_size, "merge_size": vision.merge, "temporal_patch_size": vision.frames}
    steps = dict.fromkeys(("do_resize", "do_rescale", "do_normalize"), True)
    keys.check_preparation(config, sizes | steps)
    try:
        low = int(config.get("min_pixels") or config["size"]["shortest_edge"])
        high = int(config.get("max_pixels") or config["size"]["longest_edge"])
        if not 0 < low <= high:
            raise ValueError
    except (KeyError, TypeError, ValueError):
        what = f"preprocessor_config.json: size is {config['size']!r}"
        raise ModelError(what, "shortest_edge and longest_edge: pixels at least and at most") from None
    mean, std = keys.image_statistics(config)
    return ImageFormat(
        min_pixels=low, max_pixels=high, patch_size=vision.patch_size, merge=vision.merge, mean=mean, std=std,
        resample=keys.number(config, "resample", least=0), placeholder="<|vision_start|><|image_pad|><|vision_end|>",
        marker="<|image_pad|>", has_axes=True,
    )  # fmt: skip


def stored(name: str) -> str:
    """VisionFamily.stored: q, k and v are one matrix, and so are the frames of a patch."""
    name = re.sub(r"\.[qkv]_proj\.", ".qkv_proj.", name)
    return re.sub(r"^vision\.patch_embedding\.\d+\.", "vision.patch_embedding.0.", name)


def adapt(tensors: dict[str, RawTensor], config: VisionConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """VisionFamily.adapt. In GGUF files the frames of a patch are apart."""
    if from_gguf:
        tensors = _siglip.as_matrix(tensors, config)
    patch_elements = config.hidden_size * config.frames * config.patch_width
    found: dict[str, RawTensor] = {}
    for name, tensor in _siglip.split_joined(tensors, {"qkv_proj": _siglip.QKV}).items():
        if name == "vision.patch_embedding.0.weight" and np.prod(tensor.shape) == patch_elements:
            pixels = tensor.shaped(config.hidden_size * CHANNELS * config.frames, config.patch_size**2)
            for frame in range(config.frames):
                part = pixels.take_rows(np.arange(frame, pixels.shape[0], config.frames, dtype=np.int64))
                found[f"vision.patch_embedding.{frame}.weight"] = part.shaped(config.hidden_size, config.patch_width)
        else:
            found[name] = tensor
    return found


def read_projector(metadata: Config, tensors: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """ProjectorLayout.read."""
    written = _clip.vision_config(metadata, num_hidden_layers="depth", num_attention_heads="num_heads")
    depth, whole = keys.num_layers(written, "depth"), metadata.get("clip.vision.wa_layer_indexes")
    period = keys.number(metadata, "clip.vision.n_wa_pattern", default=depth)
    written["fullatt_block_indexes"] = list(range(period - 1, depth, period)) if whole is None else whole
    written["deepstack_visual_indexes"] = _clip.deep_layers(metadata)
    side = written["image_size"] // written["patch_size"] if "v.position_embd.weight" in tensors else 0
    written["num_position_embeddings"] = side**2
    limits = {"min_pixels": metadata.get(_clip.MIN_PIXELS), "max_pixels": metadata.get(_clip.MAX_PIXELS)}
    return {"vision_config": written}, {**_clip.statistics(metadata), **limits}


PROJECTOR = ProjectorLayout(
    model_types={"qwen2.5vl_merger": "qwen2_5_vl", "qwen3vl_merger": "qwen3_vl"},
    names=_clip.names({
        "v.post_ln.": "vision.merger.patch_norm.", "mm.0.": "vision.merger.up.", "mm.2.": "vision.merger.down.",
        "v.deepstack.{i}.norm.": "vision.deep.{i}.norm.", "v.deepstack.{i}.fc1.": "vision.deep.{i}.up.",
        "v.deepstack.{i}.fc2.": "vision.deep.{i}.down.",
    }),
    read=read_projector,
)  # fmt: skip
VISION = VisionFamily(read=read, names=NAMES, adapt=adapt, stored=stored, projector=PROJECTOR)
