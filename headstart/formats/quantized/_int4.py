"""What GPTQ and AWQ have in common."""

from __future__ import annotations

from headstart.formats.quantization import Stored, WeightBytes

_GROUPED = 0.5 + 2.5 / 128
GROUPED = WeightBytes(_GROUPED, _GROUPED, _GROUPED, 2, head=2)
"""Groups of 128 with a 16-bit scale and a 4-bit zero point."""


def outputs_of(stored: Stored) -> int:
    """Rows of the weight behind packed words [in, out], by its scales [groups, out]."""
    scales = stored.beside.get("scales")
    return scales.shape[-1] if scales and scales.shape else stored.main.shape[-1]
