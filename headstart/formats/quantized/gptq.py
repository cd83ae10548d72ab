"""GPTQ: integers in 32-bit words, stored [in, out], with groups of columns or act-order.

Words are packed along the input. Files store zero points minus one, except with `checkpoint_format` gptq_v2 (AutoGPTQ,
GPTQModel).
"""

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.integers import Integers, equal_groups, unpacked
from headstart.formats.quantization import Described, Quantization, Stored, WeightBytes, bits_of

_GROUPED = 0.5 + 2.5 / 128
GROUPED = WeightBytes(_GROUPED, _GROUPED, _GROUPED, 2, head=2)
"""Groups of 128 with a 16-bit scale and a 4-bit zero point."""


def check(stored: Stored, *zeros: int) -> None:
    """Raise ModelError unless scales are [groups, out] and zero points [groups, n], n one of `zeros`."""
    scales, points = (stored.auxiliary[word].shape for word in ("scales", "qzeros"))
    are_matrices = len(stored.main.shape) == len(scales) == 2 and 0 not in scales
    if not are_matrices or points not in [(scales[0], each) for each in zeros]:
        shapes = f"{list(stored.main.shape)}, {list(scales)} and {list(points)}"
        raise ModelError(f"codes, scales and zero points are {shapes}, which do not fit each other")


def outputs_of(stored: Stored) -> int:
    """Number of rows of the unpacked weight, by its scales [groups, out]."""
    scales = stored.auxiliary.get("scales")
    return scales.shape[-1] if scales and scales.shape else stored.main.shape[-1]


def groups_of(stored: Stored, num_words: int) -> NDArray[np.int64]:
    """int64 [in], the group of each column: g_idx (act-order), else groups of equal size. Raises ModelError."""
    if (order := stored.auxiliary.get("g_idx")) is not None:
        return order.numpy().astype(np.int64)
    columns = num_words * 32 // bits_of(stored.settings)
    return equal_groups(columns, stored.auxiliary["scales"].shape[0], stored.main.name)


def describe(stored: Stored) -> Described | None:
    if stored.word != "qweight":
        return None
    bits = bits_of(stored.settings)
    if len(stored.main.shape) != 2:
        return Described(None, f"int{bits}")
    rows, columns = stored.main.shape
    if outputs_of(stored) != columns:
        return None
    order = stored.auxiliary.get("g_idx")
    inputs = order.shape[0] if order and order.shape else rows * 32 // bits
    return Described((columns, inputs), f"int{rows * 32 // inputs if inputs else bits} (gptq)")


def integers(stored: Stored) -> Integers | None:
    words, points = stored.main.numpy(), stored.auxiliary["qzeros"].numpy()
    scales = stored.auxiliary["scales"].float32()
    inputs = groups_of(stored, words.shape[0])
    bits = words.shape[0] * 32 // len(inputs)
    if bits not in (2, 4, 8):
        return None

    def codes(rows: NDArray[np.int64]) -> NDArray[np.int32]:
        return unpacked(words[:, rows].T, bits)

    offset = stored.settings.get("checkpoint_format") != "gptq_v2"
    zeros = unpacked(points, bits) + offset
    return Integers(stored.name, codes, zeros.T, scales.T, inputs, bits)


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") in ("gptq", "auto-round"),
    excludes={"gptq": "dynamic", "auto-round": "extra_config"},
    packed=("qweight",),
    auxiliary=("scales", "qzeros", "g_idx"),
    needs=(("scales",), ("qzeros",)),
    describe=describe,
    integers=integers,
    check=lambda stored: check(stored, *(stored.main.shape[-1] * bits // 32 for bits in (2, 3, 4, 8))),
    bits=4,
    plans={"int4": GROUPED},
)
