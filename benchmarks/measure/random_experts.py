"""GGUF files of published mixtures of experts with random weights, fewer layers and a small vocabulary.

qwen3-30b     Qwen3-30B-A3B: 128 experts of 768, 8 per token.
gpt-oss-20b   gpt-oss-20b: 32 experts of 2880 in MXFP4, 4 per token.
deepseek-v3   DeepSeek-V3's experts (256 of 2048, 8 per token, one shared) behind GLM-4's attention of the same size.

Routers are skewed: all embeddings share a direction, and a router's row has a component along it. `SKEW` is that
component relative to the rest; it is chosen so that two tokens share about 38 % of their experts and four tokens read
about 2.5 times as many as one, as Cohere measured for neighbouring tokens of Command models
(cohere.com/blog/mixture-of-experts-models-get-more-from-speculative-decoding, April 2026).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from measure.random_gguf import add_tokens

TYPES = {"Q8_0": (32, 34, 127 / 3**0.5), "Q4_0": (32, 18, 4.61), "MXFP4": (32, 17, 2.97)}
"""Type -> (weights of a block, its bytes, standard deviation of random codes with factor 1)."""
CHUNK = 1 << 16  # blocks drawn once and repeated
COMMON = 0.5  # length of the common direction of embeddings, relative to the rest


@dataclass(frozen=True)
class MoESizes:
    arch: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    active: int
    inner: int
    skew: float
    kind: str = "Q4_0"  # type of the experts' weights
    shared: int = 0  # width of shared experts
    vocab: int = 8192

    def fields(self) -> dict[str, Any]:
        """Metadata under the architecture's name."""
        fields: dict[str, Any] = {
            "block_count": self.layers, "context_length": 4096, "embedding_length": self.hidden,
            "feed_forward_length": self.inner, "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads, "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim, "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 1e6, "rope.dimension_count": self.head_dim, "expert_count": self.experts,
            "expert_used_count": self.active, "expert_feed_forward_length": self.inner,
        }  # fmt: skip
        if self.arch == "gpt-oss":
            fields |= {"attention.sliding_window": 128, "rope.freq_base": 150000.0}
        if self.arch == "glm4moe":
            fields |= {
                "rope.dimension_count": self.head_dim // 2, "expert_shared_count": 1, "leading_dense_block_count": 0,
                "expert_weights_scale": 2.5, "expert_weights_norm": True, "expert_gating_func": 2,
            }  # fmt: skip
        return fields

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """Names, shapes and kinds in file order."""
        q, kv, hidden, inner = self.heads * self.head_dim, self.kv_heads * self.head_dim, self.hidden, self.inner
        rows = {"attn_q": (q, hidden), "attn_k": (kv, hidden), "attn_v": (kv, hidden), "attn_output": (hidden, q)}
        stack = {"gate": (inner, hidden), "up": (inner, hidden), "down": (hidden, inner)}
        yield "token_embd.weight", (self.vocab, hidden), "embedding"
        yield "output_norm.weight", (hidden,), "one"
        yield "output.weight", (self.vocab, hidden), "Q8_0"
        for i in range(self.layers):
            layer = {"attn_norm.weight": ((hidden,), "one")}
            layer |= {f"{name}.weight": (shape, "Q8_0") for name, shape in rows.items()}
            layer["ffn_gate_inp.weight"] = ((self.experts, hidden), "router")
            layer |= {f"ffn_{name}_exps.weight": ((self.experts, *shape), self.kind) for name, shape in stack.items()}
            if self.arch == "gpt-oss":
                layer |= {f"{name}.bias": ((shape[0],), "small") for name, shape in rows.items()}
                layer |= {f"ffn_{name}_exps.bias": ((self.experts, each[0]), "small") for name, each in stack.items()}
                layer["attn_sinks.weight"] = ((self.heads,), "small")
                layer["ffn_gate_inp.bias"] = ((self.experts,), "small")
            else:
                layer |= {f"{name}_norm.weight": ((self.head_dim,), "one") for name in ("attn_q", "attn_k")}
            if self.shared:
                layer["exp_probs_b.bias"] = ((self.experts,), "zero")
                layer |= {f"ffn_{name}_shexp.weight": (shape, self.kind) for name, shape in stack.items()}
            norm = "ffn_norm" if self.arch == "qwen3moe" else "post_attention_norm"
            layer[f"{norm}.weight"] = ((hidden,), "one")
            yield from ((f"blk.{i}.{name}", shape, kind) for name, (shape, kind) in layer.items())


SHAPES = {
    "qwen3-30b": MoESizes("qwen3moe", 8, 2048, 32, 4, 128, 128, 8, 768, skew=0.2),
    "gpt-oss-20b": MoESizes("gpt-oss", 6, 2880, 64, 8, 64, 32, 4, 2880, skew=0.3, kind="MXFP4"),
    "deepseek-v3": MoESizes("glm4moe", 1, 7168, 96, 8, 128, 256, 8, 2048, skew=0.7, shared=2048),
}


def write_random_experts(path: Path, sizes: MoESizes) -> None:
    """Writes a temporary file and renames it."""
    aside = path.with_suffix(".tmp")
    writer = gguf.GGUFWriter(aside, sizes.arch)
    for key, value in sizes.fields().items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(f"{sizes.arch}.{key}", value)
    add_tokens(writer, sizes.vocab)
    for name, shape, kind in sizes.tensors():
        weights, size, _ = TYPES.get(kind, (1, 4, 0))
        raw = gguf.GGMLQuantizationType[kind] if kind in TYPES else None
        num_bytes = math.prod(shape) // weights * size
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    common = rng.standard_normal(sizes.hidden)
    for _, shape, kind in sizes.tensors():
        is_matrix = kind in TYPES
        writer.write_tensor_data(_blocks(rng, shape, kind) if is_matrix else _floats(rng, shape, kind, common, sizes))
    writer.close()
    aside.replace(path)


def _blocks(rng: np.random.Generator, shape: tuple[int, ...], kind: str) -> np.ndarray:
    """Blocks of random codes whose values have a variance of 1 / columns."""
    weights, size, deviation = TYPES[kind]
    count, factor = math.prod(shape) // weights, 1 / (deviation * shape[-1] ** 0.5)
    drawn = rng.integers(0, 256, (min(count, CHUNK), size), np.uint8)
    if kind == "MXFP4":  # a power of two, halved as the values are doubled
        drawn[:, 0] = round(np.log2(factor)) + 127
    else:
        drawn[:, :2] = np.array([factor], np.float16).view(np.uint8)
    return np.resize(drawn, (count, size))


def _floats(
    rng: np.random.Generator, shape: tuple[int, ...], kind: str, common: np.ndarray, sizes: MoESizes
) -> np.ndarray:
    values = rng.standard_normal(shape)
    if kind == "embedding":
        values += COMMON * common
    elif kind == "router":  # the component along `common` acts as a bias of the expert
        values += sizes.skew / COMMON * rng.standard_normal((shape[0], 1)) * common / sizes.hidden**0.5
        values /= shape[-1] ** 0.5
    elif kind == "small":
        values *= 0.02
    elif kind == "one":
        values = 1 + 0.1 * values
    elif kind == "zero":
        values *= 0
    return values.astype(np.float32)
