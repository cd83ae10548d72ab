"""Failed writes of `export` and `graft`: clear message, exit code, no files left."""

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from checkpoints import MIMO, NORM, mimo_head, write_checkpoint

from headstart.cli import options as cli_options
from headstart.cli.main import main
from headstart.tools.export.plan import check_disk_space

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "model", MIMO, {**NORM, **mimo_head(512)})


COMMANDS = {
    "export": lambda model: ("export", str(model)),
    "strip": lambda model: ("graft", str(model), "--strip"),
}


@contextmanager
def max_file_size(nbytes: int) -> Iterator[None]:
    """Limits the size of files, to simulate a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_full_disk_leaves_no_files(model: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "deep" / "out"
    with max_file_size(100_000):
        assert main(["export", str(model), "-o", str(out)]) == 2
    assert "no space to write" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(Exception, match="MB are free"):
        check_disk_space(out, 1 << 60)


def test_failed_replacement_keeps_the_old_output(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(model), "-o", str(out)]) == 0
    before = sorted((path.name, path.read_bytes()) for path in out.iterdir())
    with max_file_size(100_000):
        assert main(["export", str(model), "-o", str(out), "--force"]) == 2
    assert sorted((path.name, path.read_bytes()) for path in out.iterdir()) == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no file system that refuses directories")
def test_unwritable_target_is_reported(command: str, model: Path, capsys: Capture) -> None:
    assert main([*COMMANDS[command](model), "-o", "/proc/headstart/out"]) == 2
    assert "cannot write /proc/headstart/out" in capsys.readouterr().err


def test_removed_working_directory_is_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main([*COMMANDS["export"](model), "-o", str(tmp_path / "out")]) == 2
    assert "the working directory no longer exists" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted_export_leaves_no_files(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, number: signal.Signals
) -> None:
    @contextmanager
    def interrupting(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
        """A progress display that sends the signal when the first bytes are written."""
        yield lambda done, total, text: os.kill(os.getpid(), number)

    monkeypatch.setattr(cli_options, "progress", interrupting)
    for command in COMMANDS.values():
        assert main([*command(model), "-o", str(tmp_path / "out")]) == 130
        assert "interrupted" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_target_that_is_no_directory_is_refused(model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name, why in (("file", "is not a directory"), ("link", "is not a directory"), ("new.gguf", "names a file")):
        assert main(["export", str(model), "-o", str(tmp_path / name), "--force"]) == 2
        assert why in capsys.readouterr().err


def test_lone_surrogates_of_a_config_are_escaped(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text(json.dumps({**MIMO, "mine": "\ud800", "name": "für"}))
    for command, out in ((COMMANDS["export"], tmp_path / "a"), (COMMANDS["strip"], tmp_path / "b")):
        assert main([*command(model), "-o", str(out)]) == 0
        assert json.loads((out / "config.json").read_text("utf-8"))["mine"] == "\ud800"
