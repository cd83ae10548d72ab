"""The weight quantization of docs/extend as a plug-in file: loading, inspect, plan, export."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seams import plugged_in
from support import family_of
from tiny_models import write_model

from headstart import registry
from headstart.api import LLM
from headstart.cli.main import main
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.errors import ModelError
from headstart.formats.safetensors import bfloat16
from headstart.formats.safetensors_file import read_file
from headstart.models.small import Arrays

WEIGHTS = ("--weights", "ladder")
LADDER = {"quantization_config": {"quant_method": "ladder"}}


@pytest.fixture
def ladder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with plugged_in(tmp_path_factory.mktemp("plug_ins"), "quantizations"):
        yield


def quantized_and_plain(path: Path) -> tuple[Path, Path]:
    """A tiny model with an MTP head, with quantized matrices and with the same values in bfloat16."""
    config, arrays = family_of("mimo").tiny()
    rng, stored, plain = np.random.default_rng(4), Arrays(), Arrays()
    for name, array in arrays.items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = array
            continue
        codes = rng.integers(0, 256, array.shape, dtype=np.uint8)
        low, step = -rng.random(len(codes), np.float32), rng.random(len(codes), np.float32) / 128
        base = name.removesuffix("weight")
        stored |= {f"{base}codes": codes, f"{base}low": low, f"{base}step": step}
        plain[name] = bfloat16(low[:, None] + step[:, None] * codes.astype(np.float32))
    return write_model(path / "ladder", config | LADDER, stored), write_model(path / "plain", config, plain)


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    code = main([*words, "--json"])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return dict(json.loads(captured.out))


def test_quantized_model_equals_the_plain_one(ladder: None, tmp_path: Path) -> None:
    params = SamplingParams(max_tokens=12, logprobs=5, ignore_eos=True)
    seen = []
    for folder in quantized_and_plain(tmp_path):
        done = LLM(str(folder), EngineConfig(threads=1, kv_blocks=40, drafter="mtp", depth=2)).generate(
            ["the"], params
        )[0]
        assert done.speculation.drafted
        seen.append((done.token_ids, done.logprobs))
    assert seen[0] == seen[1]


def test_inspect_and_plan_know_the_format(ladder: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored, plain = quantized_and_plain(tmp_path)
    data, expected = document(capsys, "inspect", str(stored)), document(capsys, "inspect", str(plain))
    assert data["heads"]["verdict"] == "alive"
    assert data["heads"]["modules"] == expected["heads"]["modules"]
    assert data["total"]["parameters"] == expected["total"]["parameters"]
    assert "ladder" in data["parts"]["layers"]["types"] and "ladder" in data["parts"]["mtp"]["types"]
    plan = ("--gpu", "h100", "--context", "64")
    planned, asked = document(capsys, "plan", str(stored), *plan), document(capsys, "plan", str(plain), *plan, *WEIGHTS)
    assert planned["model"]["weights"] == asked["model"]["weights"] == "ladder"


def test_export_of_a_quantized_head_equals_the_plain_one(ladder: None, tmp_path: Path) -> None:
    """Exported drafts hold equal bfloat16 tensors."""
    tensors = []
    for folder in quantized_and_plain(tmp_path):
        assert main(["export", str(folder), "-o", str(folder) + "-draft"]) == 0
        tensors.append(read_file(Path(str(folder) + "-draft") / "mtp_layer_parameters.safetensors"))
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        assert (tensor.dtype, tensor.data.tobytes()) == (tensors[1][name].dtype, tensors[1][name].data.tobytes()), name


def test_unknown_quantization_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the plug-in file, a one-line error names the quantization."""
    stored, _ = quantized_and_plain(tmp_path)
    with pytest.raises(ModelError, match="unknown quantization"):
        registry.find("quantizations", "ladder")
    assert main(["generate", str(stored), "--prompt", "a"]) == 2
    assert "quantization_config names 'ladder', which is unknown" in capsys.readouterr().err.splitlines()[0]
