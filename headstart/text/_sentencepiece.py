"""Sentencepiece tokenizers (U+2581 for a space, `<0xAB>` for a byte): from a model file (`tokenizer.model`) or tables.

Formulas: sentencepiece's `bpe_model.cc` (join the neighbours whose join has the best score) and `unigram_model.cc` (the
segmentation with the best sum of scores), run by the `tokenizers` library.
The file is one protocol buffer message, `sentencepiece_model.proto`'s ModelProto: 1 pieces (1 text, 2 score, 3 type),
2 trainer_spec (3 model_type, 40 unk_id, 41 bos_id, 42 eos_id), 3 normalizer_spec (2 charsmap, 3 add_dummy_prefix,
4 remove_extra_whitespaces). Only these fields are read.
"""

import hashlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from headstart import hub
from headstart.errors import ModelError
from headstart.files import write_atomic
from headstart.text.token_bytes import SPACE

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Types of tokens, as in sentencepiece's and llama.cpp's files."""
_NEVER_SCORE = -10_000.0  # score of tokens that text must not be split into
UNIGRAM, BPE = 1, 2  # trainer_spec.model_type
MERGES = "tokenizers"  # folder of the user cache with merges of large vocabularies, which take seconds to compute
_CACHED_SIZE = 10_000  # merges of vocabularies with at least so many tokens are cached
_HINT = "download the tokenizer again"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers


@dataclass(frozen=True)
class NormalizerSpec:
    """Changes of a text before it is tokenized."""

    space_prefix: Literal["always", "first", "never"] = "always"  # first: only at the start, not after special tokens
    charsmap: bytes = b""  # sentencepiece's compiled table of character replacements
    squeeze_spaces: bool = False  # drop spaces at both ends, and all but one between words


def token_ids(tokens: Sequence[str]) -> dict[str, int]:
    """Token -> id; equal tokens get the id of the first."""
    return dict(zip(reversed(tokens), range(len(tokens) - 1, -1, -1), strict=True))


def build_bpe(
    tokens: Sequence[str], pairs: list[tuple[str, str]], unknown: str | None, spec: NormalizerSpec, where: str
) -> tokenizers.Tokenizer:
    """A BPE tokenizer with the merges `pairs`, the best first. Raises ModelError for a pair outside the vocabulary."""
    options: dict[str, Any] = {"unk_token": unknown, "fuse_unk": True, "byte_fallback": True}
    return _add_normalizer(tokenizers.Tokenizer(bpe_model(token_ids(tokens), pairs, where, **options)), spec, where)


def build_unigram(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int], unknown: int, spec: NormalizerSpec, where: str
) -> tokenizers.Tokenizer:
    """A unigram tokenizer. Text is split into normal and user-defined tokens only. ModelError for broken tables."""
    text_types = (NORMAL, USER_DEFINED)
    known = (score if kind in text_types else _NEVER_SCORE for score, kind in zip(scores, types, strict=True))
    rows = list(zip(tokens, known, strict=True))
    try:
        model = models.Unigram(rows, unknown, BYTE in types)
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"{where}: the table of pieces is broken: {error}", "download it again") from error
    return _add_normalizer(tokenizers.Tokenizer(model), spec, where)


def merges_by_score(
    tokens: Sequence[str], scores: Sequence[float] | NDArray[np.floating], types: Sequence[int]
) -> list[tuple[str, str]]:
    """Merges of a sentencepiece BPE model: (left, right) pairs, the best score first. No merge makes a control or byte
    token. Merges of large vocabularies are stored in the user cache."""
    path = None
    if len(tokens) >= _CACHED_SIZE:
        numbers = np.asarray(scores, np.float64).tobytes() + np.asarray(types, np.int64).tobytes()
        digest = hashlib.blake2b("\0".join(tokens).encode() + numbers, digest_size=16).hexdigest()
        path = hub.cache_dir() / MERGES / f"{digest}.merges"
    merges = _read_merges(path) if path else None
    if merges is None:
        merges = _find_merges(tokens, scores, types)
        if path:
            data = merges.tobytes()
            with suppress(OSError):  # works without a writable cache, too
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, zlib.crc32(data).to_bytes(4, "little") + data)
    wholes = map(tokens.__getitem__, merges[:, 0].tolist())
    return [(token[:cut], token[cut:]) for token, cut in zip(wholes, merges[:, 1].tolist(), strict=True)]


def _read_merges(path: Path) -> NDArray[np.int32] | None:
    """int32 [merges, 2] as of `_find_merges`, from a cache file; None if the file is missing or damaged."""
    with suppress(OSError):
        data = path.read_bytes()
        if data[:4] == zlib.crc32(data[4:]).to_bytes(4, "little"):
            return np.frombuffer(data, np.int32, offset=4).reshape(-1, 2)
    return None


def _find_merges(
    tokens: Sequence[str], scores: Sequence[float] | NDArray[np.floating], types: Sequence[int]
) -> NDArray[np.int32]:
    """int32 [merges, 2], the best first: the id of the merged token, and the number of characters of its left part."""
    ids = token_ids(tokens)
    reserved = {token for token, kind in zip(tokens, types, strict=False) if kind in (UNKNOWN, CONTROL, BYTE)}
    costs = (-np.asarray(scores)).tolist()
    merges = [
        (costs[number], number, ids[token[:cut]], cut)
        for token, number in ids.items()
        for cut in range(1, 0 if token in reserved else len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    return np.array([(number, cut) for _, number, _, cut in sorted(merges)], np.int32).reshape(-1, 2)


def bpe_model(vocabulary: dict[str, int], pairs: list[tuple[str, str]], where: str, **options: Any) -> models.BPE:
    """The library's BPE model. Raises ModelError for a pair that is not in the vocabulary."""
    try:
        return models.BPE(vocab=vocabulary, merges=pairs, **options)
    except Exception as error:  # the library raises bare Exception
        missing = [pair for pair in pairs if not {*pair, "".join(pair)} <= vocabulary.keys()]
        what = f"the merge {missing[0][0]!r} {missing[0][1]!r} is not in the vocabulary" if missing else str(error)
        raise ModelError(f"{where}: {what}", "convert it again") from error


def _add_normalizer(tokenizer: tokenizers.Tokenizer, spec: NormalizerSpec, where: str) -> tokenizers.Tokenizer:
    """Set normalizer, pre-tokenizer and decoder; returns the tokenizer."""
    steps: list[Any] = []
    if spec.charsmap:
        try:
            steps.append(normalizers.Precompiled(spec.charsmap))
        except Exception as error:  # the library raises bare Exception
            raise ModelError(f"{where}: the table of characters is broken: {error}", "download it again") from error
    if spec.squeeze_spaces:
        steps += [normalizers.Replace(Regex("^ +| +$"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.space_prefix == "always":
        steps.append(normalizers.Prepend(SPACE))
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    if spec.space_prefix == "first":
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    ends: list[Any] = [] if spec.space_prefix == "never" else [decoders.Strip(" ", 1, 0)]
    replace = decoders.Replace(SPACE, " ")
    tokenizer.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse(), *ends])
    return tokenizer


@dataclass
class SentencePieceModel:
    """The fields of a tokenizer.model file, with the format's defaults."""

    tokens: list[str] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    model_type: int = UNIGRAM
    unknown: int = 0  # id
    bos: int = 1  # id
    eos: int = 2  # id
    space_prefix: bool = True
    squeeze_spaces: bool = True
    charsmap: bytes = b""

    def token(self, number: int) -> str | None:
        return self.tokens[number] if 0 <= number < len(self.tokens) else None


def read(file: Path) -> SentencePieceModel:
    """Read a tokenizer.model file. Raises ModelError for a broken file or an unsupported type of model."""
    model = SentencePieceModel()
    try:
        for number, value in _fields(file.read_bytes()):
            if number == 1:
                _add_piece(value, model)
            elif number == 2:
                spec = dict(_fields(value))
                model.model_type = spec.get(3, UNIGRAM)
                model.unknown, model.bos, model.eos = (spec.get(40 + i, i) for i in range(3))
            elif number == 3:
                rules = dict(_fields(value))
                model.charsmap = bytes(rules.get(2, b""))
                model.space_prefix, model.squeeze_spaces = bool(rules.get(3, 1)), bool(rules.get(4, 1))
    except (IndexError, ValueError, TypeError, struct.error) as error:
        raise ModelError(f"{file} is not a sentencepiece model: {error}", _HINT) from error
    if not model.tokens:
        raise ModelError(f"{file} has no pieces", _HINT)
    if model.model_type not in (UNIGRAM, BPE):
        what = f"{file}: sentencepiece models of type {model.model_type} (words, characters) are not supported"
        raise ModelError(what, "save the tokenizer once with transformers")
    return model


def _add_piece(value: Any, model: SentencePieceModel) -> None:
    fields = dict(_fields(value))
    model.tokens.append(bytes(fields[1]).decode("utf-8"))
    model.scores.append(struct.unpack("<f", fields[2])[0] if 2 in fields else 0.0)
    model.types.append(fields.get(3, NORMAL))


Types: TypeAlias = Sequence[int] | NDArray[np.integer[Any]]  # of tokens, by id


def ids_of_types(types: Types, *wanted: int) -> list[int]:
    """Ids of all tokens whose type is one of `wanted`."""
    found: list[int] = np.flatnonzero(np.isin(types, wanted)).tolist()
    return found


def add_tokens(tokenizer: tokenizers.Tokenizer, tokens: Sequence[str], types: Types) -> None:
    """Add control and user-defined tokens, which texts are split at first."""
    for special, added in ((True, (CONTROL, UNKNOWN)), (False, (USER_DEFINED,))):
        named = [tokens[i] for i in ids_of_types(types[: len(tokens)], *added) if tokens[i]]
        tokenizer.add_tokens([AddedToken(token, special=special, normalized=False) for token in named])


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Number and raw value (an integer or bytes) of each field of a protocol buffer message."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        wire_type = key & 7
        if wire_type == _VARINT:
            value: Any
            value, at = _varint(data, at)
        else:
            length = 8 if wire_type == _FIXED64 else 4
            if wire_type == _BYTES:
                length, at = _varint(data, at)
            elif wire_type not in (_FIXED64, _FIXED32):
                raise ValueError(f"a field of type {wire_type} at byte {at}")
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


def build(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, str | None, str | None]:
    """The tokenizer of a tokenizer.model file, its bos and its eos. `config`: tokenizer_config.json. Its `legacy` false
    adds a space only at the start of a text, true also after special tokens, as in transformers."""
    model = read(file)
    prefix = model.space_prefix and config.get("add_prefix_space") is not False
    scheme: Any = "never" if not prefix else "first" if config.get("legacy") is False else "always"
    squeeze_spaces = model.squeeze_spaces and model.model_type == UNIGRAM
    spec = NormalizerSpec(scheme, model.charsmap, squeeze_spaces)
    if model.model_type == BPE:
        pairs = merges_by_score(model.tokens, model.scores, model.types)
        inner = build_bpe(model.tokens, pairs, model.token(model.unknown), spec, str(file))
    else:
        inner = build_unigram(model.tokens, model.scores, model.types, model.unknown, spec, str(file))
    add_tokens(inner, model.tokens, model.types)
    return inner, model.token(model.bos), model.token(model.eos)
