"""A `tokenizers.Tokenizer` from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from headstart.errors import ModelError
from headstart.text.pieces import SPACE

CONTROL, USER_DEFINED, UNKNOWN = 3, 4, 2

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"


def _words(digits: str) -> str:
    return rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_LINES}"


_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_LINES}"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"{_CONTRACTIONS}?|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
)
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    rf"|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_LINES}"
)
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    r"[\u4E00-\u9FA5\u3040-\u309F\u30A0-\u30FF]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_LINES}",
)
_DEEPSEEK_LLM = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    r"\s?[!-/:-~\uFF01-\uFF0F\uFF1A-\uFF5E\u2018-\u201F\u3000-\u3002]+",
    r"\s+$",
)
_CJK = r"[\u4E00-\u9FA5\u0800-\u4E00\uAC00-\uD7FF]+"


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut before merging: patterns applied one after the other to what is left whole."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    add_bos: bool = False  # where the file does not say


_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_LLAMA3 = PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_words(r"\p{N}"),), nfc=True)
_DEEPSEEK = PreTokenizer(_DEEPSEEK_V3)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    **dict.fromkeys(("default", "gpt-2", "gpt2", "phi-2", "mpt", "olmo", "exaone4"), PreTokenizer((_GPT2,))),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS_GPT2),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), PreTokenizer((_words(r"\p{N}{1,3}"),))),
    **dict.fromkeys(("glm4", "chatglm-bpe", "glm5"), PreTokenizer((_words(r"\p{N}{1,3}"),), ignore_merges=True)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "hunyuan"), _QWEN2),
    "stablelm2": PreTokenizer((_words(r"\p{N}"),)),
    "qwen35": PreTokenizer((_QWEN35,), nfc=True),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense"), _DEEPSEEK),
    "deepseek-llm": PreTokenizer((*_DEEPSEEK_LLM, _CJK, r"\p{N}")),
    "deepseek-coder": PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK, r"\p{N}")),
    **dict.fromkeys(("gpt-4o", "llama4"), PreTokenizer((_GPT4O,))),
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
}
"""`tokenizer.ggml.pre` -> pre-tokenizer, as the models' own tokenizer.json files have it."""


def build(metadata: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file. ModelError for a kind that is not known or for broken tables."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama", "gemma4"):
        known = "known are gpt2 (byte-level BPE), llama (sentencepiece) and gemma4 (BPE over its pieces)"
        raise ModelError(f"{where}: the tokenizer model is {kind!r}", known if kind else "the file has no tokenizer")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{where}: tokenizer.ggml.tokens is missing or empty", "convert the model again")
    vocabulary: dict[str, int] = {}
    for number, token in enumerate(tokens):
        vocabulary.setdefault(token, number)
    tokenizer = (_byte_level if kind == "gpt2" else _sentencepiece)(metadata, tokens, vocabulary, where)
    _add_special(tokenizer, metadata, tokens)
    return tokenizer


def _byte_level(
    metadata: Mapping[str, Any], tokens: list[str], vocabulary: dict[str, int], where: str
) -> tokenizers.Tokenizer:
    rule = pre_tokenizer_of(metadata, where)
    pairs = _written_merges(metadata, where)
    tokenizer = tokenizers.Tokenizer(_bpe(vocabulary, pairs, where, ignore_merges=rule.ignore_merges))
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _written_merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(f"{where}: tokenizer.ggml.merges is missing", "convert the model again")
    # A space inside a part is written as a printable character, so the first space after the start divides them.
    return [(merge[:cut], merge[cut + 1 :]) for merge in merges if (cut := merge.find(" ", 1)) > 0]


def pre_tokenizer_of(metadata: Mapping[str, Any], where: str) -> PreTokenizer:
    """The pre-tokenizer the file names. ModelError for an unknown one: a wrong guess would be wrong ids in silence."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"{where}: the pre-tokenizer {name!r} is not known", f"known are {known}")
    return PRE_TOKENIZERS[name]


def _sentencepiece(
    metadata: Mapping[str, Any], tokens: list[str], vocabulary: dict[str, int], where: str
) -> tokenizers.Tokenizer:
    unk = special_token(metadata, "unknown", tokens)
    if metadata["tokenizer.ggml.model"] == "gemma4":  # its merges are written, its scores mean nothing
        pairs = _written_merges(metadata, where)
    else:
        scores = metadata.get("tokenizer.ggml.scores")
        if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
            what = f"{where}: tokenizer.ggml.scores does not fit its {len(tokens)} tokens"
            raise ModelError(what, "convert it again")
        pairs = _merges(vocabulary, scores.tolist())
    tokenizer = tokenizers.Tokenizer(_bpe(vocabulary, pairs, where, unk_token=unk, fuse_unk=True, byte_fallback=True))
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if prefix else []
    replace = decoders.Replace(SPACE, " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *ends])
    return tokenizer


def _merges(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose join scores best: BPE merges, best score first."""
    pairs = []
    for token, number in vocabulary.items():
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((-scores[number], number, left, right, token, cut))
    pairs.sort()
    return [(token[:cut], token[cut:]) for *_, token, cut in pairs]


def _bpe(vocabulary: dict[str, int], pairs: list[tuple[str, str]], where: str, **options: Any) -> models.BPE:
    for left, right in pairs:
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(f"{where}: the merge {left!r} {right!r} is not in the vocabulary", "convert it again")
    return models.BPE(vocab=vocabulary, merges=pairs, **options)


def _add_special(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    types = metadata.get("tokenizer.ggml.token_type")
    kinds = types.tolist() if isinstance(types, np.ndarray) else []
    special = [token for token, kind in zip(tokens, kinds, strict=False) if kind in (CONTROL, UNKNOWN) and token]
    plain = [token for token, kind in zip(tokens, kinds, strict=False) if kind == USER_DEFINED and token]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    _add_ends(tokenizer, metadata, tokens)


def _add_ends(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """What `add_special=True` puts around a text: bos and eos, where the file asks for them."""
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    usual = sentencepiece or pre_tokenizer_of(metadata, "").add_bos
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", usual)
    bos = special_token(metadata, "bos", tokens) if add_bos else None
    eos = special_token(metadata, "eos", tokens) if metadata.get("tokenizer.ggml.add_eos_token", False) else None
    ends = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token}
    if ends:
        single = [part for part in (bos, "$A", eos) if part]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ends.items()))


def special_token(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> str | None:
    """The text of the token that `tokenizer.ggml.{name}_token_id` names."""
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None
