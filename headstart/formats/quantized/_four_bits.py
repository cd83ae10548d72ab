"""Two FP4 codes in a byte, the even column in the low half."""

import numpy as np
from numpy.typing import NDArray

from headstart.formats.base import Tensor
from headstart.formats.grouped import E2M1
from headstart.formats.quantization import Shape, Stored


def unpacked_shape(shape: Shape) -> Shape:
    """The shape of a weight from the shape of its bytes."""
    return (*shape[:-1], shape[-1] * 2)


def codes(stored: Tensor) -> NDArray[np.float32]:
    """The values of the codes in rows of bytes [n, b], float32 [n, 2 b]."""
    raw = stored.data
    return np.stack((E2M1[raw & 15], E2M1[raw >> 4]), axis=-1).reshape(len(raw), -1)


def group_of(stored: Stored) -> int:
    """Columns that share a scale, 16 or 32, if bytes and scales look like FP4; 0 for anything else."""
    main = stored.main
    if stored.word == "weight_packed":
        scale = stored.auxiliary.get("weight_scale")
        return 0 if main.dtype != "U8" or not main.shape else 32 if scale and scale.dtype in ("U8", "F8_E8M0") else 16
    scale = stored.auxiliary.get("weight_scale") or stored.auxiliary.get("scale")
    groups = scale.shape[-1] if scale and len(scale.shape) > 1 else 0
    if main.dtype not in ("U8", "I8") or not groups or not main.shape:
        return 0
    size, rest = divmod(2 * main.shape[-1], groups)
    return size if size in (16, 32) and not rest else 0
