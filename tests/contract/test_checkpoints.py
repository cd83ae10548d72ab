"""Tiny models in published forms: GGUF, FP8 in blocks, stacked experts, a multimodal wrapper.

Logits in float32 equal those of the plain safetensors model."""

import re
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
from tiny_models import write_model
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from headstart.core import Span
from headstart.engine.load import Model
from headstart.errors import ModelError
from headstart.formats.base import make_tensor
from headstart.formats.quantization import readable
from headstart.formats.safetensors import save
from headstart.models.small import Arrays

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CHANGES: dict[str, dict[str, Any]] = {
    "glm4_moe": {}, "deepseek_v3": {"rope_scaling": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    "qwen3_moe": {"mlp_only_layers": []}, "smollm3": {"no_rope_layers": None},
}  # fmt: skip
HYBRID = ("qwen3_5", "qwen3_5_moe", "qwen3_next")
FILES: list[tuple[str, dict[str, Any], bool]] = [
    *((family, changes, True) for family, changes in CHANGES.items()),
    *((family, {}, listed) for family in HYBRID for listed in (True, False)),
    ("lfm2", {}, True), ("lfm2_moe", {}, True),  # short convolutions
    ("gpt_oss", {"rope_scaling": {**YARN, "truncate": False}}, True),  # files do not state that the ramp is not rounded
]  # fmt: skip
TOKENS = prompt_of(80, 1)


def logits_of(model: Model) -> Tensor:
    return logits_in_chunks(make(model, dtype="float32", drafter="none"), TOKENS, 70, 1)


def native_logits(path: Path) -> NDArray[np.float32]:
    """Logits [T, V] of one pass."""
    engine = make(model_at(path, "native"), backend="native", block_size=16, dtype="float32", drafter="none")
    return np.array(engine.runner.forward([Span(new_sequence(engine, TOKENS), 0, len(TOKENS), len(TOKENS))]).logits)


@pytest.fixture(params=CHANGES)
def tiny(request: pytest.FixtureRequest) -> tuple[dict[str, Any], Arrays]:
    return family_of(request.param).tiny(**CHANGES[request.param])


# llama.cpp.


@pytest.mark.slow
@pytest.mark.parametrize(("family", "changes", "listed"), FILES)
def test_gguf_files_of_llama_cpp_equal_the_checkpoint(
    family: str, changes: dict[str, Any], listed: bool, tmp_path: Path
) -> None:
    tiny = family_of(family).tiny(**changes)
    plain = model_at(write_model(tmp_path / "plain", *tiny))
    found = model_at(write_gguf(tmp_path / "model.gguf", *tiny, listed=listed))
    most = 2e-5 if family in (*HYBRID, "lfm2", "lfm2_moe") else 1e-5
    assert float((logits_of(found) - logits_of(plain)).abs().max()) <= most
    if plain.head:
        assert replace(found.head.spec, layer=None) == replace(plain.head.spec, layer=None)  # eps: float32
    for name in plain.weights.tensors:
        if name.startswith("mtp.") and not re.search(r"\.experts\.|\.kv_b_proj", name):  # stored in another form
            both = (each.weights.tensors[name].float32() for each in (found, plain))
            np.testing.assert_array_equal(*both, err_msg=name)


@pytest.mark.parametrize("write", [write_model, write_gguf])
def test_two_mtp_modules_share_the_projection(write: Any, tmp_path: Path) -> None:
    """Draft step i runs module i % 2, each with its own block."""
    config, arrays = family_of("qwen3_5").tiny(mtp_num_hidden_layers=2)
    head = model_at(write(tmp_path / "model.gguf", config, arrays)).head
    first, second = head.modules
    assert head.spec.num_modules == 2 and (first.projection.weight == second.projection.weight).all()
    assert not (first.block.input_norm.weight == second.block.input_norm.weight).all()


@pytest.mark.parametrize("kind", [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1])
def test_quantized_experts_keep_their_values(kind: gguf.GGMLQuantizationType, tmp_path: Path) -> None:
    packing = pytest.importorskip("headstart.kernels.native.packing", exc_type=ImportError)
    config, arrays = family_of("qwen3_moe").tiny(hidden_size=64, moe_intermediate_size=32, mlp_only_layers=[])
    path = write_gguf(tmp_path / "model.gguf", config, arrays, quantized=kind)
    ours, theirs = (model_at(path, backend).decoder.layers[2].mlp.experts for backend in ("native", "reference"))
    for name in ("gate", "up", "down"):
        for matrix, expected in zip(getattr(ours, name), getattr(theirs, name), strict=True):
            assert matrix.kind == {"Q8_0": 3, "Q4_1": 4}[kind.name]
            np.testing.assert_array_equal(packing.dequantize(matrix, packing.ThreadPool(1)), expected)


def test_mxfp4_stacks_match_transformers() -> None:
    """gpt-oss's blocks [experts, out, groups, 16] and scales."""
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
    tensors["e.up_proj_scales"] = make_tensor("", (3, 40, 2), "U8", scales[..., :2].copy().reshape(-1))
    with pytest.raises(ModelError, match="MXFP4 needs one byte of scale for 16 bytes"):
        readable(tensors, {"quantization_config": {"quant_method": "mxfp4"}})


def blocks_of(array: NDArray[np.float32], size: int) -> tuple[tuple[NDArray[np.uint8], str], NDArray[np.float32]]:
    """FP8 codes and scales of a matrix; the codes are random, and define the values."""
    rows, columns = array.shape
    rng = np.random.default_rng(rows)
    codes = rng.integers(0, 0x70, array.shape, dtype=np.uint8) | rng.integers(0, 2, array.shape, dtype=np.uint8) << 7
    scales = rng.uniform(0.5, 1.5, (-(-rows // size), -(-columns // size))).astype(np.float32) * 1e-2
    return (codes, "F8_E4M3"), scales


@pytest.mark.slow
def test_fp8_blocks_equal_their_values(
    tiny: tuple[dict[str, Any], Arrays], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compared with the model of the codes' float values. Paths that multiply FP8 with bfloat16 rows have a larger
    tolerance."""
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
    quantization = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [size, size]}}
    folder = write_model(tmp_path / "fp8", config | quantization, plain)
    save(folder / "model.safetensors", quantized, {"format": "pt"})
    found = model_at(folder)
    assert float((logits_of(found) - logits_of(expected)).abs().max()) <= 1e-5
    assert (found.head is None) == (expected.head is None)
    native = pytest.importorskip("headstart.kernels.native.backend")
    from native_ops import PAIRED

    paths = native.paths()
    for path, most in ((paths[0], 0.2), (next(each for each in paths if each not in PAIRED), 1e-2)):
        monkeypatch.setattr(native, "paths", lambda portable_bits, path=path: [path])
        ours, theirs = native_logits(folder), native_logits(tmp_path / "plain")
        assert np.abs(ours - theirs).max() <= most, path  # keys and values are bfloat16, on some paths queries as well

    bare = {name: each for name, each in quantized.items() if not name.endswith("o_proj.weight_scale_inv")}
    save(folder / "model.safetensors", bare)
    with pytest.raises(ModelError, match=r"o_proj\.weight is F8_E4M3, but has no scales"):
        model_at(folder)


def test_stacked_experts_equal_single_experts(tmp_path: Path) -> None:
    """gate and up in one tensor, as some families publish them."""
    config, arrays = family_of("glm4_moe").tiny()
    expected = logits_of(model_at(write_model(tmp_path / "plain", config, arrays)))
    count, stacked = config["n_routed_experts"], {}
    for name, array in arrays.items():
        prefix, split, rest = name.partition(".experts.")
        if not split:
            stacked[name] = array
        elif rest == "0.gate_proj.weight":
            gate, up, down = (
                np.stack([arrays[f"{prefix}.experts.{e}.{part}_proj.weight"] for e in range(count)])
                for part in ("gate", "up", "down")
            )
            stacked[f"{prefix}.experts.gate_up_proj"] = np.concatenate([gate, up], 1)
            stacked[f"{prefix}.experts.down_proj"] = down
    found = model_at(write_model(tmp_path / "stacked", config, stacked))
    assert float((logits_of(found) - expected).abs().max()) <= 1e-6


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_config_selects_the_recycled_state(family: str, tmp_path: Path) -> None:
    config, arrays = family_of(family).tiny(num_hidden_layers=2)
    for recycled, changes in (("post_norm", {}), ("pre_norm", {"mtp_recycle": "pre_norm"})):
        assert model_at(write_model(tmp_path / recycled, config | changes, arrays)).head.spec.recycle == recycled


@pytest.mark.slow
@pytest.mark.parametrize("family", HYBRID)
def test_text_part_of_multimodal_checkpoints_is_loaded(family: str, tmp_path: Path) -> None:
    """Sizes in text_config, tensors under model.language_model, and a vision part that is ignored."""
    config, arrays = family_of(family).tiny()
    outside = ("model_type", "architectures", "tie_word_embeddings", "eos_token_id", "torch_dtype")
    inner = {key: value for key, value in config.items() if key not in outside}
    wrapper = {key: config[key] for key in (*outside, "vocab_size")} | {
        "model_type": config["model_type"].removesuffix("_text"),
        "text_config": {**inner, "model_type": config["model_type"]},
        "vision_config": {"hidden_size": 8, "num_hidden_layers": 1},
    }
    named = {name.replace("model.", "model.language_model.", 1): array for name, array in arrays.items()}
    named["model.visual.blocks.0.norm1.weight"] = np.ones(8, np.float32)
    expected = model_at(write_model(tmp_path / "plain", config, arrays))
    found = model_at(write_model(tmp_path / "wrapper", wrapper, named))
    assert found.config == expected.config and found.head is not None
    assert float((logits_of(found) - logits_of(expected)).abs().max()) <= 1e-5
