"""A `tokenizers.Tokenizer` from the metadata of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers, processors

from headstart.errors import ModelError
from headstart.text._pieces import (
    CONTROL,
    UNKNOWN,
    USER_DEFINED,
    Normalizing,
    bpe,
    merges_by_score,
    vocabulary_of,
    with_merges,
    with_scores,
)
from headstart.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_KINDS = {
    "gpt2": "byte pairs",
    "llama": "sentencepiece",
    "gemma4": "byte pairs over sentencepiece's pieces",
    "t5": "sentencepiece's unigrams",
}


def build(metadata: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file. ModelError for a kind that is not known or for broken tables."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _KINDS:
        known = "known are " + ", ".join(f"{name} ({what})" for name, what in _KINDS.items())
        raise ModelError(f"{where}: the tokenizer model is {kind!r}", known if kind else "the file has no tokenizer")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{where}: tokenizer.ggml.tokens is missing or empty", "convert the model again")
    if kind == "gpt2" and not pre_tokenizer_of(metadata, where).pieces:
        tokenizer = _byte_level(metadata, tokens, where)
    elif kind in ("gpt2", "gemma4"):  # the merges are written, scores mean nothing
        unknown = special_token(metadata, "unknown", tokens)
        pairs = _written_merges(metadata, where)
        tokenizer = with_merges(tokens, pairs, unknown, Normalizing(_prefix(metadata, kind == "gemma4")), where)
    else:
        tokenizer = _scored(metadata, tokens, where)
    _add_special(tokenizer, metadata, tokens)
    return tokenizer


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], where: str) -> tokenizers.Tokenizer:
    rule = pre_tokenizer_of(metadata, where)
    pairs = _written_merges(metadata, where)
    tokenizer = tokenizers.Tokenizer(bpe(vocabulary_of(tokens), pairs, where, ignore_merges=rule.ignore_merges))
    finish_byte_level(tokenizer, rule)
    return tokenizer


def finish_byte_level(tokenizer: tokenizers.Tokenizer, rule: PreTokenizer) -> None:
    """What stands around byte-level merges: normalizer, patterns, bytes as characters and back."""
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()


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


def _scored(metadata: Mapping[str, Any], tokens: list[str], where: str) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ModelError(f"{where}: tokenizer.ggml.scores does not fit its {len(tokens)} tokens", "convert it again")
    kinds = _token_kinds(metadata)
    if metadata["tokenizer.ggml.model"] == "llama":
        pairs = merges_by_score(tokens, scores.tolist(), kinds)
        unknown = special_token(metadata, "unknown", tokens)
        return with_merges(tokens, pairs, unknown, Normalizing(_prefix(metadata, True)), where)
    if len(kinds) != len(tokens):
        raise ModelError(f"{where}: tokenizer.ggml.token_type does not fit its tokens", "convert it again")
    table = metadata.get("tokenizer.ggml.precompiled_charsmap")
    charsmap = table.astype(np.uint8).tobytes() if isinstance(table, np.ndarray) else b""
    squeeze = bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False))
    how = Normalizing(_prefix(metadata, False), charsmap, squeeze)
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 2)
    return with_scores(tokens, scores.tolist(), kinds, unknown_id, how, where)


def _prefix(metadata: Mapping[str, Any], usual: bool) -> Any:
    return "always" if metadata.get("tokenizer.ggml.add_space_prefix", usual) else "never"


def _token_kinds(metadata: Mapping[str, Any]) -> list[int]:
    types = metadata.get("tokenizer.ggml.token_type")
    return types.tolist() if isinstance(types, np.ndarray) else []


def _of_kinds(metadata: Mapping[str, Any], *kinds: int) -> list[int]:
    """Ids of the tokens of these kinds."""
    types, size = metadata.get("tokenizer.ggml.token_type"), len(metadata["tokenizer.ggml.tokens"])
    found: list[int] = np.flatnonzero(np.isin(types[:size], kinds)).tolist() if isinstance(types, np.ndarray) else []
    return found


def _add_special(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    special = [tokens[i] for i in _of_kinds(metadata, CONTROL, UNKNOWN) if tokens[i]]
    plain = [tokens[i] for i in _of_kinds(metadata, USER_DEFINED) if tokens[i]]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in plain])
    _add_ends(tokenizer, metadata, tokens)


def _add_ends(tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any], tokens: list[str]) -> None:
    """What `add_special=True` puts around a text: bos and eos, where the file asks for them."""
    kind = metadata.get("tokenizer.ggml.model")
    usual = kind in ("llama", "gemma4") or (kind == "gpt2" and pre_tokenizer_of(metadata, "").add_bos)
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", usual)
    bos = special_token(metadata, "bos", tokens) if add_bos else None
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", kind == "t5")
    eos = special_token(metadata, "eos", tokens) if add_eos else None
    put_ends(tokenizer, bos, eos)


def put_ends(tokenizer: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """`add_special=True` puts `bos` before a text and `eos` behind it."""
    ends = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token}
    if ends:
        single = [part for part in (bos, "$A", eos) if part]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ends.items()))


ENDS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<EOT>", "[EOT]", "[e~[",
)  # fmt: skip
"""Control tokens that end an answer. Files name one or two of them; llama.cpp knows the others by their text."""
_END_KEYS = ("eos", "eot", "eom")


def ends_of(metadata: Mapping[str, Any]) -> set[int]:
    """Ids that end a text: those the file names, and control tokens called so. `<|end|>` ends a part of a message only
    where `<|return|>` or `<|flush|>` ends an answer (gpt-oss, Solar)."""
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS)
    found = {end for end in named if isinstance(end, int)}
    tokens = metadata["tokenizer.ggml.tokens"]
    control = {tokens[i]: i for i in _of_kinds(metadata, CONTROL) if tokens[i] in ENDS}
    if {"<|return|>", "<|flush|>"} & control.keys():
        found.discard(control.pop("<|end|>", -1))
    return found | set(control.values())


def special_token(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> str | None:
    """The text of the token that `tokenizer.ggml.{name}_token_id` names."""
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None
