"""Tokenizers with ranked byte strings instead of merges: Mistral's `tekken.json` and tiktoken files.

Adjacent tokens whose joined bytes are a token are merged, the lowest rank first. A word that is a token stays whole
(tiktoken's `byte_pair_encode`). Format of tekken.json: mistral-common's `tokens/tokenizers/tekken.py`.
"""

import base64
import binascii
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headstart.errors import ModelError
from headstart.text._gguf_tokenizer import finish_byte_level
from headstart.text._sentencepiece import bpe_model
from headstart.text.pre_tokenizers import PRE_TOKENIZERS, PreTokenizer
from headstart.text.token_bytes import byte_alphabet

_HINT = "download the tokenizer again"
_TEKKEN_SPECIAL = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]",
    "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]",
    "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]",
)  # fmt: skip
"""The first special tokens of tekken files that list none (versions v3 and v7)."""
TIKTOKEN_RULES = {"tokenization_kimi.TikTokenTokenizer": ("kimi-k2", 256)}
"""Class in `auto_map` -> name of its pre-tokenizer, and the number of special ids after the ranks."""
_CHARACTERS = {byte: char for char, byte in byte_alphabet().items()}  # byte -> its printable character


def from_tekken(file: Path) -> tuple[tokenizers.Tokenizer, str | None, str | None]:
    """The tokenizer of a tekken.json, its bos and its eos. The first ids are special tokens; rank r follows as id
    num_special + r. Raises ModelError for a broken file."""
    try:
        document = json.loads(file.read_bytes())
        config = document["config"]
        count, size = int(config["default_num_special_tokens"]), int(config["default_vocab_size"])
        ranked = [base64.b64decode(row["token_bytes"], validate=True) for row in document["vocab"][: size - count]]
        ranks = [row["rank"] for row in document["vocab"][: size - count]]
        special = _tekken_special(document.get("special_tokens"), count)
        pattern = config["pattern"]
    except (ValueError, KeyError, TypeError, binascii.Error) as error:
        raise ModelError(f"{file} is not a tekken file: {error!r}", _HINT) from error
    if ranks != list(range(size - count)) or not isinstance(pattern, str):
        raise ModelError(f"{file}: its ranks are not 0 to {size - count - 1}, or it has no pattern", _HINT)
    inner = _build(ranked, special, count, PreTokenizer((pattern,), ignore_merges=True), str(file))
    return inner, "<s>", "</s>"


def _tekken_special(rows: Any, count: int) -> dict[int, str]:
    named = dict(enumerate(_TEKKEN_SPECIAL)) if rows is None else {row["rank"]: row["token_str"] for row in rows}
    if named and not 0 <= min(named) <= max(named) < count:
        raise ValueError(f"special tokens beyond the first {count}")
    return {number: named.get(number, f"<SPECIAL_{number}>") for number in range(count)}


def from_tiktoken(file: Path, config: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, str | None, str | None]:
    """The tokenizer of a tiktoken file (`base64 rank` lines), without bos and eos. The split pattern is not in the
    file, so `config` (tokenizer_config.json) must name a class of TIKTOKEN_RULES, else ModelError is raised."""
    entry = config.get("auto_map")
    named = entry.get("AutoTokenizer") if isinstance(entry, dict) else None
    name = named[0] if isinstance(named, list) and named else named
    rule = TIKTOKEN_RULES.get(str(name).rpartition("--")[2])
    if rule is None:
        what = f"{file}: its pattern is in code ({name or 'unnamed'}), and only {', '.join(TIKTOKEN_RULES)} is known"
        raise ModelError(what, "save the tokenizer once with transformers")
    try:
        lines = [line.split() for line in file.read_bytes().splitlines() if line]
        ranked = [base64.b64decode(text, validate=True) for text, _ in lines]
        ranks = [int(rank) for _, rank in lines]
    except (ValueError, binascii.Error) as error:
        raise ModelError(f"{file} is not a tiktoken file: {error}", _HINT) from error
    if ranks != list(range(len(ranks))):
        raise ModelError(f"{file}: its ranks are not 0 to {len(ranks) - 1}", _HINT)
    pre, reserved = rule
    first = len(ranked)
    given = config.get("added_tokens_decoder")
    names = {int(number): row["content"] for number, row in (given.items() if isinstance(given, dict) else ())}
    special = {n: names.get(n, f"<|reserved_token_{n}|>") for n in range(first, first + reserved)}
    return _build(ranked, special, 0, PRE_TOKENIZERS[pre], str(file)), None, None


def _build(
    ranked: Sequence[bytes], special: Mapping[int, str], first: int, rule: PreTokenizer, where: str
) -> tokenizers.Tokenizer:
    """A byte-level BPE tokenizer of `ranked` byte strings. `special`: id -> text. `first`: the id of rank 0."""
    rank = {data: number for number, data in enumerate(ranked)}
    if len(rank) != len(ranked) or any(bytes([byte]) not in rank for byte in range(256)):
        raise ModelError(f"{where}: a token occurs twice, or a byte has no token", _HINT)
    pairs: list[tuple[int, int, int]] = []
    for number, data in enumerate(ranked):
        for cut in range(1, len(data)):
            left, right = rank.get(data[:cut]), rank.get(data[cut:])
            if left is not None and right is not None:
                pairs.append((number, left, right))
    pairs.sort()
    shown = ["".join(map(_CHARACTERS.__getitem__, data)) for data in ranked]
    vocabulary = {text: first + number for number, text in enumerate(shown)}
    vocabulary |= {text: number for number, text in special.items()}
    if len(vocabulary) != len(ranked) + len(special):
        raise ModelError(f"{where}: a special token occurs twice", _HINT)
    merges = [(shown[left], shown[right]) for _, left, right in pairs]
    inner = tokenizers.Tokenizer(bpe_model(vocabulary, merges, where, ignore_merges=rule.ignore_merges))
    finish_byte_level(inner, rule)
    inner.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    return inner
