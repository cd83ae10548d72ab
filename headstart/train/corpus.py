"""Plain text for a model that starts from nothing: documents, a tokenizer made of them, rows of tokens."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

from headstart.core import Int32
from headstart.train.data import Problems, Record, find_files, read_file
from headstart.train.textfiles import cut, read_tree

END = "<|endoftext|>"
"""Token 0: stands before and after every document."""


def read_documents(paths: Sequence[Path], problems: Problems) -> list[Record]:
    """The .jsonl records of files and folders, or else their text and source files; without paths, Python's own
    documentation and modules. Raises UsageError for a path without text."""
    if not paths:
        return _python()
    records: list[Record] = []
    for path in paths:
        if path.suffix == ".jsonl" or any(path.rglob("*.jsonl")):
            for file in find_files([path]):
                records += [_plain(record) for record in read_file(file, problems)]
        else:
            records += [Record(piece.kind, text=piece.text) for piece in read_tree(path)]
    return records


def _python() -> list[Record]:
    """The language reference and the single-file modules of the standard library (PSF licence)."""
    from pydoc_data.topics import topics

    modules = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    prose = [Record("prose", text=piece) for _, text in sorted(topics.items()) for piece in cut(text)]
    return prose + [Record("code", text=piece) for path in modules for piece in cut(path.read_text("utf-8"))]


def _plain(record: Record) -> Record:
    text = record.text or "\n\n".join(message["content"] for message in record.messages)
    return Record(record.kind, text=text)


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE of `vocab_size` ids (fewer if the texts have no more to merge); END is 0."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: tokenizers.Tokenizer, records: Sequence[Record]) -> list[Int32]:
    """Each document's tokens, END before them."""
    encoded = tokenizer.encode_batch([record.text for record in records], add_special_tokens=False)
    return [np.asarray([0, *each.ids], np.int32) for each in encoded]


def batches(documents: Sequence[Int32], rows: int, length: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Endless batches [rows, length]: the documents one behind the other, in another order each time around."""
    epoch, stream = 0, np.empty(0, np.int64)
    while True:
        while len(stream) < rows * length:
            order = np.random.default_rng((seed, epoch)).permutation(len(documents))
            stream, epoch = np.concatenate([stream, *(documents[i] for i in order)]), epoch + 1
        count = len(stream) // (rows * length)
        whole, stream = stream[: count * rows * length], stream[count * rows * length :]
        yield from whole.reshape(count, rows, length).astype(np.int64)
