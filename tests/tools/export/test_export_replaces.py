"""--force replaces what such a command has written, and nothing else whatever it is called."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import tensor, write_checkpoint

from headstart.cli.main import main
from headstart.tools.graft.run import PROVENANCE

CONFIG = {"model_type": "mimo", "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
VECTORS = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm")
HEAD = {f"model.mtp_layers.0.{name}.weight": tensor("BF16", 8) for name in VECTORS}
HEAD |= {"model.mtp_layers.0.input_proj.weight": tensor("BF16", 8, 16)}
TRUNK = {"model.norm.weight": tensor("BF16", 8)}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "users" / "me"))
    (tmp_path / "users" / "me").mkdir(parents=True)
    model = write_checkpoint(tmp_path / "models" / "model", CONFIG, {**TRUNK, **HEAD})
    (model / "tokenizer.json").write_text("{}")
    return model


COMMANDS: dict[str, Callable[[Path], list[str]]] = {
    "export": lambda model: ["export", str(model)],
    "strip": lambda model: ["graft", str(model), "--strip"],
}


def tree(folder: Path) -> dict[str, bytes | None]:
    paths = sorted(folder.rglob("*"))
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in paths}


def home(out: Path, model: Path) -> Path:
    return Path.home()


def parent_of_home(out: Path, model: Path) -> Path:
    return Path.home().parent


def working_directory(out: Path, model: Path) -> Path:
    out.mkdir()
    os.chdir(out)
    return Path()


def dots(out: Path, model: Path) -> Path:
    (out / "below").mkdir(parents=True)
    os.chdir(out / "below")
    return Path("..")


def root(out: Path, model: Path) -> Path:
    return Path("/")


def source(out: Path, model: Path) -> Path:
    return model


def parent_of_source(out: Path, model: Path) -> Path:
    return model.parent


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
    write_checkpoint(out, {**CONFIG, "mine": True}, TRUNK)
    return out


def the_same_model_again(out: Path, model: Path) -> Path:
    shutil.copytree(model, out)
    return out


def with_notes(out: Path, model: Path) -> Path:
    (out / "notes.txt").write_text("mine")
    return out


def with_folder(out: Path, model: Path) -> Path:
    (out / "checkpoint-100").mkdir()
    return out


def with_link(out: Path, model: Path) -> Path:
    (out / "tokenizer.json").unlink()
    (out / "tokenizer.json").symlink_to(model / "tokenizer.json")
    return out


def with_hidden(out: Path, model: Path) -> Path:
    (out / ".env").write_text("secret")
    return out


def with_more_weights(out: Path, model: Path) -> Path:
    (out / "adapter.safetensors").write_text("mine")
    return out


def damaged_mark(out: Path, model: Path) -> Path:
    out.mkdir()
    (out / PROVENANCE).write_text("[]")
    (out / "mine.bin").write_text("x")
    return out


BEFORE = (home, parent_of_home, working_directory, dots, root, source, parent_of_source, link_to_source, repository,
          repository_worktree, another_model, the_same_model_again, damaged_mark)  # fmt: skip
AFTER = (with_notes, with_folder, with_link, with_hidden, with_more_weights)
"""What the user has put into an output."""


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("target", [*BEFORE, *AFTER], ids=lambda each: each.__name__)
def test_what_is_never_replaced(
    command: str,
    target: Callable[[Path, Path], Path],
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path / "models")
    out, line = tmp_path / "out", COMMANDS[command](model)
    if target in AFTER:
        assert main([*line, "-o", str(out)]) == 0
    asked = target(out, model)
    before = tree(tmp_path)
    assert main([*line, "-o", str(asked), "--force"]) == 2
    assert "give --out another" in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS)
def test_its_own_output_is_replaced(command: str, model: Path, tmp_path: Path) -> None:
    out, line = tmp_path / "out", [*COMMANDS[command](model), "-o", str(tmp_path / "out")]
    assert main(line) == 0
    first = tree(out)
    assert main(line) == 2
    (model / "tokenizer.json").rename(model / "merges.txt")  # the source has changed since
    assert main([*line, "--force"]) == 0
    assert tree(out).keys() == {"merges.txt" if name == "tokenizer.json" else name for name in first}
    shutil.rmtree(out)
    out.mkdir()
    assert main([*line, "--force"]) == 0  # an empty directory
