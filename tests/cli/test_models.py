"""headstart models and pull, with a separate cache and a local Hub server."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support import PATIENCE
from tiny_models import write_tiny

from headstart import hub
from headstart.cli.main import main
from headstart.errors import UsageError

Capture = pytest.CaptureFixture[str]
COMMIT = "0" * 40
REPO = "org/tiny"
PIECE = 10 * 2**20
"""Bytes that the Hub's client writes at a time."""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty caches of the Hub's client and of headstart."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def add_to_cache(cache: Path, name: str, model: Path, commit: str = COMMIT) -> Path:
    """Copies a model into the cache in the layout of the Hub's client."""
    folder = cache / f"models--{name.replace('/', '--')}"
    shutil.copytree(model, folder / "snapshots" / commit)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(commit)
    return folder


def test_models_are_listed_and_removed(cache: Path, tmp_path: Path, capsys: Capture) -> None:
    assert main(["models"]) == 0
    assert "none yet" in capsys.readouterr().out
    kept = add_to_cache(cache, REPO, write_tiny("mimo", tmp_path / "mimo"))
    other = add_to_cache(cache, "org/half", write_tiny("llama", tmp_path / "llama"), "1" * 40)
    (other / "snapshots" / ("1" * 40) / "model.safetensors").unlink()
    assert main(["models", "--json"]) == 0
    half, whole = json.loads(capsys.readouterr().out)["models"]
    assert (whole["name"], whole["format"], whole["heads"]) == (REPO, "safetensors", "alive")
    assert whole["bytes"] > (tmp_path / "mimo" / "model.safetensors").stat().st_size
    assert (half["name"], half["format"], half["heads"]) == ("org/half", None, None)
    assert main(["models", "list"]) == 0
    assert REPO in capsys.readouterr().out
    assert main(["models", "remove", REPO]) == 2
    assert "--yes" in capsys.readouterr().err
    assert main(["models", "remove", REPO, "org/none", "--yes"]) == 2
    assert "'org/none' is not in the cache" in capsys.readouterr().err
    assert kept.exists()
    assert main(["models", "remove", REPO, "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["removed"] == [REPO]
    assert not kept.exists() and other.exists()


def test_derived_files_are_counted_and_pruned(cache: Path, capsys: Capture) -> None:
    own = cache.with_name("own")
    for folder in ("packed", "costs", "tuned"):
        (own / folder).mkdir(parents=True)
        (own / folder / "a.pack").write_bytes(bytes(2_000_000))
    assert main(["models"]) == 0
    assert "packed weights 2 MB, measured costs 2 MB; headstart models --prune" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    assert sum(json.loads(capsys.readouterr().out)["derived"].values()) == 4_000_000
    assert main(["models", "--prune", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bytes"] == 4_000_000
    assert [path.parent.name for path in own.rglob("*.pack")] == ["tuned"]
    assert main(["models", "--prune"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert main(["models", "--prune", "--available"]) == 2


def test_published_models_have_short_names(cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    assert main(["models", "--available", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["models"]
    assert all(0 < each["bytes"] < each["memory"] and each["drafts"] == "mtp" for each in rows)
    small = next(each for each in rows if each["name"] == "qwen3.5-0.8b")
    assert 1.4e9 < small["bytes"] < 1.6e9  # 0.75 billion parameters without the vision tower
    assert main(["models", "--available"]) == 0
    assert "qwen3.5-4b 1.71x: MTPLX, M5 Max" in capsys.readouterr().out
    asked: list[hub.Repo] = []
    monkeypatch.setattr(hub, "_hub_snapshot", lambda repo: asked.append(repo) or cache)
    for each in rows:
        assert hub.repo_of(each["name"]) == hub.Repo(each["repo"])
        assert hub.is_repo(each["name"])
        assert hub.resolve(each["name"]) == cache
    assert asked == [hub.Repo(each["repo"]) for each in rows]
    Path(cache.parent, "mimo-7b").mkdir()  # a local folder takes precedence
    assert hub.resolve("mimo-7b") == Path("mimo-7b")


class Hub(ThreadingHTTPServer):
    """Serves one repo. The first `breaks` responses with weights end after `cut` bytes, or wait there for `hang`."""

    def __init__(self, folder: Path, cut: int, breaks: int) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.folder, self.cut, self.breaks = folder, cut, breaks
        self.hang: threading.Event | None = None
        self.asked: list[tuple[str, str]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        """No log."""

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        name = self.path.rpartition("/")[2]
        files = sorted(self.server.folder.iterdir())
        if self.path.startswith(f"/api/models/{REPO}/tree/"):
            tree = [
                {"type": "file", "path": path.name, "size": path.stat().st_size, "oid": path.name} for path in files
            ]
            self._send(json.dumps(tree).encode(), body)
        elif self.path.startswith(f"/api/models/{REPO}"):
            named = [{"rfilename": path.name} for path in files]
            self._send(json.dumps({"id": REPO, "modelId": REPO, "sha": COMMIT, "siblings": named}).encode(), body)
        elif self.path.startswith(f"/{REPO}/resolve/"):
            self._send((self.server.folder / name).read_bytes(), body, name)
        else:
            self.send_error(404)

    def _send(self, data: bytes, body: bool, name: str = "") -> None:
        begin = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").partition("-")[0])
        self.send_response(206 if begin else 200)
        for header, value in {
            "Content-Length": str(len(data) - begin), "ETag": f'"{name}-tag"', "X-Repo-Commit": COMMIT,
            "Accept-Ranges": "bytes",
            **({"Content-Range": f"bytes {begin}-{len(data) - 1}/{len(data)}"} if begin else {}),
        }.items():  # fmt: skip
            self.send_header(header, value)
        self.end_headers()
        if not body:
            return
        if name:
            self.server.asked.append((name, self.headers.get("Range", "")))
        if name == "model.safetensors" and self.server.breaks:
            self.server.breaks -= 1
            self.wfile.write(data[begin : begin + self.server.cut])
            if self.server.hang:
                self.server.hang.wait(PATIENCE)
            self.close_connection = True
            return
        self.wfile.write(data[begin:])


@pytest.fixture
def local_hub(tmp_path: Path) -> Iterator[Hub]:
    folder = write_tiny("mimo", tmp_path / "published")
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * (PIECE // 128))
    with Hub(folder, PIECE + 1000, 1) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


PULL = [sys.executable, "-m", "headstart", "pull", REPO, "--json"]
"""Runs in a separate process: the Hub's client reads the environment once."""


def environment(hub: Hub, home: Path) -> dict[str, str]:
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), "")
    return {**os.environ, **proxies, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0"}


def pull(hub: Hub, home: Path) -> Path:
    done = subprocess.run(PULL, env=environment(hub, home), capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["path"])


@pytest.mark.slow  # processes; the Hub's client waits a second before it resumes
def test_interrupted_download_resumes(local_hub: Hub, tmp_path: Path) -> None:
    found = pull(local_hub, tmp_path / "home")
    assert (found / "model.safetensors").read_bytes() == (local_hub.folder / "model.safetensors").read_bytes()
    assert [asked for name, asked in local_hub.asked if name == "model.safetensors"] == ["", f"bytes={PIECE}-"]
    local_hub.asked.clear()
    assert pull(local_hub, tmp_path / "home") == found
    assert local_hub.asked == []  # all files are cached


@pytest.mark.slow
def test_killed_download_resumes(local_hub: Hub, tmp_path: Path) -> None:
    local_hub.hang = threading.Event()
    with subprocess.Popen(PULL, env=environment(local_hub, tmp_path / "home"), stderr=subprocess.DEVNULL) as first:
        while not any(path.stat().st_size == PIECE for path in (tmp_path / "home").rglob("*.incomplete")):
            assert first.poll() is None
            time.sleep(0.05)
        first.kill()
    local_hub.hang.set()
    found = pull(local_hub, tmp_path / "home")
    assert (found / "model.safetensors").read_bytes() == (local_hub.folder / "model.safetensors").read_bytes()
    assert [asked for name, asked in local_hub.asked if name == "model.safetensors"] == ["", f"bytes={PIECE}-"]
    assert not list((tmp_path / "home").rglob("*.incomplete"))


@pytest.mark.slow
def test_weights_of_unsupported_families_are_not_downloaded(local_hub: Hub, tmp_path: Path) -> None:
    (local_hub.folder / "config.json").write_text(json.dumps({"model_type": "dots3_note"}))
    command = [*PULL[:3], "generate", REPO, "--prompt", "a"]
    surroundings = environment(local_hub, tmp_path / "home")
    done = subprocess.run(command, env=surroundings, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == 2
    assert "dots3_note models need" in done.stderr
    assert f"headstart launch vllm {REPO}" in done.stderr
    assert {name for name, _ in local_hub.asked} == {"config.json"}


def test_model_is_resolved_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path))
    (tmp_path / "adapted").mkdir()  # adapted heads are looked up, too
    tried = []

    def fail(*given: object) -> Path:
        tried.append(given)
        raise UsageError("no network")

    monkeypatch.setattr(hub, "resolve", fail)
    assert main(["generate", "--prompt", "a"]) == 2
    assert "no network" in capsys.readouterr().err and len(tried) == 1
