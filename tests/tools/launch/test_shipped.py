"""A head in this package that another engine could use is named, with commands that work."""

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
    """A model without MTP modules, for which the package has an EAGLE-3 head."""
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


def test_the_named_commands_make_the_engine_draft(trunk: str, capsys: pytest.CaptureFixture[str]) -> None:
    start = ["launch", "vllm", trunk, "--gpus", "none", "--dry-run"]
    assert main(start) == 0
    told = capsys.readouterr().out
    assert "# depth 0: the model has no MTP head" in told
    note = next(line for line in told.splitlines() if "tiny-eagle3" in line)
    export, launch = (shlex.split(each.strip()) for each in note.partition("for it: ")[2].split(", then "))
    assert main(export[1:]) == 0
    assert main([*launch[1:], "--gpus", "none", "--dry-run"]) == 0
    assert '"method": "eagle3", "num_speculative_tokens": 1' in capsys.readouterr().out
    assert main([*start, "--depth", "2"]) == 2
    assert shlex.join(export) in capsys.readouterr().err


def test_a_trained_head_is_exported_first(trunk: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "vllm", trunk, "--head", "heads/tiny-eagle3", "--gpus", "none", "--dry-run"]) == 2
    hint = capsys.readouterr().err.partition("hint: ")[2]
    export, launch = (shlex.split(each.strip()) for each in hint.split(", then "))
    assert main(export[1:]) == 0 and main([*launch[1:], "--gpus", "none", "--dry-run"]) == 0


def test_a_trained_head_of_a_repo_names_the_targets(
    trunk: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(prepare, "read_facts", lambda model: replace(read_facts(model), local=False))
    assert main(["launch", "sglang", trunk, "--head", "heads/tiny-eagle3", "--gpus", "none", "--dry-run"]) == 2
    hint = capsys.readouterr().err.partition("hint: ")[2]
    assert hint == "by its kind: headstart export --to vllm-eagle3 or vllm-dspark or vllm-dflash\n"


def test_a_gguf_trunk_is_written_with_its_head(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["launch", "vllm", hub.DEFAULT_MODEL, "--gpus", "none", "--dry-run"]) == 2
    export = f"headstart export {hub.DEFAULT_MODEL} --to vllm-mimo --out smollm2-135m-mtp-vllm-mimo"
    launch = "headstart launch vllm smollm2-135m-mtp-vllm-mimo -- --trust-remote-code"
    assert f"{export}, then {launch}" in capsys.readouterr().err
