"""Finds the part of a model that a tensor belongs to, by the tensor's name."""

import re

from headstart.formats.base import WRAPPER

LAYERS, EXPERTS, MTP = "layers", "experts", "mtp"
PARTS = ("embedding", LAYERS, EXPERTS, "norms and rest", "lm_head", MTP, "other modalities")
_MTP = re.compile(r"(?:^|\.)(?:mtp(?:_\w+)?|nextn)\.")
_LAYER = re.compile(WRAPPER + r"(?:layers|blk|h)\.(\d+)\.")
_OTHER = re.compile(r"(?:^|\.)(?:visual|vision(?:_\w+)?|audio_\w+|multi_modal_projector|mm_projector|aligner)\.")


def part_of(name: str, num_layers: int) -> str:
    """The one of PARTS that a tensor of any family belongs to. `num_layers`: layers of the trunk; 0: unknown."""
    if ("mtp" in name or "nextn" in name) and _MTP.search(name):  # the first test is fast and usually decides
        return MTP
    if match := _LAYER.match(name):
        if num_layers and int(match[1]) >= num_layers:
            return MTP
        return EXPERTS if ".experts." in name or "_exps." in name else LAYERS
    if _OTHER.search(name):
        return "other modalities"
    if "lm_head" in name or name in ("output.weight", "head.weight"):
        return "lm_head"
    if "embed" in name or "wte" in name:
        return "embedding"
    return "norms and rest"
