"""Damaged heads and checkpoints, as found in the wild: the verdict and its reason."""

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_inspect import write_gguf
from test_inspect_drafters import DRAFTERS, write_drafter
from zoo import SIZES, ZOO, H, V, config_of, heads, trunk, write

from headstart.cli.main import main
from headstart.core import Report
from headstart.errors import ModelError
from headstart.formats.safetensors import save
from headstart.formats.safetensors_file import read_file
from headstart.hub import HEADS
from headstart.tools.inspect import run as inspect
from headstart.tools.inspect.run import InspectOptions
from tests.fuzz.checkpoints import failures

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
PROJECTION = "model.layers.4.self_attn.o_proj.weight"


def inspect_report(folder: Path) -> Report:
    return inspect.run(InspectOptions(model=str(folder)))


def verdict_of(folder: Path) -> tuple[str, str]:
    head = inspect_report(folder).data["heads"]
    return head["verdict"], head["reason"]


def write_fp8_head(folder: Path, *scales: tuple[str, str, tuple[int, ...]], dtype: str = "F8_E4M3") -> Path:
    """A complete head with one FP8 matrix and extra tensors `scales`: (suffix of the matrix's name, dtype, shape)."""
    entry = ZOO["deepseek_v3"]
    tensors = trunk(entry) | heads(entry)
    tensors[PROJECTION] = (dtype, tensors[PROJECTION][1])
    tensors |= {f"{PROJECTION}{name}": (kind, shape) for name, kind, shape in scales}
    return write(folder, {**config_of(entry), **FP8}, tensors)


def test_quantized_matrix_without_valid_scales_is_partial(tmp_path: Path) -> None:
    scale = ("_scale_inv", "F32", (1, 1))
    assert verdict_of(write_fp8_head(tmp_path / "whole", scale))[0] == "alive"
    for name, scales in {
        "none": (),
        "input": (("_input_scale", "F32", ()),),
        "two blocks": (("_scale_inv", "F32", (2, 1)),),
        "whole numbers": (("_scale_inv", "I32", (1, 1)),),
    }.items():
        verdict, reason = verdict_of(write_fp8_head(tmp_path / name, *scales))
        assert verdict == "partial" and f"{PROJECTION} is" in reason and "scale" in reason, name
    verdict, reason = verdict_of(write_fp8_head(tmp_path / "ids", dtype="I8"))
    assert (verdict, f"{PROJECTION} is I8, but a weight is wanted" in reason) == ("partial", True)


def test_bytes_outside_tensors_are_refused(tmp_path: Path) -> None:
    save(tmp_path / "model.safetensors", {"a": np.ones(4, np.float32), "b": np.ones(4, np.float32)})
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
    whole = (tmp_path / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    (tmp_path / "model.safetensors").write_bytes(whole + b"more")
    with pytest.raises(ModelError, match="has 4 bytes after its last tensor"):
        inspect_report(tmp_path)
    header = whole[8 : 8 + size].replace(b"[16,32]", b"[20,36]")
    (tmp_path / "model.safetensors").write_bytes(whole[:8] + header + whole[8 + size :] + b"more")
    with pytest.raises(ModelError, match=r"bytes 16\.\.20 belong to no tensor"):
        inspect_report(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in DRAFTERS if kind.startswith("xllm")])
def test_xllm_module_with_a_missing_tensor_is_partial(tmp_path: Path, kind: str) -> None:
    config, shapes = DRAFTERS[kind]
    for number, name in enumerate(shapes):
        rest = {other: ("BF16", shape) for other, shape in shapes.items() if other != name}
        assert verdict_of(write(tmp_path / str(number), {**SIZES, **config}, rest))[0] == "partial", name


def test_reduced_vocabulary_needs_a_valid_d2t(tmp_path: Path) -> None:
    config, shapes = DRAFTERS["eagle3"]
    tensors = {name: ("BF16", shape) for name, shape in shapes.items() if name != "d2t"}
    bare = write(tmp_path / "bare", {**SIZES, **config}, tensors)
    assert verdict_of(bare)[0] == "partial" and "d2t" in verdict_of(bare)[1]
    for name, ids in {"outside": [V] * 50, "twice": [0, -1] + [0] * 48, "below": [-1] + [0] * 49}.items():
        folder = write_drafter(tmp_path / name, "eagle3")
        rest = {other: np.zeros(shape, np.float32) for other, shape in shapes.items() if other != "d2t"}
        save(folder / "model.safetensors", {**rest, "d2t": np.array(ids, np.int64)})
        verdict, reason = verdict_of(folder)
        assert verdict == "mismatch" and "d2t maps" in reason, name


@pytest.mark.parametrize(("changes", "words"), [
    ({"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": V}}, "mask_token_id is 96"),
    ({"mask_token_id": -1}, "mask_token_id is -1"),
    ({"block_size": 0}, "block_size is 0"),
    ({"dflash_config": {"target_layer_ids": [1, 1]}}, r"layers that it reads are \[1, 1\]"),
    ({"draft_vocab_size": 2 * V}, "draft vocabulary has 192 tokens"),
])  # fmt: skip
def test_impossible_drafter_configs_are_mismatches(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    verdict, reason = verdict_of(write_drafter(tmp_path, "dflash", **changes))
    assert verdict == "mismatch" and re.search(words, reason)


def test_verdicts_of_damaged_gguf_modules(tmp_path: Path) -> None:
    assert verdict_of(write_gguf(tmp_path / "half.gguf", 1, joined=H))[0] == "mismatch"
    assert verdict_of(write_gguf(tmp_path / "bare.gguf", 1, "shared_head_norm"))[0] == "partial"
    verdict, reason = verdict_of(write_gguf(tmp_path / "m.gguf", 0))
    assert verdict == "undeclared" and "all 8 tensors" in reason


def test_verdicts_of_original_medusa_heads(tmp_path: Path) -> None:
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1}
    tensors = {f"{i}.0.linear.{name}": ("F16", shape) for i in range(2) for name, shape in MEDUSA.items()}
    tensors |= {f"{i}.1.weight": ("F16", (V, H)) for i in range(2)}
    assert verdict_of(write(tmp_path / "whole", config, tensors))[0] == "alive"
    for number, name in enumerate(tensors):
        rest = {other: value for other, value in tensors.items() if other != name}
        assert verdict_of(write(tmp_path / str(number), config, rest))[0] == "partial", name
    other = tensors | {"1.0.linear.weight": ("F16", (H, H + 1))}
    assert verdict_of(write(tmp_path / "other", config, other))[0] == "mismatch"


MEDUSA = {"weight": (H, H), "bias": (H,)}


@pytest.mark.parametrize("value", [-5, 0, 2**60, True])
def test_impossible_layer_counts_are_refused(tmp_path: Path, value: int) -> None:
    entry = ZOO["mimo"]
    folder = write(tmp_path, {**config_of(entry), "num_hidden_layers": value}, trunk(entry) | heads(entry))
    with pytest.raises(ModelError, match="num_hidden_layers is"):
        inspect_report(folder)


def test_speculation_of_generation_config_is_reported(tmp_path: Path) -> None:
    folder = write(tmp_path, {**SIZES, "model_type": "llama"}, trunk(ZOO["mimo"]))
    asked = {"speculative_decoding": {"method": "mtp", "num_speculative_tokens": 3}, "use_mtp": True, "temperature": 1}
    (folder / "generation_config.json").write_text(json.dumps(asked))
    report = inspect_report(folder)
    assert report.data["speculation"] == {key: asked[key] for key in ("speculative_decoding", "use_mtp")}
    assert "generation_config.json asks for speculation" in "\n".join(report.lines)


def test_config_without_weights_is_unchecked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(ZOO["qwen3_5"])))
    (tmp_path / "pytorch_model.bin").write_bytes(b"never opened")
    assert verdict_of(tmp_path)[0] == "unchecked" and "promises 1 MTP module" in verdict_of(tmp_path)[1]
    assert main(["inspect", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    assert "MTP: UNCHECKED" in page and not re.search("missing|lm_head|total", page)
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, "model_type": "llama"}))
    assert verdict_of(tmp_path)[:2] == ("none", "the config promises none; there are no weights here to check")
    assert re.search("does not run it: .*convert it to safetensors", "\n".join(inspect_report(tmp_path).lines))
    (tmp_path / "pytorch_model.bin").unlink()  # pickles of heads are read
    (tmp_path / "config.json").write_text(json.dumps({**SIZES, **DRAFTERS["eagle3"][0]}))
    assert verdict_of(tmp_path)[0] == "unchecked" and "EAGLE-3" in verdict_of(tmp_path)[1]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_named_pipes_are_refused(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path, {**SIZES, "model_type": "llama"}, trunk(ZOO["mimo"]))
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(ModelError, match="cannot read"):
        inspect_report(folder)


@pytest.mark.slow
def test_mutated_checkpoints_get_the_right_verdict(fuzz: int) -> None:
    assert list(failures(seed=1, numbers=range(65 * fuzz), tools=fuzz > 1)) == []


def test_model_is_found_by_its_alias(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", "qwen3_5-tiny"]) == 0 and "MTP: ALIVE" in capsys.readouterr().out


def test_shipped_head_with_a_missing_tensor_is_partial(tmp_path: Path) -> None:
    for source in (path for path in HEADS.iterdir() if (path / "config.json").exists()):
        assert verdict_of(source)[0] == "alive"
        tensors = {name: (each.dtype, each.shape) for name, each in read_file(source / "model.safetensors").items()}
        lost = next(name for name in tensors if name.endswith("q_proj.weight"))
        del tensors[lost]
        folder = write(tmp_path / source.name, json.loads((source / "config.json").read_text()), tensors)
        assert verdict_of(folder)[0] == "partial" and "self_attn.q_proj.weight" in verdict_of(folder)[1]
