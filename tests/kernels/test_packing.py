"""Packed weights: values of the file in the blocks of the kernels."""

import numpy as np
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor, make_tensor

native = pytest.importorskip("headstart.kernels.native._native")

from headstart.kernels.native import packing  # noqa: E402

BLOCKS = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,),
    "Q2_K": (80, 82), "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "IQ3_S": (0,),
}  # fmt: skip
"""ggml type -> where its block has float16 numbers. Of IQ3_S the library's floats are taken."""


POOL = packing.ThreadPool(2)


def floats(rows: int, cols: int) -> NDArray[np.float32]:
    return np.random.default_rng(rows * cols).standard_normal((rows, cols), dtype=np.float32)


def float_tensor(values: NDArray[np.float32], dtype: str = "F32") -> Tensor:
    if dtype == "BF16":
        raw = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        raw = values.astype({"F32": "<f4", "F16": "<f2", "F64": "<f8"}[dtype])
    return make_tensor("weight", values.shape, dtype, raw.reshape(-1).view(np.uint8))


def block_tensor(dtype: str, rows: int, cols: int) -> Tensor:
    """Random bits with finite scales of either sign."""
    columns, size = GGML_QUANT_SIZES[GGMLQuantizationType[dtype]]
    rng = np.random.default_rng(cols)
    blocks = rng.integers(0, 256, (rows * cols // columns, size), dtype=np.uint8)
    for at in BLOCKS[dtype]:
        scales = rng.standard_normal(len(blocks)).astype(np.float16)
        scales[::7] = np.float16(3e-6)  # subnormal
        blocks[:, at : at + 2] = scales[:, None].view(np.uint8)
    return make_tensor("weight", (rows, cols), dtype, blocks.reshape(-1))


def bits(values: NDArray[np.float32]) -> NDArray[np.uint32]:
    return values.view(np.uint32)


@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (37, 99), (40, 130)])
@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16", "F64"])
def test_float_values_are_unchanged(dtype: str, shape: tuple[int, int]) -> None:
    tensor = float_tensor(floats(*shape), dtype)
    matrix = packing.pack(tensor, POOL)
    assert matrix.kind == {"F32": 0, "F16": 1, "BF16": 2, "F64": 0}[dtype]
    np.testing.assert_array_equal(bits(packing.dequantize(matrix, POOL)), bits(tensor.float32()))


@pytest.mark.parametrize("dtype", BLOCKS)
def test_block_values_equal_those_of_gguf(dtype: str) -> None:
    """Bit for bit, including the sign of zero."""
    cols = 160 if GGML_QUANT_SIZES[GGMLQuantizationType[dtype]][0] == 32 else 768
    tensor = block_tensor(dtype, 37, cols)
    np.testing.assert_array_equal(bits(packing.dequantize(packing.pack(tensor, POOL), POOL)), bits(tensor.float32()))


def test_all_float16_values_are_unchanged() -> None:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).reshape(256, 256)
    tensor = make_tensor("weight", halves.shape, "F16", halves.reshape(-1).view(np.uint8))
    with np.errstate(invalid="ignore"):  # signalling NaNs warn on some processors
        expected = halves.astype(np.float32)
    np.testing.assert_array_equal(packing.dequantize(packing.pack(tensor, POOL), POOL), expected)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "int8"])
def test_padding_is_zero(dtype: str) -> None:
    """Reads the padded matrix as if the padding were data."""
    quantization = "int8" if dtype == "int8" else None
    tensor = (
        block_tensor(dtype, 21, 96) if dtype in BLOCKS else float_tensor(floats(21, 96), dtype.replace("int8", "F32"))
    )
    m = packing.pack(tensor, POOL, quantization)
    values = packing.dequantize(packing.Matrix(m.kind, 32, 128, m.group, m.zero, m.scales, m.offsets, m.data), POOL)
    np.testing.assert_array_equal(values[:21, :96], packing.dequantize(m, POOL))
    assert not values[21:].any() and not values[:, 96:].any()


def test_blocks_have_the_documented_layout() -> None:
    """The order of csrc/matrix.h: scales, then nibbles of columns 4 j + i and 16 + 4 j + i."""
    tensor = block_tensor("Q4_0", 16, 64)
    panel = packing.pack(tensor, POOL).data
    scales = panel[:64].view(np.float16).reshape(2, 16)
    vectors = panel[64:].reshape(2, 4, 16, 4)
    half, vector, lane, byte = 1, 2, 5, 3
    column, both = half * 32 + 4 * vector + byte, int(vectors[half, vector, lane, byte])
    expected = tensor.float32()[lane, [column, column + 16]]
    np.testing.assert_array_equal(
        scales[half, lane].astype(np.float32) * np.array([both % 16 - 8, both // 16 - 8]), expected
    )
    tensor = block_tensor("Q8_0", 32, 64)
    data = packing.pack(tensor, POOL).data
    panel = data[data.size // 2 :]  # rows 16..31
    scale = panel[:64].view(np.float16).reshape(2, 16)[1, 3]
    quant = int(panel[64:].reshape(16, 16, 4)[9, 3, 2])
    assert np.float32(scale) * np.float32(quant - 128) == tensor.float32()[16 + 3, 9 * 4 + 2]


@pytest.mark.parametrize(("dtype", "bits_each"), [("Q5_0", 5.5), ("Q5_1", 6), ("Q5_K", 5.625), ("Q4_K", 4.625)])
def test_packed_blocks_keep_their_size(dtype: str, bits_each: float) -> None:
    assert packing.pack(block_tensor(dtype, 32, 768), POOL).num_bytes * 8 == bits_each * 32 * 768


def test_large_float_matrices_are_packed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "_FLOATS_AT_ONCE", 3 * 16 * 70)
    tensor = float_tensor(floats(101, 70), "F64")
    np.testing.assert_array_equal(packing.dequantize(packing.pack(tensor, POOL), POOL), tensor.float32())


def test_int8_rounds_to_nearest() -> None:
    values = floats(33, 100)
    matrix = packing.pack(float_tensor(values), POOL, "int8")
    assert (matrix.kind, matrix.zero, matrix.scales, matrix.offsets) == (3, 128, 0, 0)
    groups = np.pad(values, ((0, 0), (0, 28))).reshape(33, 4, 32)
    scale = (np.abs(groups).max(2, keepdims=True) / np.float32(127)).astype(np.float16).astype(np.float32)
    expected = (np.rint(groups / scale) * scale).reshape(33, 128)[:, :100]
    np.testing.assert_allclose(packing.dequantize(matrix, POOL), expected, rtol=0, atol=1e-6)


def test_int4_has_less_error_than_min_max_rounding() -> None:
    values = floats(64, 512)
    values[::2] += 3  # groups whose values all have one sign
    matrix = packing.pack(float_tensor(values), POOL, "int4")
    assert (matrix.kind, matrix.scales, matrix.offsets) == (4, 0, 1)
    groups = values.reshape(-1, 32)
    low = groups.min(1, keepdims=True)
    scale = (groups.max(1, keepdims=True) - low) / 15
    plain = np.square(np.rint((groups - low) / scale) * scale + low - groups).sum()
    assert np.square(packing.dequantize(matrix, POOL) - values).sum() < 0.88 * plain


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantization_of_extreme_values_is_finite(quantization: packing.Quantization) -> None:
    """Constant groups, zeros, partial groups, tiny and huge numbers give finite values, close to the input if
    representable."""
    values = np.zeros((20, 75), np.float32)
    values[0], values[1, :40], values[2, 74], values[3] = 0.25, -3.0, 7.0, 1e-30
    values[4, 3], values[5] = 1e30, np.linspace(-1, 1, 75)
    out = packing.dequantize(packing.pack(float_tensor(values), POOL, quantization), POOL)
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[[0, 1, 2, 3, 5]], values[[0, 1, 2, 3, 5]], atol=0.04)


@pytest.mark.parametrize(
    ("dtype", "quantization", "kind"),
    [("Q4_1", "int8", 4), ("Q4_K", "int4", 4), ("Q6_K", "int8", 7), ("Q8_0", "int4", 4)],
)
def test_quantization_never_increases_the_bits(dtype: str, quantization: packing.Quantization, kind: int) -> None:
    tensor = block_tensor(dtype, 16, 256)
    matrix = packing.pack(tensor, POOL, quantization)
    assert matrix.kind == kind
    assert np.array_equal(packing.dequantize(matrix, POOL), tensor.float32()) == (dtype != "Q8_0")


def test_packing_is_independent_of_threads() -> None:
    tensor = float_tensor(floats(200, 96))
    whole = float_tensor(floats(1000, 530))  # large enough for several threads
    np.testing.assert_array_equal(packing.dequantize(packing.pack(whole, POOL), POOL), whole.float32())
    one = packing.pack(tensor, packing.ThreadPool(1), "int4")
    np.testing.assert_array_equal(one.data, packing.pack(tensor, POOL, "int4").data)


def test_invalid_input_is_refused() -> None:
    with pytest.raises(ValueError, match="matrix"):
        packing.pack(make_tensor("norm", (8,), "F32", np.zeros(32, np.uint8)), POOL)
    with pytest.raises(ModelError, match="I32"):
        packing.pack(make_tensor("ids", (2, 2), "I32", np.zeros(16, np.uint8)), POOL)
    with pytest.raises(ValueError, match="wrong size"):
        packing.Matrix(0, 16, 64, 32, 0, 0, 0, packing.aligned_empty(64))
    with pytest.raises(ValueError, match="aligned"):
        packing.Matrix(3, 16, 64, 32, 0, 0, 0, packing.aligned_empty(1089)[1:])
    with pytest.raises(ValueError, match="row size"):
        packing.pack_rows(POOL, "Q4_0", np.zeros((16, 17), np.uint8), 32, packing.aligned_empty(576))


def test_matrix_keeps_its_data() -> None:
    values = floats(16, 64)
    matrix = packing.pack(float_tensor(values), POOL)
    junk = [np.full(matrix.num_bytes, 7, np.uint8) for _ in range(4)]
    np.testing.assert_array_equal(packing.dequantize(matrix, POOL), values)
    assert len(junk) == 4 and matrix.data.ctypes.data % 64 == 0
