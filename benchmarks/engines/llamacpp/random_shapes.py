"""Published sizes of models without MTP modules, for files of random weights, and a small draft model for each.

gemma-4-e2b   35 layers, of which every fifth sees everything and the last 20 read keys of others; per-layer embeddings.
lfm2.5-1.2b   16 layers, of which six have attention and the others short convolutions.
gpt-oss-20b   8 of its 24 layers, since 24 GB do not hold a byte a weight for all: experts in MXFP4, the rest in Q8_0.
smollm3-3b    36 layers, every fourth without positions.
draft         What drafts for them: one Llama layer of 512, with the vocabulary of its trunk.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engines.llamacpp.random_files import MIXED, Kind, Shape, Tensors, attention, block, dense

CONTEXT = 4096
FULL = (2, 5, 8, 10, 12, 14)
"""Layers of LFM2.5-1.2B that have attention."""


def sizes(layers: int, hidden: int, inner: Any, heads: int, kv_heads: Any, dim: int) -> dict[str, Any]:
    return {
        "block_count": layers, "context_length": CONTEXT, "embedding_length": hidden, "feed_forward_length": inner,
        "attention.head_count": heads, "attention.head_count_kv": kv_heads, "attention.key_length": dim,
        "attention.value_length": dim, "attention.layer_norm_rms_epsilon": 1e-5, "rope.dimension_count": dim,
    }  # fmt: skip


def plain(hidden: int, inner: int, heads: int, kv_heads: int, dim: int, kind: Kind) -> dict[str, Any]:
    """A layer of Llama's."""
    mixer = attention(hidden, heads, kv_heads, dim, kind, gated=False)
    left = ("attn_q_norm.weight", "attn_k_norm.weight", "post_attention_norm.weight")
    parts = {name: part for name, part in mixer.items() if name not in left}
    return {**parts, "ffn_norm.weight": ((hidden,), "one"), **dense(hidden, inner, kind)}


def smollm_fields(layers: int) -> dict[str, Any]:
    return {**sizes(layers, 2048, 11008, 16, 4, 128), "rope.freq_base": 5e6, "vocab_size": 128256}


def smollm_tensors(layers: int, kind: Kind) -> Tensors:
    yield "token_embd.weight", (128256, 2048), kind
    yield "output_norm.weight", (2048,), "one"
    for i in range(layers):
        yield from block(i, plain(2048, 11008, 16, 4, 128, kind))


def lfm_fields(layers: int) -> dict[str, Any]:
    kv_heads = [8 if i in FULL else 0 for i in range(layers)]
    fields = {**sizes(layers, 2048, 8192, 32, kv_heads, 64), "rope.freq_base": 1e6, "vocab_size": 65536}
    return {**fields, "shortconv.l_cache": 3}


def lfm_tensors(layers: int, kind: Kind) -> Tensors:
    hidden = 2048
    convolution = {
        "attn_norm.weight": ((hidden,), "one"),
        "shortconv.conv.weight": ((hidden, 3), "conv"),
        "shortconv.in_proj.weight": ((3 * hidden, hidden), kind),
        "shortconv.out_proj.weight": ((hidden, hidden), kind),
    }
    mixer = attention(hidden, 32, 8, 64, kind, gated=False)
    del mixer["post_attention_norm.weight"]
    after = {"ffn_norm.weight": ((hidden,), "one"), **dense(hidden, 8192, kind)}
    yield "token_embd.weight", (65536, hidden), kind
    yield "token_embd_norm.weight", (hidden,), "one"
    for i in range(layers):
        yield from block(i, {**(mixer if i in FULL else convolution), **after})


def gpt_oss_fields(layers: int) -> dict[str, Any]:
    return {
        **sizes(layers, 2880, 2880, 64, 8, 64), "rope.freq_base": 150000.0, "expert_count": 32, "expert_used_count": 4,
        "expert_feed_forward_length": 2880, "attention.sliding_window": 128,
    }  # fmt: skip


def gpt_oss_tensors(layers: int, kind: Kind) -> Tensors:
    hidden, experts = 2880, 32
    rest = "Q8_0"
    mixer = attention(hidden, 64, 8, 64, rest, gated=False)
    del mixer["attn_q_norm.weight"], mixer["attn_k_norm.weight"]
    rows = {"attn_q": 4096, "attn_k": 512, "attn_v": 512, "attn_output": hidden}
    sparse = {
        "attn_sinks.weight": ((64,), "small"),
        "ffn_gate_inp.weight": ((experts, hidden), "router"),
        "ffn_gate_inp.bias": ((experts,), "small"),
    }
    for name in ("gate", "up", "down"):
        sparse[f"ffn_{name}_exps.weight"] = ((experts, hidden, hidden), kind)
        sparse[f"ffn_{name}_exps.bias"] = ((experts, hidden), "small")
    biases = {f"{name}.bias": ((count,), "small") for name, count in rows.items()}
    yield "token_embd.weight", (201088, hidden), rest
    yield "output_norm.weight", (hidden,), "one"
    yield "output.weight", (201088, hidden), rest
    for i in range(layers):
        yield from block(i, {**mixer, **biases, **sparse})


def gemma_kinds(layers: int) -> tuple[list[bool], int]:
    """Which layers have a window, and how many at the end read keys of others."""
    return [(i + 1) % 5 != 0 for i in range(layers)], layers * 20 // 35


def gemma_fields(layers: int) -> dict[str, Any]:
    sliding, shared = gemma_kinds(layers)
    inner = [6144 if i < layers - shared else 12288 for i in range(layers)]
    return {
        **sizes(layers, 1536, inner, 8, 1, 512), "rope.freq_base": 1e6, "rope.freq_base_swa": 1e4,
        "final_logit_softcapping": 30.0, "attention.sliding_window": 512, "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": 256, "attention.sliding_window_pattern": sliding,
        "attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count_swa": 256,
    }  # fmt: skip


def gemma_tensors(layers: int, kind: Kind) -> Tensors:
    hidden, vocab = 1536, 262144
    sliding, shared = gemma_kinds(layers)
    yield "token_embd.weight", (vocab, hidden), kind
    yield "per_layer_token_embd.weight", (vocab, 256 * layers), kind
    yield "per_layer_model_proj.weight", (256 * layers, hidden), kind
    yield "per_layer_proj_norm.weight", (256,), "one"
    yield "output_norm.weight", (hidden,), "one"
    yield "rope_freqs.weight", (256,), "turning"
    for i in range(layers):
        own = i < layers - shared
        parts = attention(hidden, 8, 1, 256 if sliding[i] else 512, kind, gated=False)
        if not own:
            parts = {name: part for name, part in parts.items() if not name.startswith(("attn_k", "attn_v"))}
        norms = {f"{name}.weight": ((hidden,), "one") for name in ("ffn_norm", "post_ffw_norm", "post_norm")}
        per_layer = {"inp_gate.weight": ((256, hidden), kind), "proj.weight": ((hidden, 256), kind)}
        scale = {"layer_output_scale.weight": ((1,), "one")}
        yield from block(i, {**parts, **norms, **per_layer, **scale, **dense(hidden, 6144 if own else 12288, kind)})


def draft_fields(layers: int) -> dict[str, Any]:
    return {**sizes(layers, 512, 2048, 8, 2, 64), "rope.freq_base": 1e4}


def draft_of(vocab: int) -> Shape:
    """One layer of Llama's, with so many tokens."""

    def tensors(layers: int, kind: Kind) -> Tensors:
        yield "token_embd.weight", (vocab, 512), kind
        yield "output_norm.weight", (512,), "one"
        for i in range(layers):
            yield from block(i, plain(512, 2048, 8, 2, 64, kind))

    return Shape("llama", 1, vocab, draft_fields, tensors)


def with_draft(shape: Shape, kind: Kind = MIXED) -> Shape:
    return replace(shape, types=(kind,), draft=draft_of(shape.vocab))


SHAPES = {
    "gemma-4-e2b": with_draft(Shape("gemma4", 35, 262144, gemma_fields, gemma_tensors)),
    "lfm2.5-1.2b": with_draft(Shape("lfm2", 16, 65536, lfm_fields, lfm_tensors)),
    "gpt-oss-20b": with_draft(Shape("gpt-oss", 8, 201088, gpt_oss_fields, gpt_oss_tensors), "MXFP4"),
    "smollm3-3b": with_draft(Shape("smollm3", 36, 128256, smollm_fields, smollm_tensors)),
}
