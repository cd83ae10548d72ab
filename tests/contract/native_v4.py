"""DeepSeek-V4's trunk and module by hand: plain torch over whole sequences, row by row, in float64 (see native_heads).

T tokens, n streams, H width, N heads, D head dim. After the report's sections 2.1 to 2.3 and transformers' class.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu, softplus

Tensors = dict[str, Tensor]
Getter = Callable[[str], Tensor]


def rms(x: Tensor, weight: Tensor | float, eps: float) -> Tensor:
    return x / torch.sqrt((x**2).mean(-1, keepdim=True) + eps) * weight


def turned(x: Tensor, positions: Tensor, theta: float, rotary: int) -> Tensor:
    """The last features of x [T, ..., D], neighbours as complex numbers."""
    angle = positions[:, None] * theta ** (-torch.arange(0, rotary, 2, dtype=torch.float64) / rotary)
    angle = angle.view(len(x), *(1,) * (x.dim() - 2), rotary // 2)
    pairs = torch.complex(x[..., -rotary::2], x[..., 1 - rotary :: 2]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat((x[..., :-rotary], torch.view_as_real(pairs).flatten(-2)), -1)


def entered(x: Tensor, w: Getter, name: str, c: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Streams [T, n, H] -> (their sum [T, H], shares of the output [T, n], mixing matrices [T, n, n])."""
    n, eps = c["hc_mult"], c["hc_eps"]
    mixes = linear(rms(x.flatten(1), 1.0, c["rms_norm_eps"]), w(f"{name}fn"))
    scale, base = w(f"{name}scale"), w(f"{name}base")
    pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + eps
    if len(scale) == 1:
        return (pre[..., None] * x).sum(1), pre, pre
    post = 2 * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
    square = torch.softmax((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n), -1) + eps
    for i in range(c["hc_sinkhorn_iters"]):
        if i:
            square = square / (square.sum(2, keepdim=True) + eps)
        square = square / (square.sum(1, keepdim=True) + eps)
    return (pre[..., None] * x).sum(1), post, square


def left(x: Tensor, said: Tensor, post: Tensor, square: Tensor) -> Tensor:
    return post[..., None] * said[:, None] + torch.einsum("tjk,tjh->tkh", square, x)


def entries(y: Tensor, w: Getter, name: str, every: int, dim: int, overlap: bool) -> Tensor:
    """One for each whole window, without its rotation."""
    c, z = linear(y, w(f"{name}.wkv.weight")), linear(y, w(f"{name}.wgate.weight"))
    z = z + w(f"{name}.ape")[torch.arange(len(y)) % every]
    made = []
    for end in range(every, len(y) + 1, every):
        here = slice(end - every, end)
        values, gates = c[here, -dim:], z[here, -dim:]
        if overlap and end > every:
            before = slice(end - 2 * every, end - every)
            values, gates = torch.cat((c[before, :dim], values)), torch.cat((z[before, :dim], gates))
        made.append((values * torch.softmax(gates, 0)).sum(0))
    return torch.stack(made) if made else y.new_zeros(0, dim)


def attention(y: Tensor, w: Getter, c: dict[str, Any], ratio: int) -> Tensor:
    heads, dim, rotary, eps = c["num_attention_heads"], c["head_dim"], c["qk_rope_head_dim"], c["rms_norm_eps"]
    theta, positions = c["compress_rope_theta"] if ratio else c["rope_theta"], torch.arange(len(y))
    low = rms(linear(y, w("wq_a.weight")), w("q_norm.weight"), eps)
    q = turned(rms(linear(low, w("wq_b.weight")).view(len(y), heads, dim), 1.0, eps), positions, theta, rotary)
    k = turned(rms(linear(y, w("wkv.weight")), w("kv_norm.weight"), eps), positions, theta, rotary)
    rate = {0: 0, 4: 4, 128: c["compress_rates"]["heavily_compressed_attention"]}[ratio]
    far = index = k[:0]
    if ratio:
        far = rms(entries(y, w, "compressor", rate, dim, ratio == 4), w("compressor.norm.weight"), eps)
        far = turned(far, torch.arange(len(far)) * rate, theta, rotary)
    if ratio == 4:
        size = c["index_head_dim"]
        index = rms(entries(y, w, "indexer.compressor", 4, size, True), w("indexer.compressor.norm.weight"), eps)
        index = turned(index, torch.arange(len(index)) * 4, theta, rotary)
        asked = turned(linear(low, w("indexer.wq_b.weight")).view(len(y), -1, size), positions, theta, rotary)
        shares = linear(y, w("indexer.weights_proj.weight"))
    out = torch.empty_like(q)
    for row in range(len(y)):
        there = list(range((row + 1) // rate)) if ratio else []
        if ratio == 4 and there:
            score = torch.relu(asked[row] @ index[there].T).T @ shares[row]
            there = score.topk(min(c["index_topk"], len(there))).indices.tolist()
        seen = torch.cat((far[there], k[max(0, row + 1 - c["sliding_window"]) : row + 1]))
        for head in range(heads):
            scores = torch.cat((seen @ q[row, head] * dim**-0.5, w("attn_sink")[head, None]))
            out[row, head] = torch.softmax(scores, 0)[:-1] @ seen
    grouped = turned(out, -positions, theta, rotary).reshape(len(y), c["o_groups"], -1)
    down = w("wo_a.weight").view(c["o_groups"], c["o_lora_rank"], -1)
    return linear(torch.einsum("tgi,goi->tgo", grouped, down).flatten(1), w("wo_b.weight"))


def expert(x: Tensor, w: Getter) -> Tensor:
    gate, up = linear(x, w("w1.weight")).clamp(max=10), linear(x, w("w3.weight")).clamp(-10, 10)
    return linear(silu(gate) * up, w("w2.weight"))


def experts(x: Tensor, w: Getter, c: dict[str, Any], tokens: Tensor | None) -> Tensor:
    """`tokens`: they name the experts."""
    out = expert(x, lambda n: w(f"shared_experts.{n}"))
    for row in range(len(x)):
        score = torch.sqrt(softplus(w("gate.weight") @ x[row]))
        if tokens is None:
            taken = (score + w("gate.bias")).topk(c["num_experts_per_tok"]).indices.tolist()
        else:
            taken = w("gate.tid2eid")[tokens[row]].long().tolist()
        total = sum(score[e] for e in taken)
        for e in taken:
            said = expert(x[row], lambda n, e=e: w(f"experts.{e}.{n}"))
            out[row] = out[row] + score[e] / total * c["routed_scaling_factor"] * said
    return out


def block(x: Tensor, w: Getter, c: dict[str, Any], ratio: int, tokens: Tensor | None) -> Tensor:
    """Streams [T, n, H] through one layer."""
    y, *leaving = entered(x, w, "hc_attn_", c)
    y = attention(rms(y, w("attn_norm.weight"), c["rms_norm_eps"]), lambda n: w(f"attn.{n}"), c, ratio)
    x = left(x, y, *leaving)
    y, *leaving = entered(x, w, "hc_ffn_", c)
    y = experts(rms(y, w("ffn_norm.weight"), c["rms_norm_eps"]), lambda n: w(f"ffn.{n}"), c, tokens)
    return left(x, y, *leaving)


def v4_trunk(tensors: Tensors, c: dict[str, Any], tokens: Tensor) -> Tensor:
    """All streams [T, n * H] behind the last layer."""
    x = tensors["embed.weight"][tokens][:, None].repeat(1, c["hc_mult"], 1)
    for i in range(c["num_hidden_layers"]):
        named = tokens if i < c["num_hash_layers"] else None
        x = block(x, lambda n, i=i: tensors[f"layers.{i}.{n}"], c, c["compress_ratios"][i], named)
    return x.flatten(1)


def v4_mtp(tensors: Tensors, c: dict[str, Any], hidden: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Two projections, added; a block with a window alone; all its streams are recycled."""
    w = lambda n: tensors[f"mtp.0.{n}"]  # noqa: E731
    eps = c["rms_norm_eps"]
    streams = rms(hidden.unflatten(1, (c["hc_mult"], -1)), w("hnorm.weight"), eps)
    token = rms(tensors["embed.weight"][tokens], w("enorm.weight"), eps)
    x = linear(streams, w("h_proj.weight")) + linear(token, w("e_proj.weight"))[:, None]
    x = block(x, w, c, 0, None)
    y = rms(entered(x, w, "hc_head_", c)[0], w("norm.weight"), eps)
    return linear(y, tensors["head.weight"]), x.flatten(1)
