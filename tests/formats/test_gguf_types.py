"""Tensor types of GGUF files: NVFP4 and 1-bit weights in kernel formats, types widened to float32, unreadable types."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType as Kind
from gguf_files import llama_tensors, write_gguf
from numpy.typing import NDArray
from support import family_of

from headstart import api, machine
from headstart.config import EngineConfig
from headstart.engine import load
from headstart.errors import CapacityError, ModelError
from headstart.formats import gguf_file, open_checkpoint
from headstart.formats.base import BITS, WIDENED, Tensor, make_tensor
from headstart.formats.quantization import readable, readable_shapes
from headstart.tools.inspect.run import InspectOptions, run

READ = sorted(each.name for each in Kind if each.name not in (*BITS, "Q8_1", "Q8_K"))
"""Types of blocks that files come in, and are served."""
rng = np.random.default_rng(5)


def blocks(kind: Kind, *shape: int) -> NDArray[np.uint8]:
    """Random bytes of matrices with scales of about 1."""
    columns, size = GGML_QUANT_SIZES[kind]
    found = rng.integers(0, 256, (*shape[:-1], shape[-1] // columns, size), dtype=np.uint8)
    if kind is Kind.NVFP4:
        found[..., :4] = rng.integers(0, 0x48, found[..., :4].shape)
        found[0, 0, ..., :2] = 0x7F  # stands for 0
    if kind is Kind.Q1_0:
        halves = rng.uniform(-1, 1, found.shape[:-1]).astype("<f2")
        found[..., :2] = np.ascontiguousarray(halves[..., None]).view(np.uint8)
    return found.reshape(*shape[:-1], -1)


def values(kind: Kind, raw: NDArray[np.uint8]) -> NDArray[np.float32]:
    if kind is Kind.NVFP4:
        return np.asarray(gguf.dequantize(raw, kind), np.float32)
    apart = raw.reshape(*raw.shape[:-1], -1, 18)
    signs = 2 * np.unpackbits(apart[..., 2:], axis=-1, bitorder="little").astype(np.float32) - 1
    found = np.ascontiguousarray(apart[..., :2]).view("<f2").astype(np.float32) * signs
    return found.reshape(*raw.shape[:-1], -1)


def stored(name: str, kind: str, array: NDArray[Any], shape: tuple[int, ...]) -> Tensor:
    return make_tensor(name, shape, kind, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def test_types_match_the_gguf_library() -> None:
    assert {int(kind): (kind.name, *GGML_QUANT_SIZES[kind]) for kind in Kind} == gguf_file.BLOCKS


@pytest.mark.parametrize(("kind", "count"), [(Kind.NVFP4, 0), (Kind.NVFP4, 1), (Kind.NVFP4, 3), (Kind.Q1_0, 0)])
def test_kernels_keep_every_value(kind: Kind, count: int) -> None:
    packing = pytest.importorskip("headstart.kernels.native.packing")
    shape = (3, 20, 256)
    raw, scales = blocks(kind, *shape), rng.uniform(0.5, 2, count).astype(np.float32)
    tensors = {"a.weight": stored("a.weight", kind.name, raw, shape)}
    if count:
        tensors["a.scale"] = stored("a.scale", "F32", scales, (count,))
    read = readable(tensors, {})
    assert list(read) == ["a.weight"] and readable_shapes(tensors, {}) == {"a.weight": read["a.weight"].shape}
    expected = values(kind, raw) * (scales if count else np.ones(1, np.float32)).reshape(-1, 1, 1)
    np.testing.assert_allclose(read["a.weight"].float32(), expected, rtol=2e-7)
    pool = packing.ThreadPool(1)
    for index in range(3):
        part = read["a.weight"].part(index)
        matrix = packing.pack(part, pool)
        np.testing.assert_array_equal(packing.dequantize(matrix, pool), part.float32())
        assert matrix.kind == 4


def test_scale_with_wrong_shape_is_refused() -> None:
    tensors = {
        "a.weight": stored("a.weight", "NVFP4", blocks(Kind.NVFP4, 3, 20, 64), (3, 20, 64)),
        "a.scale": stored("a.scale", "F32", np.ones(2, np.float32), (2,)),
    }
    with pytest.raises(ModelError, match=r"a\.scale \[2\] is not a scale for a\.weight \[3, 20, 64\]"):
        readable(tensors, {})


def test_only_types_without_a_kernel_are_widened() -> None:
    native = pytest.importorskip("headstart.kernels.native._native")
    for name in READ:
        columns, size = GGML_QUANT_SIZES[Kind[name]]
        tensor = stored("a.weight", name, np.zeros((32, size), np.uint8), (32, columns))
        (found,) = readable({"a.weight": tensor}, {}).values()
        assert (native.source_form(found.dtype) is None) == (name in WIDENED), name


def model_file(path: Path, kind: Kind) -> Path:
    """A Llama with one kind of matrix in this type."""
    config, arrays = family_of("llama").tiny(hidden_size=256, intermediate_size=256, num_hidden_layers=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "quantize", lambda array, kind: blocks(kind, *array.shape))
        return write_gguf(path, config, arrays, quantized=kind, part=".ffn_up.")


@pytest.mark.parametrize("kind", [Kind.Q8_1, Kind.Q8_K], ids=str)
def test_unreadable_types_are_refused_before_loading(kind: Kind, tmp_path: Path) -> None:
    path = model_file(tmp_path / "m.gguf", kind)
    reason = f"tensor layers.0.mlp.up_proj.weight is stored as {kind.name}, which cannot be read"
    report = run(InspectOptions(model=str(path)))
    assert report.data["here"]["why"] == reason and f"headstart does not run it: {reason}" in report.lines
    assert "  fix: convert the file to another quantization, such as Q8_0 or Q4_K_M" in report.lines
    with pytest.raises(ModelError, match=reason):
        api.LLM(str(path), EngineConfig(backend="reference"))


def test_widened_weights_beyond_the_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file(tmp_path / "m.gguf", Kind.IQ2_XXS)
    lines = run(InspectOptions(model=str(path))).lines
    assert "  IQ2_XXS become float32 in memory: 0.0 GB, or 0.0 with --quantization int4" in lines
    load.check_memory(open_checkpoint(path))
    monkeypatch.setattr(machine, "memory", lambda: machine.Memory(1 << 40, 1 << 30, 4 * 256 * 256 - 1))
    with pytest.raises(CapacityError, match="IQ2_XXS become float32 in memory") as caught:
        load.check_memory(open_checkpoint(path))
    assert caught.value.hint.startswith("--quantization int4 rounds them to 0.0 GB")


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["reference", "native"])
def test_nvfp4_experts_with_separate_scales_are_read(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Layout of llama.cpp's converter for ModelOpt checkpoints: a scale for each expert, and one for activations."""
    config, arrays = family_of("qwen3_moe").tiny(hidden_size=64, moe_intermediate_size=64, mlp_only_layers=[])
    count, expert_scales = config["num_experts"], dict[str, NDArray[np.float32]]()
    raws = dict[bytes, NDArray[np.uint8]]()

    def quantize(array: NDArray[np.float32], kind: Kind) -> NDArray[np.uint8]:  # the gguf package cannot quantize NVFP4
        return raws.setdefault(array.tobytes(), blocks(kind, *array.shape))

    monkeypatch.setattr(gguf, "quantize", quantize)

    def more(writer: gguf.GGUFWriter) -> None:
        for layer in range(config["num_hidden_layers"]):
            for part in ("gate", "up", "down"):
                name = f"blk.{layer}.ffn_{part}_exps"
                expert_scales[name] = rng.uniform(0.5, 2, count).astype(np.float32)
                writer.add_tensor(f"{name}.scale", expert_scales[name])
                writer.add_tensor(f"{name}.input_scale", expert_scales[name])

    path = write_gguf(tmp_path / "m.gguf", config, arrays, quantized=Kind.NVFP4, more=more)
    llm = api.LLM(str(path), EngineConfig(backend=backend, threads=1))
    tensors, plain = llm.model.weights.tensors, llama_tensors(config, arrays)
    for part, ours in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "down_proj")):
        name = f"blk.1.ffn_{part}_exps"
        expected = values(Kind.NVFP4, raws[plain[f"{name}.weight"].tobytes()]) * expert_scales[name].reshape(-1, 1, 1)
        np.testing.assert_allclose(tensors[f"layers.1.mlp.experts.{ours}.weight"].float32(), expected, rtol=2e-7)
    assert len(llm.generate([[3, 4, 5]])[0].token_ids) > 0
