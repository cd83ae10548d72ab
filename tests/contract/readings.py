"""Models that transformers lacks, implemented in torch after vLLM's code; tensors have the names of files."""

import re
import unicodedata
from collections.abc import Callable, Mapping
from functools import cache, reduce
from itertools import count
from operator import xor
from typing import Any

import numpy as np
import torch
from block_drafts import rotate_pairs, sinkhorn
from tiny_models import tiny_tokenizer
from torch import Tensor, nn
from torch.nn.functional import linear, silu, softplus
from transformers.modeling_outputs import CausalLMOutputWithPast

Config = dict[str, Any]
Part = Callable[[Tensor], Tensor]


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
        """Transformers' interface; no tensors are tied."""

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
    """Sums [B, T, n * H] before and after the layer; without attention residuals n is 1 and the sum is the hidden
    state."""

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


# DeepSeek-V4.1: vLLM 0.33, models/deepseek_v41 (attention.py, compressor.py, common/engram.py, nvidia/model.py,
# nvidia/dspark.py), and transformers' models/deepseek_v41 (0a2080b4), without its rounding of caches.


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def prime_from(number: int) -> int:
    return next(n for n in count(number) if all(n % i for i in range(2, int(n**0.5) + 1)))


class DeepseekV41(nn.Module):
    """Reads tensors by their names in files, for one sequence; the cache holds tokens."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config, self.arrays = config, dict[str, Tensor]()
        self.eps, self.streams, self.window = config["rms_norm_eps"], config["hc_mult"], config["sliding_window"]

    def load_state_dict(self, named: Any, strict: bool = True) -> Any:
        self.arrays = dict(named)
        return [], []

    def tie_weights(self) -> None:
        """Transformers' interface; no tensors are tied."""

    def forward(self, tokens: Tensor, use_cache: bool, cache: Tensor | None = None) -> CausalLMOutputWithPast:
        every = tokens if cache is None else torch.cat((cache, tokens), 1)
        return CausalLMOutputWithPast(logits=self.logits(self.trunk(every[0])[0])[None], past_key_values=every)

    def logits(self, x: Tensor, norm: str = "norm.weight") -> Tensor:
        head = self.arrays["embed.weight" if self.config["tie_word_embeddings"] else "head.weight"]
        return linear(rms(x, self.arrays[norm], self.eps), head)

    def trunk(self, tokens: Tensor) -> tuple[Tensor, list[Tensor]]:
        """The last sum of the streams [T, H], and their mean before each layer."""
        x = self.embed(tokens)[:, None].repeat(1, self.streams, 1)
        weights, means, shared = self.first(x), list[Tensor](), dict[str, Any]()
        for i in range(self.config["num_hidden_layers"]):
            means.append(x.mean(1))
            if i in self.config["engram_layer_ids"]:
                x = self.memory(i, x, tokens)
            x, weights = self.layer(f"layers.{i}", x, weights, lambda y, i=i: self.attention(i, y, shared))
        return (weights[..., None] * x).sum(1), means

    def embed(self, tokens: Tensor) -> Tensor:
        return self.arrays["embed.weight"][tokens]

    def router_bias(self, at: str) -> Tensor:
        return self.arrays[f"{at}.gate.bias"]

    def first(self, x: Tensor) -> Tensor:
        return torch.eye(self.streams, dtype=x.dtype)[0].expand(len(x), -1)

    def layer(
        self, at: str, x: Tensor, weights: Tensor, attention: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Streams [T, n, H] after the layer; `weights` [T, n] are those that the part before computed."""
        n, eps = self.streams, self.config["hc_eps"]
        for kind, part in (("attn", attention), ("ffn", lambda y: self.experts(f"{at}.ffn", y))):
            mixes = linear(rms(x.flatten(1), 1.0, self.eps), self.arrays[f"{at}.hc_{kind}_fn"])
            scale, base = self.arrays[f"{at}.hc_{kind}_scale"], self.arrays[f"{at}.hc_{kind}_base"]
            pre, post, square = (
                each * scale[i] + own
                for i, (each, own) in enumerate(
                    zip(mixes.split((n, n, n * n), -1), base.split((n, n, n * n)), strict=True)
                )
            )
            square = sinkhorn(square, self.config["hc_sinkhorn_iters"], eps)
            y = part(rms((weights[..., None] * x).sum(1), self.arrays[f"{at}.{kind}_norm.weight"], self.eps))
            x = 2 * post.sigmoid()[..., None] * y[:, None] + torch.einsum("tjk,tjh->tkh", square, x)
            weights = pre.sigmoid() + eps
        return x, weights

    def rope(self, x: Tensor, positions: Tensor, theta: float, inverse: bool = False) -> Tensor:
        return rotate_pairs(x, positions, theta, self.config["qk_rope_head_dim"], inverse=inverse)

    def attention(self, layer: int, x: Tensor, shared: dict[str, Any]) -> Tensor:
        at, every, rows = f"layers.{layer}.attn", self.config["compress_ratios"][layer], torch.arange(len(x))
        theta = self.config["compress_rope_theta" if every else "rope_theta"]
        keys, behind = self.keys(at, x, rows, theta), rows[:, None] - rows
        seen = (behind >= 0) & (behind < self.window)
        if every:
            if layer in self.config["kv_source_layer_ids"]:
                entries, first = self.entries(f"{at}.compressor", x, every), rows[::every][: len(x) // every]
                index = rms(
                    linear(entries, self.arrays[f"{at}.indexer.wk.weight"]),
                    self.arrays[f"{at}.indexer.k_norm.weight"], self.eps,
                )  # fmt: skip
                turned = (self.rope(each[:, None], first, theta)[:, 0] for each in (entries, index))
                shared["entries"], shared["index"] = turned
            if layer in self.config["index_source_layer_ids"]:
                shared["seen"] = self.selected(layer, x, shared, (rows + 1) // every, theta)
            keys, seen = torch.cat((keys, shared["entries"])), torch.cat((seen, shared["seen"]), -1)
        return self.attend(at, x, keys, seen, rows, theta)

    def keys(self, at: str, x: Tensor, positions: Tensor, theta: float) -> Tensor:
        kv = rms(linear(x, self.arrays[f"{at}.wkv.weight"]), self.arrays[f"{at}.kv_norm.weight"], self.eps)
        return self.rope(kv[:, None], positions, theta)[:, 0]

    def entries(self, at: str, x: Tensor, every: int) -> Tensor:
        """Entries [T / every, D] without rotation."""
        whole = x[: len(x) // every * every].unflatten(0, (-1, every))
        values, gates = linear(whole, self.arrays[f"{at}.wkv.weight"]), torch.zeros(())
        if every > 1:
            gates = linear(whole, self.arrays[f"{at}.wgate.weight"])
        return rms((values * gates.expand_as(values).softmax(1)).sum(1), self.arrays[f"{at}.norm.weight"], self.eps)

    def low(self, at: str, x: Tensor) -> Tensor:
        return rms(linear(x, self.arrays[f"{at}.wq_a.weight"]), self.arrays[f"{at}.q_norm.weight"], self.eps)

    def selected(self, layer: int, x: Tensor, shared: dict[str, Any], visible: Tensor, theta: float) -> Tensor:
        """bool [T, entries]; publishes or reads blocks of candidates (vLLM: dsa/candidate_blocks.py)."""
        at, index, source = f"layers.{layer}.attn", shared["index"], self.config["candidate_source_layer_id"]
        q = linear(self.low(at, x), self.arrays[f"{at}.indexer.wq_b.weight"]).unflatten(-1, (-1, index.shape[-1]))
        products = torch.einsum("thd,nd->tnh", self.rope(q, torch.arange(len(x)), theta), index).relu()
        scores = (products * linear(x, self.arrays[f"{at}.indexer.weights_proj.weight"])[:, None]).sum(-1)
        scores = scores.masked_fill(torch.arange(len(index)) >= visible[:, None], -torch.inf)
        number = torch.arange(len(index)) // self.config["candidate_block_size"]
        if layer == source:
            blocks = torch.full((len(x), number[-1:].sum() + 1), -torch.inf, dtype=scores.dtype)
            blocks = blocks.scatter_reduce(-1, number.expand_as(scores), scores, "amax")
            newest = (visible - 1).clamp(min=0) // self.config["candidate_block_size"]
            blocks[torch.arange(len(x)), newest] = torch.inf
            kept = blocks.topk(min(self.config["candidate_topk_blocks"], blocks.shape[1]), -1).indices
            shared["candidates"] = torch.zeros_like(blocks, dtype=torch.bool).scatter(-1, kept, True)[:, number]
        elif 0 <= source < layer:
            scores = scores.masked_fill(~shared["candidates"], -torch.inf)
        best = scores.topk(min(self.config["index_topk"], len(index)), -1)
        return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best.indices, best.values > -torch.inf)

    def attend(self, at: str, x: Tensor, keys: Tensor, seen: Tensor, positions: Tensor, theta: float) -> Tensor:
        q = linear(self.low(at, x), self.arrays[f"{at}.wq_b.weight"]).unflatten(-1, (-1, keys.shape[-1]))
        scores = torch.einsum("thd,nd->thn", self.rope(q, positions, theta), keys) * keys.shape[-1] ** -0.5
        scores = scores.masked_fill(~seen[:, None], -torch.inf)
        sinks = self.arrays[f"{at}.attn_sink"].expand(len(x), -1)[..., None]
        out = torch.einsum("thn,nd->thd", torch.cat((scores, sinks), -1).softmax(-1)[..., :-1], keys)
        out, groups = self.rope(out, positions, theta, inverse=True), self.config["o_groups"]
        down = self.arrays[f"{at}.wo_a.weight"].unflatten(0, (groups, -1))
        narrow = torch.einsum("tgw,gow->tgo", out.flatten(1).unflatten(-1, (groups, -1)), down)
        return linear(narrow.flatten(1), self.arrays[f"{at}.wo_b.weight"])

    def expert(self, at: str, x: Tensor) -> Tensor:
        gate, up = (linear(x, self.arrays[f"{at}.{name}.weight"]) for name in ("w1", "w3"))
        return linear(silu(gate.clamp(max=10)) * up.clamp(-10, 10), self.arrays[f"{at}.w2.weight"])

    def experts(self, at: str, x: Tensor) -> Tensor:
        drafts = "dspark_" if at.startswith("mtp.") else ""
        top = self.config.get(f"{drafts}num_experts_per_tok") or self.config["num_experts_per_tok"]
        scores = softplus(linear(x, self.arrays[f"{at}.gate.weight"])).sqrt()
        chosen = (scores + self.router_bias(at)).topk(top).indices
        shares = scores.gather(-1, chosen)
        shares = shares / (shares.sum(-1, keepdim=True) + 1e-20) * self.config["routed_scaling_factor"]
        weights = torch.zeros_like(scores).scatter(-1, chosen, shares)
        routed = sum(weights[:, e, None] * self.expert(f"{at}.experts.{e}", x) for e in range(scores.shape[-1]))
        return routed + self.expert(f"{at}.shared_experts", x)

    def memory(self, layer: int, x: Tensor, tokens: Tensor) -> Tensor:
        at, hidden = f"layers.{layer}.engram", x.shape[-1]
        e = self.arrays[f"{at}.embed.weight"][self.rows(layer, tokens)].flatten(1)
        kv = linear(e, self.arrays[f"{at}.wkv.weight"])
        keys, value = kv[:, :-hidden].unflatten(-1, (-1, hidden)), kv[:, -hidden:]
        product = rms(x, 1.0, self.eps) * rms(keys, 1.0, self.eps)
        dots = (product * (self.arrays[f"{at}.q_weight"] * self.arrays[f"{at}.k_weight"])).sum(-1) * hidden**-0.5
        gates = torch.copysign(dots.abs().clamp(min=1e-6).sqrt(), dots).sigmoid()
        return x + gates[..., None] * value[:, None]

    def rows(self, layer: int, tokens: Tensor) -> Tensor:
        """Rows of a table [T, hashes]."""
        config, longest, heads = self.config, self.config["engram_max_ngram_size"], self.config["engram_n_heads"]
        ids, sizes = sorted(config["engram_layer_ids"]), [config["engram_vocab_size"] - 1]
        for _ in range(len(ids) * (longest - 1) * heads):
            sizes.append(prime_from(sizes[-1] + 1))
        own = sizes[1:][ids.index(layer) * (longest - 1) * heads :][: (longest - 1) * heads]
        bound = (2**63 - 1) // config["engram_compressed_vocab_size"] // 2
        factors = (np.random.default_rng(10007 * layer).integers(0, bound, longest) * 2 + 1).tolist()
        table, found = token_map(config["vocab_size"]), list[list[int]]()
        assert max(table) + 1 == config["engram_compressed_vocab_size"]
        numbers = [table[config["engram_pad_token_id"]]] * (longest - 1) + [table[each] for each in tokens.tolist()]
        for t in range(len(tokens)):
            last, row = numbers[t : t + longest][::-1], list[int]()
            for i in range(1, longest):
                mixed = reduce(xor, (a * b for a, b in zip(last[: i + 1], factors, strict=False)))
                row += [mixed % size for size in own[(i - 1) * heads : i * heads]]
            found.append([sum(own[:j]) + each for j, each in enumerate(row)])
        return torch.tensor(found)

    def drafted(self, states: Tensor, anchor: int) -> tuple[Tensor, Tensor]:
        """From taps [N, taps * H] of positions 0 .. N - 1 and the token at N: base logits [B, V] and sums [B, H]."""
        main = linear(states, self.arrays["mtp.0.main_proj.weight"])
        main = rms(main, self.arrays["mtp.0.main_norm.weight"], self.eps)
        size, theta = self.config["dspark_block_size"], self.config["rope_theta"]
        before, positions = torch.arange(len(states)), len(states) + torch.arange(size)
        ids = [anchor] + [self.config["dspark_noise_token_id"]] * (size - 1)
        x = self.arrays["embed.weight"][ids][:, None].repeat(1, self.streams, 1)
        weights, last = self.first(x), self.config["num_nextn_predict_layers"] - 1

        def attention(at: str, y: Tensor) -> Tensor:
            both = self.keys(at, main, before, theta)[-self.window :], self.keys(at, y, positions, theta)
            keys = torch.cat(both)
            return self.attend(at, y, keys, torch.ones(size, len(keys), dtype=torch.bool), positions, theta)

        for i in range(last + 1):
            x, weights = self.layer(f"mtp.{i}", x, weights, lambda y, i=i: attention(f"mtp.{i}.attn", y))
        summed = (weights[..., None] * x).sum(1)
        return self.logits(summed, f"mtp.{last}.norm.weight"), summed


@cache
def token_map(vocab: int) -> list[int]:
    """Number of each token's normalized text; ids without a token: 0."""
    tokenizer, keys, numbers = tiny_tokenizer(vocab), dict[str, int](), list[int]()
    for token in range(tokenizer.get_vocab_size()):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = tokenizer.id_to_token(token)
        if "\ufffd" not in text:
            plain = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
            plain = "".join(each for each in plain if unicodedata.category(each) != "Mn").lower()
            plain = re.sub(r"[ \t\r\n]+", " ", plain)
            key = plain if plain == " " else plain.strip() or text
        numbers.append(keys.setdefault(key, len(keys)))
    return numbers + [0] * (vocab - len(numbers))


READINGS: Mapping[str, Callable[[Config], nn.Module]] = {"kimi_k3": KimiK3, "deepseek_v41": DeepseekV41}
"""Family -> its model."""
