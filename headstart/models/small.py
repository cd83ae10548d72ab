"""Sizes and random tensors of small models, for tests and `train --from-scratch`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[np.float32]]

TINY: Mapping[str, Any] = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 131, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "torch_dtype": "float32",
    "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
"""Keys of config.json of a small model that still has grouped heads, several layers and odd sizes."""

SCRATCH: Mapping[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "torch_dtype": "bfloat16",
}  # fmt: skip
"""config.json keys for about a million parameters, in sizes that other engines support: multiples of 32."""
SCRATCH_EXPERTS: Mapping[str, Any] = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}


def random_arrays(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> Arrays:
    """Random tensors. Matrices ~ N(0, 1 / in), so that logits are of order 1 to 10; norm weights near 1; convolutions
    of order 1 / sqrt(width); decay rates with which states forget within about 3 to 30 rows."""
    rng = np.random.default_rng(seed)
    arrays = {}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape)
        if name.endswith(".decay_rate"):
            values = -np.geomspace(0.03, 0.5, shape[0])
        elif name.endswith(".table"):  # experts of a token: neighbours, of a few more than it takes
            values = rng.integers(0, shape[1] + 2, (shape[0], 1)) + np.arange(shape[1], dtype=np.float64)
        elif len(shape) == 2:
            values = values / np.sqrt(shape[-1])
        elif name.endswith((".conv", ".conv.weight")):
            values = values * 0.5
        else:
            values = values * 0.1 + (1 if "norm" in name or name.endswith(("scale", "scalar")) else 0)
        arrays[name] = values.astype(np.float32)
    return arrays
