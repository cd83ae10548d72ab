"""Gemma 3 (270M, 1B; the text part of 4B, 12B, 27B).

Formula: transformers 5.23 `models/gemma3`; GGUF names and folded norms: llama.cpp `conversion/gemma.py`; attention
scale there: `models/gemma3.cpp`.
"""

import math
from collections.abc import Collection
from typing import Any

from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig
from headstart.layers.vision import MergerConfig, VisionConfig
from headstart.models import _clip, _gemma, _siglip, keys
from headstart.models.base import Family, ProjectorLayout, VisionFamily
from headstart.models.keys import Config, number
from headstart.models.names import ALL_NORMS
from headstart.text.image_prompt import ImageFormat

LAYERS_27B = 62  # of which llama.cpp knows 27B


def parse(config: Config) -> DecoderConfig:
    config = keys.text_config(config)
    _gemma.refuse_bidirectional(config)
    kinds, window = keys.kinds_in_turn(config, 6), number(config, "sliding_window", default=0, least=0)
    mixers = {
        kind: keys.attention(
            read,
            scale=_gemma.score_scalar(config, LAYERS_27B) ** -0.5,
            window=window if kind == keys.SLIDING else 0,
            **keys.biases(config),
            qk_norm=True,
        )
        for kind, read in keys.by_kind(config).items()
    }
    return keys.decoder(
        keys.by_kind(config)[keys.FULL],
        [keys.layer(config, mixers[kind], keys.mlp(config), norms="sandwich") for kind in kinds],
        embedding_scale=math.sqrt(number(config, "hidden_size")),
        logit_softcap=keys.real(config, "final_logit_softcapping", 0.0),
    )


def tower(config: Config, trunk: DecoderConfig, _: Config) -> tuple[VisionConfig, ImageFormat] | None:
    """VisionFamily.read: SigLIP with averages of its patches, whose rows attend to each other."""
    written = config.get("vision_config")
    if not isinstance(written, dict):
        return None
    merger = MergerConfig(name="vision.merger", averaged=True, patch_norm="layer", norm="rms")
    num_tokens = number(config, "mm_tokens_per_image", default=256)
    vision = _siglip.tower(written, merger, num_tokens=num_tokens, out=trunk.hidden_size)
    return vision, ImageFormat(
        image_size=vision.positions * vision.patch_size, patch_size=vision.patch_size, merge=vision.merge,
        placeholder="<start_of_image>", marker="<start_of_image>", begin="<start_of_image>", end="<end_of_image>",
        around="\n\n", is_bidirectional=True,
        token_id=min(number(config, "image_token_index", default=262144), trunk.vocab_size - 1),
    )  # fmt: skip


def adapt_tower(tensors: dict[str, RawTensor], config: VisionConfig, from_gguf: bool) -> dict[str, RawTensor]:
    """VisionFamily.adapt: the projection is stored [in, out]."""
    norm, projection = "vision.merger.norm.weight", "vision.merger.projection.weight"
    more = {projection: tensors[projection].transposed()}
    more |= {} if from_gguf else {norm: tensors[norm].affine(1, 1)}  # llama.cpp's converter has added 1
    return _siglip.as_matrix(tensors, config) | more


def read_projector(metadata: Config, _: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """ProjectorLayout.read."""
    written = _clip.vision_config(metadata)
    unit = number(written, "patch_size") * number(metadata, _clip.SCALE_FACTOR, default=4)
    return {"vision_config": written, "mm_tokens_per_image": (number(written, "image_size") // unit) ** 2}, {}


PROJECTOR = ProjectorLayout(
    model_types={"gemma3": "gemma3"},
    names=_clip.names({
        "v.post_ln.": "vision.merger.patch_norm.", "mm.soft_emb_norm.": "vision.merger.norm.",
        "mm.input_projection.": "vision.merger.projection.",
    }),
    read=read_projector,
)  # fmt: skip


FAMILY = Family(
    vision=VisionFamily(read=tower, names=_siglip.NAMES, adapt=adapt_tower, projector=PROJECTOR),
    parse=parse,
    names=_gemma.NAMES,
    shifted_norms=ALL_NORMS,
    defaults={**_gemma.DEFAULTS, "vocab_size": 262208, "num_hidden_layers": 26, "query_pre_attn_scalar": 256,
        "sliding_window": 4096,},
    harmless=_gemma.HARMLESS,
    aliases=("gemma3_text",),
    small={
        "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "head_dim": 16, "sliding_window": 11,
        "query_pre_attn_scalar": 20, "sliding_window_pattern": 2, "rope_theta": 1e6,
        "tie_word_embeddings": True,
    },
)  # fmt: skip
