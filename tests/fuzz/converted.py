"""Random models converted to GGUF files by `gguf_files`."""

import json
from pathlib import Path
from random import Random

from gguf_files import write_gguf

from headstart.formats.safetensors_file import read_file
from tests.fuzz.drawn import BY_KIND, FULL, HYBRID, KINDS, Config

NOT_THERE = ("mimo",)
"""Families that llama.cpp has no architecture for."""


def without_unsupported_keys(family: str, drawn: Config, rng: Random) -> Config:
    """A drawn configuration without the keys and values that GGUF files of its architecture cannot hold."""
    fixed: Config = {
        "hidden_act": "silu", "use_sliding_window": False, "layer_types": None, "rope_interleave": True,
        "decoder_sparse_step": 1, "mlp_only_layers": None, "norm_topk_prob": True, "num_mtp_layers": 0,
        "is_encoder_decoder": False, "dtype": "float32", "hidden_activation": "gelu_pytorch_tanh",
        "use_bidirectional_attention": False,
    }  # fmt: skip
    if family == "glm4_moe":
        fixed |= {"n_group": 1, "topk_group": 1}
    if family in ("glm4_moe", "deepseek_v3"):
        del fixed["norm_topk_prob"]
    if KINDS[family] in HYBRID:
        del fixed["layer_types"]
    found = drawn | {key: value for key, value in fixed.items() if key in drawn}
    count = found.get("n_routed_experts", 0)
    if count and found["num_experts_per_tok"] > count // found["n_group"] * found["topk_group"]:
        found["num_experts_per_tok"] = 1
    if KINDS[family] in BY_KIND:
        ropes = drawn["rope_parameters"]
        return found | {
            "rope_parameters": ropes | {FULL: _supported_rope(family, ropes[FULL], rng)}, "layer_types": None,
            "num_hidden_layers": rng.choice((2, 6, 7)), "query_pre_attn_scalar": found["head_dim"], "vocab_size": 97,
        }  # fmt: skip
    return found | {"rope_parameters": _supported_rope(family, drawn["rope_parameters"], rng)}


def _supported_rope(family: str, rope: Config, rng: Random) -> Config:
    kinds = ["default", "linear", "yarn"]
    if family == "llama":
        kinds.append("llama3")  # stored as factors
    if KINDS[family] in BY_KIND:
        kinds.remove("yarn")
    if family == "deepseek_v3":
        kinds.remove("linear")  # its attention temperature would be that of YaRN
    if rope["rope_type"] not in kinds:
        return {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if key in rope} | {
            "rope_type": "default"
        }
    if rope["rope_type"] != "yarn":
        return rope
    rope = {key: value for key, value in rope.items() if key not in ("truncate", "mscale", "mscale_all_dim")}
    if family == "deepseek_v3":
        rope.pop("attention_factor", None)
        if rng.random() < 0.7:
            rope["mscale"] = rope["mscale_all_dim"] = rng.choice((1.0, 0.707))
    return rope


def convert(folder: Path, path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    tensors = read_file(folder / "model.safetensors")
    arrays = {name: each.float32().reshape(each.shape) for name, each in tensors.items() if 0 not in each.shape}
    write_gguf(path, config, arrays)
