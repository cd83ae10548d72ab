"""An export from one file, the text of CONTRIBUTING.md, found by its file name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from headstart import registry
from headstart.cli.main import main
from headstart.formats.safetensors_file import read_file
from headstart.tools.tiny import write_tiny

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_an_export_is_one_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, out, folder = write_tiny("mimo", tmp_path / "model"), tmp_path / "out", tmp_path / "targets"
    text = PAGE.read_text("utf-8").split("## Write an export\n")[1].split("\n## ")[0]
    folder.mkdir()
    (folder / "bare_head.py").write_text(re.findall(r"^```python\n(.*?)^```$", text, re.M | re.S)[0], "utf-8")
    with registry.search_path("exports", folder):
        assert main(["export", str(model), "--to", "bare-head", "-o", str(out)]) == 0
    whole, head = read_file(model / "model.safetensors"), read_file(out / "head.safetensors")
    assert head.keys() == {name for name in whole if "mtp_layers" in name}
    assert all(tensor.data.tobytes() == whole[name].data.tobytes() for name, tensor in head.items())
    assert f"use it with: ls {out}" in capsys.readouterr().out
    assert main(["export", str(model), "--to", "bare-head", "-o", str(out)]) == 2
    assert "choose one of gguf, speculators, vllm-eagle" in capsys.readouterr().err
