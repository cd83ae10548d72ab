"""bitsandbytes: 8-bit integers with a scale for each row (`SCB`), or blocks of 4 bits. Not read yet."""

from __future__ import annotations

from headstart.formats.quantization import Described, Quantization, Stored


def describe(stored: Stored) -> Described | None:
    if "SCB" in stored.beside:
        return Described(stored.main.shape, "int8 (bitsandbytes)")
    return Described(None, "4-bit (bitsandbytes)") if any("absmax" in word for word in stored.beside) else None


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "bitsandbytes",
    excludes={"bitsandbytes": "llm_int8_skip_modules"},
    beside=("SCB", "weight_format"),
    after=(
        ".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", ".quant_state.bitsandbytes__nf4",
        ".quant_state.bitsandbytes__fp4",
    ),
    describe=describe,
)  # fmt: skip
