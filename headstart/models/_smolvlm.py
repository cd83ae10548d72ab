"""SmolVLM and Idefics3: SigLIP over the squares of an image, and over the whole of it.

Formula: transformers 5.24 `models/smolvlm`; preparation: `image_processing_pil_smolvlm.py`, `processing_smolvlm.py`.
"""

from collections.abc import Collection
from typing import Any

from headstart.errors import ModelError
from headstart.layers.build import DecoderConfig
from headstart.layers.vision import MergerConfig, VisionConfig
from headstart.models import _clip, _siglip, keys
from headstart.models.base import ProjectorLayout, VisionFamily
from headstart.models.keys import Config
from headstart.models.names import Names
from headstart.text.image_prompt import ImageFormat

DEFAULTS = {**_siglip.DEFAULTS, "hidden_size": 1152, "num_attention_heads": 16, "patch_size": 32}
NAMES = Names(
    {
        "model.vision_model.encoder.layers.{i}.": "vision.layers.{i}.",
        "model.vision_model.embeddings.patch_embedding.": "vision.patch_embedding.0.",
        "model.vision_model.embeddings.position_embedding.": "vision.position_embedding.",
        "model.vision_model.post_layernorm.": "vision.merger.patch_norm.",
        "model.connector.modality_projection.proj.": "vision.merger.projection.",
    },
    parts=_siglip.NAMES.parts,
)


def read(config: Config, trunk: DecoderConfig, preparation: Config) -> tuple[VisionConfig, ImageFormat] | None:
    """VisionFamily.read."""
    written = config.get("vision_config")
    if not isinstance(written, dict):
        return None
    merge = keys.number(config, "scale_factor", default=2)
    merger = MergerConfig(name="vision.merger", patch_norm="layer")
    vision = _siglip.tower(written, merger, merge=merge, out=trunk.hidden_size, defaults=DEFAULTS)
    side = vision.positions * vision.patch_size
    size = preparation.get("size", {"longest_edge": 4 * 364})
    if preparation.get("max_image_size", {"longest_edge": side}) != {"longest_edge": side}:
        what = f"preprocessor_config.json: max_image_size is {preparation['max_image_size']!r}"
        raise ModelError(what, f"the vision tower takes {side} pixels")
    is_cut = keys.flag(preparation, "do_image_splitting", True)
    return vision, ImageFormat(
        image_size=side, longest=keys.number(size, "longest_edge"), is_cut=is_cut,
        patch_size=vision.patch_size, merge=merge, resample=keys.number(preparation, "resample", default=1, least=0),
        placeholder="<image>", marker="<image>", begin="<fake_token_around_image>", end="<fake_token_around_image>",
    )  # fmt: skip


def read_projector(metadata: Config, _: Collection[str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """ProjectorLayout.read."""
    longest = metadata.get("clip.vision.preproc_image_size")
    config = {"vision_config": _clip.vision_config(metadata), "scale_factor": metadata.get(_clip.SCALE_FACTOR)}
    return config, {"size": {"longest_edge": longest}} if longest else {}


PROJECTOR = ProjectorLayout(
    model_types={"idefics3": "smolvlm"},
    names=_clip.names({"v.post_ln.": "vision.merger.patch_norm.", "mm.model.fc.": "vision.merger.projection."}),
    read=read_projector,
)
VISION = VisionFamily(read=read, names=NAMES, adapt=_siglip.as_matrix, projector=PROJECTOR)
