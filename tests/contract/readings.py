"""Models that transformers has no class of, read in torch from vLLM's code; the names of tensors are those in files."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.modeling_outputs import CausalLMOutputWithPast

Config = dict[str, Any]


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class CausalLM(nn.Module):
    """A trunk with an LM head; the cache of a forward call holds its tokens."""

    model: nn.Module

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.lm_head = nn.Linear(config["hidden_size"], config["vocab_size"], bias=False)

    def tie_weights(self) -> None:
        """Nothing."""

    def get_input_embeddings(self) -> Any:
        return self.model.embed_tokens

    def forward(self, tokens: Tensor, use_cache: bool, cache: Tensor | None = None) -> CausalLMOutputWithPast:
        every = tokens if cache is None else torch.cat((cache, tokens), 1)
        return CausalLMOutputWithPast(logits=self.lm_head(self.model(every)), past_key_values=every)


class Trunk(nn.Module):
    def __init__(self, config: Config, layers: list[nn.Module]) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config["vocab_size"], config["hidden_size"])
        self.layers, self.norm = nn.ModuleList(layers), RMSNorm(config["hidden_size"], config["rms_norm_eps"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)


# Kimi-K3: vLLM 0.33, models/kimi_k3 (amd/linear.py, amd/kda.py, amd/ops/attn_res.py).


def situ(gate: Tensor, up: Tensor) -> Tensor:
    return 4 * torch.tanh(gate / 4) * gate.sigmoid() * 25 * torch.tanh(up / 25)


class MLP(nn.Module):
    def __init__(
        self, width: int, inner: int, names: tuple[str, str, str], act: Callable[[Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__()
        self.names, self.act = names, act
        for name, shape in zip(names, ((width, inner), (width, inner), (inner, width)), strict=True):
            setattr(self, name, nn.Linear(*shape, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act(gate(x), up(x)))


PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def act_of(config: Config) -> Callable[[Tensor, Tensor], Tensor]:
    return situ if config["hidden_act"] == "situ" else lambda gate, up: silu(gate) * up


class KimiExperts(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, inner, act = config["hidden_size"], config["moe_intermediate_size"], act_of(config)
        self.config, latent = config, config["routed_expert_hidden_size"]
        self.gate = nn.Linear(hidden, config["num_experts"], bias=False)
        self.gate.e_score_correction_bias = nn.Parameter(torch.zeros(config["num_experts"]))
        self.experts = nn.ModuleList(MLP(latent, inner, ("w1", "w3", "w2"), act) for _ in range(config["num_experts"]))
        self.shared_experts = MLP(hidden, inner * config["num_shared_experts"], PROJECTIONS, act)
        self.routed_expert_down_proj = nn.Linear(hidden, latent, bias=False)
        self.routed_expert_norm = RMSNorm(latent, config["rms_norm_eps"])
        self.routed_expert_up_proj = nn.Linear(latent, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).sigmoid()
        chosen = (scores + self.gate.e_score_correction_bias).topk(self.config["num_experts_per_token"]).indices
        shares = scores.gather(-1, chosen)
        shares = shares / shares.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        weights = torch.zeros_like(scores).scatter(-1, chosen, shares)
        low = self.routed_expert_down_proj(x)
        routed = sum(weights[..., e : e + 1] * expert(low) for e, expert in enumerate(self.experts))
        return self.routed_expert_up_proj(self.routed_expert_norm(routed)) + self.shared_experts(x)


class KimiDelta(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        linears = config["linear_attn_config"]
        self.heads, self.dim, self.bound = linears["num_heads"], linears["head_dim"], linears["gate_lower_bound"]
        hidden, inner, taps = config["hidden_size"], self.heads * self.dim, linears["short_conv_kernel_size"]
        for part in "qkvg":
            setattr(self, f"{part}_proj", nn.Linear(hidden, inner, bias=False))
        for part in "qkv":
            conv = nn.Conv1d(inner, inner, taps, groups=inner, padding=taps - 1, bias=False)
            setattr(self, f"{part}_conv1d", conv)
        self.f_a_proj, self.f_b_proj = nn.Linear(hidden, self.dim, bias=False), nn.Linear(self.dim, inner, bias=False)
        self.b_proj, self.o_proj = nn.Linear(hidden, self.heads, bias=False), nn.Linear(inner, hidden, bias=False)
        self.A_log, self.dt_bias = nn.Parameter(torch.zeros(self.heads)), nn.Parameter(torch.zeros(inner))
        self.o_norm = RMSNorm(self.dim, config["rms_norm_eps"])

    def forward(self, x: Tensor) -> Tensor:
        def mixed(part: str) -> Tensor:
            conv = getattr(self, f"{part}_conv1d")(getattr(self, f"{part}_proj")(x).transpose(1, 2))
            return silu(conv[..., : x.shape[1]].transpose(1, 2)).unflatten(-1, (self.heads, self.dim))

        q, k, v = mixed("q"), mixed("k"), mixed("v")
        q, k = (each * torch.rsqrt(each.square().sum(-1, keepdim=True) + 1e-6) for each in (q, k))
        raw = (self.f_b_proj(self.f_a_proj(x)) + self.dt_bias).unflatten(-1, (self.heads, self.dim))
        decay = (self.bound * (self.A_log.exp()[:, None] * raw).sigmoid()).exp()
        beta, outputs = self.b_proj(x).sigmoid(), []
        state = x.new_zeros(x.shape[0], self.heads, self.dim, self.dim)
        for t in range(x.shape[1]):
            state = decay[:, t, :, :, None] * state
            missing = v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)
            state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], beta[:, t, :, None] * missing)
            outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, t] * self.dim**-0.5, state))
        return self.o_proj((self.o_norm(torch.stack(outputs, 1)).flatten(-2)) * self.g_proj(x).sigmoid())


class KimiLatent(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        hidden, self.heads, eps = config["hidden_size"], config["num_attention_heads"], config["rms_norm_eps"]
        self.nope, self.rest = config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        self.value, self.latent = config["v_head_dim"], config["kv_lora_rank"]
        rank, wide = config["q_lora_rank"], self.heads * self.value
        self.q_a_proj, self.q_a_layernorm = nn.Linear(hidden, rank, bias=False), RMSNorm(rank, eps)
        self.q_b_proj = nn.Linear(rank, self.heads * (self.nope + self.rest), bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(hidden, self.latent + self.rest, bias=False)
        self.kv_a_layernorm = RMSNorm(self.latent, eps)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.value), bias=False)
        self.g_proj, self.o_proj = nn.Linear(hidden, wide, bias=False), nn.Linear(wide, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).unflatten(-1, (self.heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split((self.latent, self.rest), -1)
        k, v = (
            self.kv_b_proj(self.kv_a_layernorm(latent))
            .unflatten(-1, (self.heads, -1))
            .split((self.nope, self.value), -1)
        )
        k = torch.cat((k, shared[:, :, None].expand(-1, -1, self.heads, -1)), -1)
        scores = torch.einsum("bthd,bshd->bhts", q, k) * (self.nope + self.rest) ** -0.5
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        out = torch.einsum("bhts,bshv->bthv", scores.masked_fill(later, -torch.inf).softmax(-1), v)
        return self.o_proj(out.flatten(-2) * self.g_proj(x).sigmoid())


def mixture(sums: Tensor, norm: RMSNorm, proj: nn.Linear) -> Tensor:
    """[..., n, H] -> [..., H]."""
    scores = linear(norm(sums), proj.weight)
    return (scores.softmax(-2) * sums).sum(-2)


class KimiLayer(nn.Module):
    """Sums [B, T, n * H] -> sums behind the layer; without attention residuals n is 1 and the sum is the stream."""

    def __init__(self, config: Config, index: int) -> None:
        super().__init__()
        hidden, eps, self.every = config["hidden_size"], config["rms_norm_eps"], config.get("attn_res_block_size")
        self.hidden, self.index = hidden, index
        linears = config["linear_attn_config"]["kda_layers"]
        self.self_attn = KimiDelta(config) if index + 1 in linears else KimiLatent(config)
        self.sparse = index >= config["first_k_dense_replace"]
        if self.sparse:
            self.block_sparse_moe = KimiExperts(config)
        else:
            self.mlp = MLP(hidden, config["intermediate_size"], PROJECTIONS, act_of(config))
        self.input_layernorm, self.post_attention_layernorm = RMSNorm(hidden, eps), RMSNorm(hidden, eps)
        for part in ("self_attention_res", "mlp_res") if self.every else ():
            setattr(self, f"{part}_norm", RMSNorm(hidden, eps))
            setattr(self, f"{part}_proj", nn.Linear(hidden, 1, bias=False))
        self.end: Callable[[Tensor], Tensor] = lambda sums: sums[..., 0, :]

    def forward(self, hidden_states: Tensor) -> Tensor:
        sums = hidden_states.unflatten(-1, (-1, self.hidden))
        feed = self.block_sparse_moe if self.sparse else self.mlp
        if not self.every:
            x = sums[..., 0, :]
            x = x + self.self_attn(self.input_layernorm(x))
            return x + feed(self.post_attention_layernorm(x))
        x = mixture(sums, self.self_attention_res_norm, self.self_attention_res_proj)
        y = self.self_attn(self.input_layernorm(x))[..., None, :]
        begins = self.index % self.every == 0
        sums = torch.cat((sums, y), -2) if begins else torch.cat((sums[..., :-1, :], sums[..., -1:, :] + y), -2)
        x = mixture(sums, self.mlp_res_norm, self.mlp_res_proj)
        y = feed(self.post_attention_layernorm(x))[..., None, :]
        return self.end(torch.cat((sums[..., :-1, :], sums[..., -1:, :] + y), -2))


class KimiK3(CausalLM):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        layers = [KimiLayer(config, i) for i in range(config["num_hidden_layers"])]
        self.model = trunk = Trunk(config, layers)
        if not config.get("attn_res_block_size"):
            return
        trunk.output_attn_res_norm = RMSNorm(config["hidden_size"], config["rms_norm_eps"])
        trunk.output_attn_res_proj = nn.Linear(config["hidden_size"], 1, bias=False)
        for layer in layers:
            layer.end = lambda sums: sums.flatten(-2)
        layers[-1].end = lambda sums: mixture(sums, trunk.output_attn_res_norm, trunk.output_attn_res_proj)


READINGS: Mapping[str, Callable[[Config], CausalLM]] = {"kimi_k3": KimiK3}
"""Family -> its model."""
