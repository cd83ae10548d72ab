"""GPTQ: integers packed along the input into 32-bit words, stored [in, out]. Not read yet."""

from __future__ import annotations

from headstart.formats.quantization import Described, Quantization, Stored, bits_of
from headstart.formats.quantized._int4 import GROUPED, check, outputs_of


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


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") in ("gptq", "auto-round"),
    excludes={"gptq": "dynamic", "auto-round": "extra_config"},
    packed=("qweight",),
    beside=("scales", "qzeros", "g_idx"),
    needs=(("scales",), ("qzeros",)),
    describe=describe,
    check=lambda stored: check(stored, *(stored.main.shape[-1] * bits // 32 for bits in (2, 3, 4, 8))),
    bits=4,
    plans={"int4": GROUPED},
)
