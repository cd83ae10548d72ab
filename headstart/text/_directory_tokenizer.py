"""A `tokenizers.Tokenizer` from what a model directory holds: tokenizer.json, or the file its family ships instead."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from headstart.errors import ModelError
from headstart.text import _ranked, _sentencepiece_file
from headstart.text._gguf_tokenizer import put_ends

FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "tiktoken.model")


def build(path: Path, settings: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, dict[str, str], Path]:
    """The tokenizer, its `bos_token` and `eos_token`, and the file that it is from; `settings` is what
    tokenizer_config.json holds. ModelError when there is none, or it is broken."""
    file = next((path / name for name in FILES if (path / name).is_file()), None)
    named = special_tokens(settings)
    if file is None:
        hint = "save the tokenizer once with transformers" if (path / "vocab.json").exists() else "download it again"
        raise ModelError(f"{path} has no {', '.join(FILES[:-1])} or {FILES[-1]}", hint)
    if file.name == "tokenizer.json":
        return _parse(file), named, file
    inner, bos, eos = _from_other(file, settings)
    _add_named(inner, settings, file)
    ends = {"bos_token": bos, "eos_token": eos}
    tokens = {name: token for name, token in ends.items() if token is not None} | named
    add_bos = settings.get("add_bos_token", bos is not None)
    put_ends(
        inner,
        tokens.get("bos_token") if add_bos else None,
        tokens.get("eos_token") if settings.get("add_eos_token", False) else None,
    )
    return inner, tokens, file


def _from_other(file: Path, settings: Mapping[str, Any]) -> tuple[tokenizers.Tokenizer, str | None, str | None]:
    if file.name == "tekken.json":
        return _ranked.from_tekken(file)
    return (_ranked.from_tiktoken if file.name == "tiktoken.model" else _sentencepiece_file.build)(file, settings)


def _add_named(inner: tokenizers.Tokenizer, settings: Mapping[str, Any], file: Path) -> None:
    """Tokens of tokenizer_config.json, some of which are behind the file's own. ModelError for one whose id is not
    the next."""
    given = settings.get("added_tokens_decoder")
    rows = sorted((int(number), row) for number, row in given.items()) if isinstance(given, dict) else []
    for number, row in rows:
        flags = {name: bool(row.get(name, False)) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        token = AddedToken(row["content"], special=bool(row.get("special", False)), **flags)
        inner.add_tokens([token])
        if inner.token_to_id(row["content"]) != number:
            what = f"{file}: {row['content']!r} cannot have the id {number} that tokenizer_config.json gives it"
            raise ModelError(what, "save the tokenizer once with transformers")


def special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """The texts of bos_token, eos_token and so on in a tokenizer_config.json: plain strings or AddedToken objects."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts


def _parse(file: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for any broken file
        raise ModelError(f"cannot read {file}: {error}", "download the tokenizer again") from error


def optional(file: Path) -> dict[str, Any]:
    """A JSON object, or nothing where there is no file. ModelError for one that is broken."""
    if not file.exists():
        return {}
    try:
        value = json.loads(file.read_bytes())
    except ValueError as error:
        raise ModelError(f"{file} is not valid JSON: {error}", "download it again") from error
    return value if isinstance(value, dict) else {}
