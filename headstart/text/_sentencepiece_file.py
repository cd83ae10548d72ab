"""A `tokenizers.Tokenizer` from a sentencepiece model file (`tokenizer.model`).

The file is one protocol buffer message, `sentencepiece_model.proto`'s ModelProto: 1 pieces (1 text, 2 score, 3 kind),
2 trainer_spec (3 model_type, 40 unk_id, 41 bos_id, 42 eos_id), 3 normalizer_spec (2 charsmap, 3 add_dummy_prefix,
4 remove_extra_whitespaces). Only these fields are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headstart.errors import ModelError
from headstart.text._pieces import (
    CONTROL,
    NORMAL,
    UNKNOWN,
    USER_DEFINED,
    Normalizing,
    merges_by_score,
    with_merges,
    with_scores,
)

UNIGRAM, BPE = 1, 2
_HINT = "download the tokenizer again"
_VARINT, _EIGHT, _BYTES, _FOUR = 0, 1, 2, 5


@dataclass
class PieceTable:
    """What a file holds, with the message's own defaults."""

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    model: int = UNIGRAM
    unknown: int = 0
    bos: int = 1
    eos: int = 2
    prefix: bool = True
    squeeze: bool = True
    charsmap: bytes = b""

    def token(self, number: int) -> str | None:
        return self.tokens[number] if 0 <= number < len(self.tokens) else None


def read(file: Path) -> PieceTable:
    """The table of a file. ModelError for one that is broken or of a kind that is not known."""
    table = PieceTable()
    try:
        for number, value in _fields(file.read_bytes()):
            if number == 1:
                _piece(value, table)
            elif number == 2:
                spec = dict(_fields(value))
                table.model = spec.get(3, UNIGRAM)
                table.unknown, table.bos, table.eos = (spec.get(40 + i, i) for i in range(3))
            elif number == 3:
                rules = dict(_fields(value))
                table.charsmap = bytes(rules.get(2, b""))
                table.prefix, table.squeeze = bool(rules.get(3, 1)), bool(rules.get(4, 1))
    except (IndexError, ValueError, TypeError, struct.error) as error:
        raise ModelError(f"{file} is not a sentencepiece model: {error}", _HINT) from error
    if not table.tokens:
        raise ModelError(f"{file} has no pieces", _HINT)
    if table.model not in (UNIGRAM, BPE):
        what = f"{file}: sentencepiece models of type {table.model} (words, characters) are not read"
        raise ModelError(what, "save the tokenizer once with transformers")
    return table


def _piece(value: Any, table: PieceTable) -> None:
    fields = dict(_fields(value))
    table.tokens.append(bytes(fields[1]).decode("utf-8"))
    table.scores.append(struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0)
    table.kinds.append(fields.get(3, NORMAL))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Numbers and raw values of a message's fields: integers, or bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        kind = key & 7
        if kind == _VARINT:
            value: Any
            value, at = _varint(data, at)
        else:
            length = 8 if kind == _EIGHT else 4
            if kind == _BYTES:
                length, at = _varint(data, at)
            elif kind not in (_EIGHT, _FOUR):
                raise ValueError(f"a field of kind {kind} at byte {at}")
            if length > len(data) - at:
                raise ValueError(f"it ends at byte {len(data)}, but {length} bytes are wanted at byte {at}")
            value, at = data[at : at + length], at + length
        yield key >> 3, value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"a number of more than ten bytes at byte {at}")


def build(file: Path, settings: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, str | None, str | None]:
    """The tokenizer, its bos and its eos. `settings` is tokenizer_config.json: with `legacy` false a space is put at
    the start of a text only, as transformers does, else after special tokens too."""
    table = read(file)
    prefix = table.prefix and settings.get("add_prefix_space") is not False
    scheme: Any = "never" if not prefix else "first" if settings.get("legacy") is False else "always"
    squeeze = table.squeeze and table.model == UNIGRAM
    how = Normalizing(scheme, table.charsmap, squeeze)
    if table.model == BPE:
        pairs = merges_by_score(table.tokens, table.scores, table.kinds)
        inner = with_merges(table.tokens, pairs, table.token(table.unknown), how, str(file))
    else:
        inner = with_scores(table.tokens, table.scores, table.kinds, table.unknown, how, str(file))
    for special, kinds in ((True, (CONTROL, UNKNOWN)), (False, (USER_DEFINED,))):
        named = [token for token, kind in zip(table.tokens, table.kinds, strict=True) if kind in kinds and token]
        inner.add_tokens([AddedToken(token, special=special, normalized=False) for token in named])
    return inner, table.token(table.bos), table.token(table.eos)
