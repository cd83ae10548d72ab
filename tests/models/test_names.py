"""Tensor names mapped to canonical names and back by one table."""

import re

import pytest
from checkpoints import as_tensors
from support import ALL_FAMILIES, family_of

from headstart.models.names import Names, trailing_modules, trailing_name

JOINED = re.compile("linear_attn|experts|(gate|up|qkv|[qkv])_proj")
TABLE = Names(
    {
        "model.": "", "wrapped.model.": "", "lm_head.": "lm_head.", "vision.": None,
        "model.extra.{i}.": "mtp.{i}.block.", "model.extra_norm.": "mtp.{i}.norm."},
    parts={".ff.": ".mlp."},
)  # fmt: skip
THERE = {
    "model.layers.3.ff.up_proj.weight": "layers.3.mlp.up_proj.weight", "wrapped.model.norm.weight": "norm.weight",
    "lm_head.weight": "lm_head.weight", "vision.patch.weight": None,
    "model.extra.2.ff.gate.weight": "mtp.2.block.mlp.gate.weight", "model.extra_norm.weight": "mtp.0.norm.weight",
    "elsewhere.weight": "elsewhere.weight", "model.rotary_emb.inv_freq": None,
}  # fmt: skip
BACK = {
    "layers.3.mlp.up_proj.weight": "model.layers.3.ff.up_proj.weight", "norm.weight": "model.norm.weight",
    "lm_head.weight": "lm_head.weight", "mtp.2.block.mlp.gate.weight": "model.extra.2.ff.gate.weight",
    "mtp.0.norm.weight": "model.extra_norm.weight",
    "mtp.1.norm.weight": "model.extra_norm.weight",  # shared by all modules
}  # fmt: skip


def test_longest_prefix_is_mapped() -> None:
    assert {name: TABLE.canonical(name) for name in THERE} == THERE
    assert {name: TABLE.theirs(name) for name in BACK} == BACK and TABLE.of_modules and not Names().of_modules


def test_trailing_mtp_modules_are_renamed() -> None:
    names = {
        "layers.4.mlp.up_proj.weight": "layers.4.mlp.up_proj.weight",
        "layers.5.enorm.weight": "mtp.0.norm_embedding.weight",
        "layers.6.shared_head.norm.weight": "mtp.1.norm.weight",
        "layers.6.mlp.up_proj.bias": "mtp.1.block.mlp.up_proj.bias",
    }
    copies = dict.fromkeys(("layers.5.shared_head.head.weight", "layers.6.embed_tokens.weight"))
    assert list(trailing_modules(dict.fromkeys([*names, *copies]), 5)) == list(names.values())
    assert [trailing_name(new, 5) for new in names.values()] == list(names)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_tiny_model_has_all_tensors_of_the_family(family: str) -> None:
    """Written names map back to the family's shapes, except for tensors that the family joins or converts."""
    found = family_of(family)
    config, arrays = found.tiny()
    sizes = found.read(config)
    names = {name: found.names.canonical(name) for name in arrays}
    assert None not in names.values()
    tensors = as_tensors({new: arrays[name] for name, new in names.items() if new})
    adapted = found.adapt(tensors, sizes, False) if found.adapt else tensors
    differences = set(trailing_modules(adapted, sizes.num_layers)) ^ set(found.shapes(sizes))
    assert not differences if not found.restore else all(JOINED.search(n) for n in differences), differences
