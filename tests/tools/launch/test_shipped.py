"""`launch` names a shipped head that the engine can use, with commands that work."""

import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import support

from headstart import hub
from headstart.cli.main import main
from headstart.heads import files
from headstart.heads.kind import HeadCheckpoint
from headstart.layers.weights import trunk_fingerprint
from headstart.models.shipped_heads import heads_in_package
from headstart.tools.launch import prepare
from headstart.tools.launch.model_facts import read_facts


@pytest.fixture
def trunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A model without MTP modules, with an EAGLE-3 head in the package."""
    model = support.tiny_model("llama")
    spec, arrays = support.eagle3_spec(model), support.eagle3_arrays(model, support.eagle3_spec(model))
    head = HeadCheckpoint(
        spec=spec, hidden_size=model.config.hidden_size, vocab_size=model.config.vocab_size, trunk="tiny",
        trunk_fingerprint=trunk_fingerprint(model.weights.tensors),
    )  # fmt: skip
    files.write_head(tmp_path / "heads" / "tiny-eagle3", head, arrays)
    monkeypatch.setattr(hub, "HEADS", tmp_path / "heads")
    monkeypatch.chdir(tmp_path)
    heads_in_package.cache_clear()
    yield model.name
    heads_in_package.cache_clear()


def test_printed_commands_export_the_head_and_launch_with_it(trunk: str, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["launch", "vllm", trunk, "--gpus", "none", "--dry-run"]
    assert main(start) == 0
    printed = capsys.readouterr().out
    assert "# depth 0: the model has no MTP head" in printed
    note = next(line for line in printed.splitlines() if "tiny-eagle3" in line)
    export, launch = (shlex.split(each.strip()) for each in note.partition("for it: ")[2].split(", then "))
    assert main(export[1:]) == 0
    assert main([*launch[1:], "--gpus", "none", "--dry-run"]) == 0
    assert '"method": "eagle3", "num_speculative_tokens": 1' in capsys.readouterr().out
    assert main([*start, "--depth", "2"]) == 2
    assert shlex.join(export) in capsys.readouterr().err


def test_head_that_no_export_writes_is_named_with_the_reason(trunk: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "trtllm", trunk, "--gpus", "h100x1", "--dry-run"]) == 0
    note = "# note: headstart has the head tiny-eagle3 for it, but no export writes it for TensorRT-LLM"
    assert note in capsys.readouterr().out.splitlines()


def test_trained_head_gets_export_and_launch_commands(trunk: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "vllm", trunk, "--head", "heads/tiny-eagle3", "--gpus", "none", "--dry-run"]) == 2
    hint = capsys.readouterr().err.partition("hint: ")[2]
    export, launch = (shlex.split(each.strip()) for each in hint.split(", then "))
    assert main(export[1:]) == 0 and main([*launch[1:], "--gpus", "none", "--dry-run"]) == 0


def test_trained_head_for_a_hub_repo_gets_the_export_targets(
    trunk: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "read_facts", lambda model: replace(read_facts(model), local=False))
    assert main(["launch", "sglang", trunk, "--head", "heads/tiny-eagle3", "--gpus", "none", "--dry-run"]) == 2
    hint = capsys.readouterr().err.partition("hint: ")[2]
    assert hint == "by its kind: headstart export --to vllm-eagle3 or vllm-dspark or vllm-dflash\n"


def test_gguf_trunk_gets_an_export_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "vllm", hub.DEFAULT_MODEL, "--gpus", "none", "--dry-run"]) == 2
    export = f"headstart export {hub.DEFAULT_MODEL} --to vllm-mimo --out smollm2-135m-mtp-vllm-mimo"
    launch = "headstart launch vllm smollm2-135m-mtp-vllm-mimo -- --trust-remote-code"
    assert f"{export}, then {launch}" in capsys.readouterr().err
