"""Files that stand in the place of a checkpoint's file: pointers, web pages, downloads that have not ended."""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from headstart.errors import ModelError

FIRST_BYTES = 512  # bytes of a file that tell a placeholder
DOWNLOAD = "download the file again, as with: headstart pull REPO"
POINTERS = {
    b"version https://git-lfs": ("a Git LFS pointer", "get the file itself: git lfs install, then git lfs pull"),
    b"# xet version": ("a pointer of Xet storage", DOWNLOAD),
}
PAGES = (b"<!doctype", b"<html", b"<?xml")
ANSWERS = (b"Entry not found", b"Repository not found", b"Invalid username", b"Invalid credentials", b"Access to ")
"""Beginnings of the Hub's error texts, which some programs save in place of the file."""
PARTIAL = (".incomplete", ".part", ".crdownload", ".aria2", ".tmp", ".download")
"""Endings of files that a downloader has not finished."""


def placeholder_error(path: Path | str, first: bytes, size: int) -> ModelError | None:
    """The error for a placeholder, from the first FIRST_BYTES of a file of `size` bytes; None for any other file."""
    if not size:
        return ModelError(f"{path} is empty", DOWNLOAD)
    for begin, (name, hint) in POINTERS.items():
        if first.startswith(begin):
            return ModelError(f"{path} is {name} of {size} bytes, not the file itself", hint)
    text = first.lstrip(b"\xef\xbb\xbf \t\r\n")
    if text[:9].lower().startswith(PAGES):
        hint = "a link to a file of the Hub has /resolve/ in it, not /blob/; or use headstart pull REPO"
        return ModelError(f"{path} is a web page that was saved under this name", hint)
    if text.startswith(ANSWERS):
        line = text.decode("utf-8", "replace").splitlines()[0][:80]
        return ModelError(f"{path} holds a server's answer instead of the file: {line}", DOWNLOAD)
    return None


def check_placeholder(path: Path) -> None:
    """Raises ModelError for a file that is a placeholder. A file that cannot be read is none."""
    error = None
    with suppress(OSError), path.open("rb") as file:
        error = placeholder_error(path, file.read(FIRST_BYTES), path.stat().st_size)
    if error is not None:
        raise error


def partial_files(folder: Path) -> Iterator[str]:
    """Names of files in a folder whose download has not ended. The folder is listed at the first use."""
    yield from sorted(file.name for file in folder.iterdir() if file.name.endswith(PARTIAL))
