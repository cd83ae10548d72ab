"""GGUF files with llama.cpp's names, realistic shapes and random weights, written in a stream.

qwen3.5-0.8b  `qwen35`: the published sizes of Qwen3.5-0.8B, 24 layers of which every fourth has full attention, tied
              embedding, one MTP module.
moe           `glm4moe`, since llama.cpp's qwen3moe has no MTP: Qwen3-30B-A3B's proportions (128 experts, 8 taken, heads
              of 128, 8 query heads to a key head) at half its width and a third of its layers, a shared expert and an
              MTP module as GLM's.

Of these two the embedding (and LM head) is Q8_0 whatever the type of the other matrices; routers, norms and
convolutions are float32. Other shapes: random_shapes.py. Q4_K_M is llama-quantize's mixture: Q6_K for embeddings and
for half of the values' and the MLPs' last matrices (`use_more_bits`), Q4_K for the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Kind = str
"""A ggml type, or what float32 values are: "one", "small", "decay", "conv", "router"."""
Tensors = Iterator[tuple[str, tuple[int, ...], Kind]]
TYPES = {
    "Q8_0": (32, 34, 127 / 3**0.5), "Q4_0": (32, 18, 4.61), "Q4_K": (256, 144, 258.3), "Q6_K": (256, 210, 1366.0),
    "MXFP4": (32, 17, 2.97), "Q4_1": (32, 20, 4.61), "Q5_0": (32, 22, 9.23), "Q5_1": (32, 24, 9.23),
    "Q2_K": (256, 84, 13.91), "Q3_K": (256, 110, 43.33), "Q5_K": (256, 176, 524.1), "IQ4_NL": (32, 18, 67.13),
    "IQ4_XS": (256, 136, 1254.0),
}  # fmt: skip
"""Type -> weights and bytes of a block, and the standard deviation of its values where bytes are random and the block's
own factor is 1."""
FACTOR_AT = {"Q2_K": 80, "Q3_K": 108, "Q6_K": 208}
"""Where a block has its factor, if not at its beginning."""
MEANS = {"Q4_1": (2, -7.5), "Q5_1": (2, -15.5), "Q2_K": (82, 1.5), "Q4_K": (2, 7.5), "Q5_K": (2, 15.5)}
"""Where it has another one, and how many times the first that must be for a mean of 0."""
MIXED = "Q4_K_M"
EMBEDDING = "Q8_0"


@dataclass(frozen=True)
class Shape:
    """`layers`: of the trunk. `fields(layers)`: metadata below `{arch}.`. `tensors(layers, type)`: in file order.
    `types`: what it is measured in. `draft`: the small model that drafts, where there is no MTP module."""

    arch: str
    layers: int
    vocab: int
    fields: Callable[[int], Mapping[str, Any]]
    tensors: Callable[[int, Kind], Tensors]
    types: tuple[Kind, ...] = ("Q8_0", "Q4_0")
    draft: Shape | None = None


def block(i: int, parts: Mapping[str, tuple[tuple[int, ...], Kind]]) -> Tensors:
    for name, (shape, kind) in parts.items():
        yield f"blk.{i}.{name}", shape, kind


def attention(hidden: int, heads: int, kv_heads: int, dim: int, kind: Kind, *, gated: bool) -> dict[str, Any]:
    q = heads * dim
    return {
        "attn_norm.weight": ((hidden,), "one"),
        "attn_q.weight": ((q * (1 + gated), hidden), kind),
        "attn_k.weight": ((kv_heads * dim, hidden), kind),
        "attn_v.weight": ((kv_heads * dim, hidden), kind),
        "attn_q_norm.weight": ((dim,), "one"),
        "attn_k_norm.weight": ((dim,), "one"),
        "attn_output.weight": ((hidden, q), kind),
        "post_attention_norm.weight": ((hidden,), "one"),
    }


def dense(hidden: int, inner: int, kind: Kind, end: str = "") -> dict[str, Any]:
    return {
        f"ffn_gate{end}.weight": ((inner, hidden), kind),
        f"ffn_up{end}.weight": ((inner, hidden), kind),
        f"ffn_down{end}.weight": ((hidden, inner), kind),
    }


def nextn(hidden: int, kind: Kind) -> dict[str, Any]:
    norms = {f"nextn.{name}.weight": ((hidden,), "one") for name in ("enorm", "hnorm", "shared_head_norm")}
    return {"nextn.eh_proj.weight": ((hidden, 2 * hidden), kind), **norms}


def qwen_fields(layers: int) -> dict[str, Any]:
    return {
        "block_count": layers + 1, "nextn_predict_layers": 1, "context_length": 4096, "embedding_length": 1024,
        "feed_forward_length": 3584, "attention.head_count": 8, "attention.head_count_kv": 2,
        "attention.key_length": 256, "attention.value_length": 256, "attention.layer_norm_rms_epsilon": 1e-6,
        "rope.freq_base": 1e7, "rope.dimension_count": 64, "rope.dimension_sections": [11, 11, 10, 0],
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.group_count": 16, "ssm.time_step_rank": 16,
        "ssm.inner_size": 2048, "full_attention_interval": 4,
    }  # fmt: skip


def qwen_tensors(layers: int, kind: Kind) -> Tensors:
    hidden, channels, inner, heads = 1024, 3 * 2048, 2048, 16
    linear = {
        "attn_norm.weight": ((hidden,), "one"),
        "attn_qkv.weight": ((channels, hidden), kind),
        "attn_gate.weight": ((inner, hidden), kind),
        "ssm_conv1d.weight": ((channels, 4), "conv"),
        "ssm_dt.bias": ((heads,), "small"),
        "ssm_a": ((heads,), "decay"),
        "ssm_beta.weight": ((heads, hidden), kind),
        "ssm_alpha.weight": ((heads, hidden), kind),
        "ssm_norm.weight": ((128,), "one"),
        "ssm_out.weight": ((hidden, inner), kind),
        "post_attention_norm.weight": ((hidden,), "one"),
    }
    full, after = attention(hidden, 8, 2, 256, kind, gated=True), dense(hidden, 3584, kind)
    yield "token_embd.weight", (248320, hidden), EMBEDDING
    yield "output_norm.weight", (hidden,), "one"
    for i in range(layers):
        yield from block(i, {**(full if (i + 1) % 4 == 0 else linear), **after})
    yield from block(layers, {**full, **after, **nextn(hidden, kind)})


def moe_fields(layers: int) -> dict[str, Any]:
    return {
        "block_count": layers + 1, "nextn_predict_layers": 1, "context_length": 4096, "embedding_length": 1024,
        "feed_forward_length": 3072, "attention.head_count": 16, "attention.head_count_kv": 2,
        "attention.key_length": 128, "attention.value_length": 128, "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e6, "rope.dimension_count": 64, "expert_count": 128, "expert_used_count": 8,
        "expert_feed_forward_length": 384, "expert_shared_count": 1, "leading_dense_block_count": 1,
        "expert_weights_scale": 1.0, "expert_weights_norm": True, "expert_gating_func": 2,
    }  # fmt: skip


def moe_tensors(layers: int, kind: Kind) -> Tensors:
    hidden, inner, experts = 1024, 384, 128
    whole = attention(hidden, 16, 2, 128, kind, gated=False)
    sparse = {
        "ffn_gate_inp.weight": ((experts, hidden), "router"),
        "exp_probs_b.bias": ((experts,), "small"),
        "ffn_gate_exps.weight": ((experts, inner, hidden), kind),
        "ffn_up_exps.weight": ((experts, inner, hidden), kind),
        "ffn_down_exps.weight": ((experts, hidden, inner), kind),
        **dense(hidden, inner, kind, "_shexp"),
    }
    yield "token_embd.weight", (151936, hidden), EMBEDDING
    yield "output_norm.weight", (hidden,), "one"
    yield "output.weight", (151936, hidden), EMBEDDING
    for i in range(layers):
        yield from block(i, {**whole, **(dense(hidden, 3072, kind) if i == 0 else sparse)})
    yield from block(layers, {**whole, **sparse, **nextn(hidden, kind)})


SHAPES = {
    "qwen3.5-0.8b": Shape("qwen35", 24, 248320, qwen_fields, qwen_tensors, ("Q8_0", "Q4_0", MIXED)),
    "moe": Shape("glm4moe", 16, 151936, moe_fields, moe_tensors),
}


def write(path: Path, shape: Shape, kind: Kind, layers: int) -> None:
    """The file, beside its place and renamed."""
    aside = path.with_suffix(".tmp")
    writer = gguf.GGUFWriter(aside, shape.arch)
    for key, value in shape.fields(layers).items():
        add_field(writer, f"{shape.arch}.{key}", value)
    add_tokens(writer, shape.vocab)
    listed = [(name, size, typed(name, of, layers)) for name, size, of in shape.tensors(layers, kind)]
    for name, size, of in listed:
        raw = gguf.GGMLQuantizationType[of] if of in TYPES else None
        writer.add_tensor_info(name, size, np.dtype(np.float32), num_bytes(size, of), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for _, size, of in listed:
        writer.write_tensor_data(quantized(rng, size, of) if of in TYPES else floats(rng, size, of))
    writer.close()
    aside.replace(path)


def typed(name: str, kind: Kind, layers: int) -> Kind:
    """What a tensor of a mixture has, as llama.cpp's `llama_tensor_get_type` chooses."""
    if kind != MIXED:
        return kind
    if not name.startswith("blk."):
        return "Q6_K" if name in ("token_embd.weight", "output.weight") else "Q4_K"
    i, eighth = int(name.split(".")[1]), layers // 8
    more_bits = i < eighth or i >= 7 * layers // 8 or (i - eighth) % 3 == 2
    return "Q6_K" if more_bits and ("attn_v." in name or "ffn_down" in name) else "Q4_K"


def num_bytes(shape: tuple[int, ...], kind: Kind) -> int:
    count = int(np.prod(shape))
    if kind not in TYPES:
        return 4 * count
    weights, size, _ = TYPES[kind]
    return count // weights * size


def quantized(rng: np.random.Generator, shape: tuple[int, ...], kind: Kind) -> Any:
    """Blocks of random integers whose values have a variance of 1 / columns."""
    weights, size, deviation = TYPES[kind]
    blocks = rng.integers(0, 256, (int(np.prod(shape)) // weights, size), np.uint8)
    factor = 1 / (deviation * shape[-1] ** 0.5)
    if kind == "MXFP4":  # a power of two, half of the factor of doubled values
        blocks[:, 0] = round(np.log2(factor)) + 127
        return blocks
    factors = {FACTOR_AT.get(kind, 0): factor}
    if kind in MEANS:
        at, times = MEANS[kind]
        factors[at] = times * factor
    for at, value in factors.items():
        blocks[:, at : at + 2] = np.array([value], np.float16).view(np.uint8)
    return blocks


def floats(rng: np.random.Generator, shape: tuple[int, ...], kind: Kind) -> Any:
    values = rng.standard_normal(shape)
    scaled = {
        "one": 1 + 0.1 * values,
        "small": 0.1 * values,
        "decay": -np.geomspace(0.03, 0.5, shape[0]),
        "conv": 0.5 * values,
        "router": values / shape[-1] ** 0.5,
        "turning": np.where(np.arange(shape[0]) < shape[0] // 4, 1.0, 1e30),
    }
    return scaled[kind].astype(np.float32)


def add_field(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(key, value)
    else:
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)


def add_tokens(writer: Any, count: int) -> None:
    """A byte-level vocabulary that both engines read: the 256 bytes, one merge, and words without meaning."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    signs = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*signs, "ab", *(f"<{i}>" for i in range(count - len(signs) - 1))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)
