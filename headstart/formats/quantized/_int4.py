"""What GPTQ and AWQ have in common."""

from __future__ import annotations

from headstart.errors import ModelError
from headstart.formats.quantization import Stored, WeightBytes

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
