"""The table of MTP families against transformers' own layers: names and shapes of attention, MLP and norms."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from headstart.formats.mtp_families import families_by_key

SIZES: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 40, "moe_intermediate_size": 24, "q_lora_rank": 12, "kv_lora_rank": 20,
    "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10, "n_routed_experts": 8, "num_experts": 8,
    "n_shared_experts": 2, "shared_expert_intermediate_size": 28, "index_n_heads": 3, "index_head_dim": 4,
    "num_local_experts": 8, "moe_num_experts": 8,
}  # fmt: skip

CASES: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    # family -> model, class of a block, an index at which the block is like the MTP module's, sizes that matter
    "deepseek_v3": ("deepseek_v3", "DeepseekV3DecoderLayer", 3, {"n_group": 2, "num_key_value_heads": 4}),
    "deepseek_v32": ("deepseek_v32", "DeepseekV32DecoderLayer", 3, {"n_group": 2, "num_key_value_heads": 4}),
    "glm4_moe": ("glm4_moe", "Glm4MoeDecoderLayer", 3, {"use_qk_norm": True}),
    "glm4_moe_lite": ("glm4_moe_lite", "Glm4MoeLiteDecoderLayer", 3, {"num_key_value_heads": 4}),
    "glm_moe_dsa": ("glm_moe_dsa", "GlmMoeDsaDecoderLayer", 3, {"num_key_value_heads": 4}),
    "qwen3_next": ("qwen3_next", "Qwen3NextDecoderLayer", 3, {}),
    "qwen3_5": ("qwen3_5", "Qwen3_5DecoderLayer", 3, {}),
    "qwen3_5_moe": ("qwen3_5_moe", "Qwen3_5MoeDecoderLayer", 3, {}),
    "ernie4_5_moe": ("ernie4_5_moe", "Ernie4_5_MoeDecoderLayer", 0, {}),
    "exaone_moe": ("exaone_moe", "ExaoneMoeDecoderLayer", 0, {}),
    "hy_v3": ("hy_v3", "HYV3DecoderLayer", 3, {}),
    "pangu_ultra_moe": ("deepseek_v3", "DeepseekV3DecoderLayer", 3, {"n_group": 2, "num_key_value_heads": 4}),
    "mellum": ("mellum", "MellumDecoderLayer", 0, {}),
    "step3p5": ("step3p7", "Step3p7DecoderLayer", 0, {}),
}
HEAD = ("eh_proj", "enorm", "hnorm", "shared_head", "final_layernorm", "fc.", "pre_fc_norm", "mtp.norm")


@pytest.mark.parametrize("key", CASES)
def test_blocks_are_those_of_transformers(key: str) -> None:
    kind, name, index, changes = CASES[key]
    config = CONFIG_MAPPING[kind]().get_text_config()
    for field, value in {**SIZES, **changes}.items():
        if hasattr(config, field):
            setattr(config, field, value)
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    with torch.device("meta"):
        layer = getattr(module, name)(config, index)
    theirs = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    family = families_by_key()[key]
    sizes = family.sizes({**config.to_dict(), **{k: v for k, v in {**SIZES, **changes}.items() if hasattr(config, k)}})
    prefix = next(each for each in family.tensors if each.startswith(("layers.", "mtp.layers.", "mtp_block.")))
    prefix = prefix.format(i=0, layer=4)
    present = {prefix + name for name in theirs}  # experts are fused there
    slots = [slot for slot in family.expected(sizes, 0, 4, present) if slot.name.startswith(prefix)]
    block = {slot.name.removeprefix(prefix): slot for slot in slots if not any(word in slot.name for word in HEAD)}
    assert len([slot for slot in block.values() if not slot.optional]) > 5
    for name, slot in block.items():
        if name not in theirs:
            assert slot.optional, name
            continue
        assert slot.shape is not None and len(slot.shape) == len(theirs[name]), name
        sizes_of_both = zip(slot.shape, theirs[name], strict=True)
        assert all(ours == real or not isinstance(ours, int) for ours, real in sizes_of_both), (name, slot)
    assert family.open or not set(theirs) - set(block), set(theirs) - set(block)
