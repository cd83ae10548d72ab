"""Plain text at hand (documentation, source trees): what the trunk labels, and passages for prompts with long input."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import UsageError
from headstart.train.prompts import Foreign, split_sentences

_CODE = "py c h cc cpp hpp rs go js ts tsx java kt rb sh sql html css lua php cs"
CODE = frozenset(f".{name}" for name in re.findall(r"\w+", _CODE))
PROSE = frozenset((".txt", ".md", ".rst", ".adoc", ".tex", ".org"))
DATA = frozenset((".json", ".yaml", ".yml", ".toml", ".xml", ".csv"))
PIECE_CHARS = 6000
"""Longer files are cut at line ends into pieces of about this size."""
SHORTEST = 200
MOST_FILE_BYTES = 2 << 20
PASSAGE_WORDS = (120, 350)
ENGLISH = "English"
_FUNCTION_WORDS = {
    ENGLISH: "the of and to is that it for are with this you be on as not or by",
    "German": "der die und das ist nicht zu den mit sich auf für ein eine auch dem wird von",
    "French": "les des est une dans pour que qui sur pas avec plus au sont par cette vous et",
    "Spanish": "los las una del que por con para es se no lo como más está y el su",
    "Italian": "il che di non una per sono con gli della è nel come anche più questo alla e",
    "Portuguese": "os que uma não para com do da em mais dos como se foi pelo são ao e",
    "Dutch": "het een van niet dat zijn met voor op te ook worden aan deze bij wordt naar en",
}
LANGUAGES = {name: frozenset(words.split()) for name, words in _FUNCTION_WORDS.items()}
FOREIGN_SHARE = 0.15
"""Of the words of a text in another language, those that are its function words, at least."""
FOREIGN_SENTENCES, FOREIGN_WORDS = (1, 1, 2, 3), (5, 60)
"""Sentences of a text to translate, by turns, and its words."""


@dataclass(frozen=True)
class Piece:
    """Part of a file."""

    text: str
    kind: str
    source: str


def read_tree(folder: Path) -> Iterator[Piece]:
    """Pieces of every text file under a folder (or of one file), in order of their paths. Raises UsageError when there
    is none."""
    if not folder.exists():
        raise UsageError(f"--text: {folder} does not exist", "give a folder of text or source files")
    any_file = False
    for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
        kind = kind_of(path.relative_to(folder.parent))
        if kind is None or not path.is_file() or path.stat().st_size > MOST_FILE_BYTES:
            continue
        try:
            text = path.read_text("utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        for piece in cut(text):
            any_file = True
            yield Piece(piece, kind, folder.name)
    if not any_file:
        raise UsageError(f"--text: {folder} holds no text", f"files end in {' '.join(sorted(PROSE | CODE))}")


def kind_of(path: Path) -> str | None:
    """code, prose, data, or None for what is no text or hidden."""
    if any(part.startswith(".") for part in path.parts[1:]):
        return None
    suffix = path.suffix.lower()
    return "code" if suffix in CODE else "prose" if suffix in PROSE else "data" if suffix in DATA else None


def cut(text: str) -> Iterator[str]:
    """Pieces of about PIECE_CHARS, cut at line ends; what is too short is left out."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line[:PIECE_CHARS])
        size += len(piece[-1])
        if size >= PIECE_CHARS:
            yield "".join(piece)
            piece, size = [], 0
    if size >= SHORTEST:
        yield "".join(piece)


def records(pieces: Sequence[Piece], licence: str) -> Iterator[dict[str, Any]]:
    """Training records of plain text."""
    for piece in pieces:
        key = hashlib.sha256(piece.text.encode()).hexdigest()[:32]
        yield {"key": key, "kind": piece.kind, "source": piece.source, "licence": licence, "text": piece.text}


def language(text: str) -> str:
    """Of prose, by its function words; English where they are few."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    hits = {name: sum(word in known for word in words) for name, known in LANGUAGES.items()}
    best = max(hits, key=lambda name: hits[name])
    return best if hits[best] >= FOREIGN_SHARE * max(len(words), 1) else ENGLISH


def foreign_passages(pieces: Sequence[Piece]) -> list[tuple[Foreign, str]]:
    """(text to translate, source) of the prose that is not English: a few sentences each."""
    taken: list[tuple[Foreign, str]] = []
    low, high = FOREIGN_WORDS
    for piece in pieces:
        if piece.kind != "prose" or (name := language(piece.text)) == ENGLISH:
            continue
        sentences = [each for part in re.split(r"\n\s*\n", piece.text) for each in split_sentences(part)]
        while sentences:
            count = FOREIGN_SENTENCES[len(taken) % len(FOREIGN_SENTENCES)]
            text, sentences = " ".join(sentences[:count]), sentences[count:]
            if low <= len(text.split()) <= high:
                taken.append((Foreign(name, text), piece.source))
    return taken


def passages(pieces: Sequence[Piece]) -> list[tuple[str, str]]:
    """(text, source) of paragraphs of English prose, joined up to the size of a passage."""
    pieces_taken: list[tuple[str, str]] = []
    low, high = PASSAGE_WORDS
    for piece in pieces:
        if piece.kind != "prose" or language(piece.text) != ENGLISH:
            continue
        words: list[str] = []
        for paragraph in re.split(r"\n\s*\n", piece.text):
            words += paragraph.split()
            if len(words) >= low:
                pieces_taken.append((" ".join(words[:high]), piece.source))
                words = []
    return pieces_taken
