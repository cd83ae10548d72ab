"""Exports and grafts that cannot be written to the end: a clear line, the right exit code, and nothing left behind."""

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
def largest_file(nbytes: int) -> Iterator[None]:
    """No file may grow beyond this: what a full disk does to a writer."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_no_space_in_the_middle(model: Path, tmp_path: Path, capsys: Capture) -> None:
    out = tmp_path / "deep" / "out"
    with largest_file(100_000):
        assert main(["export", str(model), "-o", str(out)]) == 2
    assert "no space to write" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["model"]
    with pytest.raises(Exception, match="MB are free"):
        check_disk_space(out, 1 << 60)


def test_what_was_there_stays_when_the_new_one_fails(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert main(["export", str(model), "-o", str(out)]) == 0
    before = sorted((path.name, path.read_bytes()) for path in out.iterdir())
    with largest_file(100_000):
        assert main(["export", str(model), "-o", str(out), "--force"]) == 2
    assert sorted((path.name, path.read_bytes()) for path in out.iterdir()) == before


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="no file system that refuses directories")
def test_a_target_that_cannot_be_written(command: str, model: Path, capsys: Capture) -> None:
    assert main([*COMMANDS[command](model), "-o", "/proc/headstart/out"]) == 2
    assert "cannot write /proc/headstart/out" in capsys.readouterr().err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupted(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, number: signal.Signals
) -> None:
    @contextmanager
    def interrupting(what: str, *, quiet: bool = False) -> Iterator[Callable[[int, int, str], None]]:
        """Progress that presses Ctrl-C as soon as something is written."""
        yield lambda done, total, text: os.kill(os.getpid(), number)

    monkeypatch.setattr(cli_options, "progress", interrupting)
    for command in COMMANDS.values():
        assert main([*command(model), "-o", str(tmp_path / "out")]) == 130
        assert "interrupted" in capsys.readouterr().err and [path.name for path in tmp_path.iterdir()] == ["model"]


def test_only_a_directory_is_written_or_replaced(model: Path, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name, why in (("file", "is not a directory"), ("link", "is not a directory"), ("new.gguf", "names a file")):
        assert main(["export", str(model), "-o", str(tmp_path / name), "--force"]) == 2
        assert why in capsys.readouterr().err


def test_a_config_with_half_a_character_is_escaped(model: Path, tmp_path: Path) -> None:
    (model / "config.json").write_text(json.dumps({**MIMO, "mine": "\ud800", "name": "für"}))
    for command, out in ((COMMANDS["export"], tmp_path / "a"), (COMMANDS["strip"], tmp_path / "b")):
        assert main([*command(model), "-o", str(out)]) == 0
        assert json.loads((out / "config.json").read_text("utf-8"))["mine"] == "\ud800"
