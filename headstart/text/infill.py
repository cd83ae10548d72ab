"""Prompts that fill a gap in a text (fill in the middle, Bavarian et al. 2022)."""

# ruff: noqa: RUF001  (the bars of DeepSeek's markers are U+FF5C)

from headstart.errors import ParameterError
from headstart.text.tokenizer import Tokenizer

MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
)
"""Markers of each model family: before the prefix, before the suffix, and at the end of the prompt."""


def infill_prompt(tokenizer: Tokenizer, prefix: str, suffix: str) -> str:
    """The prompt whose continuation is the text between `prefix` and `suffix`. Raises ParameterError for a model
    without tokens for it."""
    for before, after, middle in MARKERS:
        if all(tokenizer.id_of(each) is not None for each in (before, after, middle)):
            return f"{before}{prefix}{after}{suffix}{middle}"
    raise ParameterError("suffix", "is given, but the model has no tokens that mark a gap", "leave it out")
