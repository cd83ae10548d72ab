"""--force replaces output of `export` and `graft`, and no other directory."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import MIMO, NORM, mimo_head, write_checkpoint

from headstart.cli.main import main
from headstart.tools.graft.run import PROVENANCE

Capture = pytest.CaptureFixture[str]
COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "export": lambda model: ["export", str(model)],
    "strip": lambda model: ["graft", str(model), "--strip"],
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "users" / "me"))
    (tmp_path / "users" / "me").mkdir(parents=True)
    model = write_checkpoint(tmp_path / "models" / "model", MIMO, {**NORM, **mimo_head(8)})
    (model / "tokenizer.json").write_text("{}")
    return model


def tree(folder: Path) -> dict[str, bytes | None]:
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def working_directory(out: Path, model: Path) -> Path:
    out.mkdir()
    os.chdir(out)
    return Path()


def dots(out: Path, model: Path) -> Path:
    (out / "below").mkdir(parents=True)
    os.chdir(out / "below")
    return Path("..")


def link_to_source(out: Path, model: Path) -> Path:
    out.symlink_to(model)
    return out


def repository(out: Path, model: Path) -> Path:
    (out / ".git").mkdir(parents=True)
    return out


def repository_worktree(out: Path, model: Path) -> Path:
    out.mkdir()
    (out / ".git").write_text("gitdir: /elsewhere")
    return out


def another_model(out: Path, model: Path) -> Path:
    return write_checkpoint(out, {**MIMO, "mine": True}, NORM)


def with_link(out: Path, model: Path) -> Path:
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").symlink_to(model / "tokenizer.json")
    return out


def with_file(name: str) -> Callable[[Path, Path], Path]:
    return lambda out, model: (out / name).write_text("mine") and out


def damaged_mark(out: Path, model: Path) -> Path:
    out.mkdir()
    (out / PROVENANCE).write_text("[]")
    (out / "mine.bin").write_text("x")
    return out


BEFORE: dict[str, Callable[[Path, Path], Path]] = {
    "home": lambda out, model: Path.home(), "parent of home": lambda out, model: Path.home().parent,
    "root": lambda out, model: Path("/"), "source": lambda out, model: model,
    "parent of source": lambda out, model: model.parent,
    "the same model": lambda out, model: shutil.copytree(model, out),
    **{each.__name__: each for each in (working_directory, dots, link_to_source, repository, repository_worktree,
                                        another_model, damaged_mark)},
}  # fmt: skip
AFTER: dict[str, Callable[[Path, Path], Path]] = {
    "link": with_link, "folder": lambda out, model: (out / "checkpoint-100").mkdir() or out,
    **{name: with_file(name) for name in ("notes.txt", ".env", "adapter.safetensors")},
}  # fmt: skip
"""What the user has put into an output."""


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("target", [*BEFORE, *AFTER])
def test_force_never_replaces_foreign_directories(
    command: str, target: str, model: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path / "models")
    out, line = tmp_path / "out", COMMANDS[command](model)
    if target in AFTER:
        assert main([*line, "-o", str(out)]) == 0
    asked, before = {**BEFORE, **AFTER}[target](out, model), tree(tmp_path)
    assert main([*line, "-o", str(asked), "--force"]) == 2
    assert "give --out another" in capsys.readouterr().err and tree(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_force_replaces_own_output(command: str, model: Path, tmp_path: Path) -> None:
    out, line = tmp_path / "out", [*COMMANDS[command](model), "-o", str(tmp_path / "out")]
    assert main(line) == 0
    first = tree(out)
    assert main(line) == 2
    (model / "tokenizer.json").rename(model / "merges.txt")  # the source has changed
    assert main([*line, "--force"]) == 0
    assert tree(out).keys() == {"merges.txt" if name == "tokenizer.json" else name for name in first}
    shutil.rmtree(out)
    out.mkdir()
    assert main([*line, "--force"]) == 0  # an empty directory
