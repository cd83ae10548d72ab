"""LoRA adapter files written without PEFT."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from support import new_folder

from headstart.formats import open_checkpoint, safetensors

ADAPTED = ("_proj.weight", "in_proj_qkv.weight", "in_proj_z.weight")


def random_adapter(model: Path, seed: int, rank: int = 4) -> Path:
    """A PEFT directory with factors of all attention and MLP matrices of a checkpoint."""
    rng, arrays = np.random.default_rng(seed), dict[str, Any]()
    for name, tensor in open_checkpoint(model).tensors.items():
        if name.endswith(ADAPTED) and "mtp" not in name:
            module = f"base_model.model.{name.removesuffix('.weight')}"
            a, b = rng.standard_normal((rank, tensor.shape[1])), rng.standard_normal((tensor.shape[0], rank))
            arrays[f"{module}.lora_A.weight"] = a.astype(np.float32)
            arrays[f"{module}.lora_B.weight"] = b.astype(np.float32) / 10
    return write_adapter(arrays, {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank})


def write_adapter(arrays: Mapping[str, Any], config: Mapping[str, Any]) -> Path:
    folder = new_folder() / "adapter"
    folder.mkdir(parents=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    safetensors.save(folder / "adapter_model.safetensors", arrays)
    return folder
