"""Invalid models, heads and options: a one-line error that names the value, exit code 2, empty stdout."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_models import write_tiny

from headstart.cli.main import main
from headstart.core import SamplingParams
from headstart.errors import UsageError
from headstart.formats import safetensors, safetensors_file
from headstart.heads.base import HeadSpec
from headstart.heads.files import write_head
from headstart.heads.kind import HeadCheckpoint
from headstart.params import parameters


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "tiny")


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Error text of a command; checks exit code 2, one line and an optional hint, no traceback."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert lines[0].startswith("headstart: error: ")
    assert len(lines) <= 2
    assert len(lines) == 1 or lines[1].startswith("hint: ")
    assert "Traceback" not in captured.err
    return captured.err


def generate(model: Path | str, *more: str) -> tuple[str, ...]:
    return ("generate", str(model), "--prompt", "hello", "--max-tokens", "4", *more)


def test_unknown_alias_has_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean smollm2-135m-mtp" in error_of(capsys, *generate("smollm2-135-mtp"))


CONFIG, WEIGHTS, REMOVED = "config.json", "model.safetensors", "model.layers.1.mlp.up_proj.weight"


def change_config(folder: Path, **changes: object) -> None:
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | changes))


def remove_tensor(folder: Path, name: str) -> None:
    tensors = {name: each.numpy() for name, each in safetensors_file.read_file(folder / WEIGHTS).items()}
    del tensors[name]
    safetensors.save(folder / WEIGHTS, tensors)


DAMAGED: dict[str, tuple[str, Callable[[Path], object], list[str]]] = {
    "absent": ("nowhere", lambda folder: None, ["nowhere"]),
    "no model": ("notes.txt", lambda folder: (folder / "notes.txt").write_text("not a model"), ["notes.txt"]),
    "cut off": ("", lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size - 1000), [WEIGHTS]),
    "gguf": ("m.gguf", lambda folder: (folder / "m.gguf").write_bytes(b"GGUF\3\0\0\0" + b"\xff" * 64), ["m.gguf"]),
    "not json": ("", lambda folder: (folder / CONFIG).write_text("{"), [CONFIG]),
    "unknown architecture": ("", lambda folder: change_config(folder, model_type="mamba9"), ["mamba9"]),
    "missing tensor": ("", lambda folder: remove_tensor(folder, REMOVED), [REMOVED.removeprefix("model.")]),
    "config against tensors": ("", lambda folder: change_config(folder, intermediate_size=96), ["96", "80"]),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_model_names_the_problem(capsys: pytest.CaptureFixture[str], tiny: Path, case: str) -> None:
    name, damage, named = DAMAGED[case]
    damage(tiny)
    error = error_of(capsys, *generate(tiny / name))
    assert all(each in error for each in named)


def other_head(folder: Path, hidden_size: int, vocab_size: int) -> Path:
    """A head for another trunk. Its tensors are never read."""
    head = HeadCheckpoint(spec=HeadSpec(), hidden_size=hidden_size, vocab_size=vocab_size, trunk="another")
    write_head(folder, head, {"mtp.0.norm.weight": np.ones(hidden_size, np.float32)})
    return folder


@pytest.mark.parametrize(("hidden", "vocab", "named"), [(64, 131, "hidden_size is 64"), (48, 999, "vocab_size is 999")])
def test_head_of_another_trunk_is_refused(
    capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path, hidden: int, vocab: int, named: str
) -> None:
    head = other_head(tmp_path / "head", hidden, vocab)
    assert named in error_of(capsys, *generate(tiny, "--head", str(head)))


def test_folder_without_a_head_is_refused(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    assert "without an MTP head" in error_of(capsys, *generate(tiny, "--head", str(tiny)))
    assert "nothing" in error_of(capsys, *generate(tiny, "--head", str(tmp_path / "nothing")))


@pytest.mark.parametrize(("options", "named"), [
    (("--max-model-len", "100000"), "100000"), (("--logit-bias", '{"99999": 1}'), "99999"),
    (("--drafter", "mtp"), "no MTP head"), (("--raw", "--prompt", "hello " * 400), "512"),
])  # fmt: skip
def test_options_that_do_not_fit_the_model_are_refused(
    capsys: pytest.CaptureFixture[str], tiny: Path, options: tuple[str, ...], named: str
) -> None:
    assert named in error_of(capsys, *generate(tiny, *options))


def test_missing_or_binary_prompt_file(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    assert "prompt.txt" in error_of(capsys, "generate", str(tiny), "--prompt-file", str(file))
    file.write_bytes(b"\xff\xfe\x00\xff")
    assert "prompt.txt" in error_of(capsys, "generate", str(tiny), "--prompt-file", str(file))


def test_non_finite_parameters_are_refused() -> None:
    for name in [row.name for row in parameters().values() if row.kind == "number"]:
        for value in (float("nan"), float("inf"), float("-inf")):
            with pytest.raises(UsageError, match=name):
                SamplingParams(**{name: value})
