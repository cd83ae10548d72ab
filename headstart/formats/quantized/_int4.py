"""What GPTQ and AWQ have in common."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.quantization import Stored, WeightBytes, bits_of

_GROUPED = 0.5 + 2.5 / 128
GROUPED = WeightBytes(_GROUPED, _GROUPED, _GROUPED, 2, head=2)
"""Groups of 128 with a 16-bit scale and a 4-bit zero point."""


def check(stored: Stored, *zeros: int) -> None:
    """Scales [groups, out] and zero points [groups, one of `zeros`]. Raises ModelError where they do not fit."""
    scales, points = (stored.beside[word].shape for word in ("scales", "qzeros"))
    if (
        len(stored.main.shape) != 2
        or len(scales) != 2
        or 0 in scales
        or points not in [(scales[0], each) for each in zeros]
    ):
        shapes = f"{list(stored.main.shape)}, {list(scales)} and {list(points)}"
        raise ModelError(f"codes, scales and zero points are {shapes}, which do not fit each other")


def outputs_of(stored: Stored) -> int:
    """Rows of the weight behind packed words [in, out], by its scales [groups, out]."""
    scales = stored.beside.get("scales")
    return scales.shape[-1] if scales and scales.shape else stored.main.shape[-1]


def groups_of(stored: Stored, num_words: int) -> NDArray[np.int64]:
    """The group of each column, by the file's own map or by groups of one size. ModelError where neither fits."""
    if (order := stored.beside.get("g_idx")) is not None:
        return order.numpy().astype(np.int64)
    inputs, count = num_words * 32 // bits_of(stored.settings), stored.beside["scales"].shape[0]
    if inputs % count:
        raise ModelError(f"{stored.main.name}: {inputs} columns do not make {count} groups of one size")
    return np.arange(inputs) // (inputs // count)
