"""A checkpoint of the size of DeepSeek-V3: 160 shards, 92,000 tensors, FP8 with block scales. The files are sparse."""

from pathlib import Path

import pytest
from zoo import Tensors, write

from headstart import registry
from headstart.models.names import trailing_name
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions

HIDDEN, VOCABULARY, LAYERS, EXPERTS, DENSE = 7168, 129280, 61, 256, 3
CONFIG = {
    "model_type": "deepseek_v3", "hidden_size": HIDDEN, "vocab_size": VOCABULARY, "num_hidden_layers": LAYERS,
    "num_attention_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": EXPERTS, "n_shared_experts": 1,
    "moe_intermediate_size": 2048, "intermediate_size": 18432, "num_nextn_predict_layers": 1,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}  # fmt: skip
KEPT = ("norm", "eh_proj", "gate.weight", "embed_tokens", "shared_head", "bias")
"""Tensors that are not quantized."""


def tensors() -> Tensors:
    family = registry.find("models", "deepseek_v3").FAMILY
    shapes = {
        family.names.theirs(trailing_name(name, LAYERS)): shape
        for name, shape in family.shapes(family.read(CONFIG, strict=False)).items()
    }
    shapes |= {
        f"model.layers.{LAYERS}.embed_tokens.weight": (VOCABULARY, HIDDEN),
        f"model.layers.{LAYERS}.shared_head.head.weight": (VOCABULARY, HIDDEN),
    }
    found: Tensors = {}
    for name, shape in shapes.items():
        if not name.startswith("model.layers.") or any(word in name for word in KEPT):
            found[name] = ("F32" if name.endswith("bias") else "BF16", shape)
        else:
            found[name] = ("F8_E4M3", shape)
            found[f"{name}_scale_inv"] = ("F32", tuple(-(-size // 128) for size in shape))
    return found


@pytest.mark.slow
def test_large_checkpoint_is_inspected(tmp_path: Path) -> None:
    made = tensors()
    assert len(made) > 90_000
    data = inspect.run(InspectOptions(model=str(write(tmp_path, CONFIG, made, shards=160)))).data
    assert (data["heads"]["verdict"], data["files"]) == ("alive", 160)
    parameters = {part: row["parameters"] for part, row in data["parts"].items()}
    assert round((data["total"]["parameters"] - parameters["mtp"]) / 1e9) == 671  # the published number
    assert 11.4e9 < parameters["mtp"] - 2 * parameters["embedding"] < 11.7e9
    assert list(data["parts"]["experts"]["types"]) == ["FP8 (128x128 blocks)"]
    assert data["heads"]["embedding"] == data["heads"]["lm_head"] == "copy"
