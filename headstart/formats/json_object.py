"""Reads JSON files of a checkpoint, with errors that name the file."""

import json
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from headstart.errors import ModelError
from headstart.files import read_regular
from headstart.placeholder import FIRST_BYTES, placeholder_error

MAX_BYTES = 100_000_000  # more than the index of any checkpoint


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        raise ValueError("a key appears twice")
    return items


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Parse a JSON object. Raises ModelError, which names `where`, for anything else or a duplicate key."""
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON: {error}", "download the file again") from error
    if not isinstance(value, dict):
        what = f"{where} holds a JSON {type(value).__name__}, but must be an object"
        raise ModelError(what, "is it the right file?")
    return value


@cache
def read_packaged(package: str, file: str) -> Any:
    """The document of a JSON file in a Python package, cached; callers must not change it."""
    return json.loads(resources.files(package).joinpath(file).read_text("utf-8"))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises ModelError if it is missing, unreadable or not a JSON object."""
    try:
        text = read_regular(path, MAX_BYTES)
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}", "is it there, and may you read it?") from error
    if placeholder := placeholder_error(path, text[:FIRST_BYTES], len(text)):
        raise placeholder
    return parse_object(text, str(path))
