"""Quantized weights compared with the libraries that define the formats: compressed-tensors and bitsandbytes."""

from typing import Any

import numpy as np
import pytest
import test_integers
import test_small_floats
import torch
from test_small_floats import rounded, tensors

from headstart.formats.quantization import readable

TYPES = {"F8_E4M3": "float8_e4m3fn", "BF16": "bfloat16"}
FP8 = {"num_bits": 8, "type": "float"}
INT8, INT4 = {"num_bits": 8, "type": "int"}, {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}
SMALL: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8, DeepSeek's blocks": ("float-quantized", {**FP8, "strategy": "block", "block_structure": [16, 128]}),
    "fp8, compressed, a row": ("float-quantized", {**FP8, "strategy": "channel"}),
    "fp8, fbgemm": ("float-quantized", {**FP8, "strategy": "channel"}),
    "fp8, compressed, a tensor": ("float-quantized", {**FP8, "strategy": "tensor"}),
    "mxfp8": ("mxfp8-quantized", {**FP8, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}),
    "nvfp4, compressed": (
        "nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}),
    "mxfp4, compressed": (
        "mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
    "int8, a row": ("int-quantized", {**INT8, "strategy": "channel"}),
    "int8, groups and zero points": (
        "int-quantized", {**INT8, "strategy": "group", "group_size": 64, "symmetric": False}),
}  # fmt: skip
PACKED: dict[str, dict[str, Any]] = {
    "packed": INT4, "packed, zero points": {**INT4, "symmetric": False}, "packed, 8 bits": {**INT4, "num_bits": 8},
}  # fmt: skip
"""Cases of the other files -> the library's format, and its arguments."""


def as_torch(parts: dict[str, tuple[str, Any]]) -> dict[str, Any]:
    """Tensors of torch, including types that numpy lacks."""
    found = {name: torch.from_numpy(np.array(values)) for name, (_, values) in parts.items()}
    return {
        name: tensor.view(getattr(torch, TYPES[parts[name][0]])) if parts[name][0] in TYPES else tensor
        for name, tensor in found.items()
    }


def decompress(form: str, weights: dict[str, Any], parts: dict[str, Any]) -> Any:
    """Float32 values decompressed by compressed-tensors."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**weights), format=form)
    return BaseCompressor.get_value_from_registry(form).decompress(parts, scheme)["weight"].float().numpy()


@pytest.mark.parametrize("case", SMALL)
def test_small_floats_match_compressed_tensors(case: str) -> None:
    form, weights = SMALL[case]
    settings, make = test_small_floats.CASES[case]
    parts, _ = make()
    theirs = {name.replace("scale_inv", "scale"): tensor for name, tensor in as_torch(parts).items()}
    expected = decompress(form, weights, theirs)
    found = readable(tensors(parts), {"quantization_config": settings})["a.weight"].float32()
    np.testing.assert_array_equal(rounded(found), rounded(expected))


@pytest.mark.parametrize("case", PACKED)
def test_packed_integers_match_compressed_tensors(case: str) -> None:
    _, parts, settings, _ = test_integers.CASES[case]
    theirs = as_torch({name: ("", values) for name, values in parts.items()})
    expected = decompress("pack-quantized", PACKED[case], theirs)
    found = readable(test_integers.tensors(parts), {"quantization_config": settings})["a.weight"].float32()
    np.testing.assert_array_equal(found.astype(np.float16), expected.astype(np.float16))


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in test_small_floats.CASES if case.startswith(("nf4", "fp4"))])
def test_4_bit_values_match_bitsandbytes(case: str) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    settings, make = test_small_floats.CASES[case]
    parts, _ = make()
    theirs = as_torch(parts)
    codes = theirs.pop("weight")
    state = bitsandbytes.functional.QuantState.from_dict(theirs, device="cpu")
    expected = bitsandbytes.functional.dequantize_4bit(codes, state).float().numpy()
    found = readable(tensors(parts), {"quantization_config": settings})["a.weight"].float32()
    np.testing.assert_array_equal(rounded(found), rounded(expected))
