"""FP8, NVFP4, MXFP4, bitsandbytes and 8-bit integers: values by the definition of each format, and refused tensors."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor, make_tensor
from headstart.formats.quantization import readable, readable_shapes
from headstart.formats.safetensors import bfloat16

ROWS, COLUMNS = 48, 256
Parts = dict[str, tuple[str, NDArray[Any]]]
"""Last part of a name -> type and values."""
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
COMPRESSED, MODELOPT = {"quant_method": "compressed-tensors"}, {"quant_method": "modelopt", "quant_algo": "NVFP4"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
rng = np.random.default_rng(11)


def tensors(parts: Parts) -> dict[str, Tensor]:
    return {
        f"a.{end}": make_tensor(f"a.{end}", part.shape, dtype, np.ascontiguousarray(part).reshape(-1).view(np.uint8))
        for end, (dtype, part) in parts.items()
    }


def e4m3(shape: tuple[int, ...], *, positive: bool = False) -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Random codes, including subnormal ones, and their values by torch."""
    codes = rng.integers(0, 0x7F, shape, dtype=np.uint8)
    codes |= np.uint8(0 if positive else 0x80) * rng.integers(0, 2, shape, dtype=np.uint8)
    return codes, torch.from_numpy(codes).view(torch.float8_e4m3fn).float().numpy()


def scales(*shape: int) -> NDArray[np.float32]:
    return rng.uniform(0.5, 1.5, shape).astype(np.float32) * np.float32(2e-3)


def fp8(grid: tuple[int, ...], word: str = "weight_scale", *, bf16: bool = False) -> tuple[Parts, NDArray[np.float32]]:
    codes, values = e4m3((ROWS, COLUMNS))
    each = scales(*grid)
    stored: NDArray[Any] = bfloat16(each)[0] if bf16 else each
    if bf16:
        each = (stored.astype(np.uint32) << 16).view(np.float32)
    wide = each.reshape((1,) * (2 - each.ndim) + each.shape) if each.ndim != 1 else each[:, None]
    wide = np.kron(wide, np.ones((ROWS // wide.shape[0], COLUMNS // wide.shape[1]), np.float32))
    return {"weight": ("F8_E4M3", codes), word: ("BF16" if bf16 else "F32", stored)}, values * wide


def mxfp8() -> tuple[Parts, NDArray[np.float32]]:
    codes, values = e4m3((ROWS, COLUMNS))
    powers = rng.integers(110, 125, (ROWS, COLUMNS // 32), dtype=np.uint8)
    wide = np.repeat(np.float32(2) ** (powers.astype(np.float32) - 127), 32, axis=1)
    return {"weight": ("F8_E4M3", codes), "weight_scale": ("U8", powers)}, values * wide


def packed_e2m1() -> tuple[NDArray[np.uint8], NDArray[np.float32]]:
    """Pairs of E2M1 codes in a byte, the even column in the low half, and their values."""
    codes = rng.integers(0, 16, (ROWS, COLUMNS), dtype=np.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4, E2M1[codes]


def nvfp4(*, packed: bool) -> tuple[Parts, NDArray[np.float32]]:
    raw, values = packed_e2m1()
    codes, each = e4m3((ROWS, COLUMNS // 16), positive=True)
    whole = np.array([1536.5 if packed else 7e-4], np.float32)
    factor = np.float32(1) / whole if packed else whole
    main, beside = ("weight_packed", "weight_global_scale") if packed else ("weight", "weight_scale_2")
    parts: Parts = {main: ("U8", raw), "weight_scale": ("F8_E4M3", codes), beside: ("F32", whole)}
    return parts, values * np.repeat(each * factor, 16, axis=1)


def mxfp4(word: str) -> tuple[Parts, NDArray[np.float32]]:
    raw, values = packed_e2m1()
    powers = rng.integers(0, 250, (ROWS, COLUMNS // 32), dtype=np.uint8)
    wide = np.repeat(np.float32(2) ** (powers.astype(np.float32) - 127), 32, axis=1)
    return {word: ("U8", raw), "weight_scale": ("U8", powers)}, values * wide


def bnb(levels: NDArray[np.float32], *, double: bool, size: int = 64, columns: int = COLUMNS) -> Any:
    codes = rng.integers(0, 16, (ROWS * columns), dtype=np.uint8)
    count = len(codes) // size
    name = "nf4" if levels is NF4 else "fp4"
    state: dict[str, Any] = {"quant_type": name, "blocksize": size, "dtype": "bfloat16", "shape": [ROWS, columns]}
    parts: Parts = {
        "weight": ("U8", (codes[::2] << 4 | codes[1::2])[:, None]), "weight.quant_map": ("F32", levels),
    }  # fmt: skip
    largest = scales(count)
    if double:
        inner, kept = np.linspace(-1, 1, 256, dtype=np.float32), rng.integers(0, 256, count, dtype=np.uint8)
        outer = scales(-(-count // 256))
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.0123}
        largest = inner[kept] * np.repeat(outer, 256)[:count] + np.float32(0.0123)
        parts |= {"weight.nested_absmax": ("F32", outer), "weight.nested_quant_map": ("F32", inner)}
    parts["weight.absmax"] = ("U8", kept) if double else ("F32", largest)
    text = np.frombuffer(json.dumps(state).encode(), np.uint8)
    parts[f"weight.quant_state.bitsandbytes__{name}"] = ("U8", text)
    return parts, (levels[codes] * np.repeat(largest, size)).reshape(ROWS, columns)


def int8(groups: int, *, asymmetric: bool = False) -> tuple[Parts, NDArray[np.float32]]:
    codes, each = rng.integers(-128, 128, (ROWS, COLUMNS), dtype=np.int8), scales(ROWS, groups)
    points = rng.integers(-30, 30, each.shape, dtype=np.int8)
    parts: Parts = {"weight": ("I8", codes), "weight_scale": ("F32", each)}
    parts |= {"weight_zero_point": ("I8", points)} if asymmetric else {}
    wide = [np.repeat(part, COLUMNS // groups, axis=1) for part in (points * np.int8(asymmetric), each)]
    return parts, (codes.astype(np.float32) - wide[0]) * wide[1]


Case = tuple[Parts, NDArray[np.float32]]
CASES: dict[str, tuple[dict[str, Any], Callable[[], Case]]] = {
    "fp8, DeepSeek's blocks": (
        {"quant_method": "fp8", "weight_block_size": [16, 128]}, lambda: fp8((3, 2), "weight_scale_inv")),
    "fp8, compressed, a row": (COMPRESSED, lambda: fp8((ROWS, 1), bf16=True)),
    "fp8, compressed, a tensor": (COMPRESSED, lambda: fp8((1,))),
    "fp8, fbgemm": ({"quant_method": "fbgemm_fp8"}, lambda: fp8((ROWS, 1))),
    "fp8, ModelOpt": ({"quant_method": "modelopt", "quant_algo": "FP8"}, lambda: fp8(())),
    "fp8, blocks of no kernel's size": ({"quant_method": "fp8"}, lambda: fp8((6, 32 * 2))),
    "mxfp8": (COMPRESSED, mxfp8),
    "nvfp4, ModelOpt": (MODELOPT, lambda: nvfp4(packed=False)),
    "nvfp4, compressed": (COMPRESSED, lambda: nvfp4(packed=True)),
    "mxfp4, compressed": (COMPRESSED, lambda: mxfp4("weight_packed")),
    "mxfp4, two codes in a byte": ({"quant_method": "mxfp4"}, lambda: mxfp4("weight")),
    "nf4": (BNB, lambda: bnb(NF4, double=False)),
    "nf4, double": (BNB, lambda: bnb(NF4, double=True, size=128)),
    "fp4": (BNB, lambda: bnb(FP4, double=False)),
    "nf4, blocks across rows": (BNB, lambda: bnb(NF4, double=True, columns=72)),
    "int8, a row": (COMPRESSED, lambda: int8(1)),
    "int8, groups and zero points": (COMPRESSED, lambda: int8(4, asymmetric=True)),
}  # fmt: skip


def rounded(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Values rounded to bfloat16, as in the formats' libraries."""
    return (bfloat16(np.ascontiguousarray(values))[0].astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("case", CASES)
def test_values_match_the_format(case: str) -> None:
    settings, make = CASES[case]
    parts, expected = make()
    read = readable(tensors(parts), {"quantization_config": settings})
    assert list(read) == ["a.weight"]
    found = read["a.weight"]
    assert found.shape == expected.shape
    assert readable_shapes(tensors(parts), {"quantization_config": settings}) == {"a.weight": found.shape}
    np.testing.assert_array_equal(rounded(found.float32()), rounded(expected))
    chosen = rng.permutation(ROWS)[:9]
    np.testing.assert_array_equal(rounded(found.take_rows(chosen).float32()), rounded(expected[chosen]))


KEPT = {
    "fp8, DeepSeek's blocks": "E4M3:64:F32", "fp8, compressed, a row": "E4M3:64:F32",
    "fp8, compressed, a tensor": "E4M3:64:F32", "fp8, fbgemm": "E4M3:64:F32", "fp8, ModelOpt": "E4M3:64:F32",
    "fp8, blocks of no kernel's size": "BF16", "mxfp8": "E4M3:32:F32", "nvfp4, ModelOpt": "E2M1:16:E4M3",
    "nvfp4, compressed": "E2M1:16:E4M3", "mxfp4, compressed": "MXFP4", "mxfp4, two codes in a byte": "MXFP4",
    "nf4": "NF4:64:F32", "nf4, double": "NF4:64:F32", "fp4": "FP4:64:F32", "nf4, blocks across rows": "BF16",
    "int8, a row": "I8:64:F32", "int8, groups and zero points": "U8:64:F32",
}  # fmt: skip
"""What a weight becomes: bfloat16 where its blocks are no groups of columns."""


@pytest.mark.parametrize("case", CASES)
def test_native_kernels_keep_every_value(case: str) -> None:
    """Bit for bit the values of `reference`, in about the size of the file."""
    packing = pytest.importorskip("headstart.kernels.native.packing")
    settings, make = CASES[case]
    parts, _ = make()
    found = readable(tensors(parts), {"quantization_config": settings})["a.weight"]
    assert found.dtype == KEPT[case]
    pool = packing.ThreadPool(1)
    matrix = packing.pack(found, pool)
    np.testing.assert_array_equal(packing.dequantize(matrix, pool), found.float32())
    if found.dtype != "BF16":
        size = sum(part.nbytes for name, (_, part) in parts.items() if "state" not in name and "map" not in name)
        assert matrix.num_bytes <= 1.15 * size


def with_changed_part(
    make: Callable[[], Case], end: str, change: Callable[[NDArray[Any]], NDArray[Any]] | None
) -> Parts:
    parts, _ = make()
    dtype, values = parts.pop(end)
    return parts if change is None else {**parts, end: (dtype, change(values.copy()))}


def with_nan(values: NDArray[Any]) -> NDArray[Any]:
    values.reshape(-1)[-1] = 0x7F if values.dtype == np.uint8 else np.nan
    return values


def state_bytes(text: str) -> Callable[[NDArray[Any]], NDArray[Any]]:
    return lambda values: np.frombuffer(text.encode(), np.uint8)


STATE = "weight.quant_state.bitsandbytes__nf4"
BAD: dict[str, tuple[str, str, Callable[[NDArray[Any]], NDArray[Any]] | None, str]] = {
    "fp8, NaN": ("fp8, compressed, a row", "weight_scale", lambda v: v * 0 + 0x7FC0, "are not all numbers"),
    "fp8, other scales": ("fp8, compressed, a row", "weight_scale", lambda v: v[:31], "do not fit the blocks"),
    "fp8, none": ("fp8, ModelOpt", "weight_scale", None, "has no scales"),
    "nvfp4, NaN": ("nvfp4, ModelOpt", "weight_scale", with_nan, "are not all numbers"),
    "nvfp4, NaN for all": ("nvfp4, ModelOpt", "weight_scale_2", with_nan, "are not all numbers"),
    "nvfp4, no whole scale": ("nvfp4, compressed", "weight_global_scale", None, "whole tensor is missing"),
    "nvfp4, fewer groups": ("nvfp4, compressed", "weight_scale", lambda v: v[:, :9], "16 columns must share one"),
    "nvfp4, no reciprocal": ("nvfp4, compressed", "weight_global_scale", lambda v: v * 0, "is 0, but"),
    "int8, NaN": ("int8, a row", "weight_scale", with_nan, "are not all numbers"),
    "int8, other points": (
        "int8, groups and zero points", "weight_zero_point", lambda v: v[:, :2], "not as the scales"),
    "nf4, NaN": ("nf4", "weight.absmax", with_nan, "are not all numbers"),
    "nf4, fewer magnitudes": ("nf4", "weight.absmax", lambda v: v[:-1], "magnitudes do not fit"),
    "nf4, no levels": ("nf4", "weight.quant_map", None, "its quant_map is missing"),
    "nf4, no state": ("nf4", STATE, None, "its quant_state is missing"),
    "nf4, no JSON": ("nf4", STATE, state_bytes("{"), "cannot be read"),
    "nf4, no sizes": ("nf4", STATE, state_bytes('{"shape": [4, "x"], "blocksize": 64}'), "cannot be read"),
    "nf4, another shape": ("nf4", STATE, state_bytes('{"shape": [4, 4], "blocksize": 64}'), "do not hold"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_invalid_tensors_are_refused(case: str) -> None:
    good, end, change, message = BAD[case]
    settings, make = CASES[good]
    with pytest.raises(ModelError, match=message):
        readable(tensors(with_changed_part(make, end, change)), {"quantization_config": settings})
