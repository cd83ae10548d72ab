"""Native MTP heads and the trunks below them, by hand: plain torch over whole sequences, row by row, in float64.

T tokens, H width, N heads, D head dim. Each function restates a published formula, with no thought of speed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from native_v4 import v4_mtp, v4_trunk
from torch import Tensor
from torch.nn.functional import linear, relu, silu

Tensors = dict[str, Tensor]
Getter = Callable[[str], Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def rotated(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """x [T, N, D], as complex numbers of halves."""
    dim = x.shape[-1]
    angle = positions[:, None] * theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    turned = torch.complex(x[..., : dim // 2], x[..., dim // 2 :]) * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((turned.real, turned.imag), dim=-1)


def attended(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int = 10**6,
    sinks: Tensor | None = None,
    chosen: list[list[int]] | None = None,
) -> Tensor:
    """q [T, N, D], k [T, K, D], v [T, K, V] -> [T, N * V]: every row over itself and the rows before it, or those that
    are chosen for it."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    out = torch.empty(len(q), heads, v.shape[-1], dtype=q.dtype)
    for head in range(heads):
        for row in range(len(q)):
            seen = chosen[row] if chosen else list(range(max(0, row + 1 - window), row + 1))
            scores = k[seen, head // group] @ q[row, head] * scale
            if sinks is not None:
                scores = torch.cat((sinks[head : head + 1], scores))
            weights = torch.softmax(scores, 0)[0 if sinks is None else 1 :]
            out[row, head] = weights @ v[seen, head // group]
    return out.flatten(1)


def gated(x: Tensor, w: Getter) -> Tensor:
    return linear(silu(linear(x, w("gate_proj.weight"))) * linear(x, w("up_proj.weight")), w("down_proj.weight"))


def sigmoid_experts(x: Tensor, w: Getter, c: dict[str, Any]) -> Tensor:
    """DeepSeek-V3 report, equations 12 to 16, with the choice of groups; the shared experts."""
    groups, shared = c["n_group"], c.get("n_shared_experts")
    out = gated(x, lambda n: w(f"shared_experts.{n}")) if shared else torch.zeros_like(x)
    for row in range(len(x)):
        score = torch.sigmoid(w("gate.weight") @ x[row])
        choice = (score + w("gate.e_score_correction_bias")).view(groups, -1)
        best = sorted(range(groups), key=lambda g: -float(choice[g].sort().values[-2:].sum()))[: c["topk_group"]]
        size = choice.shape[1]
        able = [g * size + i for g in best for i in range(size)]
        taken = sorted(able, key=lambda e: -float(choice.flatten()[e]))[: c["num_experts_per_tok"]]
        total = sum(score[e] for e in taken)
        for e in taken:
            expert = gated(x[row], lambda n, e=e: w(f"experts.{e}.{n}"))
            out[row] = out[row] + expert * score[e] / total * c["routed_scaling_factor"]
    return out


def softmax_experts(x: Tensor, w: Getter, c: dict[str, Any]) -> Tensor:
    """Experts weighted by a softmax over those chosen, and one for every row behind a gate."""
    out = torch.zeros_like(x)
    if "shared_expert_intermediate_size" in c:
        out = gated(x, lambda n: w(f"shared_expert.{n}")) * torch.sigmoid(linear(x, w("shared_expert_gate.weight")))
    for row in range(len(x)):
        best = (w("gate.weight") @ x[row]).topk(c["num_experts_per_tok"])
        for weight, e in zip(torch.softmax(best.values, 0), best.indices.tolist(), strict=True):
            out[row] = out[row] + weight * gated(x[row], lambda n, e=e: w(f"experts.{e}.{n}"))
    return out


def qwen2_block(x: Tensor, w: Getter, c: dict[str, Any], positions: Tensor) -> Tensor:
    """A whole sequence at once, every row over itself and the rows before it."""
    dim, eps = c["head_dim"], c["rms_norm_eps"]
    y = rms(x, w("input_layernorm.weight"), eps)
    q, k, v = (
        linear(y, w(f"self_attn.{n}_proj.weight"), w(f"self_attn.{n}_proj.bias")).view(len(x), -1, dim) for n in "qkv"
    )
    q, k = rotated(q, positions, c["rope_theta"]), rotated(k, positions, c["rope_theta"])
    x = x + linear(attended(q, k, v, dim**-0.5), w("self_attn.o_proj.weight"))
    y = rms(x, w("post_attention_layernorm.weight"), eps)
    return x + gated(y, lambda n: w(f"mlp.{n}"))


def mimo_trunk(tensors: Tensors, c: dict[str, Any], tokens: Tensor) -> Tensor:
    """The stream [T, H] before the final norm: what vLLM's mimo.py gives the head."""
    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        x = qwen2_block(x, lambda n, i=i: tensors[f"model.layers.{i}.{n}"], c, torch.arange(len(tokens)))
    return x


def mimo_mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Pairs (hidden [P, H], the token after it [P]) -> (logits [P, V], recycled [P, H])."""
    w = lambda n: tensors[f"model.mtp_layers.0.{n}"]  # noqa: E731
    e = tensors["model.embed_tokens.weight"][tokens].clone()
    e[0] = 0  # the embedding of the first pair is masked
    joined = torch.cat(
        (
            rms(hidden, w("hidden_layernorm.weight"), c["rms_norm_eps"]),
            rms(e, w("token_layernorm.weight"), c["rms_norm_eps"]),
        ),
        dim=-1,
    )
    x = qwen2_block(linear(joined, w("input_proj.weight")), w, c, torch.arange(len(tokens)))
    y = rms(x, w("final_layernorm.weight"), c["rms_norm_eps"])
    return linear(y, tensors["lm_head.weight"]), y


def glm_block(x: Tensor, w: Getter, c: dict[str, Any], positions: Tensor, window: int = 10**6) -> Tensor:
    """Head norms, then rotation of the first part of each head; experts, or a gated MLP where there are none."""
    dim, eps = c["head_dim"], c["rms_norm_eps"]
    turning = int(dim * c.get("partial_rotary_factor", 1))
    bias = (lambda n: w(f"self_attn.{n}_proj.bias")) if c.get("attention_bias") else lambda n: None
    y = rms(x, w("input_layernorm.weight"), eps)
    q, k, v = (linear(y, w(f"self_attn.{n}_proj.weight"), bias(n)).view(len(x), -1, dim) for n in "qkv")
    q, k = rms(q, w("self_attn.q_norm.weight"), eps), rms(k, w("self_attn.k_norm.weight"), eps)
    q, k = (torch.cat((rotated(a[..., :turning], positions, c["rope_theta"]), a[..., turning:]), -1) for a in (q, k))
    x = x + linear(attended(q, k, v, dim**-0.5, window), w("self_attn.o_proj.weight"))
    return x + feed_forward(rms(x, w("post_attention_layernorm.weight"), eps), w, c)


def feed_forward(x: Tensor, w: Getter, c: dict[str, Any]) -> Tensor:
    try:
        w("mlp.gate.weight")
    except KeyError:
        return gated(x, lambda n: w(f"mlp.{n}"))
    experts = sigmoid_experts if "n_routed_experts" in c else softmax_experts
    return experts(x, lambda n: w(f"mlp.{n}"), c)


def deepseek_block(x: Tensor, w: Getter, c: dict[str, Any], positions: Tensor) -> Tensor:
    x = latent_attention(x, w, c, positions)
    return x + feed_forward(rms(x, w("post_attention_layernorm.weight"), c["rms_norm_eps"]), w, c)


def latent_attention(
    x: Tensor, w: Getter, c: dict[str, Any], positions: Tensor, queries: float = 1.0, latents: float = 1.0
) -> Tensor:
    """Latent attention with keys and values of every head written out (DeepSeek-V2 report, equations 9 to 19), and the
    stream. `queries` and `latents` are multiplied by these."""
    heads, nope, rotary, value = (
        c[key] for key in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    a, eps, latent = (lambda n: w(f"self_attn.{n}.weight")), c["rms_norm_eps"], c["kv_lora_rank"]
    y = rms(x, w("input_layernorm.weight"), eps)
    compressed = rms(linear(y, a("q_a_proj")), a("q_a_layernorm"), 1e-6)
    q = linear(compressed, a("q_b_proj")).view(len(x), heads, -1) * queries
    down = linear(y, a("kv_a_proj_with_mqa"))
    kept = rms(down[:, :latent], (a("kv_a_layernorm").float() * np.float32(latents)).double(), 1e-6)
    expanded = linear(kept, a("kv_b_proj")).view(len(x), heads, -1)

    def turned(part: Tensor) -> Tensor:  # pairs lie side by side
        halves = torch.cat((part[..., 0::2], part[..., 1::2]), -1)
        return rotated(halves, positions, c["rope_theta"])

    q = torch.cat((q[..., :nope], turned(q[..., nope:])), -1)
    k = torch.cat((expanded[..., :nope], turned(down[:, None, latent:]).expand(-1, heads, -1)), -1)
    chosen = best_by_indexer(y, compressed, w, c, positions) if "index_topk" in c else None
    assert expanded.shape[-1] == nope + value
    out = attended(q, k, expanded[..., nope:], (nope + rotary) ** -0.5, chosen=chosen)
    return x + linear(out, a("o_proj"))


def longcat_block(x: Tensor, w: Getter, c: dict[str, Any], positions: Tensor, shortcut: Any = None) -> Tensor:
    """Half of a layer; `shortcut` is given what the MLP reads."""
    ranks = [(c["hidden_size"] / c[key]) ** 0.5 for key in ("q_lora_rank", "kv_lora_rank")]
    x = latent_attention(x, w, c, positions, *ranks)
    y = rms(x, w("post_attention_layernorm.weight"), c["rms_norm_eps"])
    if shortcut:
        shortcut(y)
    return x + gated(y, lambda n: w(f"mlp.{n}"))


def longcat_trunk(tensors: Tensors, c: dict[str, Any], tokens: Tensor) -> Tensor:
    x, positions = tensors["model.embed_tokens.weight"][tokens], torch.arange(len(tokens))
    for i in range(c["num_hidden_layers"] // 2):
        layer, late = f"model.layers.{i}", []

        def half(name: str, which: int, layer: str = layer) -> Tensor:
            first, rest = name.replace("mlp.", "mlps.").split(".", 1)
            return tensors[f"{layer}.{first}.{which}.{rest}"]

        def experts(y: Tensor, layer: str = layer, late: list[Tensor] = late) -> None:
            late.append(longcat_experts(y, lambda n: tensors[f"{layer}.mlp.{n}"], c))

        x = longcat_block(x, lambda n, half=half: half(n, 0), c, positions, experts)
        x = longcat_block(x, lambda n, half=half: half(n, 1), c, positions) + late[0]
    return rms(x, tensors["model.norm.weight"], c["rms_norm_eps"])


def longcat_experts(x: Tensor, w: Getter, c: dict[str, Any]) -> Tensor:
    """Chosen by a softmax and a bias; those behind the last give back the row."""
    out = torch.zeros_like(x)
    for row in range(len(x)):
        score = torch.softmax(w("router.classifier.weight") @ x[row], 0)
        for e in (score + w("router.e_score_correction_bias")).topk(c["moe_topk"]).indices.tolist():
            own = e < c["n_routed_experts"]
            said = gated(x[row], lambda n, e=e: w(f"experts.{e}.{n}")) if own else x[row]
            out[row] += score[e] * c["routed_scaling_factor"] * said
    return out


def best_by_indexer(y: Tensor, compressed: Tensor, w: Getter, c: dict[str, Any], positions: Tensor) -> list[list[int]]:
    """DeepSeek-V3.2 report, equations 1 and 2: what each row attends to; without an indexer, what a layer before had
    chosen (`c["chosen"]`)."""
    try:
        w("self_attn.indexer.wk.weight")
    except KeyError:
        return list(c["chosen"])
    a, dim, rotary = (lambda n: w(f"self_attn.indexer.{n}")), c["index_head_dim"], c["qk_rope_head_dim"]
    k = linear(y, a("wk.weight"))
    k = torch.nn.functional.layer_norm(k, (dim,), a("k_norm.weight"), a("k_norm.bias"), 1e-6)[:, None]
    q = linear(compressed, a("wq_b.weight")).view(len(y), -1, dim)

    def turned(part: Tensor) -> Tensor:
        if c.get("indexer_rope_interleave"):
            part = torch.cat((part[..., 0::2], part[..., 1::2]), -1)
        return rotated(part, positions, c["rope_theta"])

    q, k = (torch.cat((turned(each[..., :rotary]), each[..., rotary:]), -1) for each in (q, k))
    weights, found = linear(y, a("weights_proj.weight")), []
    for row in range(len(y)):
        score = weights[row] @ torch.relu(q[row] @ k[: row + 1, 0].T)
        found.append(sorted(range(row + 1), key=lambda p, score=score: -float(score[p]))[: c["index_topk"]])
    c["chosen"] = found
    return found


def normed_trunk(block: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The stream [T, H] after the final norm of a trunk of such blocks."""

    def trunk(tensors: Tensors, c: dict[str, Any], tokens: Tensor) -> Tensor:
        x, c = tensors["model.embed_tokens.weight"][tokens], dict(c)
        for i in range(c["num_hidden_layers"]):
            x = block(x, lambda n, i=i: tensors[f"model.layers.{i}.{n}"], c, torch.arange(len(tokens)))
        return rms(x, tensors["model.norm.weight"], c["rms_norm_eps"])

    return trunk


def mtp_of(block: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """DeepSeek-V3 report, equations 21 to 23; recycles after its norm. `w`: the module's tensors."""

    def mtp(tensors: Tensors, w: Getter, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        eps, e, c = c["rms_norm_eps"], tensors["model.embed_tokens.weight"][tokens], dict(c)
        joined = torch.cat((rms(e, w("enorm.weight"), eps), rms(hidden, w("hnorm.weight"), eps)), dim=-1)
        x = block(linear(joined, w("eh_proj.weight")), w, c, torch.arange(len(tokens)))
        y = rms(x, w("shared_head.norm.weight"), eps)
        return linear(y, tensors["lm_head.weight"]), y

    return mtp


def trailing_mtp(block: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """For a module that is layer N."""
    return lambda tensors, c, hidden, tokens: mtp_of(block)(
        tensors, lambda n: tensors[f"model.layers.{c['num_hidden_layers']}.{n}"], c, hidden, tokens
    )


def plus_one(weight: Tensor) -> Tensor:
    """The factor of a (1 + w) norm, rounded as a float32 weight is."""
    return (1 + weight.float()).double()


def gated_block(x: Tensor, w: Getter, c: dict[str, Any], positions: Tensor) -> Tensor:
    """Attention whose q_proj makes a gate too, partial rotary, norms of 1 + w; a whole sequence at once."""
    heads, kv_heads, dim, eps = c["num_attention_heads"], c["num_key_value_heads"], c["head_dim"], c["rms_norm_eps"]
    rotary = int(dim * c["partial_rotary_factor"])
    y = rms(x, plus_one(w("input_layernorm.weight")), eps)
    q, gate = linear(y, w("self_attn.q_proj.weight")).view(len(x), heads, 2 * dim).split(dim, dim=-1)
    k, v = (linear(y, w(f"self_attn.{n}_proj.weight")).view(len(x), kv_heads, dim) for n in "kv")
    q, k = rms(q, plus_one(w("self_attn.q_norm.weight")), eps), rms(k, plus_one(w("self_attn.k_norm.weight")), eps)
    q, k = (torch.cat((rotated(z[..., :rotary], positions, c["rope_theta"]), z[..., rotary:]), -1) for z in (q, k))
    out = attended(q, k, v, dim**-0.5) * torch.sigmoid(gate.flatten(1))
    x = x + linear(out, w("self_attn.o_proj.weight"))
    return x + plus_one_feed_forward(x, w, c)


def plus_one_feed_forward(x: Tensor, w: Getter, c: dict[str, Any]) -> Tensor:
    return feed_forward(rms(x, plus_one(w("post_attention_layernorm.weight")), c["rms_norm_eps"]), w, c)


def delta_block(x: Tensor, w: Getter, c: dict[str, Any]) -> Tensor:
    """Gated DeltaNet of a whole sequence, head by head and row by row."""
    key_heads, heads = c["linear_num_key_heads"], c["linear_num_value_heads"]
    key_dim, value_dim, width = c["linear_key_head_dim"], c["linear_value_head_dim"], c["linear_conv_kernel_dim"]
    y, inner = rms(x, plus_one(w("input_layernorm.weight")), c["rms_norm_eps"]), heads * value_dim
    if c["model_type"] == "qwen3_next":
        by_head = linear(y, w("linear_attn.in_proj_qkvz.weight")).view(len(x), key_heads, -1)
        parts = by_head.split([key_dim, key_dim, inner // key_heads, inner // key_heads], dim=-1)
        *qkv, z = (part.flatten(1) for part in parts)
        joined = linear(y, w("linear_attn.in_proj_ba.weight")).view(len(x), key_heads, 2, -1)
        b, a, qkv = joined[:, :, 0].flatten(1), joined[:, :, 1].flatten(1), torch.cat(qkv, dim=-1)
    else:
        qkv, z, b, a = (linear(y, w(f"linear_attn.in_proj_{part}.weight")) for part in ("qkv", "z", "b", "a"))
    padded, taps = torch.cat((qkv.new_zeros(width - 1, qkv.shape[1]), qkv)), w("linear_attn.conv1d.weight")[:, 0]
    qkv = silu(sum(padded[j : j + len(x)] * taps[:, j] for j in range(width)))
    q, k, v = qkv.split([key_heads * key_dim, key_heads * key_dim, inner], dim=-1)
    q, k = (part / torch.sqrt((part**2).sum(-1, keepdim=True) + 1e-6)
            for part in (each.view(len(x), key_heads, key_dim) for each in (q, k)))  # fmt: skip
    decay = torch.exp(
        -torch.from_numpy(np.exp(w("linear_attn.A_log").float().numpy())).double()
        * torch.log1p(torch.exp(a + w("linear_attn.dt_bias")))
    )
    out = x.new_empty(len(x), heads, value_dim)
    for head in range(heads):
        state, group = x.new_zeros(value_dim, key_dim), head // (heads // key_heads)
        for row, value in enumerate(v.view(len(x), heads, value_dim)[:, head]):
            state = decay[row, head] * state
            error = torch.sigmoid(b[row, head]) * (value - state @ k[row, group])
            state = state + torch.outer(error, k[row, group])
            out[row, head] = state @ q[row, group] / key_dim**0.5
    out = rms(out, w("linear_attn.norm.weight"), c["rms_norm_eps"]) * silu(z.view_as(out))
    x = x + linear(out.flatten(1), w("linear_attn.out_proj.weight"))
    return x + plus_one_feed_forward(x, w, c)


def hybrid_trunk(tensors: Tensors, c: dict[str, Any], tokens: Tensor) -> Tensor:
    """The state [T, H] after the final norm."""
    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        w = lambda n, i=i: tensors[f"model.layers.{i}.{n}"]  # noqa: E731
        is_full = (i + 1) % c["full_attention_interval"] == 0
        x = gated_block(x, w, c, torch.arange(len(tokens))) if is_full else delta_block(x, w, c)
    return rms(x, plus_one(tensors["model.norm.weight"]), c["rms_norm_eps"])


def hybrid_mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """As mimo_mtp: embedding first, nothing masked."""
    norm = lambda x, name: rms(x, plus_one(tensors[f"mtp.{name}.weight"]), c["rms_norm_eps"])  # noqa: E731
    e = norm(tensors["model.embed_tokens.weight"][tokens], "pre_fc_norm_embedding")
    x = linear(torch.cat((e, norm(hidden, "pre_fc_norm_hidden")), dim=-1), tensors["mtp.fc.weight"])
    x = gated_block(x, lambda n: tensors[f"mtp.layers.0.{n}"], c, torch.arange(len(tokens)))
    y = norm(x, "norm")
    return linear(y, tensors["lm_head.weight"]), y


def longcat_mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's longcat_flash_mtp.py: DeepSeek's module with a dense MLP and names of its own."""
    parts = {"enorm": "enorm.m", "hnorm": "hnorm.m", "mlp": "transformer_layer.mlp"}

    def w(name: str) -> Tensor:
        first, rest = name.split(".", 1)
        if first == "shared_head":
            return tensors["model.mtp.norm.weight"]
        return tensors[f"model.mtp.layers.0.{parts.get(first, first)}.{rest}"]

    return mtp_of(longcat_block)(tensors, w, c, hidden, tokens)


def mimo_v2_block(x: Tensor, w: Getter, c: dict[str, Any], sliding: bool, norm: str) -> Tensor:
    """Layers with a window: twice the kv heads, a sink for each head; values are scaled."""
    dim, eps, kind = c["head_dim"], c["rms_norm_eps"], "sliding_attention" if sliding else "full_attention"
    rope, positions = c["rope_parameters"][kind], torch.arange(len(x))
    turning = int(dim * rope["partial_rotary_factor"])
    y = rms(x, w("input_layernorm.weight"), eps)
    q, k = (linear(y, w(f"self_attn.{n}_proj.weight")).view(len(x), -1, dim) for n in "qk")
    v = linear(y, w("self_attn.v_proj.weight")).view(len(x), -1, c["v_head_dim"]) * 0.707
    q, k = (torch.cat((rotated(a[..., :turning], positions, rope["rope_theta"]), a[..., turning:]), -1) for a in (q, k))
    assert k.shape[1] == c["num_key_value_heads"] * (1 + sliding)
    more = (c["sliding_window"], w("self_attn.attention_sink_bias")) if sliding else ()
    x = x + linear(attended(q, k, v, dim**-0.5, *more), w("self_attn.o_proj.weight"))
    return x + feed_forward(rms(x, w(f"{norm}.weight"), eps), w, c)


def mimo_v2_trunk(tensors: Tensors, c: dict[str, Any], tokens: Tensor) -> Tensor:
    """The stream [T, H] before the final norm; of two layers the first is full."""
    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        x = mimo_v2_block(x, lambda n, i=i: tensors[f"model.layers.{i}.{n}"], c, i > 0, "post_attention_layernorm")
    return x


def mimo_v2_mtp(
    tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor, module: int
) -> tuple[Tensor, Tensor]:
    """As mimo_mtp: embedding first, nothing masked, the block's own output recycled."""
    w = lambda n: tensors[f"model.mtp.layers.{module}.{n}"]  # noqa: E731
    eps, e = c["rms_norm_eps"], tensors["model.embed_tokens.weight"][tokens]
    joined = torch.cat((rms(e, w("enorm.weight"), eps), rms(hidden, w("hnorm.weight"), eps)), dim=-1)
    x = mimo_v2_block(linear(joined, w("eh_proj.weight")), w, c, True, "pre_mlp_layernorm")
    return linear(rms(x, w("final_layernorm.weight"), eps), tensors["lm_head.weight"]), x


def squared(x: Tensor, w: Getter) -> Tensor:
    return linear(relu(linear(x, w("up_proj.weight"))) ** 2, w("down_proj.weight"))


def latent_experts(x: Tensor, w: Getter, c: dict[str, Any]) -> Tensor:
    """Chosen by a sigmoid and a bias, in a smaller space; one for every row beside them."""
    small, out = linear(x, w("fc1_latent_proj.weight")), torch.zeros(len(x), c["moe_latent_size"], dtype=x.dtype)
    for row in range(len(x)):
        score = torch.sigmoid(w("gate.weight") @ x[row])
        taken = (score + w("gate.e_score_correction_bias")).topk(c["num_experts_per_tok"]).indices.tolist()
        for e in taken:
            share = score[e] / score[taken].sum() * c["routed_scaling_factor"]
            out[row] += squared(small[row], lambda n, e=e: w(f"experts.{e}.{n}")) * share
    return linear(out, w("fc2_latent_proj.weight")) + squared(x, lambda n: w(f"shared_experts.{n}"))


def mamba2(y: Tensor, w: Getter, c: dict[str, Any]) -> Tensor:
    """Of a whole sequence, head by head and row by row (Dao, Gu 2024, the recurrent form)."""
    heads, dim, groups, size = (c[key] for key in ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size"))
    inner, width = heads * dim, c["conv_kernel"]
    z, xbc, dt = linear(y, w("in_proj.weight")).split([inner, inner + 2 * groups * size, heads], dim=-1)
    padded, taps = torch.cat((xbc.new_zeros(width - 1, xbc.shape[1]), xbc)), w("conv1d.weight")[:, 0]
    xbc = silu(sum(padded[j : j + len(y)] * taps[:, j] for j in range(width)) + w("conv1d.bias"))
    x, b, seen = xbc.split([inner, groups * size, groups * size], dim=-1)
    x, b, seen = x.view(len(y), heads, dim), b.view(len(y), groups, size), seen.view(len(y), groups, size)
    step, out = torch.log1p(torch.exp(dt + w("dt_bias"))), torch.empty_like(x)
    rate = -torch.from_numpy(np.exp(w("A_log").float().numpy())).double()
    for head in range(heads):
        state, group = x.new_zeros(dim, size), head // (heads // groups)
        for row in range(len(y)):
            state = torch.exp(rate[head] * step[row, head]) * state
            state = state + step[row, head] * torch.outer(x[row, head], b[row, group])
            out[row, head] = state @ seen[row, group] + w("D")[head] * x[row, head]
    gated_out = (out.flatten(1) * silu(z)).view(len(y), groups, -1)
    normed = rms(gated_out, w("norm.weight").view(groups, -1), c["layer_norm_epsilon"]).flatten(1)
    return linear(normed, w("out_proj.weight"))


def nemotron_part(x: Tensor, w: Getter, kind: str, c: dict[str, Any]) -> Tensor:
    """One layer: Mamba2, attention without positions, experts, or an MLP."""
    m = lambda n: w(f"mixer.{n}")  # noqa: E731
    y = rms(x, w("norm.weight"), c["layer_norm_epsilon"])
    if kind == "*":
        q, k, v = (linear(y, m(f"{n}_proj.weight")).view(len(x), -1, c["head_dim"]) for n in "qkv")
        return x + linear(attended(q, k, v, c["head_dim"] ** -0.5), m("o_proj.weight"))
    return x + (mamba2(y, m, c) if kind == "M" else latent_experts(y, m, c) if kind == "E" else squared(y, m))


def nemotron_trunk(tensors: Tensors, c: dict[str, Any], tokens: Tensor) -> Tensor:
    x = tensors["backbone.embeddings.weight"][tokens]
    for i, kind in enumerate(c["hybrid_override_pattern"]):
        x = nemotron_part(x, lambda n, i=i: tensors[f"backbone.layers.{i}.{n}"], kind, c)
    return rms(x, tensors["backbone.norm_f.weight"], c["layer_norm_epsilon"])


def nemotron_mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's nemotron_h_mtp.py: embedding first, attention, experts; recycles after its norm."""
    first, last = (lambda n, j=j: tensors[f"mtp.layers.{j}.{n}"] for j in (0, 1))
    eps, e = c["layer_norm_epsilon"], tensors["backbone.embeddings.weight"][tokens]
    joined = torch.cat((rms(e, first("enorm.weight"), eps), rms(hidden, first("hnorm.weight"), eps)), dim=-1)
    x = nemotron_part(linear(joined, first("eh_proj.weight")), first, "*", c)
    y = rms(nemotron_part(x, last, "E", c), last("final_layernorm.weight"), eps)
    return linear(y, tensors["lm_head.weight"]), y


def ernie_experts(x: Tensor, w: Getter, c: dict[str, Any]) -> Tensor:
    """Scores of a softmax over all, chosen with a bias, divided by the sum of those chosen; shared ones for all."""
    out = gated(x, lambda n: w(f"shared_experts.{n}"))
    for row in range(len(x)):
        score = torch.softmax(w("gate.weight") @ x[row], 0)
        taken = (score + w("moe_statics.e_score_correction_bias")[0]).topk(c["moe_k"]).indices.tolist()
        for e in taken:
            weight = score[e] / sum(score[i] for i in taken)
            out[row] = out[row] + weight * gated(x[row], lambda n, e=e: w(f"experts.{e}.{n}"))
    return out


def ernie_block(x: Tensor, w: Getter, c: dict[str, Any], positions: Tensor) -> Tensor:
    """Rotary pairs lie side by side."""
    dim, eps = c["head_dim"], c["rms_norm_eps"]
    y = rms(x, w("input_layernorm.weight"), eps)
    q, k, v = (linear(y, w(f"self_attn.{n}_proj.weight")).view(len(x), -1, dim) for n in "qkv")
    q, k = (rotated(torch.cat((a[..., 0::2], a[..., 1::2]), -1), positions, c["rope_theta"]) for a in (q, k))
    x = x + linear(attended(q, k, v, dim**-0.5), w("self_attn.o_proj.weight"))
    y = rms(x, w("post_attention_layernorm.weight"), eps)
    try:
        return x + gated(y, lambda n: w(f"mlp.{n}"))
    except KeyError:
        return x + ernie_experts(y, lambda n: w(f"mlp.{n}"), c)


def ernie_mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The first embedding is masked; what the block leaves goes to the LM head and to the next step as it is."""
    norm = lambda x, name: rms(x, tensors[f"model.mtp_{name}_norm.0.weight"], c["rms_norm_eps"])  # noqa: E731
    e = tensors["model.embed_tokens.weight"][tokens].clone()
    e[0] = 0
    joined = torch.cat((norm(e, "emb"), norm(hidden, "hidden")), dim=-1)
    x = linear(joined, tensors["model.mtp_linear_proj.0.weight"])
    y = ernie_block(x, lambda n: tensors[f"model.mtp_block.0.{n}"], c, torch.arange(len(tokens)))
    return linear(y, tensors["model.embed_tokens.weight"]), y


def step_block(x: Tensor, w: Getter, c: dict[str, Any], index: int) -> Tensor:
    """A gate for each head; layers with a window have more heads. No limit is reached."""
    dim, eps, sliding = c["head_dim"], c["rms_norm_eps"], c["layer_types"][index] == "sliding_attention"
    positions, turning = torch.arange(len(x)), int(dim * c["partial_rotary_factors"][index])
    norm = lambda x, name: rms(x, plus_one(w(f"{name}.weight")), eps)  # noqa: E731
    y = norm(x, "input_layernorm")
    q, k, v = (linear(y, w(f"self_attn.{n}_proj.weight")).view(len(x), -1, dim) for n in "qkv")
    q, k = norm(q, "self_attn.q_norm"), norm(k, "self_attn.k_norm")
    q, k = (
        torch.cat((rotated(a[..., :turning], positions, c["rope_theta"][index]), a[..., turning:]), -1) for a in (q, k)
    )
    assert q.shape[1] == (c["attention_other_setting"] if sliding else c)["num_attention_heads"]
    out = attended(q, k, v, dim**-0.5, c["sliding_window"] if sliding else 10**6)
    gates = torch.sigmoid(linear(y, w("self_attn.g_proj.weight")))
    x = x + linear((out.view(len(x), -1, dim) * gates[..., None]).flatten(1), w("self_attn.o_proj.weight"))
    y = norm(x, "post_attention_layernorm")
    if index not in range(1, c["num_hidden_layers"]):
        return x + gated(y, lambda n: w(f"mlp.{n}"))
    out = gated(y, lambda n: w(f"share_expert.{n}"))
    for row in range(len(x)):
        score = torch.sigmoid(w("moe.gate.weight") @ y[row])
        taken = (score + w("moe.router_bias")).topk(c["moe_top_k"]).indices.tolist()
        for e in taken:
            weight = score[e] / sum(score[i] for i in taken) * c["moe_router_scaling_factor"]
            out[row] = out[row] + weight * gated(y[row], lambda n, e=e: w(f"moe.{n}")[e])
    return x + out


def step_trunk(tensors: Tensors, c: dict[str, Any], tokens: Tensor) -> Tensor:
    """The stream [T, H] before the final norm."""
    x = tensors["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        x = step_block(x, lambda n, i=i: tensors[f"model.layers.{i}.{n}"], c, i)
    return x


def step_mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor, module: int) -> tuple[Tensor, Tensor]:
    """Each module has an LM head of its own; the block's output is recycled."""
    layer = c["num_hidden_layers"] + module
    w = lambda n: tensors[f"model.layers.{layer}.{n}"]  # noqa: E731
    norm = lambda x, name: rms(x, plus_one(w(f"{name}.weight")), c["rms_norm_eps"])  # noqa: E731
    e = tensors["model.embed_tokens.weight"][tokens]
    x = step_block(linear(torch.cat((norm(e, "enorm"), norm(hidden, "hnorm")), -1), w("eh_proj.weight")), w, c, layer)
    return linear(norm(x, "transformer.shared_head.norm"), w("transformer.shared_head.output.weight")), x


AS_DEEPSEEK = {
    "mlp.expert_bias": "mlp.gate.e_score_correction_bias", "mlp.router.gate.": "mlp.gate.",
    "mlp.shared_mlp.": "mlp.shared_experts.", "mlp.gate.expert_bias": "mlp.gate.e_score_correction_bias",
    "mlp.e_score_correction_bias": "mlp.gate.e_score_correction_bias", "final_layernorm": "shared_head.norm",
    "word_embeddings.": "embed_tokens.", ".attention.dense.": ".self_attn.o_proj.",
    ".attention.query_layernorm": ".self_attn.q_norm", ".attention.key_layernorm": ".self_attn.k_norm",
    "num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts",
    "router_scaling_factor": "routed_scaling_factor",
}  # fmt: skip
"""Names of tensors (parts of them) and keys of families with DeepSeek's experts -> DeepSeek's."""


def as_deepseek(tensors: Tensors, c: dict[str, Any]) -> tuple[Tensors, dict[str, Any]]:
    """Under DeepSeek's names, q, k and v apart."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        for old, new in AS_DEEPSEEK.items():
            name = name if new in name else name.replace(old, new)
        if ".query_key_value." in name:
            heads = [c[key] * c["head_dim"] for key in ("num_attention_heads", *["num_key_value_heads"] * 2)]
            for part, rows in zip("qkv", tensor.split(heads), strict=True):
                found[name.replace("attention.query_key_value", f"self_attn.{part}_proj")] = rows
        else:
            found[name] = tensor
    return found, {"n_group": 1, "topk_group": 1, **c} | {AS_DEEPSEEK.get(key, key): value for key, value in c.items()}


def renamed(formula: Callable[..., Any]) -> Callable[..., Any]:
    """A trunk or a module under DeepSeek's names."""
    return lambda tensors, c, *rows: formula(*as_deepseek(tensors, c), *rows)


def masked_mtp(block: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    """trailing_mtp, where the first embedding is masked."""

    def mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        nothing = torch.zeros_like(tensors["model.embed_tokens.weight"][:1])
        table = torch.cat((tensors["model.embed_tokens.weight"], nothing))
        first = torch.tensor([len(table) - 1])
        return trailing_mtp(block)(
            {**tensors, "model.embed_tokens.weight": table}, c, hidden, torch.cat((first, tokens[1:]))
        )

    return mtp


def post_normed_block(x: Tensor, w: Getter, c: dict[str, Any], positions: Tensor, window: int = 10**6) -> Tensor:
    """As glm_block, with norms behind each part and an MLP."""
    dim, eps = c["head_dim"], c["rms_norm_eps"]
    turning = int(dim * c.get("partial_rotary_factor", 1))
    q, k, v = (linear(x, w(f"self_attn.{n}_proj.weight")).view(len(x), -1, dim) for n in "qkv")
    q, k = rms(q, w("self_attn.q_norm.weight"), eps), rms(k, w("self_attn.k_norm.weight"), eps)
    if turning:
        q, k = rotated(q, positions, c["rope_theta"]), rotated(k, positions, c["rope_theta"])
    out = linear(attended(q, k, v, dim**-0.5, window), w("self_attn.o_proj.weight"))
    x = x + rms(out, w("post_attention_layernorm.weight"), eps)
    return x + rms(gated(x, lambda n: w(f"mlp.{n}")), w("post_feedforward_layernorm.weight"), eps)


def exaone_trunk(tensors: Tensors, c: dict[str, Any], tokens: Tensor) -> Tensor:
    """The state after the final norm; layers with a window rotate positions, those that see all do not."""
    block = post_normed_block if c["model_type"] == "exaone4" else glm_block
    x, positions = tensors["model.embed_tokens.weight"][tokens], torch.arange(len(tokens))
    for i in range(c["num_hidden_layers"]):
        sliding = (i + 1) % c["sliding_window_pattern"] > 0
        kind = (c, positions, c["sliding_window"]) if sliding else ({**c, "partial_rotary_factor": 0}, positions)
        x = block(x, lambda n, i=i: tensors[f"model.layers.{i}.{n}"], *kind)
    return rms(x, tensors["model.norm.weight"], c["rms_norm_eps"])


def exaone_mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """vLLM's exaone_moe_mtp.py and exaone4_5_mtp.py: Qwen's names, plain norms, a layer like the first, with an MLP."""
    block = post_normed_block if c["model_type"] == "exaone4" else glm_block
    return own_mtp(block, tensors, c, hidden, tokens)


def own_mtp(
    block: Callable[..., Tensor], tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor
) -> tuple[Tensor, Tensor]:
    """A module beside the layers, whose block has a window."""
    norm = lambda x, name: rms(x, tensors[f"mtp.{name}.weight"], c["rms_norm_eps"])  # noqa: E731
    e = norm(tensors["model.embed_tokens.weight"][tokens], "pre_fc_norm_embedding")
    x = linear(torch.cat((e, norm(hidden, "pre_fc_norm_hidden")), dim=-1), tensors["mtp.fc.weight"])
    w = lambda n: tensors[f"mtp.layers.0.{n}"]  # noqa: E731
    y = norm(block(x, w, c, torch.arange(len(tokens)), c["sliding_window"]), "norm")
    return linear(y, tensors["lm_head.weight"]), y


def mellum_block(x: Tensor, w: Getter, c: dict[str, Any], positions: Tensor, window: int = 0) -> Tensor:
    """Layers with a window have a rope of their own."""
    kind = "sliding_attention" if window else "full_attention"
    c = {**c, "rope_theta": c["rope_parameters"][kind]["rope_theta"]}
    return glm_block(x, w, c, positions, window or 10**6)


def mellum_mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """transformers' MtpLayer: plain norms, a layer with a window."""
    return own_mtp(mellum_block, tensors, c, hidden, tokens)


def centered(x: Tensor, weight: Tensor, c: dict[str, Any]) -> Tensor:
    return torch.nn.functional.layer_norm(x, x.shape[-1:], weight, None, c["layer_norm_eps"])


def cohere_block(x: Tensor, w: Getter, c: dict[str, Any], window: int, *, turned: bool) -> Tensor:
    """Both parts read one norm; of routed and shared experts the mean is taken."""
    dim, y = c["head_dim"], centered(x, w("input_layernorm.weight"), c)
    q, k, v = (linear(y, w(f"self_attn.{n}_proj.weight")).view(len(x), -1, dim) for n in "qkv")
    if turned:  # pairs lie side by side
        halves = (torch.cat((each[..., 0::2], each[..., 1::2]), -1) for each in (q, k))
        q, k = (rotated(each, torch.arange(len(x)), c["rope_theta"]) for each in halves)
    x = x + linear(attended(q, k, v, dim**-0.5, window), w("self_attn.o_proj.weight"))
    try:
        gate = w("mlp.gate.weight")
    except KeyError:
        return x + gated(y, lambda n: w(f"mlp.{n}"))
    said = gated(y, lambda n: w(f"mlp.shared_experts.{n}"))
    for row in range(len(x)):
        best = (gate @ y[row]).topk(c["num_experts_per_tok"])
        scores = torch.sigmoid(best.values)
        for weight, e in zip(scores / scores.sum(), best.indices.tolist(), strict=True):
            said[row] += weight * gated(y[row], lambda n, e=e: w(f"mlp.experts.{e}.{n}"))
    return x + said / 2


def cohere_trunk(tensors: Tensors, c: dict[str, Any], tokens: Tensor) -> Tensor:
    """The first layers, with an MLP, rotate and see all; of those behind every nth sees all and does not rotate."""
    x, first = tensors["model.embed_tokens.weight"][tokens], c["first_k_dense_replace"]
    for i in range(c["num_hidden_layers"]):
        sliding = i >= first and (i - first + 1) % c["sliding_window_pattern"] > 0
        w = lambda n, i=i: tensors[f"model.layers.{i}.{n}"]  # noqa: E731
        x = cohere_block(x, w, c, c["sliding_window"] if sliding else 10**6, turned=sliding or i < first)
    return centered(x, tensors["model.norm.weight"], c)


def cohere_mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """llama.cpp's cohere2moe.cpp: e first, a layer that rotates and sees all."""
    w = lambda n: tensors[f"model.layers.{c['num_hidden_layers']}.{n}"]  # noqa: E731
    table = tensors["model.embed_tokens.weight"]
    joined = (centered(table[tokens], w("enorm.weight"), c), centered(hidden, w("hnorm.weight"), c))
    x = cohere_block(linear(torch.cat(joined, -1), w("eh_proj.weight")), w, c, 10**6, turned=True)
    y = centered(x, w("shared_head.norm.weight"), c)
    return linear(y, table), y


MODULES = {"mimo_v2_flash": (0, 1, 2, 2), "step3p5": (0, 1, 2, 0)}
"""Families with more than one module: which serves each draft step."""
NATIVE_HEADS: dict[str, tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]] = {
    "qwen3_5": (hybrid_trunk, hybrid_mtp),
    "qwen3_5_moe": (hybrid_trunk, hybrid_mtp),
    "qwen3_next": (hybrid_trunk, hybrid_mtp),
    "mimo": (mimo_trunk, mimo_mtp),
    "mimo_v2_flash": (mimo_v2_trunk, mimo_v2_mtp),
    "step3p5": (step_trunk, step_mtp),
    "ernie4_5_moe": (normed_trunk(ernie_block), ernie_mtp),
    "glm4_moe": (normed_trunk(glm_block), trailing_mtp(glm_block)),
    "deepseek_v3": (normed_trunk(deepseek_block), trailing_mtp(deepseek_block)),
    "deepseek_v32": (normed_trunk(deepseek_block), trailing_mtp(deepseek_block)),
    "glm4_moe_lite": (normed_trunk(deepseek_block), trailing_mtp(deepseek_block)),
    "glm_moe_dsa": (normed_trunk(deepseek_block), trailing_mtp(deepseek_block)),
    "longcat_flash": (longcat_trunk, longcat_mtp),
    "deepseek_v4": (v4_trunk, v4_mtp),
    "nemotron_h": (nemotron_trunk, nemotron_mtp),
    "exaone4": (exaone_trunk, exaone_mtp),
    "cohere2_moe": (cohere_trunk, cohere_mtp),
    "mellum": (normed_trunk(mellum_block), mellum_mtp),
    "exaone_moe": (renamed(exaone_trunk), renamed(exaone_mtp)),
    "hy_v3": (renamed(normed_trunk(glm_block)), renamed(masked_mtp(glm_block))),
    "bailing_moe": (renamed(normed_trunk(glm_block)), renamed(trailing_mtp(glm_block))),
}
"""Family -> (hidden states that its head reads, draft logits and recycled vectors, of a module if it has several)."""
