"""`Tokenizer`: text to token ids and back, from a model directory or from a GGUF file's metadata.

Decoding is defined per token (token_bytes.py): the bytes of all tokens are joined and read as UTF-8, with U+FFFD for
invalid bytes. Later tokens therefore never change text that was already streamed.
"""

import codecs
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken

from headstart.errors import ModelError
from headstart.placeholder import check_placeholder
from headstart.text import _gguf_tokenizer
from headstart.text.token_bytes import parse_decoder

FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")  # in order of preference
MAX_ID = 2**32 - 1  # largest id that the library accepts
LONG_TEXT = 4096  # characters from which on a text is encoded without the GIL


class Tokenizer:
    """A `tokenizers.Tokenizer` with its special ids and the bytes of each token."""

    def __init__(
        self, inner: tokenizers.Tokenizer, *, eos_ids: Iterable[int] = (), bos_id: int | None = None,
        where: str = "the tokenizer",
    ) -> None:  # fmt: skip
        """`where`: the file's name for error messages. Raises ModelError for an unknown decoder."""
        self._inner = inner
        self._inner.no_truncation()
        self._inner.no_padding()
        # how token texts become bytes
        self.rule = parse_decoder(json.loads(inner.decoder.__getstate__()) if inner.decoder else None, where)
        self._bytes: dict[int, bytes] = {}  # cache of token_bytes
        self.special_ids = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        self.eos_ids = frozenset(eos_ids)  # every id that ends a text
        self.bos_id = bos_id  # the id that starts a text

    @classmethod
    def from_directory(cls, path: Path) -> "Tokenizer":
        """Load the first of FILES in a directory, with the configs. Raises ModelError for a missing or broken file."""
        inner, tokens, file = _build(path, read_config(path / "tokenizer_config.json"))
        bos = inner.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None
        ends = _declared_ends(read_config(path / "generation_config.json"), read_config(path / "config.json"))
        if "eos_token" in tokens and (end := inner.token_to_id(tokens["eos_token"])) is not None:
            ends.add(end)
        return cls(inner, eos_ids=ends, bos_id=bos, where=str(file))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str = "the GGUF file") -> "Tokenizer":
        """Build the tokenizer of GGUF metadata. Raises ModelError for an unknown type of tokenizer."""
        inner = _gguf_tokenizer.build(metadata, where)
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        return cls(inner, eos_ids=_gguf_tokenizer.end_ids_of(metadata), bos_id=bos, where=where)

    def encode(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special`: add the special tokens around a raw text (often bos). `parse_special`:
        names of special tokens become these tokens, as in a chat template's output; False: they are plain text."""
        inner = self._inner if parse_special else self._literal
        try:
            text.encode()
        except UnicodeEncodeError:
            # the library refuses half of a surrogate pair
            text = text.encode("utf-8", "replace").decode()
        if len(text) < LONG_TEXT:
            return list(inner.encode(text, add_special_tokens=add_special).ids)
        (encoding,) = inner.encode_batch_fast([text], add_special_tokens=add_special)  # lets other threads run
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`. Ids without a token add nothing."""
        kept = [token for token in ids if not (skip_special and token in self.special_ids)]
        return self.strip_start(b"".join(map(self.token_bytes, kept))).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token adds to a text."""
        data = self._bytes.get(token_id)
        if data is None:  # padding rows of the embedding have ids, but no text
            text = self._inner.id_to_token(token_id) if 0 <= token_id <= MAX_ID else None
            data = self._bytes[token_id] = b"" if text is None else self.rule.to_bytes(text)
        return data

    def token_text(self, token_id: int) -> str:
        """The bytes of one token as text, U+FFFD for parts of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        return str(self._inner.to_str(pretty=True))

    def vocabulary(self) -> dict[str, int]:
        """Token text -> id, for all tokens."""
        return dict(self._inner.get_vocab(with_added_tokens=True))

    def normalized_numbers(self) -> NDArray[np.int64]:
        """int64 [tokens]: a number for each token, equal for those of the same normalized text."""
        from headstart.text.normalized import normalized_numbers  # few models need it

        return normalized_numbers(self._inner)

    def id_of(self, token: str) -> int | None:
        """The id of a token by its text in the vocabulary; None if it is unknown."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    def strip_start(self, data: bytes) -> bytes:
        """`data`, the first bytes of a text, without the spaces that the tokenizer added there."""
        for _ in range(self.rule.strip_start):
            data = data.removeprefix(b" ")
        return data

    @cached_property
    def vocab_size(self) -> int:
        """The largest id plus one. Some lower ids may have no token."""
        size: int = self._inner.get_vocab_size(with_added_tokens=True)
        if all(map(self._inner.id_to_token, range(size))):
            return size
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_names(self) -> tuple[str, ...]:
        """Texts of special tokens, the longest first."""
        names = {token.content for token in self._inner.get_added_tokens_decoder().values() if token.special}
        return tuple(sorted(names - {""}, key=lambda name: (-len(name), name)))

    @cached_property
    def max_token_bytes(self) -> int:
        """Bytes of the longest token. A text of n bytes has at least n / max_token_bytes tokens."""
        return max(map(len, map(self.token_bytes, range(self.vocab_size))), default=1) or 1

    def may_fit(self, text: str, max_tokens: int) -> bool:
        """False if `text` surely has more than `max_tokens` tokens, without encoding it. Short texts skip
        `max_token_bytes`, whose first use takes a second for a large vocabulary."""
        return len(text) <= max_tokens or len(text) <= max_tokens * self.max_token_bytes

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """Encodes names of special tokens as plain text. Shares the vocabulary, since a copy would take seconds."""
        inner, literal = self._inner, tokenizers.Tokenizer(self._inner.model)
        for part in ("normalizer", "pre_tokenizer", "decoder", "post_processor"):
            if (value := getattr(inner, part)) is not None:
                setattr(literal, part, value)
        literal.add_tokens([token for _, token in sorted(inner.get_added_tokens_decoder().items())])
        literal.encode_special_tokens = True
        return literal


def _declared_ends(generation: Mapping[str, Any], config: Mapping[str, Any]) -> set[int]:
    nested = config.get("text_config")
    sources = (generation, config, nested if isinstance(nested, dict) else {})
    for value in (source.get("eos_token_id") for source in sources):
        ids = value if isinstance(value, list) else [value]
        if ends := {end for end in ids if isinstance(end, int)}:
            return ends
    return set()


def _build(path: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str], Path]:
    """The tokenizer of a directory, its `bos_token` and `eos_token`, and its file. `config`: tokenizer_config.json.
    Raises ModelError for a missing or broken file."""
    file = next((path / name for name in FILES if (path / name).is_file()), None)
    named = special_tokens(config)
    if file is None:
        hint = "save the tokenizer once with transformers" if (path / "vocab.json").exists() else "download it again"
        raise ModelError(f"{path} has no {', '.join(FILES[:-1])} or {FILES[-1]}", hint)
    if file.name == "tokenizer.json":
        return _parse(file), named, file
    inner, bos, eos = _build_other(file, config)
    _add_tokens(inner, config, file)
    ends = {"bos_token": bos, "eos_token": eos}
    tokens = {name: token for name, token in ends.items() if token is not None} | named
    add_bos = config.get("add_bos_token", bos is not None)
    begin = tokens.get("bos_token") if add_bos else None
    end = tokens.get("eos_token") if config.get("add_eos_token", False) else None
    _gguf_tokenizer.add_bos_eos(inner, begin, end)
    return inner, tokens, file


def _build_other(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, str | None, str | None]:
    """The tokenizer of a file other than tokenizer.json, its bos token and its eos token."""
    if file.name == "tokenizer.model":
        from headstart.text import _sentencepiece

        return _sentencepiece.build(file, config)
    from headstart.text import _tiktoken

    return _tiktoken.from_tekken(file) if file.name == "tekken.json" else _tiktoken.from_tiktoken(file, config)


def _add_tokens(inner: tokenizers.Tokenizer, config: Mapping[str, Any], file: Path) -> None:
    """Add the tokens of tokenizer_config.json. Raises ModelError if the library assigns a token another id."""
    given = config.get("added_tokens_decoder")
    rows = sorted((int(number), row) for number, row in given.items()) if isinstance(given, dict) else []
    for number, row in rows:
        flags = {name: bool(row.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        token = AddedToken(row["content"], special=bool(row.get("special", False)), **flags)
        inner.add_tokens([token])
        if inner.token_to_id(row["content"]) != number:
            what = f"{file}: {row['content']!r} cannot have the id {number} that tokenizer_config.json gives it"
            raise ModelError(what, "save the tokenizer once with transformers")


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token, ... -> their texts, from tokenizer_config.json's strings or AddedToken objects."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _parse(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_buffer(file.read_bytes().removeprefix(codecs.BOM_UTF8))
    except Exception as error:  # the library raises bare Exception for any broken file
        check_placeholder(file)
        raise ModelError(f"cannot read {file}: {error}", "download the tokenizer again") from error


def read_config(file: Path) -> dict[str, Any]:
    """The JSON object of a file; empty if there is no file. Raises ModelError for a broken file."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        check_placeholder(file)
        raise ModelError(f"{file} is not valid JSON: {error}", "download it again") from error
    return value if isinstance(value, dict) else {}
