"""Blocks of MTP modules compared with transformers' layers: names and shapes of attention, MLP and norms."""

import importlib
import re
from typing import Any

import pytest
import torch
from family_rows import ROWS
from support import family_of
from transformers import CONFIG_MAPPING

from headstart.heads.kind import head_kind
from headstart.models.base import Family
from headstart.models.expected import Outline

CASES = {name: row.mtp_block for name, row in ROWS.items() if row.mtp_block is not None}
CHANGES = {"step3p5": {"moe_layers_enum": "2"}}  # layer 1 is dense, like the module's block
Shapes = dict[str, tuple[int, ...]]


@pytest.mark.parametrize("key", CASES)
def test_blocks_match_transformers(key: str) -> None:
    family = family_of(key)
    values = {k: v for k, v in family.tiny_config().items() if v is not None} | CHANGES.get(key, {})
    config = CONFIG_MAPPING[ROWS[key].trunk or key]().get_text_config().from_dict(values)
    module = importlib.import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    [layer_class] = [each for name, each in vars(module).items() if name.endswith("DecoderLayer")]
    with torch.device("meta"):
        layer = layer_class(config, CASES[key] % config.num_hidden_layers)
    theirs = canonical(family, {f"model.layers.0.{n}": tuple(value.shape) for n, value in layer.state_dict().items()})
    mtp, ours = ROWS[key].mtp, block_of(family)
    if mtp and mtp.single_stream:
        theirs = {name: shape for name, shape in theirs.items() if "_hc." not in name}
    assert len(ours) > 5 and ours == theirs


def block_of(family: Family) -> Shapes:
    """Shapes of the block of the first module."""
    sizes = family.read(family.tiny_config())
    head = family.head_of(sizes)
    shapes = head_kind(head.kind).shapes(head, sizes.hidden_size)
    outlines: Any = {name: Outline(shape) for name, shape in shapes.items() if name.startswith("mtp.0.block.")}
    return canonical(family, {name: each.shape for name, each in family.as_published(outlines, sizes).items()})


def canonical(family: Family, shapes: Shapes) -> Shapes:
    """Tensors of a layer by canonical name without prefix, with separate experts."""
    found: Shapes = {}
    for full, shape in shapes.items():
        name = re.sub(r"^(layers\.\d+|mtp\.0\.block)\.", "", str(family.names.canonical(full)))
        name = name.replace("mlp.e_score_", "mlp.gate.e_score_")  # transformers' name of Hunyuan's expert_bias
        if name.endswith("experts.gate_up_proj"):
            half = (shape[1] // 2, shape[2])
            at = name.removesuffix("gate_up_proj")
            found |= {f"{at}{i}.{part}_proj.weight": half for i in range(shape[0]) for part in ("gate", "up")}
        elif name.endswith("experts.down_proj"):
            found |= {f"{name.removesuffix('down_proj')}{i}.down_proj.weight": shape[1:] for i in range(shape[0])}
        else:
            found[name] = shape
    return found
