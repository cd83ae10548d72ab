"""Plain text from files and folders (documentation, source code): pieces to train on, and passages for prompts."""

import hashlib
import re
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.errors import UsageError
from headstart.train.prompts import ForeignText, split_sentences
from headstart.train.records import SkippedRecords, TrainingRecord, find_files, read_file

_CODE = "py c h cc cpp hpp rs go js ts tsx java kt rb sh sql html css lua php cs"
CODE = frozenset(f".{name}" for name in _CODE.split())
PROSE = frozenset((".txt", ".md", ".rst", ".adoc", ".tex", ".org"))
DATA = frozenset((".json", ".yaml", ".yml", ".toml", ".xml", ".csv"))
PIECE_CHARS = 6000  # longer files are cut at line ends into pieces of about this size
MIN_PIECE_CHARS = 200
MAX_FILE_BYTES = 2 << 20
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
MIN_FUNCTION_WORDS = 0.15
"""Share of a text's words that must be function words of a language, or the text counts as English."""
FOREIGN_SENTENCES, FOREIGN_WORDS = (1, 1, 2, 3), (5, 60)
"""Texts to translate: sentences, in turn, and the range of their words."""


@dataclass(frozen=True)
class TextPiece:
    """Part of a file."""

    text: str
    kind: str  # see `text_kind`
    source: str  # the folder or file that was given


def read_tree(folder: Path) -> Iterator[TextPiece]:
    """Pieces of every text file in a folder (or of one file), in path order. Raises UsageError if there is none."""
    if not folder.exists():
        raise UsageError(f"{folder} does not exist", "give a folder of text or source files")
    any_file = False
    for path in [folder] if folder.is_file() else sorted(folder.rglob("*")):
        kind = text_kind(path.relative_to(folder.parent))
        if kind is None or not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            continue
        try:
            text = path.read_text("utf-8-sig")
        except (OSError, UnicodeDecodeError):
            continue
        for piece in cut_text(text):
            any_file = True
            yield TextPiece(piece, kind, folder.name)
    if not any_file:
        raise UsageError(f"{folder} holds no text", f"files end in {' '.join(sorted(PROSE | CODE))}")


def text_kind(path: Path) -> str | None:
    """code, prose or data by the file name; None for hidden files and for anything else."""
    if any(part.startswith(".") for part in path.parts[1:]):
        return None
    suffix = path.suffix.lower()
    return "code" if suffix in CODE else "prose" if suffix in PROSE else "data" if suffix in DATA else None


def cut_text(text: str) -> Iterator[str]:
    """Pieces of about PIECE_CHARS, cut at line ends; a short last piece is left out."""
    piece: list[str] = []
    size = 0
    for line in text.splitlines(keepends=True):
        piece.append(line[:PIECE_CHARS])
        size += len(piece[-1])
        if size >= PIECE_CHARS:
            yield "".join(piece)
            piece, size = [], 0
    if size >= MIN_PIECE_CHARS:
        yield "".join(piece)


def text_records(pieces: Sequence[TextPiece], licence: str) -> Iterator[dict[str, Any]]:
    """JSON training records of plain text."""
    for piece in pieces:
        key = hashlib.sha256(piece.text.encode()).hexdigest()[:32]
        yield {"key": key, "kind": piece.kind, "source": piece.source, "licence": licence, "text": piece.text}


def detect_language(text: str) -> str:
    """Language of prose by its function words; English where these are few."""
    words = re.findall(r"[^\W\d_]+", text.lower())
    hits = {name: sum(word in known for word in words) for name, known in LANGUAGES.items()}
    best = max(hits, key=lambda name: hits[name])
    return best if hits[best] >= MIN_FUNCTION_WORDS * max(len(words), 1) else ENGLISH


def foreign_passages(pieces: Sequence[TextPiece]) -> list[tuple[ForeignText, str]]:
    """(text to translate, source) from the prose that is not English: a few sentences each."""
    found: list[tuple[ForeignText, str]] = []
    low, high = FOREIGN_WORDS
    for piece in pieces:
        if piece.kind != "prose" or (name := detect_language(piece.text)) == ENGLISH:
            continue
        sentences = [each for part in re.split(r"\n\s*\n", piece.text) for each in split_sentences(part)]
        while sentences:
            count = FOREIGN_SENTENCES[len(found) % len(FOREIGN_SENTENCES)]
            text, sentences = " ".join(sentences[:count]), sentences[count:]
            if low <= len(text.split()) <= high:
                found.append((ForeignText(name, text), piece.source))
    return found


def passages(pieces: Sequence[TextPiece]) -> list[tuple[str, str]]:
    """(text, source) from English prose: paragraphs joined up to the size of a passage."""
    found: list[tuple[str, str]] = []
    low, high = PASSAGE_WORDS
    for piece in pieces:
        if piece.kind != "prose" or detect_language(piece.text) != ENGLISH:
            continue
        words: list[str] = []
        for paragraph in re.split(r"\n\s*\n", piece.text):
            words += paragraph.split()
            if len(words) >= low:
                found.append((" ".join(words[:high]), piece.source))
                words = []
    return found


def read_documents(paths: Sequence[Path], skipped: SkippedRecords) -> list[TrainingRecord]:
    """Plain text of files and folders: their .jsonl records, or else their text and source files. Without paths:
    Python's documentation and modules. Raises UsageError for a path without text."""
    if not paths:
        return _python_documents()
    records: list[TrainingRecord] = []
    for path in paths:
        if path.suffix == ".jsonl" or any(path.rglob("*.jsonl")):
            for file in find_files([path]):
                records += [_as_plain_text(record) for record in read_file(file, skipped)]
        else:
            records += [TrainingRecord(piece.kind, text=piece.text) for piece in read_tree(path)]
    return records


def _python_documents() -> list[TrainingRecord]:
    """The language reference and the single-file modules of the standard library (PSF licence)."""
    from pydoc_data.topics import topics

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    prose = [TrainingRecord("prose", text=piece) for _, text in sorted(topics.items()) for piece in cut_text(text)]
    return prose + [TrainingRecord("code", text=piece) for path in files for piece in cut_text(path.read_text("utf-8"))]


def _as_plain_text(record: TrainingRecord) -> TrainingRecord:
    text = record.text or "\n\n".join(message["content"] for message in record.messages)
    return TrainingRecord(record.kind, text=text)
