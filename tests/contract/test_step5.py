"""Step-5 up to the longest context at which its indexers select all regions, beside a reading of vLLM's code."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import family_of, make, model_at, new_folder, new_sequence
from tiny_models import write_model
from torch import Tensor
from torch.nn.functional import linear, silu

from headstart.core import Span
from headstart.models.families import family_named
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions

LONGEST = 24
INDEXER = {"q": (12, 64), "k": (6, 64), "w": (2, 64), "z": (6, 64), "q_norm": (6,), "k_norm": (6,)}
"""Parts of an indexer -> shapes of their weights."""
CONFIG: dict[str, Any] = {
    "model_type": "step5", "architectures": ["Step5ForCausalLM"], "moe_layers_enum": None, "moe_layer_list": [1, 2],
    "attention_other_setting": None, "swa_num_attention_heads": 6, "norm_dtype": "fp32",
    "fp32_residual_connection": True, "yarn_only_types": ["full_attention"], "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16},
    "sparse_config": {"topk": 3, "region_block_size": 8, "apply_to_layer_types": ["full_attention"]},
}  # fmt: skip


@cache
def checkpoint() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config, arrays = family_of("step3p5").tiny(**CONFIG)
    generator = np.random.default_rng(0)
    for layer, kind in enumerate(config["layer_types"]):
        at = f"model.layers.{layer}.self_attn."
        if kind == "full_attention":
            arrays |= {
                f"{at}sparse_indexer_{part}.weight": generator.standard_normal(shape, np.float32)
                for part, shape in INDEXER.items()
            }
            arrays |= {
                f"{at}sparse_indexer_k_norm.bias": np.ones(6, np.float32),
                f"{at}ssmax_s": np.ones(4, np.float32),
            }
    return config, arrays


@cache
def written() -> Path:
    return write_model(new_folder(), *checkpoint())


def test_logits_of_vllm_up_to_the_longest_context() -> None:
    model = model_at(written())
    assert model.config.max_length == LONGEST
    config, arrays = checkpoint()
    tokens = [(7 * i * i + 3) % model.config.vocab_size for i in range(LONGEST)]
    engine = make(model, dtype="float32", drafter="none", max_model_len=LONGEST)
    ours = engine.runner.forward([Span(new_sequence(engine, tokens, computed=0), 0, LONGEST, LONGEST)]).logits
    theirs = Reading(config, arrays)(torch.tensor(tokens))
    torch.testing.assert_close(ours.double(), theirs, atol=2e-4, rtol=0)


def test_inspect_says_how_long_a_context_may_be() -> None:
    assert "headstart runs it, to 24 positions" in inspect.run(InspectOptions(model=str(written()))).lines


class Reading:
    """A reading of vLLM 0.33 `models/step5/nvidia/model.py`, in float64, where `select_all_regions` selects."""

    def __init__(self, config: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        self.config, self.arrays = config, {name: torch.tensor(each).double() for name, each in arrays.items()}

    def __call__(self, tokens: Tensor) -> Tensor:
        x = self.arrays["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self.attention(layer, self.norm(x, f"{at}input_layernorm"))
            h = self.norm(x, f"{at}post_attention_layernorm")
            x = x + (self.experts(layer, h) if layer in self.config["moe_layer_list"] else self.dense(f"{at}mlp", h))
        return self.linear(self.norm(x, "model.norm"), "lm_head")

    def linear(self, x: Tensor, name: str) -> Tensor:
        return linear(x, self.arrays[f"{name}.weight"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return scaled * (1 + self.arrays[f"{name}.weight"])

    def attention(self, layer: int, x: Tensor) -> Tensor:
        at, dim, rows = f"model.layers.{layer}.self_attn", self.config["head_dim"], torch.arange(len(x))
        q, k, v = (self.linear(x, f"{at}.{part}_proj").unflatten(-1, (-1, dim)) for part in "qkv")
        q, k = (self.rope(layer, self.norm(each, f"{at}.{part}_norm")) for each, part in ((q, "q"), (k, "k")))
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1) for each in (k, v))
        behind = rows[:, None] - rows
        seen = behind >= 0
        if self.config["layer_types"][layer] == "sliding_attention":
            seen &= behind < self.config["sliding_window"]
        scores = (torch.einsum("rhd,nhd->hrn", q, k) * dim**-0.5).masked_fill(~seen, -torch.inf)
        out = torch.einsum("hrn,nhd->rhd", scores.softmax(-1), v)
        return self.linear((out * self.linear(x, f"{at}.g_proj").sigmoid()[..., None]).flatten(1), f"{at}.o_proj")

    def rope(self, layer: int, x: Tensor) -> Tensor:
        """[R, heads, D]: rotates pairs of the first features, from both halves of them."""
        width = int(self.config["head_dim"] * self.config["partial_rotary_factors"][layer])
        rates = self.config["rope_theta"][layer] ** (-torch.arange(0, width, 2).double() / width)
        if self.config["layer_types"][layer] in self.config["yarn_only_types"]:
            rates = self.scaled(rates)
        angles = (torch.arange(len(x)).double()[:, None] * rates)[:, None]
        left, right, rest = x.split((width // 2, width // 2, x.shape[-1] - width), -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)

    def scaled(self, rates: Tensor) -> Tensor:
        """Llama 3's scaling of frequencies."""
        told = self.config["rope_scaling"]
        low, high = told["low_freq_factor"], told["high_freq_factor"]
        turns = told["original_max_position_embeddings"] * rates / (2 * torch.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * rates / told["factor"] + smooth * rates

    def dense(self, at: str, x: Tensor) -> Tensor:
        return self.linear(silu(self.linear(x, f"{at}.gate_proj")) * self.linear(x, f"{at}.up_proj"), f"{at}.down_proj")

    def experts(self, layer: int, x: Tensor) -> Tensor:
        at = f"model.layers.{layer}"
        scores = self.linear(x, f"{at}.moe.gate").sigmoid()
        chosen = (scores + self.arrays[f"{at}.moe.router_bias"]).topk(self.config["moe_top_k"], -1).indices
        shares = scores.gather(-1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) * self.config["moe_router_scaling_factor"]
        gate, up, down = (self.arrays[f"{at}.moe.{part}_proj.weight"][chosen] for part in ("gate", "up", "down"))
        left, right = (torch.einsum("rh,rkih->rki", x, each) for each in (gate, up))
        left, limit = silu(left), self.config["swiglu_limits"][layer]
        if limit:
            left, right = left.clamp(max=limit), right.clamp(-limit, limit)
        routed = torch.einsum("rk,rki,rkhi->rh", shares, left * right, down)
        return routed + self.dense(f"{at}.share_expert", x)


@pytest.mark.parametrize("name", ["sparse_indexer_q.weight", "sparse_indexer_k_norm.bias", "ssmax_s"])
def test_tensors_of_indexers_are_left(name: str) -> None:
    names = family_named("step5_vl").names
    assert names.canonical(f"model.language_model.layers.4.self_attn.{name}") is None
    assert names.canonical(f"model.layers.93.self_attn.{name}") is None
