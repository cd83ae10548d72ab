"""A local server with the Hub's API for one repo: it answers byte ranges and counts the bytes sent."""

import hashlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import close_session

from headstart.formats import remote

REPO = "org/model"
SHA = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Hub:
    """State of the server. `sent`: bytes sent of each file."""

    folder: Path
    url: str = ""
    ranges: bool = True
    private: bool = False
    sent: dict[str, int] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        return sum(count for name, count in self.sent.items() if name.endswith((".safetensors", ".gguf")))


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, hub: Hub, *arguments: Any) -> None:
        self.hub = hub
        super().__init__(*arguments)

    def log_message(self, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        parts = self.path.partition("?")[0].strip("/").split("/")
        if self.hub.private:
            self.answer(401, b"", {"X-Error-Code": "GatedRepo"})
        elif parts[:2] == ["api", "models"]:
            here = sorted(self.hub.folder.iterdir())
            files = [{"rfilename": path.name} for path in here]
            if "tree" in parts:
                files = [{"type": "file", "path": p.name, "size": p.stat().st_size, "oid": p.name} for p in here]
                self.answer(200, json.dumps(files).encode(), {})
                return
            document = {"id": REPO, "sha": SHA, "siblings": files}
            known = "/".join(parts[2:4]) == REPO
            missing = {"X-Error-Code": "RepoNotFound"}
            self.answer(200, json.dumps(document).encode(), {}) if known else self.answer(404, b"{}", missing)
        else:
            self.file(parts[-1])

    def file(self, name: str) -> None:
        path = self.hub.folder / name
        if not path.is_file():
            self.answer(404, b"", {"X-Error-Code": "EntryNotFound"})
            return
        size = path.stat().st_size
        begin, end, code, headers = 0, size, 200, {"X-Repo-Commit": SHA}
        headers["ETag"] = f'"{hashlib.sha1(name.encode()).hexdigest()}"'
        if self.hub.ranges and (asked := self.headers.get("Range")):
            first, _, last = asked.removeprefix("bytes=").partition("-")
            begin, end, code = int(first), min(size, int(last) + 1), 206
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        with path.open("rb") as file:
            file.seek(begin)
            self.answer(code, file.read(end - begin), headers, name)

    def answer(self, code: int, body: bytes, headers: dict[str, str], name: str = "") -> None:
        self.send_response(code)
        for key, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(body)
            try:
                self.wfile.write(body)
            except OSError:  # the client has closed the connection
                self.close_connection = True


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    served = Hub(tmp_path / "served")
    served.folder.mkdir()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, served))
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    served.url = f"http://127.0.0.1:{server.server_address[1]}"
    point_at(monkeypatch, served.url, tmp_path / "cache")
    close_session()
    yield served
    close_session()
    server.shutdown()
    server.server_close()


def point_at(monkeypatch: pytest.MonkeyPatch, url: str, cache: Path) -> None:
    """Sets the constants that huggingface_hub derives from HF_ENDPOINT and HF_HOME at import."""
    constants = "huggingface_hub.constants"
    monkeypatch.setattr(f"{constants}.ENDPOINT", url)
    monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(remote, "RETRIES", 0)
