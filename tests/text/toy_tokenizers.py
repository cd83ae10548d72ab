"""Small tokenizers for tests: byte-level and sentencepiece, as GGUF metadata."""

from typing import Any

import numpy as np

from headstart.text.token_bytes import byte_alphabet

NORMAL, CONTROL, USER_DEFINED, BYTE, UNKNOWN = 1, 3, 4, 6, 2


def byte_level(pre: str = "gpt-2", **extra: Any) -> dict[str, Any]:
    """256 bytes, a few merges, three control tokens and one user-defined token."""
    bytes_ = list(byte_alphabet())
    merged = ["he", "ll", "hell", "hello", "Ġhe", "Ġhell", "Ġhello", "12", "ðŁ", "ðŁİ"]
    merges = ["h e", "l l", "he ll", "hell o", "Ġ he", "Ġhe ll", "Ġhell o", "1 2", "ð Ł", "ðŁ İ"]
    tokens = [*bytes_, *merged, "<s>", "</s>", "<think> x", "<|eot|>"]
    types = [NORMAL] * (len(bytes_) + len(merged)) + [CONTROL, CONTROL, USER_DEFINED, CONTROL]
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.merges": merges, "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.bos_token_id": tokens.index("<s>"), "tokenizer.ggml.eos_token_id": tokens.index("</s>"),
        "tokenizer.ggml.eot_token_id": tokens.index("<|eot|>"),
    } | extra  # fmt: skip


WORDS = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "▁he", "llo", "▁hello", "wor", "ld", "▁world", "▁▁"]
SCORES = [-1.0, *[-9.0 - i for i in range(7)], -3.0, -2.5, -2.0, -2.2, -1.5, -4.0, -5.0, -4.5, -6.0]


def sentencepiece(**extra: Any) -> dict[str, Any]:
    """A vocabulary with scores and byte fallback."""
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *WORDS]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS)]
    return {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + SCORES, np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32), "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
    } | extra  # fmt: skip
