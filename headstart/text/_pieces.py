"""Tokenizers over pieces of text (sentencepiece): U+2581 for a space, perhaps `<0xAB>` for a byte.

Formulas: sentencepiece's `bpe_model.cc` (join the neighbours whose join scores best) and `unigram_model.cc` (the
segmentation with the best sum), run by the `tokenizers` library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import tokenizers
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers

from headstart.errors import ModelError
from headstart.text.pieces import SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Kinds of tokens, as in sentencepiece's and llama.cpp's files."""
_NEVER = -10_000.0


@dataclass(frozen=True)
class Normalizing:
    """What happens to a text before it is cut: `charsmap` is sentencepiece's compiled table, `squeeze` drops spaces at
    the ends and all but one between words, `prefix` says where a space is put before a text: never, at its start, or
    after every special token too."""

    prefix: Literal["always", "first", "never"] = "always"
    charsmap: bytes = b""
    squeeze: bool = False


def vocabulary_of(tokens: Sequence[str]) -> dict[str, int]:
    """Ids by token; the first of equal ones."""
    last = len(tokens) - 1
    return {token: last - place for place, token in enumerate(reversed(tokens))}


def with_merges(
    tokens: Sequence[str], pairs: list[tuple[str, str]], unknown: str | None, how: Normalizing, where: str
) -> tokenizers.Tokenizer:
    """Neighbours are joined in the order of `pairs`. ModelError for a pair that is not in the vocabulary."""
    options: dict[str, Any] = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return _finished(tokenizers.Tokenizer(bpe(vocabulary_of(tokens), pairs, where, **options)), how, where)


def with_scores(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], unknown: int, how: Normalizing, where: str
) -> tokenizers.Tokenizer:
    """The cut with the best sum of scores. What is no text (controls, bytes) is never part of it."""
    text = (NORMAL, USER_DEFINED)
    rows = [(t, s if kind in text else _NEVER) for t, s, kind in zip(tokens, scores, kinds, strict=True)]
    try:
        model = models.Unigram(rows, unknown, BYTE in kinds)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{where}: the table of pieces is broken: {error}", "download it again") from error
    return _finished(tokenizers.Tokenizer(model), how, where)


def merges_by_score(tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    """Sentencepiece joins the neighbours whose join scores best: pairs, best score first. Joins never make a control
    token or a byte's name out of text."""
    vocabulary = vocabulary_of(tokens)
    reserved = {token for token, kind in zip(tokens, kinds, strict=False) if kind in (UNKNOWN, CONTROL, BYTE)}
    pairs = []
    for token, number in vocabulary.items():
        if token in reserved:
            continue
        for cut in range(1, len(token)):
            left, right = vocabulary.get(token[:cut]), vocabulary.get(token[cut:])
            if left is not None and right is not None:
                pairs.append((-scores[number], number, left, right, token, cut))
    pairs.sort()
    return [(token[:cut], token[cut:]) for *_, token, cut in pairs]


def bpe(vocabulary: Mapping[str, int], pairs: list[tuple[str, str]], where: str, **options: Any) -> models.BPE:
    """The library's model. ModelError for a pair that is not in the vocabulary."""
    try:
        return models.BPE(vocab=dict(vocabulary), merges=pairs, **options)
    except Exception as error:  # the library raises bare Exception
        named = [pair for pair in pairs if not {*pair, "".join(pair)} <= vocabulary.keys()]
        what = f"the merge {named[0][0]!r} {named[0][1]!r} is not in the vocabulary" if named else str(error)
        raise ModelError(f"{where}: {what}", "convert it again") from error


def _finished(tokenizer: tokenizers.Tokenizer, how: Normalizing, where: str) -> tokenizers.Tokenizer:
    steps: list[Any] = []
    if how.charsmap:
        try:
            steps.append(normalizers.Precompiled(how.charsmap))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{where}: the table of characters is broken: {error}", "download it again") from error
    if how.squeeze:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if how.prefix == "always":
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if how.prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ends: list[Any] = [] if how.prefix == "never" else [decoders.Strip(" ", 1, 0)]
    replace = decoders.Replace(SPACE, " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *ends])
    return tokenizer
