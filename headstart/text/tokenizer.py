"""`Tokenizer`: text to token ids and back, from a model directory or from a GGUF file's metadata.

Decoding is defined per token (text/pieces.py): the bytes of all tokens joined, read as UTF-8 with U+FFFD for what is
not UTF-8. So text can be streamed and never changes later.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from headstart.text import _gguf_tokenizer
from headstart.text.pieces import rule_of

LARGEST_ID = 2**32 - 1
"""That the library takes."""
LONG_TEXT = 4096
"""Characters from which other threads shall run meanwhile."""


class Tokenizer:
    """Wraps a `tokenizers.Tokenizer`. `eos_ids`: every id that ends a text; `bos_id`: the id that starts one;
    `rule`: how tokens become bytes."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int] = (),
        bos_id: int | None = None,
        where: str = "the tokenizer",
    ) -> None:
        """Raises ModelError for a tokenizer whose decoder is not known."""
        self._inner = inner
        self._inner.no_truncation()
        self._inner.no_padding()
        self.rule = rule_of(json.loads(inner.decoder.__getstate__()) if inner.decoder else None, where)
        self._pieces: dict[int, bytes] = {}
        self.special_ids = frozenset(i for i, token in inner.get_added_tokens_decoder().items() if token.special)
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """From tokenizer.json, or what a family ships instead, and the configs beside it. Raises ModelError when it is
        missing or broken."""
        from headstart.text import _directory_tokenizer  # with all that families ship: not for a GGUF file

        optional = _directory_tokenizer.optional
        inner, tokens, file = _directory_tokenizer.build(path, optional(path / "tokenizer_config.json"))
        bos = inner.token_to_id(tokens["bos_token"]) if "bos_token" in tokens else None
        ends = _declared_ends(optional(path / "generation_config.json"), optional(path / "config.json"))
        if "eos_token" in tokens and (end := inner.token_to_id(tokens["eos_token"])) is not None:
            ends.add(end)
        return cls(inner, eos_ids=ends, bos_id=bos, where=str(file))

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], where: str = "the GGUF file") -> Tokenizer:
        """From GGUF metadata. Raises ModelError for an unknown kind of tokenizer."""
        inner = _gguf_tokenizer.build(metadata, where)
        bos = metadata.get("tokenizer.ggml.bos_token_id")
        return cls(inner, eos_ids=_gguf_tokenizer.ends_of(metadata), bos_id=bos, where=where)

    def encode(self, text: str, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of `text`. `add_special` puts what the model wants around a raw text (often bos). Names of special
        tokens inside the text become those tokens (a chat template's output needs that) unless `parse_special` is
        False: then they are plain text."""
        inner = self._inner if parse_special else self._literal
        try:
            text.encode()
        except UnicodeEncodeError:
            # Half of a surrogate pair (from careless JSON) is no text; the tokenizer would refuse it.
            text = text.encode("utf-8", "replace").decode()
        if len(text) < LONG_TEXT:
            return list(inner.encode(text, add_special_tokens=add_special).ids)
        (encoding,) = inner.encode_batch_fast([text], add_special_tokens=add_special)  # lets other threads run
        return list(encoding.ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """The text of `ids`; ids that no token has give nothing."""
        kept = [token for token in ids if not (skip_special and token in self.special_ids)]
        return self.strip_start(b"".join(map(self.token_bytes, kept))).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """What one token adds to a text."""
        piece = self._pieces.get(token_id)
        if piece is None:  # padding rows of the embedding have ids, but no text
            text = self._inner.id_to_token(token_id) if 0 <= token_id <= LARGEST_ID else None
            piece = self._pieces[token_id] = b"" if text is None else self.rule.to_bytes(text)
        return piece

    def token_text(self, token_id: int) -> str:
        """One token for people: its bytes as text, U+FFFD for parts of a character."""
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        return str(self._inner.to_str(pretty=True))

    def vocabulary(self) -> dict[str, int]:
        """Ids of all tokens by their names."""
        return dict(self._inner.get_vocab(with_added_tokens=True))

    def id_of(self, token: str) -> int | None:
        """The id of a token by its name in the vocabulary."""
        token_id: int | None = self._inner.token_to_id(token)
        return token_id

    def strip_start(self, data: bytes) -> bytes:
        """`data`, the start of a text, without the space that the tokenizer put before it."""
        for _ in range(self.rule.strip_start):
            data = data.removeprefix(b" ")
        return data

    @cached_property
    def vocab_size(self) -> int:
        """Ids end below it; some of them may have no token."""
        return max(self._inner.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_names(self) -> tuple[str, ...]:
        """What special tokens are written as, the longest first."""
        names = {token.content for token in self._inner.get_added_tokens_decoder().values() if token.special}
        return tuple(sorted(names - {""}, key=lambda name: (-len(name), name)))

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token: a text has at least as many tokens as it has bytes, divided by this."""
        return max(map(len, map(self.token_bytes, range(self.vocab_size))), default=1) or 1

    @cached_property
    def _literal(self) -> tokenizers.Tokenizer:
        """Reads names of special tokens as plain text."""
        literal = tokenizers.Tokenizer.from_str(self._inner.to_str())
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
