"""Headers of a model on the Hub: JSON files through huggingface_hub's cache, headers of weights by range requests.

HF_ENDPOINT, HF_HOME, HF_TOKEN and offline mode work as in huggingface_hub. If the Hub does not answer, the files in the
local cache are used.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from headstart.core import Progress
from headstart.errors import HeadstartError, ModelError, UsageError
from headstart.formats import gguf, safetensors, safetensors_file
from headstart.formats.base import Checkpoint, File, Tensor
from headstart.formats.gguf_file import GgufFile, IncompleteHeader, parse
from headstart.formats.json_object import read_object
from headstart.formats.safetensors import CONFIG, GENERATION
from headstart.hub import Repo, choose_gguf, hub_errors, is_reachable, part_names

T = TypeVar("T")
FIRST = 128 * 1024  # bytes of the first request: most headers are shorter
AT_ONCE = 8  # parallel requests
RETRIES = 2  # of a request


def open_repo(source: Repo, progress: Progress) -> Checkpoint:
    """A checkpoint of a repo's headers; without tensors if the repo has a config and weights of another format.
    UsageError for an unknown or unreachable repo, ModelError for damaged files."""
    found = read_repo(source, progress)
    return found if isinstance(found, Checkpoint) else gguf.join_files(found[0].path, found)


def read_repo(source: Repo, progress: Progress) -> Checkpoint | list[GgufFile]:
    """The headers of a repo: a checkpoint, or the parts of its GGUF model. Raises as `open_repo`."""
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE or not is_reachable():
        return _cached(source)
    from huggingface_hub.utils import httpx  # the client library that it really uses

    with hub_errors(source.repo):
        try:
            info = HfApi().model_info(source.repo, revision=source.revision or None)
        except (httpx.TransportError, OSError) as error:
            if getattr(error, "response", None) is not None:  # the Hub has refused the request
                raise
            try:
                return _cached(source)
            except HeadstartError:
                raise error from None
    files = [each.rfilename for each in info.siblings or []]
    return _Remote(source, str(info.sha or source.revision or "main"), files, progress).headers()


def _cached(source: Repo) -> Checkpoint | list[GgufFile]:
    """`read_repo` from huggingface_hub's cache. Raises UsageError if the cache does not have it."""
    from huggingface_hub import hf_hub_download, snapshot_download

    with hub_errors(source.repo):
        if source.file:
            file = hf_hub_download(source.repo, source.file, local_files_only=True, dry_run=False)
            return gguf.read_parts(Path(file))
        revision, kept = source.revision or None, [CONFIG]  # any other file may be missing
        folder = Path(
            snapshot_download(source.repo, revision=revision, local_files_only=True, allow_patterns=kept, dry_run=False)
        )
    if any(folder.glob("*.safetensors")):
        return safetensors.open_checkpoint(folder)
    ggufs = [str(path.relative_to(folder)) for path in folder.rglob("*.gguf")]
    if ggufs or not (folder / CONFIG).exists():
        return gguf.read_parts(folder / choose_gguf(source.repo, ggufs)[0])
    return _config_alone(source, read_object(folder / CONFIG))


def _config_alone(source: Repo, config: dict[str, Any]) -> Checkpoint:
    return Checkpoint(Path(source.repo), "safetensors", config, {}, canonical_names=False)


class _Remote:
    """Reads the headers of one revision of one repo. `files`: names of all its files."""

    def __init__(self, source: Repo, revision: str, files: list[str], progress: Progress) -> None:
        self.source, self.revision, self.files, self.progress = source, revision, files, progress

    def headers(self) -> Checkpoint | list[GgufFile]:
        if self.source.file:
            return self._all(self._part, part_names(self.source.file))
        weights = [file for file in self.files if file.endswith(".safetensors") and "/" not in file]
        if CONFIG in self.files and (weights or safetensors_file.INDEX in self.files):
            return self._safetensors(weights)
        if CONFIG in self.files and not any(file.endswith(".gguf") for file in self.files):
            return _config_alone(self.source, self._json(CONFIG))
        return self._all(self._part, choose_gguf(self.source.repo, self.files))

    def _safetensors(self, weights: list[str]) -> Checkpoint:
        config = self._json(CONFIG)
        index = self._json(safetensors_file.INDEX) if safetensors_file.INDEX in self.files else None
        where = f"{self.source.repo}/{safetensors_file.INDEX}"
        if index is not None and safetensors_file.is_stale(weights, index, where):
            index = None
        files = safetensors_file.shards_of(weights, index, where)
        more = [file for file in weights if "mtp" in file and file not in files]
        shards = dict(zip([*files, *more], self._all(self._shard, [*files, *more]), strict=True))
        tensors = safetensors_file.tensors_of({file: shards[file] for file in files}, index, where, self.source.repo)
        stray = {name: each for held in shards.values() for name, each in held.items() if name not in tensors}
        return Checkpoint(
            path=Path(self.source.repo), format="safetensors", config=config,
            tensors={**tensors, **safetensors.sidecar_heads(tensors, stray, config)}, canonical_names=False,
            files=tuple(map(Path, files)), generation_config=self._json(GENERATION) if GENERATION in self.files else {},
            stray=stray,
        )  # fmt: skip

    def _json(self, file: str) -> dict[str, Any]:
        from huggingface_hub import hf_hub_download

        with hub_errors(self.source.repo):
            path = hf_hub_download(self.source.repo, file, revision=self.revision, dry_run=False)
        return read_object(Path(path))

    def _shard(self, file: str) -> dict[str, Tensor]:
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(self.source.repo, file, revision=self.revision)
        if isinstance(cached, str):
            return safetensors_file.read_file(Path(cached))
        where = f"{self.source.repo}/{file}"
        first, size = self._bytes(file, 0, FIRST)
        length = safetensors_file.header_size(first, size, where)
        if (missing := safetensors_file.PREFIX + length - len(first)) > 0:
            first += self._bytes(file, len(first), missing)[0]
        header = first[safetensors_file.PREFIX : safetensors_file.PREFIX + length]
        return safetensors_file.parse_header(header, size, where, File(Path(file), here=False))

    def _all(self, fetch: Callable[[str], T], files: list[str]) -> list[T]:
        """`fetch(file)` for each file, in order; AT_ONCE run in parallel."""
        results: list[T] = []
        with ThreadPoolExecutor(AT_ONCE) as pool:
            try:
                for result in pool.map(fetch, files):
                    results.append(result)
                    self.progress(len(results), len(files), f"reading headers of {self.source.repo}")
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return results

    def _part(self, file: str) -> GgufFile:
        path = Path(self.source.repo, file)
        first, size = self._bytes(file, 0, FIRST)
        while True:
            try:
                return parse(File(path, here=False), np.frombuffer(first, np.uint8), size)
            except IncompleteHeader:
                is_too_long = len(first) > safetensors_file.MAX_HEADER
                more = b"" if is_too_long else self._bytes(file, len(first), 3 * len(first))[0]
                if not more:
                    what = f"the header of {path} is cut off or too long"
                    raise ModelError(what, safetensors_file.AGAIN) from None
                first += more

    def _bytes(self, file: str, begin: int, count: int) -> tuple[bytes, int]:
        """Up to `count` bytes of a file from byte `begin` on, and the file's size. UsageError if the request fails."""
        from huggingface_hub import constants, hf_hub_url
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_stream_backoff

        url = hf_hub_url(self.source.repo, file, revision=self.revision, endpoint=constants.ENDPOINT)
        headers = build_hf_headers() | {"Range": f"bytes={begin}-{begin + count - 1}", "Accept-Encoding": "identity"}
        data = bytearray()
        with (
            hub_errors(self.source.repo),
            http_stream_backoff(
                "GET", url, max_retries=RETRIES, headers=headers, follow_redirects=True,
                timeout=constants.HF_HUB_DOWNLOAD_TIMEOUT,
            ) as answer,
        ):  # fmt: skip
            hf_raise_for_status(answer)
            ranged = answer.status_code == 206
            size = answer.headers.get("Content-Range" if ranged else "Content-Length", "").rpartition("/")[2]
            if not size.isdecimal():
                raise UsageError(f"the response for {url} has no length", "is HF_ENDPOINT a Hugging Face hub?")
            skip = 0 if ranged else begin  # a server without range requests sends the file from its beginning
            for piece in answer.iter_bytes():
                data += piece
                if len(data) >= skip + count:
                    break
        return bytes(data[skip : skip + count]), int(size)
