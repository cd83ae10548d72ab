"""The export target of docs/extend as a plug-in file."""

from pathlib import Path

import pytest
from seams import plugged_in
from tiny_models import write_tiny

from headstart.cli.main import main
from headstart.formats.safetensors_file import read_file


def test_export_plug_in_is_found_by_its_file_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out = write_tiny("mimo", tmp_path / "model"), tmp_path / "out"
    with plugged_in(tmp_path, "exports"):
        assert main(["export", str(model), "--to", "bare-head", "-o", str(out)]) == 0
    whole, head = read_file(model / "model.safetensors"), read_file(out / "head.safetensors")
    assert head.keys() == {name for name in whole if "mtp_layers" in name}
    assert all(tensor.data.tobytes() == whole[name].data.tobytes() for name, tensor in head.items())
    assert f"use it with: ls {out}" in capsys.readouterr().out
    assert main(["export", str(model), "--to", "bare-head", "-o", str(out)]) == 2
    assert "choose one of gguf, slice, speculators, vllm-dflash" in capsys.readouterr().err
