"""SigLIP vision towers (Zhai et al. 2023): config keys and tensor names. Formula: transformers 5.24 `models/siglip`."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from headstart.errors import ModelError
from headstart.formats.rows import row_parts
from headstart.kernels.ops import AttentionSpec, RawTensor
from headstart.layers.attention import AttentionConfig
from headstart.layers.decoder import LayerConfig
from headstart.layers.mlp import MLPConfig
from headstart.layers.vision import CHANNELS, MergerConfig, VisionConfig
from headstart.models import keys
from headstart.models.keys import Config
from headstart.models.names import Names

TOWERS = ("vision_tower.", "vision_tower.vision_model.")
PROJECTOR = "multi_modal_projector."
QKV = ("q_proj", "k_proj", "v_proj")
"""Parts of a `qkv_proj`."""
NAMES = Names(
    {
        **{f"{tower}encoder.layers.{{i}}.": "vision.layers.{i}." for tower in TOWERS},
        **{f"{tower}embeddings.patch_embedding.": "vision.patch_embedding.0." for tower in TOWERS},
        **{f"{tower}embeddings.position_embedding.": "vision.position_embedding." for tower in TOWERS},
        **{f"{tower}post_layernorm.": "vision.merger.patch_norm." for tower in TOWERS},
        f"{PROJECTOR}mm_soft_emb_norm.": "vision.merger.norm.",
        f"{PROJECTOR}mm_input_projection_weight": "vision.merger.projection.weight",
    },
    parts={
        ".layer_norm1.": ".input_layernorm.",
        ".layer_norm2.": ".post_attention_layernorm.",
        ".self_attn.out_proj.": ".self_attn.o_proj.",
        ".mlp.fc1.": ".mlp.up_proj.",
        ".mlp.fc2.": ".mlp.down_proj.",
    },
)
DEFAULTS = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "image_size": 224, "patch_size": 16, "layer_norm_eps": 1e-6, "hidden_act": "gelu_pytorch_tanh", "num_channels": 3,
}  # fmt: skip
"""Hugging Face's defaults of SiglipVisionConfig."""


def tower(
    written: dict[str, Any], merger: MergerConfig, *, merge: int = 0, num_tokens: int = 0, out: int,
    defaults: Mapping[str, Any] = DEFAULTS,
) -> VisionConfig:  # fmt: skip
    """The tower of a `vision_config`, whose merger makes tokens of `merge` * `merge` patches (0: `num_tokens` of them)
    of width `out`."""
    config = keys.filled(written, defaults)
    keys.refuse_others(config, {"num_channels": CHANNELS})
    hidden, heads = keys.number(config, "hidden_size"), keys.number(config, "num_attention_heads")
    patch, eps = keys.number(config, "patch_size"), keys.real(config, "layer_norm_eps", 1e-6)
    grid = keys.number(config, "image_size") // patch
    side = grid // merge if merge else round(num_tokens**0.5)
    if hidden % heads or not side or grid % side or side**2 != (num_tokens or side**2):
        raise ModelError(f"config.json: {heads} heads of {hidden} features, or {side}^2 tokens of {grid}^2 patches")
    spec = AttentionSpec(heads, heads, hidden // heads, (hidden // heads) ** -0.5)
    layer = LayerConfig(
        mixer=AttentionConfig(spec=spec, rope=None, qkv_bias=True, o_bias=True),
        mlp=MLPConfig(
            inner=keys.number(config, "intermediate_size"), activation=keys.activation(config), gated=False, bias=True
        ),
        eps=eps, centered=True, biased=True,
    )  # fmt: skip
    return VisionConfig(
        patch_size=patch, hidden_size=hidden, positions=grid, eps=eps, merge=grid // side, out=out,
        layers=(layer,) * keys.num_layers(config), merger=merger,
    )  # fmt: skip


def rotary_spec(config: Config, heads_key: str = "num_attention_heads") -> AttentionSpec:
    """Attention of a tower whose heads turn by rows and columns. Raises ModelError for heads without such halves."""
    hidden, heads = keys.number(config, "hidden_size"), keys.number(config, heads_key)
    if hidden % (4 * heads):
        raise ModelError(f"config.json: {heads} heads of {hidden} features in the vision tower")
    return AttentionSpec(heads, heads, hidden // heads, (hidden // heads) ** -0.5)


def split_joined(tensors: Mapping[str, RawTensor], parts: Mapping[str, tuple[str, ...]]) -> dict[str, RawTensor]:
    """The tensors with matrices and biases that are stored as one split by rows. parts: name of the joined one in
    a tensor's name -> names of its parts. A tensor whose rows do not split stays as it is."""
    found: dict[str, RawTensor] = {}
    for name, tensor in tensors.items():
        joined = next((each for each in parts if f".{each}." in name), None)
        if joined is None or tensor.shape[0] % len(parts[joined]):
            found[name] = tensor
            continue
        size = tensor.shape[0] // len(parts[joined])
        named = row_parts(tensor, dict.fromkeys(parts[joined], size))
        found |= {name.replace(joined, part): each for part, each in named.items()}
    return found


def patch_by_patch(tensors: dict[str, RawTensor], config: VisionConfig, name: str) -> dict[str, RawTensor]:
    """The tensors with the columns of a merger's first matrix patch by patch; stored, they are feature by feature."""
    matrix, size = tensors[name], config.merge**2
    if matrix.shape[-1] != config.hidden_size * size:
        return tensors  # refused when the merger is built
    order = np.arange(matrix.shape[-1], dtype=np.int64).reshape(-1, size).T.reshape(-1)
    return {**tensors, name: matrix.transposed().take_rows(order).transposed()}


def as_matrix(tensors: dict[str, RawTensor], config: VisionConfig, _: bool = False) -> dict[str, RawTensor]:
    """VisionFamily.adapt: a convolution over patches is a matrix."""
    found, shape = dict(tensors), (config.hidden_size, config.patch_width)
    for name, kernel in tensors.items():
        if re.fullmatch(r"vision\.patch_embedding\.\d\.weight", name) and math.prod(kernel.shape) == math.prod(shape):
            found[name] = kernel.shaped(*shape)
    return found
