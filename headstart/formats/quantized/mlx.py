"""MLX: integers packed along the input into 32-bit words. inspect and plan know them; they cannot be loaded."""

from headstart.formats.quantization import Described, Quantization, Stored, WeightBytes, bits_of


def describe(stored: Stored) -> Described | None:
    shape, bits = stored.main.shape, bits_of(stored.settings)
    if stored.main.dtype != "U32" or "scales" not in stored.auxiliary or not shape:
        return None
    return Described((*shape[:-1], shape[-1] * 32 // bits), f"int{bits} (mlx)")


QUANTIZATION = Quantization(
    needs=(("scales",), ("biases",)),
    describe=describe,
    auxiliary=("scales", "biases"),
    bits=4,
    plans={"mlx4": WeightBytes(0.5625, 0.5625, 0.5625, 0.5625)},
)
