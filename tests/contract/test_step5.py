"""Step-5 compared with a reading of vLLM's code, for contexts with more regions than its indexers select."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import family_of, make, model_at, new_folder, prompt_of
from test_families import logits_in_chunks
from tiny_models import write_model
from torch import Tensor
from torch.nn.functional import layer_norm, linear, silu

from headstart.errors import ModelError
from headstart.models.families import family_named

LENGTH = 150
CONFIG: dict[str, Any] = {
    "model_type": "step5", "architectures": ["Step5ForCausalLM"], "moe_layers_enum": None, "moe_layer_list": [1, 2],
    "attention_other_setting": None, "swa_num_attention_heads": 6, "norm_dtype": "fp32",
    "fp32_residual_connection": True, "yarn_only_types": ["full_attention"], "rope_scaling": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16},
    "sparse_config": {
        "topk": 3, "region_block_size": 8, "apply_to_layer_types": ["full_attention"], "proxy_dim": 12,
        "sparse_indexer_num_heads": 6, "sparse_indexer_rope_dim": 4},
}  # fmt: skip


@cache
def checkpoint() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config, arrays = family_of("step3p5").tiny(**CONFIG)
    return config, arrays | {"model.layers.0.self_attn.ssmax_s": np.ones(4, np.float32)}


@cache
def folder() -> Path:
    return write_model(new_folder(), *checkpoint())


@pytest.mark.parametrize("backend", ["reference", "native"])
def test_logits_with_selected_regions_match_the_reading(backend: str) -> None:
    settings: dict[str, Any] = {"kv_cache_dtype": "float32"} if backend == "native" else {}
    model, (config, arrays) = model_at(folder(), backend, **settings), checkpoint()
    tokens, settings = prompt_of(LENGTH, 5), {**settings, "backend": backend, "block_size": 16}
    engine = make(model, dtype="float32", drafter="none", max_model_len=LENGTH, **settings)
    theirs = Step5Reading(config, arrays)(torch.tensor(tokens))
    for first, chunk in ((LENGTH, 1), (7, 41)):
        ours = logits_in_chunks(engine, tokens, first, chunk)
        torch.testing.assert_close(ours.double(), theirs, atol=2e-4, rtol=0)


class Step5Reading:
    """After vLLM 0.33 `models/step5/nvidia` (model.py, ops/indexer_norm_rope.py, ops/summary_update.py,
    ops/sparse_indexer_scores.py, ops/sparse_indexer.py), in float64, without rounding indexers to FP8."""

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
        distance = rows[:, None] - rows
        seen = distance >= 0
        if self.config["layer_types"][layer] == "sliding_attention":
            seen = seen & (distance < self.config["sliding_window"])
        else:
            seen = (seen & self.selected(layer, x)).repeat_interleave(
                self.config["num_attention_heads"] // self.config["num_attention_groups"], 0
            )
        scores = (torch.einsum("rhd,nhd->hrn", q, k) * dim**-0.5).masked_fill(~seen, -torch.inf)
        out = torch.einsum("hrn,nhd->rhd", scores.softmax(-1), v)
        return self.linear((out * self.linear(x, f"{at}.g_proj").sigmoid()[..., None]).flatten(1), f"{at}.o_proj")

    def selected(self, layer: int, x: Tensor) -> Tensor:
        """bool [KV heads, R, R]: positions in the regions that each row selects, and in the row's own region."""
        at, sparse = f"model.layers.{layer}.self_attn.sparse_indexer", self.config["sparse_config"]
        dim, size, groups = sparse["proxy_dim"], sparse["region_block_size"], self.config["num_attention_groups"]
        q = self.norm(self.linear(x, f"{at}_q").unflatten(-1, (-1, dim)), f"{at}_q_norm")
        norm = self.arrays[f"{at}_k_norm.weight"], self.arrays[f"{at}_k_norm.bias"]
        k = layer_norm(self.linear(x, f"{at}_k"), (dim,), *norm, self.config["rms_norm_eps"])[:, None]
        q, k = (self.rope(layer, each, sparse["sparse_indexer_rope_dim"]) for each in (q, k))
        count, rows = len(x) // size, torch.arange(len(x))  # complete regions
        shares = self.linear(x, f"{at}_z")[: count * size].unflatten(0, (-1, size)).softmax(1)
        summaries = (shares * k[: count * size, 0].unflatten(0, (-1, size))).sum(1)
        weights = self.linear(x, f"{at}_w").unflatten(-1, (groups, -1)) * (q.shape[1] // groups) ** -0.5
        products = torch.einsum("rghd,nd->grhn", q.unflatten(1, (groups, -1)), summaries).relu()
        scores = torch.einsum("grhn,rgh->grn", products, weights)
        current = rows // size
        scores = scores.masked_fill(torch.arange(count) >= current[:, None], -torch.inf)
        # ties between regions without a positive product go to the lower region
        best = scores.sort(dim=-1, descending=True, stable=True)
        chosen = torch.zeros(groups, len(x), count + 1, dtype=torch.bool)
        chosen.scatter_(-1, best.indices[..., : sparse["topk"]], (best.values > -torch.inf)[..., : sparse["topk"]])
        return (chosen | (torch.arange(count + 1) == current[:, None]))[..., rows // size]

    def rope(self, layer: int, x: Tensor, width: int = 0) -> Tensor:
        """[R, heads, D]: rotates pairs formed from both halves of the first features. width 0: that of attention."""
        width = width or int(self.config["head_dim"] * self.config["partial_rotary_factors"][layer])
        rates = self.config["rope_theta"][layer] ** (-torch.arange(0, width, 2).double() / width)
        if self.config["layer_types"][layer] in self.config["yarn_only_types"]:
            rates = self.scaled(rates)
        angles = (torch.arange(len(x)).double()[:, None] * rates)[:, None]
        left, right, rest = x.split((width // 2, width // 2, x.shape[-1] - width), -1)
        cos, sin = angles.cos(), angles.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin, rest), -1)

    def scaled(self, rates: Tensor) -> Tensor:
        """Llama 3's scaling of frequencies."""
        scaling = self.config["rope_scaling"]
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        turns = scaling["original_max_position_embeddings"] * rates / (2 * torch.pi)
        smooth = ((turns - low) / (high - low)).clamp(0, 1)
        return (1 - smooth) * rates / scaling["factor"] + smooth * rates

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


def test_indexer_tensors_are_renamed() -> None:
    names = family_named("step5_vl").names
    for at in ("model.language_model.layers.4.self_attn.", "model.layers.4.self_attn."):
        assert names.canonical(f"{at}sparse_indexer_z.weight") == "layers.4.self_attn.indexer.pool_gate"
        assert names.canonical(f"{at}sparse_indexer_q_norm.weight") == "layers.4.self_attn.indexer.q_norm.weight"
        assert names.canonical(f"{at}ssmax_s") is None


WRONG = {
    "topk": 0, "proxy_dim": 2, "sparse_indexer_num_heads": 5, "region_block_size": 1, "sparse_indexer_num_k_heads": 2,
    "apply_to_layer_types": ["sliding_attention"], "sparse_indexer_csa_z_norm_type": "rmsnorm",
}  # fmt: skip


@pytest.mark.parametrize("key", WRONG)
def test_unsupported_sparse_configs_are_refused(key: str) -> None:
    family = family_of("step3p5")
    sparse = CONFIG["sparse_config"] | {key: WRONG[key]}
    with pytest.raises(ModelError, match=r"config\.json: "):
        family.read(family.tiny_config(**CONFIG | {"sparse_config": sparse}))
