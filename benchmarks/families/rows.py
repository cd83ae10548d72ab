"""Rows of the table of verify_families.py: small random models of families, variants and weight formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from test_step5 import CONFIG as STEP5
from tiny_models import write_model

from families.softened import DAMPED, agreeing, kind_of_head
from families.weight_formats import FORMATS
from headstart import registry
from headstart.models.base import Family
from headstart.models.small import Arrays

VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "deepseek_v4_dspark": (
        "deepseek_v4",
        {
            "dspark_block_size": 5, "dspark_markov_rank": 48, "dspark_noise_token_id": 130,
            "dspark_target_layer_ids": [0, 2], "compress_ratios": [4, 128, 0, 0, 0, 0],
        },
    ),
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
    "inkling_chain": (
        "inkling",
        {"mtp_config": {"num_nextn_predict_layers": 3, "local_layer_ids": [0, 2], "chain_hidden_post_norm": True}},
    ),
    "step5": ("step3p5", STEP5),
}  # fmt: skip
"""Additional rows: family, and changes of its tiny config."""
QUANTIZED, SIZES = "mimo", {"hidden_size": 128, "intermediate_size": 256}
"""Family of the weight-format rows. The trunk's q, k, v, gate and up are quantized, the MTP module is not."""


@dataclass(frozen=True)
class Row:
    name: str
    module: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    weight_format: str = ""  # one of FORMATS; empty: float32

    @property
    def family(self) -> Family:
        found: Family = registry.find("models", self.module).FAMILY
        return found

    def write(self, folder: Path) -> tuple[Path, int, str]:
        """Writes the softened model. Returns its directory, vocabulary size, and kind of head (empty: none)."""
        config, arrays = self.family.tiny(**self.changes)
        for part in (config, config.get("text_config", {})):  # room for prompts of verify's LONG_LENGTHS
            if "max_position_embeddings" in part:
                part["max_position_embeddings"] = 2048
        drafts, arrays = kind_of_head(arrays), agreeing(arrays)
        if self.weight_format:
            config = {**config, "quantization_config": dict(FORMATS[self.weight_format][0])}
            arrays = quantize_trunk(arrays, self.weight_format)
        return write_model(folder / self.name, config, arrays), config["vocab_size"], drafts


def quantize_trunk(arrays: Arrays, weight_format: str) -> Arrays:
    """Replaces the trunk's matrices, except for softened ones, by random weights in a format."""
    rng, result = np.random.default_rng(0), dict[str, Any]()
    for name, array in arrays.items():
        if ".layers." in name and name.endswith("_proj.weight") and not name.endswith(DAMPED):
            result |= FORMATS[weight_format][1](rng, name, array.shape)
        else:
            result[name] = array
    return result


def all_rows() -> dict[str, Row]:
    rows = [Row(name, name) for name in registry.available("models")]
    rows += [Row(name, family, changes) for name, (family, changes) in VARIANTS.items()]
    rows += [Row(f"{QUANTIZED}+{name}", QUANTIZED, SIZES, name) for name in FORMATS]
    return {row.name: row for row in rows}
