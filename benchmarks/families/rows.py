"""Rows of the table of verify_families.py: a small random model each, of a family, of a variant, in a weight format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from measure import formats

from families.softened import QUIET, agreeing, has_head
from headstart import registry
from headstart.models.base import Family
from headstart.models.small import Arrays
from headstart.tools.tiny import write_model

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "gemma4_experts": (
        "gemma4", {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20},
    ),
    "gemma4_shared": (
        "gemma4",
        {
            "num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
            "layer_types": [("sliding", "full")[i % 2 if i < 3 else i - 3] + "_attention" for i in range(5)],
        },
    ),
}  # fmt: skip
"""Rows beside those of each family: the family, and changes of its small config."""
QUANTIZED, SIZES = "mimo", {"hidden_size": 128, "intermediate_size": 256}
"""The family of rows of weight formats: its trunk's q, k, v, gate and up are quantized; its MTP module is not."""
FORMATS: Mapping[str, tuple[Mapping[str, Any], formats.Stored]] = {
    "fp8_blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, formats.fp8_blocks),
    **formats.FORMATS,
}


@dataclass(frozen=True)
class Row:
    name: str
    module: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    form: str = ""
    """Of FORMATS; empty: as it is."""

    @property
    def family(self) -> Family:
        found: Family = registry.find("models", self.module).FAMILY
        return found

    @property
    def of_family(self) -> bool:
        """Is it the row of a family as it is?"""
        return not self.changes and not self.form

    def write(self, folder: Path) -> tuple[Path, int, bool]:
        """The softened model: its directory, its vocabulary's size, and whether it has an MTP module."""
        config, arrays = self.family.tiny(**self.changes)
        drafts, arrays = has_head(arrays), agreeing(arrays)
        if self.form:
            told, stored = FORMATS[self.form]
            config, arrays = {**config, "quantization_config": dict(told)}, quantized(arrays, stored)
        return write_model(folder / self.name, config, arrays), config["vocab_size"], drafts


def quantized(arrays: Arrays, stored: formats.Stored) -> Arrays:
    """With random weights of a format in the place of the trunk's matrices, but for those that are softened."""
    rng, found = np.random.default_rng(0), dict[str, Any]()
    for name, array in arrays.items():
        if ".layers." in name and name.endswith("_proj.weight") and not name.endswith(QUIET):
            found |= {part.name: (part.make(rng), part.dtype) for part in stored(name, array.shape)}
        else:
            found[name] = array
    return found


def all_rows() -> dict[str, Row]:
    rows = [Row(name, name) for name in registry.available("models")]
    rows += [Row(name, family, changes) for name, (family, changes) in VARIANTS.items()]
    rows += [Row(f"{QUANTIZED}+{form}", QUANTIZED, SIZES, form) for form in FORMATS]
    return {row.name: row for row in rows}
