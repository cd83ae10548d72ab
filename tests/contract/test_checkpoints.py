"""Tiny models in the forms that people have them in: GGUF, FP8 in blocks, stacked experts.

Each form says the same as the plain safetensors model: logits in float32.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf_files import write_gguf
from numpy.typing import NDArray
from support import family_of, make, model_at, new_sequence, prompt_of
from test_families import logits_in_chunks
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headstart.core import Span
from headstart.engine.load import Model
from headstart.errors import ModelError
from headstart.formats.base import make_tensor
from headstart.formats.quantization import readable
from headstart.formats.safetensors import save
from headstart.models.small import Arrays
from headstart.tools.tiny import write_model

YARN = {
    "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 1.0,
}  # fmt: skip
CHANGES: dict[str, dict[str, Any]] = {
    "glm4_moe": {},
    "deepseek_v3": {"rope_scaling": YARN},
    "qwen3_moe": {"mlp_only_layers": []},
    "smollm3": {"no_rope_layers": None},
}
TOKENS = prompt_of(80, 1)


def logits_of(model: Model) -> Tensor:
    return logits_in_chunks(make(model, dtype="float32", drafter="none"), TOKENS, 70, 1)


def native_logits(path: Path) -> NDArray[np.float32]:
    """[T, V] of one pass."""
    engine = make(model_at(path, "native"), backend="native", block_size=16, dtype="float32", drafter="none")
    return np.array(engine.runner.forward([Span(new_sequence(engine, TOKENS), 0, len(TOKENS), len(TOKENS))]).logits)


@pytest.fixture(params=CHANGES)
def tiny(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Arrays]:
    return family_of(request.param).tiny(**CHANGES[request.param])


# llama.cpp.


@pytest.mark.slow
def test_llama_cpp_files(tiny: tuple[dict[str, Any], Arrays], tmp_path: Path) -> None:
    plain = model_at(write_model(tmp_path / "plain", *tiny))
    found = model_at(write_gguf(tmp_path / "model.gguf", *tiny))
    assert float((logits_of(found) - logits_of(plain)).abs().max()) <= 1e-5
    if plain.head is None:
        return
    assert found.head is not None
    assert replace(found.head.spec, layer=None) == replace(plain.head.spec, layer=None)  # eps is float32 in the file
    ours, theirs = (model.weights.tensors["mtp.0.projection.weight"].float32() for model in (found, plain))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantized_experts_keep_their_values(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    packing = pytest.importorskip("headstart.kernels.native.packing", exc_type=ImportError)
    config, arrays = family_of("qwen3_moe").tiny(hidden_size=64, moe_intermediate_size=32, mlp_only_layers=[])
    path = write_gguf(tmp_path / "model.gguf", config, arrays, experts=kind)
    ours, theirs = (model_at(path, backend).decoder.layers[2].mlp.experts for backend in ("native", "reference"))
    for name in ("gate", "up", "down"):
        for matrix, expected in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            assert matrix.kind == {"Q8_0": 3, "Q4_1": 4}[kind.name]
            np.testing.assert_array_equal(packing.dequantize(matrix, packing.ThreadPool(1)), expected)


def test_sinks_windows_and_biases_in_a_gguf_file(tmp_path: Path) -> None:
    """llama.cpp's files do not say that YaRN's ramp is not rounded."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False}
    tiny = family_of("gpt_oss").tiny(rope_scaling=yarn)
    plain = model_at(write_model(tmp_path / "plain", *tiny))
    found = model_at(write_gguf(tmp_path / "model.gguf", *tiny))
    assert float((logits_of(found) - logits_of(plain)).abs().max()) <= 1e-5


# Hugging Face.


def test_stacks_in_mxfp4_keep_their_values() -> None:
    """gpt-oss's blocks [experts, out, groups, 16] and scales, against transformers' own reading."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 40, 4, 16), dtype=np.uint8)
    scales = rng.integers(100, 140, (3, 40, 4), dtype=np.uint8)
    named = {"e.up_proj_blocks": blocks, "e.up_proj_scales": scales}
    tensors = {name: make_tensor(name, array.shape, "U8", array.reshape(-1)) for name, array in named.items()}
    found = readable(tensors, {"quantization_config": {"quant_method": "mxfp4"}})["e.up_proj_blocks"]
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    expected = theirs.numpy().swapaxes(1, 2)
    np.testing.assert_array_equal(found.float32(), expected)
    np.testing.assert_array_equal(found.part(1).take_rows(np.arange(1, 40, 2)).float32(), expected[1, 1::2])
    narrow = {
        **tensors,
        "e.up_proj_scales": make_tensor("e.up_proj_scales", (3, 40, 2), "U8", scales[..., :2].copy().reshape(-1)),
    }
    with pytest.raises(ModelError, match="MXFP4 has a byte for each 16 bytes"):
        readable(narrow, {"quantization_config": {"quant_method": "mxfp4"}})


def blocks_of(array: NDArray[np.float32], size: int) -> tuple[tuple[NDArray[np.uint8], str], NDArray[np.float32]]:
    """FP8 codes and scales of a matrix; any codes will do, the values are what they say."""
    rows, columns = array.shape
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 0x70, array.shape, dtype=np.uint8) | rng.integers(0, 2, array.shape, dtype=np.uint8) << 7
    scales = rng.uniform(0.5, 1.5, (-(-rows // size), -(-columns // size))).astype(np.float32) * 1e-2
    return (codes, "F8_E4M3"), scales


@pytest.mark.slow
def test_fp8_blocks(tiny: tuple[dict[str, Any], Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model of the codes' values, written out plainly. Where FP8 meets rows in bfloat16, those round more."""
    config, arrays = tiny
    size, quantized, plain = 16, {}, {}
    for name, array in arrays.items():
        if array.ndim == 2 and (".self_attn." in name or ".mlp." in name) and not name.endswith("mlp.gate.weight"):
            (codes, dtype), scales = blocks_of(array, size)
            values = make_tensor("", codes.shape, dtype, codes.reshape(-1)).float32()
            wide = np.kron(scales, np.ones((size, size), np.float32))[: codes.shape[0], : codes.shape[1]]
            quantized |= {name: (codes, dtype), f"{name}_scale_inv": scales}
            plain[name] = values * wide
            continue
        quantized[name] = plain[name] = array
    expected = model_at(write_model(tmp_path / "plain", config, plain))
    told = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [size, size]}}
    folder = write_model(tmp_path / "fp8", config | told, plain)
    save(folder / "model.safetensors", quantized, {"format": "pt"})
    found = model_at(folder)
    assert float((logits_of(found) - logits_of(expected)).abs().max()) <= 1e-5
    assert (found.head is None) == (expected.head is None)
    native = pytest.importorskip("headstart.kernels.native.backend")
    from native_ops import PAIRED

    paths = native.paths()
    for path, most in ((paths[0], 0.2), (next(each for each in paths if each not in PAIRED), 1e-2)):
        monkeypatch.setattr(native, "paths", lambda path=path: [path])
        ours, theirs = native_logits(folder), native_logits(tmp_path / "plain")
        assert np.abs(ours - theirs).max() <= most, path  # keys and values are bfloat16, on some paths queries too

    save(
        folder / "model.safetensors", {k: v for k, v in quantized.items() if not k.endswith("o_proj.weight_scale_inv")}
    )
    with pytest.raises(ModelError, match=r"o_proj\.weight is F8_E4M3, but no scales stand beside it"):
        model_at(folder)


def test_stacked_experts(tmp_path: Path) -> None:
    """gate and up in one tensor, as other families publish them."""
    config, arrays = family_of("glm4_moe").tiny()
    expected = logits_of(model_at(write_model(tmp_path / "plain", config, arrays)))
    count, stacked = config["n_routed_experts"], {}
    for name, array in arrays.items():
        prefix, split, rest = name.partition(".experts.")
        if not split:
            stacked[name] = array
        elif rest == "0.gate_proj.weight":
            parts = {
                n: [arrays[f"{prefix}.experts.{e}.{n}_proj.weight"] for e in range(count)]
                for n in ("gate", "up", "down")
            }
            stacked[f"{prefix}.experts.gate_up_proj"] = np.concatenate(
                [np.stack(parts["gate"]), np.stack(parts["up"])], 1
            )
            stacked[f"{prefix}.experts.down_proj"] = np.stack(parts["down"])
    found = model_at(write_model(tmp_path / "stacked", config, stacked))
    assert float((logits_of(found) - expected).abs().max()) <= 1e-6


RECYCLES: dict[str, dict[str, Any]] = {"nothing": {}, "pre": {"mtp_recycle": "pre_norm"}}


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_checkpoint_says_what_is_recycled(family: str, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny(num_hidden_layers=2)
    heads = [
        model_at(write_model(tmp_path / name, config | changes, arrays)).head for name, changes in RECYCLES.items()
    ]
    assert [head and head.spec.recycle for head in heads] == ["post_norm", "pre_norm"]
