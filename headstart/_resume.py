"""Downloads that go on where they were when the program ended, however it did: what came lies in a file beside its
place, and is asked for by its range. Whole files only reach their place, checked where a checksum is known."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from headstart import system
from headstart.core import Progress

if TYPE_CHECKING:
    from huggingface_hub import DryRunFileInfo

LARGE = 16 * 2**20
"""Bytes from which on a file of the Hub is worth it."""
SUFFIX = ".headstart.incomplete"
_CHUNK = 1 << 20
_TIMEOUT_S, _PAUSE_S, _TRIES = 30, 1.0, 5
_SHA256 = 64


class Broken(Exception):
    """The rest could not be had, or the whole is not what was expected; the message says why."""


@contextmanager
def _begun(path: Path) -> Iterator[BinaryIO | None]:
    """The file with what has come, at its end; None while another process writes it, or nobody can tell."""
    path.touch()
    with path.open("r+b") as file:
        if not system.lock(file.fileno()):
            yield None
            return
        file.seek(0, os.SEEK_END)
        yield file


def by_range(url: str, path: Path, num_bytes: int, progress: Progress) -> bool:
    """Have `path` hold all bytes of `url`. False while another process is at it. Raises Broken, or OSError when the
    file cannot be written."""
    import http.client
    import urllib.error

    with _begun(path) as file:
        if file is None:
            return False
        left = _TRIES
        while file.tell() < num_bytes:
            before = file.tell()
            try:
                _receive(url, file, num_bytes, progress)
            except (urllib.error.URLError, http.client.HTTPException, ConnectionError, TimeoutError) as error:
                left = _TRIES if file.tell() > before else left - 1
                if left == 0 or isinstance(error, urllib.error.HTTPError):
                    raise Broken(f"{url}: {error}") from error
                time.sleep(_PAUSE_S)
        file.truncate(num_bytes)
    return True


def _receive(url: str, file: BinaryIO, num_bytes: int, progress: Progress) -> None:
    """What is missing, as far as it comes. A server that knows no ranges sends all of it again."""
    import http.client
    import urllib.request

    begin = file.tell()
    asked = urllib.request.Request(url, headers={"Range": f"bytes={begin}-"} if begin else {})
    with urllib.request.urlopen(asked, timeout=_TIMEOUT_S) as answer:
        if begin and answer.status != http.HTTPStatus.PARTIAL_CONTENT:
            file.seek(0)
            file.truncate()
        while piece := answer.read1(_CHUNK):
            file.write(piece)
            file.flush()
            progress(min(file.tell(), num_bytes), num_bytes, "downloading")
    if file.tell() < num_bytes:
        raise http.client.IncompleteRead(b"", num_bytes - file.tell())


def large_files(repo: str, listed: Callable[[], list[DryRunFileInfo]]) -> None:
    """Put the large ones of those that are missing into the cache of the Hub's client, which then finds them there:
    its own downloads begin anew when they were killed. Raises what its client does while it downloads, and Broken; who
    cannot list them is asked again by whoever wants the rest."""
    from huggingface_hub import errors
    from huggingface_hub.utils import httpx

    try:
        files = listed()
    except (errors.HfHubHTTPError, OSError, httpx.HTTPError):
        return
    for each in files:
        if each.will_download and (each.file_size or 0) >= LARGE:
            _large_file(repo, each)


def _large_file(repo: str, wanted: DryRunFileInfo) -> None:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
    from huggingface_hub.file_download import http_get, repo_folder_name
    from huggingface_hub.utils import build_hf_headers

    url = hf_hub_url(repo, wanted.filename, revision=wanted.commit_hash)
    known = get_hf_file_metadata(url)
    if known.etag is None or known.size is None or known.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        return
    blobs = Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model") / "blobs"
    blobs.mkdir(parents=True, exist_ok=True)
    place = blobs / (known.etag + SUFFIX)
    with _begun(place) as file:
        if file is None:
            return
        headers = build_hf_headers()
        http_get(url, file, resume_size=file.tell(), headers=headers, expected_size=known.size,
                 displayed_filename=wanted.filename)  # fmt: skip
    if len(known.etag) == _SHA256 and sha256_of(place) != known.etag:
        place.unlink()
        raise Broken(f"{wanted.filename} came damaged: try again")
    place.replace(blobs / known.etag)


def sha256_of(path: Path, progress: Progress | None = None) -> str:
    """The sha256 of a file, as hex."""
    digest, done, total = hashlib.sha256(), 0, path.stat().st_size
    with path.open("rb") as source:
        for chunk in iter(partial(source.read, _CHUNK), b""):
            digest.update(chunk)
            done += len(chunk)
            if progress:
                progress(done, total, "checking")
    return digest.hexdigest()
