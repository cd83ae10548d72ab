"""GPTQ, AWQ and packed compressed-tensors: values by the definition of each format, and the resulting types."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support import family_of, make as make_engine, model_at, prompt_of, request, run
from tiny_models import write_model

from headstart.errors import ModelError
from headstart.formats.base import make_tensor
from headstart.formats.quantization import readable, readable_shapes

OUT, IN, GROUP = 48, 96, 32
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Weight:
    """codes [out, in], zeros and scales [out, groups], and the group of each column."""

    codes: Ints
    zeros: Ints
    scales: NDArray[np.float32]
    groups: Ints

    def values(self) -> NDArray[np.float32]:
        return np.float32((self.codes - self.zeros[:, self.groups]) * self.scales[:, self.groups])


def make_weight(
    *, bits: int = 4, symmetric: bool = True, group: int = GROUP, mixed: bool = False, out: int = OUT
) -> Weight:
    rng, count = np.random.default_rng(3), IN // group
    groups = np.arange(IN) // group
    zeros = np.full((out, count), 1 << bits - 1) if symmetric else rng.integers(1, 1 << bits, (out, count))
    scales = rng.uniform(0.005, 0.02, (out, count)).astype(np.float16).astype(np.float32)
    return Weight(
        rng.integers(0, 1 << bits, (out, IN)), zeros, scales, rng.permutation(groups) if mixed else groups
    )  # fmt: skip


def pack_words(numbers: Ints, bits: int, order: tuple[int, ...] = ()) -> NDArray[np.int32]:
    """[n, m] -> [n, m * bits / 32], packed from the lowest bits."""
    count = 32 // bits
    parts = numbers.reshape(len(numbers), -1, count).astype(np.uint32)
    whole = np.zeros(parts.shape[:2], np.uint32)
    for i in range(count):
        whole |= parts[..., order[i] if order else i] << np.uint32(bits * i)
    return whole.view(np.int32)


def gptq(w: Weight, bits: int, *, ordered: bool = False) -> dict[str, Any]:
    found = {
        "qweight": pack_words(w.codes, bits).T, "qzeros": pack_words(w.zeros.T - 1, bits),
        "scales": w.scales.T.astype(np.float16),
    }  # fmt: skip
    return found | ({"g_idx": w.groups.astype(np.int32)} if ordered else {})


def awq(w: Weight, bits: int) -> dict[str, Any]:
    return {
        "qweight": pack_words(w.codes.T, 4, AWQ_ORDER), "qzeros": pack_words(w.zeros.T, 4, AWQ_ORDER),
        "scales": w.scales.T.astype(np.float16),
    }  # fmt: skip


def packed(w: Weight, bits: int, *, zeros: bool = False, ordered: bool = False) -> dict[str, Any]:
    found = {
        "weight_packed": pack_words(w.codes, bits), "weight_scale": w.scales.astype(np.float16),
        "weight_shape": np.array([len(w.codes), IN], np.int64),
    }  # fmt: skip
    found |= {"weight_zero_point": pack_words(w.zeros.T, bits).T} if zeros else {}
    return found | ({"weight_g_idx": w.groups.astype(np.int32)} if ordered else {})


PACKED = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 4}}}}
PACKED8 = {"quant_method": "compressed-tensors", "config_groups": {"g": {"weights": {"num_bits": 8}}}}
GPTQ, GPTQ8 = {"quant_method": "gptq", "bits": 4}, {"quant_method": "gptq", "bits": 8}
CASES: dict[str, tuple[Weight, dict[str, Any], dict[str, Any], str]] = {
    "gptq": (w := make_weight(), gptq(w, 4, ordered=True), GPTQ, "Q4_0"),
    "gptq, zero points": (w := make_weight(symmetric=False), gptq(w, 4), GPTQ, "U4:32:F16"),
    "gptq, act-order": (w := make_weight(mixed=True), gptq(w, 4, ordered=True), GPTQ, "F16"),
    "gptq, 8 bits": (w := make_weight(bits=8), gptq(w, 8), GPTQ8, "Q8_0"),
    "gptq, a row's scale": (w := make_weight(group=IN), gptq(w, 4), GPTQ, "Q4_0"),
    "gptq, zero points of a row": (w := make_weight(symmetric=False, group=IN), gptq(w, 4), GPTQ, "U4:64:F16"),
    "gptq, groups of 16": (w := make_weight(group=16), gptq(w, 4), GPTQ, "F16"),
    "awq": (w := make_weight(symmetric=False), awq(w, 4), {"quant_method": "awq"}, "U4:32:F16"),
    "awq, symmetric": (w := make_weight(), awq(w, 4), {"quant_method": "awq"}, "Q4_0"),
    "packed": (w := make_weight(), packed(w, 4), PACKED, "Q4_0"),
    "packed, zero points": (w := make_weight(symmetric=False), packed(w, 4, zeros=True), PACKED, "U4:32:F16"),
    "packed, 8 bits": (w := make_weight(bits=8), packed(w, 8), PACKED8, "Q8_0"),
    "packed, 8 bits beside groups of 4": (w := make_weight(bits=8), packed(w, 8), PACKED, "Q8_0"),
    "packed, act-order": (w := make_weight(mixed=True), packed(w, 4, ordered=True), PACKED, "F16"),
}


def tensors(parts: dict[str, Any]) -> dict[str, Any]:
    names = {"int32": "I32", "int64": "I64", "float16": "F16", "float32": "F32"}
    return {
        f"a.{word}": make_tensor(
            f"a.{word}", part.shape, names[part.dtype.name], np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        )
        for word, part in parts.items()
    }


@pytest.mark.parametrize("case", CASES)
def test_integer_values_match_the_format(case: str) -> None:
    expected, parts, settings, dtype = CASES[case]
    read = readable(tensors(parts), {"quantization_config": settings})
    told = None if "weight_shape" in parts else {"a.weight": (OUT, IN)}
    assert readable_shapes(tensors(parts), {"quantization_config": settings}) == told
    assert list(read) == ["a.weight"]
    found = read["a.weight"]
    assert (found.shape, found.dtype) == ((OUT, IN), dtype)
    values = expected.values()
    wanted = values.astype(np.float16).astype(np.float32) if dtype == "F16" else values
    np.testing.assert_array_equal(found.float32(), wanted)
    rows = np.array([7, 3, 40, 8])
    np.testing.assert_array_equal(found.take_rows(rows).float32(), wanted[rows])


BAD: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no scales": ({k: v for k, v in gptq(make_weight(), 4).items() if k != "scales"}, GPTQ, "has no scales"),
    "groups that do not fit": ({**gptq(make_weight(), 4), "scales": np.ones((5, OUT), np.float16)}, GPTQ, "do not fit"),
    "a map out of range": (
        {**gptq(make_weight(), 4), "g_idx": np.full(IN, 3, np.int32)}, GPTQ, "of groups 3 to 3, but it has 3"),
    "scales that are NaN": (
        {**gptq(make_weight(), 4), "scales": np.full((3, OUT), np.nan, np.float16)}, GPTQ, "are not all numbers"),
    "a packed map below 0": (
        {**packed(make_weight(), 4), "weight_g_idx": np.full(IN, -1, np.int32)}, PACKED, "of groups -1 to -1"),
    "packed groups": ({**packed(make_weight(), 4), "weight_scale": np.ones((OUT, 5), np.float16)}, PACKED, "5 groups"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_tensors_are_refused_in_one_line(case: str) -> None:
    parts, settings, message = BAD[case]
    with pytest.raises(ModelError, match=message) as error:
        readable(tensors(parts), {"quantization_config": settings})["a.weight"].float32()
    assert "\n" not in error.value.message


def test_gptq_model_equals_its_float_copy(tmp_path: Path) -> None:
    """All matrices of the layers are GPTQ; embedding, norms and LM head are plain, as published."""
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "head_dim": 16}
    config, arrays = family_of("llama").tiny(**sizes)
    stored: dict[str, Any] = {}
    plain: dict[str, Any] = {}
    rng = np.random.default_rng(5)
    for name, array in arrays.items():
        if not name.endswith("_proj.weight"):
            stored[name] = plain[name] = array
            continue
        out, columns = array.shape
        scales = rng.uniform(0.01, 0.03, (out, columns // 32)).astype(np.float16).astype(np.float32)
        zeros = np.full(scales.shape, 8)
        w = Weight(rng.integers(0, 16, array.shape), zeros, scales, np.arange(columns) // 32)
        plain[name] = w.values()
        stored |= {name.replace("weight", word): part for word, part in gptq(w, 4).items()}
    texts = []
    for which, kept, settings in (("gptq", stored, {"quantization_config": GPTQ}), ("plain", plain, {})):
        folder = write_model(tmp_path / which, {**config, **settings}, kept)
        engine = make_engine(model_at(folder), dtype="float32", drafter="none")
        texts.append(run(engine, [request(prompt_of(12, 8), max_tokens=16, stops=())])["r", 0].tokens)
    assert texts[0] == texts[1]


@pytest.mark.parametrize("case", CASES)
def test_native_kernels_keep_every_value(case: str) -> None:
    packing = pytest.importorskip("headstart.kernels.native.packing")
    native = pytest.importorskip("headstart.kernels.native._native")
    _, parts, settings, dtype = CASES[case]
    found = readable(tensors(parts), {"quantization_config": settings})["a.weight"]
    pool = native.ThreadPool(1)
    matrix = packing.pack(found, pool)
    np.testing.assert_array_equal(packing.dequantize(matrix, pool), found.float32())
    assert matrix.kind == {"F16": 1, "Q8_0": 3}.get(dtype, 4)
