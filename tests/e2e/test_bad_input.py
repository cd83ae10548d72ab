"""Every kind of bad input: one clear line that names the value, a hint, exit code 2, nothing on stdout."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headstart.cli.main import main
from headstart.core import SamplingParams
from headstart.errors import UsageError
from headstart.formats import safetensors, safetensors_file
from headstart.heads.base import HeadSpec
from headstart.heads.files import write_head
from headstart.heads.kind import HeadCheckpoint
from headstart.params import parameters
from headstart.tools.tiny import write_tiny


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny("llama", tmp_path / "tiny")


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error text of a command that must exit 2 with one line, a hint or none, and no traceback."""
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.strip().splitlines()
    assert lines[0].startswith("headstart: error: ")
    assert len(lines) <= 2
    assert len(lines) == 1 or lines[1].startswith("hint: ")
    assert "Traceback" not in captured.err
    return captured.err


def generate(model: Path | str, *more: str, prompt: str = "hello") -> tuple[str, ...]:
    return ("generate", str(model), "--prompt", prompt, "--max-tokens", "4", *more)


def test_missing_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "nowhere" in refused(capsys, *generate(tmp_path / "nowhere"))


def test_unknown_alias_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean smollm2-135m-mtp" in refused(capsys, *generate("smollm2-135-mtp"))


def test_no_model_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "notes.txt"
    file.write_text("not a model")
    assert "notes.txt" in refused(capsys, *generate(file))


def test_truncated_safetensors(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    assert "model.safetensors" in refused(capsys, *generate(tiny))


def test_corrupt_gguf(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + b"\xff" * 64)
    assert "model.gguf" in refused(capsys, *generate(file))


def test_config_is_not_json(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    (tiny / "config.json").write_text("{")
    assert "config.json" in refused(capsys, *generate(tiny))


def test_unknown_architecture(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "model_type": "mamba9"}))
    assert "mamba9" in refused(capsys, *generate(tiny))


def test_missing_tensor(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    tensors = {name: t.numpy() for name, t in safetensors_file.read_file(tiny / "model.safetensors").items()}
    tensors.pop("model.layers.1.mlp.up_proj.weight")
    safetensors.save(tiny / "model.safetensors", tensors)
    assert "layers.1.mlp.up_proj.weight" in refused(capsys, *generate(tiny))


def test_config_contradicts_tensors(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    error = refused(capsys, *generate(tiny))
    assert "96" in error
    assert "80" in error


def other_head(folder: Path, hidden_size: int, vocab_size: int) -> Path:
    """A head made for another trunk; its tensors are never reached."""
    head = HeadCheckpoint(spec=HeadSpec(), hidden_size=hidden_size, vocab_size=vocab_size, trunk="another")
    write_head(folder, head, {"mtp.0.norm.weight": np.ones(hidden_size, np.float32)})
    return folder


@pytest.mark.parametrize(("hidden", "vocab", "named"), [(64, 131, "hidden_size is 64"), (48, 999, "vocab_size is 999")])
def test_head_of_another_trunk(
    capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path, hidden: int, vocab: int, named: str
) -> None:
    head = other_head(tmp_path / "head", hidden, vocab)
    assert named in refused(capsys, *generate(tiny, "--head", str(head)))


def test_head_that_is_no_head(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    assert "without an MTP head" in refused(capsys, *generate(tiny, "--head", str(tiny)))
    assert "nothing" in refused(capsys, *generate(tiny, "--head", str(tmp_path / "nothing")))


def test_no_head_for_mtp(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    assert "no MTP head" in refused(capsys, *generate(tiny, "--drafter", "mtp"))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--depth", "17"), "17"),
        (("--depth", "-1"), "-1"),
        (("--temperature", "-0.5"), "-0.5"),
        (("--temperature", "nan"), "nan"),
        (("--top-p", "1.5"), "1.5"),
        (("--min-p", "nan"), "nan"),
        (("--drafter", "oracle"), "oracle"),
        (("--max-model-len", "100000"), "100000"),
        (("--speculative-config", '{"method": "mtp", "depth": 3}'), "depth"),
        (("--speculative-config", "{"), "JSON"),
        (("--logit-bias", '{"99999": 1}'), "99999"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], tiny: Path, options: tuple[str, ...], named: str) -> None:
    assert named in refused(capsys, *generate(tiny, *options))


def test_empty_prompt(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    assert "empty" in refused(capsys, *generate(tiny, prompt=""))


def test_prompt_longer_than_the_context(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    error = refused(capsys, *generate(tiny, "--raw", prompt="hello " * 400))
    assert "512" in error


def test_prompt_file_that_is_missing_or_no_text(capsys: pytest.CaptureFixture[str], tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    assert "prompt.txt" in refused(capsys, "generate", str(tiny), "--prompt-file", str(file))
    file.write_bytes(b"\xff\xfe\x00\xff")
    assert "prompt.txt" in refused(capsys, "generate", str(tiny), "--prompt-file", str(file))


def test_infinite_values_never_become_parameters() -> None:
    for name in [row.name for row in parameters().values() if row.kind == "number"]:
        for value in (float("nan"), float("inf"), float("-inf")):
            with pytest.raises(UsageError, match=name):
                SamplingParams(**{name: value})
