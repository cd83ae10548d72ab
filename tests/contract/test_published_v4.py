"""DeepSeek-V4 as published: FP4 experts with a scale for 32 columns, other matrices in FP8, integer tables."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from support import family_of, make, model_at, prompt_of, request, run, write_model

SIZES = {"hidden_size": 64, "moe_intermediate_size": 32, "q_lora_rank": 32, "head_dim": 32, "o_lora_rank": 16}
FP8 = ("wq_b.weight", "wkv.weight", "wo_a.weight", "wo_b.weight", "shared_experts.w1.weight", "e_proj.weight")
CODES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
QUANTIZATION = {
    "activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "scale_fmt": "ue8m0",
    "weight_block_size": [128, 128],
}  # fmt: skip


def stored(name: str, array: Any, rng: np.random.Generator) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """A tensor and its scales as stored in files, and its values."""
    values, scale = torch.from_numpy(array), name.replace(".weight", ".scale")
    if ".experts." in name:
        codes = rng.integers(0, 16, array.shape).astype(np.uint8)
        powers = rng.integers(122, 125, (array.shape[0], array.shape[1] // 32)).astype(np.uint8)
        pairs = torch.from_numpy((codes[:, 0::2] | codes[:, 1::2] << 4).view(np.int8))
        numbers = torch.from_numpy(CODES[codes] * np.repeat(2.0 ** (powers.astype(np.float32) - 127), 32, 1)).float()
        return {name: pairs, scale: torch.from_numpy(powers).view(torch.float8_e8m0fnu)}, numbers
    if name.endswith(FP8) and "compressor" not in name:
        powers = np.full([-(-size // 128) for size in array.shape], 126, np.uint8)
        small = values.to(torch.float8_e4m3fn)
        return {name: small, scale: torch.from_numpy(powers).view(torch.float8_e8m0fnu)}, small.float() / 2
    values = values.long() if name.endswith("tid2eid") else values
    return {name: values}, values


def test_published_quantization_equals_plain_values(tmp_path: Path) -> None:
    config, arrays = family_of("deepseek_v4").tiny(**SIZES)
    rng, packed, plain = np.random.default_rng(0), {}, {}
    for name, array in arrays.items():
        files, plain[name] = stored(name, array, rng)
        packed |= files
    texts = []
    for tensors, settings in ((plain, {}), (packed, {"quantization_config": QUANTIZATION, "expert_dtype": "fp4"})):
        folder = write_model(tmp_path / str(len(texts)), config, arrays)
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps({**config, **settings}))
        engine = make(model_at(folder, dtype="float64"), drafter="mtp", depth=2)
        texts.append(run(engine, [request(prompt_of(40, 3), max_tokens=30, stops=())])["r", 0].tokens)
    assert texts[0] == texts[1]
