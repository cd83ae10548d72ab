"""Writes a GGUF file of a Llama shape with random Q8_0 weights as a stream."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np

BLOCK = 32
"""Weights of a Q8_0 block, which has a float16 scale and a byte per weight."""


@dataclass(frozen=True)
class LlamaSizes:
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int = 4096

    def fields(self) -> dict[str, Any]:
        """Metadata under `llama.`."""
        return {
            "block_count": self.layers, "context_length": self.context, "embedding_length": self.hidden,
            "feed_forward_length": self.inner, "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads, "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim, "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.dimension_count": self.head_dim, "rope.freq_base": 1e6,
        }  # fmt: skip

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and shapes in file order; norms have one dimension."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = {
            "attn_norm": (self.hidden,), "attn_q": (q, self.hidden), "attn_k": (kv, self.hidden),
            "attn_v": (kv, self.hidden), "attn_output": (self.hidden, q), "ffn_norm": (self.hidden,),
            "ffn_gate": (self.inner, self.hidden), "ffn_up": (self.inner, self.hidden),
            "ffn_down": (self.hidden, self.inner),
        }  # fmt: skip
        yield "token_embd.weight", (self.vocab, self.hidden)
        yield "output_norm.weight", (self.hidden,)
        for i in range(self.layers):
            yield from ((f"blk.{i}.{name}.weight", shape) for name, shape in layer.items())


def write_random_gguf(path: Path, sizes: LlamaSizes) -> None:
    """Writes a temporary file and renames it. Matrices are Q8_0, norms float32."""
    aside = path.with_suffix(".tmp")
    writer = gguf.GGUFWriter(aside, "llama")
    for key, value in sizes.fields().items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"llama.{key}", value)
    add_tokens(writer, sizes.vocab)
    for name, shape in sizes.tensors():
        count, is_matrix = math.prod(shape), len(shape) == 2
        num_bytes = count // BLOCK * (BLOCK + 2) if is_matrix else 4 * count
        raw = gguf.GGMLQuantizationType.Q8_0 if is_matrix else None
        writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    rng = np.random.default_rng(0)
    for _, shape in sizes.tensors():
        if len(shape) == 1:
            writer.write_tensor_data((1 + 0.1 * rng.standard_normal(shape)).astype(np.float32))
        else:  # random codes whose values have the variance 1 / columns
            blocks = rng.integers(0, 256, (math.prod(shape) // BLOCK, BLOCK + 2), np.uint8)
            scale = 3**0.5 / 127 / shape[-1] ** 0.5
            blocks[:, :2] = np.array([scale], np.float16).view(np.uint8)
            writer.write_tensor_data(blocks)
    writer.close()
    aside.replace(path)


def add_tokens(writer: Any, count: int) -> None:
    """Adds a byte-level vocabulary for both engines: 256 bytes, one merge, and filler words."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    signs = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*signs, "ab", *(f"<{i}>" for i in range(count - len(signs) - 1))])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(count - 1)
