"""Pixtral's vision tower in Mistral Small 3.1 and later and Ministral 3: rotary rows and columns, any shape.

Formula: transformers 5.24 `models/pixtral`, `models/mistral3`; preparation: `image_processing_pil_pixtral.py`.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from headstart.formats.rows import unpermute_rows
from headstart.kernels.ops import RawTensor, RopeSpec
from headstart.layers.attention import AttentionConfig
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.vision import CHANNELS, MergerConfig, VisionConfig
from headstart.models import _clip, _siglip, keys
from headstart.models.base import ProjectorLayout, VisionFamily
from headstart.models.keys import Config
from headstart.models.names import Names
from headstart.text.image_prompt import ImageFormat

EPS = 1e-5  # of the tower's norms, in no config
DEFAULTS = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "num_channels": CHANNELS, "patch_size": 16, "hidden_act": "gelu",
}  # fmt: skip
"""Hugging Face's defaults of PixtralVisionConfig."""
PROJECTOR = "model.multi_modal_projector."
NAMES = Names(
    {
        "model.vision_tower.transformer.layers.{i}.": "vision.layers.{i}.",
        "model.vision_tower.patch_conv.": "vision.patch_embedding.0.",
        "model.vision_tower.ln_pre.": "vision.patch_norm.",
        f"{PROJECTOR}norm.": "vision.merger.patch_norm.",
        f"{PROJECTOR}patch_merger.merging_layer.": "vision.merger.join.",
        f"{PROJECTOR}linear_1.": "vision.merger.up.",
        f"{PROJECTOR}linear_2.": "vision.merger.down.",
    },
    parts={
        ".attention_norm.": ".input_layernorm.",
        ".ffn_norm.": ".post_attention_layernorm.",
        ".attention.": ".self_attn.",
        ".feed_forward.": ".mlp.",
    },
)


def read(config: Config, trunk: DecoderConfig, preparation: Config) -> tuple[VisionConfig, ImageFormat] | None:
    """VisionFamily.read."""
    written = config.get("vision_config")
    if not isinstance(written, dict) or config.get("model_type") != "mistral3":
        return None
    keys.refuse_others(config, {"vision_feature_layer": -1})
    vision = _tower(keys.filled(written, DEFAULTS), config, trunk)
    size, (mean, std) = preparation.get("size"), keys.image_statistics(preparation)
    return vision, ImageFormat(
        longest=keys.number(size if isinstance(size, dict) else {}, "longest_edge", default=1024),
        patch_size=vision.patch_size, merge=vision.merge, mean=mean, std=std,
        resample=keys.number(preparation, "resample", default=3, least=0), placeholder="[IMG]", marker="[IMG]",
        row_end="[IMG_BREAK]", end="[IMG_END]",
    )  # fmt: skip


def _tower(config: dict[str, Any], outer: Config, trunk: DecoderConfig) -> VisionConfig:
    keys.refuse_others(config, {"num_channels": CHANNELS})
    spec = _siglip.rotary_spec(config)
    theta = keys.real(config.get("rope_parameters") or config, "rope_theta", 10000.0)
    hidden, dim = keys.number(config, "hidden_size"), spec.head_dim
    frequencies = theta ** (-np.arange(0, dim, 2) / dim)
    rope = RopeSpec(
        (*frequencies[0::2].tolist(), *frequencies[1::2].tolist()), dim, axes=(1,) * (dim // 4) + (2,) * (dim // 4)
    )
    layer = LayerConfig(mixer=AttentionConfig(spec=spec, rope=rope), mlp=keys.mlp(config), eps=EPS)
    activation = keys.activation({"hidden_act": outer.get("projector_hidden_act") or "gelu"})
    text = keys.text_config(outer)
    return VisionConfig(
        patch_size=keys.number(config, "patch_size"), patch_bias=False, patch_norm="rms", hidden_size=hidden,
        layers=(layer,) * keys.num_layers(config), eps=keys.real(text, "rms_norm_eps", 1e-6),
        merge=keys.number(outer, "spatial_merge_size", default=2), out=trunk.hidden_size,
        merger=MergerConfig(
            name="vision.merger", patch_norm="rms", joined=hidden, inner=trunk.hidden_size, activation=activation,
            bias=keys.flag(outer, "multimodal_projector_bias"),
        ),
    )  # fmt: skip


def adapt(tensors: dict[str, RawTensor], config: VisionConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """VisionFamily.adapt: the columns of `join` are stored feature by feature, here they are patch by patch. In GGUF
    files the two rows of a rotary pair are side by side."""
    if from_gguf:
        turned = [name for name in tensors if name.endswith((".q_proj.weight", ".k_proj.weight"))]
        tensors = tensors | {name: unpermute_rows(tensors[name], config.spec.num_heads) for name in turned}
    return _siglip.patch_by_patch(_siglip.as_matrix(tensors, config), config, "vision.merger.join.weight")


def read_projector(metadata: Config, tensors: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """ProjectorLayout.read."""
    written = _clip.vision_config(metadata)
    merge, has_bias = written.get("spatial_merge_size", 1), "mm.1.bias" in tensors
    config = {"vision_config": written, "spatial_merge_size": merge, "multimodal_projector_bias": has_bias}
    return config, {"size": {"longest_edge": written.get("image_size")}, **_clip.statistics(metadata)}


PROJECTOR_FILE = ProjectorLayout(
    model_types={"pixtral": "mistral3"},
    names=_clip.names({
        "v.pre_ln.": "vision.patch_norm.", "mm.input_norm.": "vision.merger.patch_norm.",
        "mm.patch_merger.": "vision.merger.join.", "mm.1.": "vision.merger.up.", "mm.2.": "vision.merger.down.",
        "v.token_embd.img_break": None,  # a row of the text model's embedding
    }),
    read=read_projector,
)  # fmt: skip
VISION = VisionFamily(read=read, names=NAMES, adapt=adapt, projector=PROJECTOR_FILE)
