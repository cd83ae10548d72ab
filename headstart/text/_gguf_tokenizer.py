"""Builds a `tokenizers.Tokenizer` from the metadata of a GGUF file."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import Regex, decoders, normalizers, pre_tokenizers, processors

from headstart.errors import ModelError
from headstart.text import _sentencepiece
from headstart.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer

_TYPES = {
    "gpt2": "byte pairs",
    "llama": "sentencepiece",
    "gemma4": "byte pairs over sentencepiece's pieces",
    "t5": "sentencepiece's unigrams",
}


def build(metadata: Mapping[str, Any], where: str) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file. Raises ModelError for an unknown type or broken tables."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in _TYPES:
        known = "known are " + ", ".join(f"{name} ({what})" for name, what in _TYPES.items())
        raise ModelError(f"{where}: the tokenizer model is {kind!r}", known if kind else "the file has no tokenizer")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise ModelError(f"{where}: tokenizer.ggml.tokens is missing or empty", "convert the model again")
    rule = pre_tokenizer_of(metadata, where) if kind == "gpt2" else None
    if rule is not None and not rule.pieces:
        vocabulary, pairs = _sentencepiece.token_ids(tokens), _read_merges(metadata, where)
        model = _sentencepiece.bpe_model(vocabulary, pairs, where, ignore_merges=rule.ignore_merges)
        tokenizer = tokenizers.Tokenizer(model)
        finish_byte_level(tokenizer, rule)
    elif kind in ("gpt2", "gemma4"):  # the file has merges; scores are unused
        unknown = special_token(metadata, "unknown", tokens)
        pairs = _read_merges(metadata, where)
        spec = _sentencepiece.NormalizerSpec(_space_prefix(metadata, kind == "gemma4"))
        tokenizer = _sentencepiece.build_bpe(tokens, pairs, unknown, spec, where)
    else:
        tokenizer = _from_scores(metadata, tokens, where)
    _sentencepiece.add_tokens(tokenizer, tokens, _token_types(metadata))
    adds_bos = metadata.get("tokenizer.ggml.add_bos_token", rule.add_bos if rule else kind in ("llama", "gemma4"))
    adds_eos = metadata.get("tokenizer.ggml.add_eos_token", kind == "t5")
    bos, eos = (
        special_token(metadata, name, tokens) if adds else None for name, adds in (("bos", adds_bos), ("eos", adds_eos))
    )
    add_bos_eos(tokenizer, bos, eos)
    return tokenizer


def finish_byte_level(tokenizer: tokenizers.Tokenizer, rule: PreTokenizer) -> None:
    """Set normalizer, pre-tokenizer and decoder of a byte-level BPE model."""
    if rule.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in rule.patterns]
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()


def _read_merges(metadata: Mapping[str, Any], where: str) -> list[tuple[str, str]]:
    merges = metadata.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise ModelError(f"{where}: tokenizer.ggml.merges is missing", "convert the model again")
    # spaces inside a part are written as another character, so the first space separates the two parts
    return [(merge[:cut], merge[cut + 1 :]) for merge in merges if (cut := merge.find(" ", 1)) > 0]


def pre_tokenizer_of(metadata: Mapping[str, Any], where: str) -> PreTokenizer:
    """The pre-tokenizer that the file names. Raises ModelError for an unknown name: a guess could give wrong ids."""
    name = metadata.get("tokenizer.ggml.pre", "default")
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise ModelError(f"{where}: the pre-tokenizer {name!r} is not known", f"known are {known}")
    return PRE_TOKENIZERS[name]


def _from_scores(metadata: Mapping[str, Any], tokens: list[str], where: str) -> tokenizers.Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ModelError(f"{where}: tokenizer.ggml.scores does not fit its {len(tokens)} tokens", "convert it again")
    types = _token_types(metadata).tolist()
    if metadata["tokenizer.ggml.model"] == "llama":
        pairs = _sentencepiece.merges_by_score(tokens, scores, types)
        unknown = special_token(metadata, "unknown", tokens)
        spec = _sentencepiece.NormalizerSpec(_space_prefix(metadata, True))
        return _sentencepiece.build_bpe(tokens, pairs, unknown, spec, where)
    if len(types) != len(tokens):
        raise ModelError(f"{where}: tokenizer.ggml.token_type does not fit its tokens", "convert it again")
    table = metadata.get("tokenizer.ggml.precompiled_charsmap")
    charsmap = table.astype(np.uint8).tobytes() if isinstance(table, np.ndarray) else b""
    squeeze_spaces = bool(metadata.get("tokenizer.ggml.remove_extra_whitespaces", False))
    spec = _sentencepiece.NormalizerSpec(_space_prefix(metadata, False), charsmap, squeeze_spaces)
    unknown_id = metadata.get("tokenizer.ggml.unknown_token_id", 2)
    return _sentencepiece.build_unigram(tokens, scores.tolist(), types, unknown_id, spec, where)


def _space_prefix(metadata: Mapping[str, Any], default: bool) -> Any:
    return "always" if metadata.get("tokenizer.ggml.add_space_prefix", default) else "never"


def _token_types(metadata: Mapping[str, Any]) -> NDArray[Any]:
    types = metadata.get("tokenizer.ggml.token_type")
    return types if isinstance(types, np.ndarray) else np.array([], np.int32)


def add_bos_eos(tokenizer: tokenizers.Tokenizer, bos: str | None, eos: str | None) -> None:
    """Let `add_special=True` add `bos` before a text and `eos` after it."""
    ends = {token: tokenizer.token_to_id(token) for token in (bos, eos) if token}
    if ends:
        single = [part for part in (bos, "$A", eos) if part]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=list(ends.items()))


END_TOKENS = (
    "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|calls|>", "<|flush|>",
    "<end_of_turn>", "<turn|>", "<|tool_response>", "<end_of_utterance>", "<EOT>", "[EOT]", "[e~[", "<|endoftext|>",
    "<|end_of_text|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>",
)  # fmt: skip
"""Control tokens that end an answer. Files name only one or two; others are recognized by text, as in llama.cpp."""
_END_KEYS = ("eos", "eot", "eom")


def end_ids_of(metadata: Mapping[str, Any]) -> set[int]:
    """Ids that end a text: those that the file names, and END_TOKENS. If `<|return|>` or `<|flush|>` is among them
    (gpt-oss, Solar), `<|end|>` is left out: it only ends a part of a message."""
    named = (metadata.get(f"tokenizer.ggml.{key}_token_id") for key in _END_KEYS)
    found = {end for end in named if isinstance(end, int)}
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = _sentencepiece.ids_of_types(_token_types(metadata)[: len(tokens)], _sentencepiece.CONTROL)
    control = {tokens[i]: i for i in ids if tokens[i] in END_TOKENS}
    if {"<|return|>", "<|flush|>"} & control.keys():
        found.discard(control.pop("<|end|>", -1))
    return found | set(control.values())


def special_token(metadata: Mapping[str, Any], name: str, tokens: list[str]) -> str | None:
    """The text of the token whose id is `tokenizer.ggml.{name}_token_id`; None without such an id."""
    number = metadata.get(f"tokenizer.ggml.{name}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None
