"""Which part of a model a tensor belongs to, and what each part weighs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from headstart.formats.mtp_families import WRAPPER
from headstart.tools.inspect.weights import Weight

LAYERS, EXPERTS, MTP = "layers", "experts", "mtp"
ORDER = ("embedding", LAYERS, EXPERTS, "norms and rest", "lm_head", MTP, "other modalities")
_MTP = re.compile(r"(?:^|\.)(?:mtp(?:_\w+)?|nextn)\.")
_LAYER = re.compile(WRAPPER + r"(?:layers|blk|h)\.(\d+)\.")
_OTHER = re.compile(r"(?:^|\.)(?:visual|vision_\w+|audio_\w+|multi_modal_projector|mm_projector|aligner)\.")


def part_of(name: str, num_layers: int) -> str:
    """One of ORDER; `num_layers` of the trunk, 0 where they are not known."""
    if ("mtp" in name or "nextn" in name) and _MTP.search(name):  # the first test is quick, and mostly enough
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


def summary(weights: Iterable[Weight]) -> dict[str, Any]:
    """Parameters, bytes (scales included) and bytes by type."""
    bytes_of: Counter[str] = Counter()
    parameters = 0
    for weight in weights:
        bytes_of[weight.kind] += weight.nbytes
        parameters += weight.parameters
    return {"parameters": parameters, "bytes": sum(bytes_of.values()), "types": dict(bytes_of.most_common())}


Parts = dict[str, dict[str, Weight]]
"""Weights of each part, by name."""


def by_part(weights: Mapping[str, Weight], num_layers: int) -> Parts:
    """The weights of each part that has some, in the order of ORDER."""
    parts: dict[str, dict[str, Weight]] = {part: {} for part in ORDER}
    for name, weight in weights.items():
        parts[part_of(name, num_layers)][name] = weight
    return {part: group for part, group in parts.items() if group}
