"""The bytes that one token adds to a text, independent of its neighbours.

There are two kinds of vocabulary. *byte-level*: each character of a token stands for one byte (GPT-2's table).
*sentencepiece*: U+2581 is a space, `<0xAB>` is a byte, and often a space is stripped at the start of a text.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headstart.errors import ModelError

SPACE = "\u2581"
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_alphabet() -> dict[str, int]:
    """GPT-2's table: printable character -> byte, for all 256 bytes."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_ALPHABET = byte_alphabet()


@dataclass(frozen=True)
class TokenBytesRule:
    """How token texts become bytes."""

    kind: Literal["byte_level", "sentencepiece"]
    byte_fallback: bool = True  # `<0xAB>` is a byte, not text
    strip_start: int = 0  # spaces that are dropped at the start of a text

    def to_bytes(self, text: str) -> bytes:
        """The bytes of one token's text."""
        if self.kind == "byte_level":
            values = [_ALPHABET.get(char, -1) for char in text]
            # a token with a character outside the table is an added token, whose text is plain
            return text.encode("utf-8", "replace") if -1 in values else bytes(values)
        if self.byte_fallback and text.startswith("<0x") and (match := _BYTE.fullmatch(text)):
            return bytes([int(match.group(1), 16)])
        return text.replace(SPACE, " ").encode("utf-8", "replace")


def parse_decoder(decoder: Mapping[str, Any] | None, where: str) -> TokenBytesRule:
    """The rule of the `decoder` of a tokenizer.json. Raises ModelError for an unknown decoder."""
    steps = _steps(decoder)
    kinds = [step.get("type") for step in steps]
    if kinds and set(kinds) <= {"ByteLevel", "Fuse"}:
        return TokenBytesRule("byte_level")
    if "Metaspace" in kinds:
        scheme = next(step.get("prepend_scheme", "always") for step in steps if step["type"] == "Metaspace")
        return TokenBytesRule("sentencepiece", "ByteFallback" in kinds, 0 if scheme == "never" else 1)
    if kinds and set(kinds) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        strip = sum(step.get("start", 0) for step in steps if step["type"] == "Strip" and step.get("content") == " ")
        return TokenBytesRule("sentencepiece", "ByteFallback" in kinds, strip)
    hint = "known are ByteLevel, Metaspace and Replace with ByteFallback"
    raise ModelError(f"{where}: the decoder {'+'.join(map(str, kinds)) or 'null'} is not known", hint)


def _steps(decoder: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if decoder is None:
        return []
    return list(decoder["decoders"]) if decoder.get("type") == "Sequence" else [decoder]
