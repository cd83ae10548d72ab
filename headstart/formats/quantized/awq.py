"""AWQ (AutoAWQ's gemm layout): 4-bit integers in 32-bit words, stored [in, out].

Words are packed along the output. The eight numbers of a word are interleaved (ORDER).
"""

import numpy as np
from numpy.typing import NDArray

from headstart.formats.integers import Integers, unpacked
from headstart.formats.quantization import Described, Quantization, Stored, bits_of
from headstart.formats.quantized.gptq import GROUPED, check, outputs_of

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def describe(stored: Stored) -> Described | None:
    if stored.word != "qweight" or len(stored.main.shape) != 2:
        return None
    (rows, columns), outputs = stored.main.shape, outputs_of(stored)
    if outputs == columns:
        return None
    return Described((outputs, rows), f"int{columns * 32 // outputs if outputs else bits_of(stored.settings)} (awq)")


def integers(stored: Stored) -> Integers | None:
    words, points = stored.main.numpy(), stored.auxiliary["qzeros"].numpy()
    scales = stored.auxiliary["scales"].float32()
    inputs, count = words.shape[0], len(scales)
    if scales.shape[1] != 8 * words.shape[1] or inputs % count:
        return None

    def codes(rows: NDArray[np.int64]) -> NDArray[np.int32]:
        chosen = np.unique(rows // 8)  # columns of words that hold these rows
        numbers = unpacked(words[:, chosen], 4, ORDER)
        places = np.searchsorted(chosen, rows // 8) * 8 + rows % 8
        whole = len(places) == numbers.shape[1] and (np.diff(places) == 1).all()
        return (numbers if whole else numbers[:, places]).T

    zeros = unpacked(points, 4, ORDER)
    groups = np.arange(inputs) // (inputs // count)
    return Integers(stored.name, codes, zeros.T, scales.T, groups, 4)


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "awq",
    excludes={"awq": "modules_to_not_convert"},
    packed=("qweight",),
    auxiliary=("scales", "qzeros"),
    needs=(("scales",), ("qzeros",)),
    describe=describe,
    integers=integers,
    check=lambda stored: check(stored, stored.main.shape[-1]),
    bits=4,
    plans={"int4": GROUPED},
)
