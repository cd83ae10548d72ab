"""AWQ: integers packed along the output into 32-bit words, stored [in, out]. Not read yet."""

from __future__ import annotations

from headstart.formats.quantization import Described, Quantization, Stored, bits_of
from headstart.formats.quantized._int4 import GROUPED, check, outputs_of


def describe(stored: Stored) -> Described | None:
    if stored.word != "qweight" or len(stored.main.shape) != 2:
        return None
    (rows, columns), outputs = stored.main.shape, outputs_of(stored)
    if outputs == columns:
        return None
    return Described((outputs, rows), f"int{columns * 32 // outputs if outputs else bits_of(stored.settings)} (awq)")


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "awq",
    excludes={"awq": "modules_to_not_convert"},
    packed=("qweight",),
    beside=("scales", "qzeros"),
    needs=(("scales",), ("qzeros",)),
    describe=describe,
    check=lambda stored: check(stored, stored.main.shape[-1]),
    bits=4,
    plans={"int4": GROUPED},
)
