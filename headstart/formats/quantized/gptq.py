"""GPTQ: integers packed along the input into 32-bit words, stored [in, out], with a group of columns for each scale,
or a map of groups where columns were quantized in another order (act-order).

Zero points are one less in files than they are, but for `checkpoint_format` gptq_v2 (AutoGPTQ, GPTQModel).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headstart.formats.integers import Integers, unpacked
from headstart.formats.quantization import Described, Quantization, Stored, bits_of
from headstart.formats.quantized._int4 import GROUPED, check, groups_of, outputs_of


def describe(stored: Stored) -> Described | None:
    if stored.word != "qweight":
        return None
    bits = bits_of(stored.settings)
    if len(stored.main.shape) != 2:
        return Described(None, f"int{bits}")
    rows, columns = stored.main.shape
    if outputs_of(stored) != columns:
        return None
    order = stored.beside.get("g_idx")
    inputs = order.shape[0] if order and order.shape else rows * 32 // bits
    return Described((columns, inputs), f"int{rows * 32 // inputs if inputs else bits} (gptq)")


def integers(stored: Stored) -> Integers | None:
    words, points = stored.main.numpy(), stored.beside["qzeros"].numpy()
    scales = stored.beside["scales"].float32()
    inputs = groups_of(stored, words.shape[0])
    bits = words.shape[0] * 32 // len(inputs)
    if bits not in (2, 4, 8):
        return None

    def codes(rows: NDArray[np.int64]) -> NDArray[np.int32]:
        return unpacked(np.ascontiguousarray(words[:, rows].T), bits)

    stored_less = stored.settings.get("checkpoint_format") != "gptq_v2"
    zeros = unpacked(np.ascontiguousarray(points), bits) + stored_less
    return Integers(stored.name, codes, zeros.T, scales.T, inputs, bits)


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") in ("gptq", "auto-round"),
    excludes={"gptq": "dynamic", "auto-round": "extra_config"},
    packed=("qweight",),
    beside=("scales", "qzeros", "g_idx"),
    needs=(("scales",), ("qzeros",)),
    describe=describe,
    integers=integers,
    check=lambda stored: check(stored, *(stored.main.shape[-1] * bits // 32 for bits in (2, 3, 4, 8))),
    bits=4,
    plans={"int4": GROUPED},
)
