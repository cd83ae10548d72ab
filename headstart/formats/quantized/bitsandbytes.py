"""bitsandbytes: 8-bit rows (LLM.int8) and 4-bit blocks (nf4, fp4), also with double quantization.

An 8-bit weight has a scale per row (`SCB`). A 4-bit weight is one column of bytes with two codes each, the first in the
high half; its shape is in the JSON text of `quant_state`. Value = level of the code * absmax of its block, in float32;
bitsandbytes rounds that once to the model's dtype. Kernels use codes and absmax directly.
"""

import json
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.errors import ModelError
from headstart.formats.base import Tensor
from headstart.formats.grouped import LEVELS, Layout, joined
from headstart.formats.integers import Integers
from headstart.formats.quantization import Decode, Described, Quantization, Repacked, Stored, WeightBytes
from headstart.formats.quantized._scaled import numbers

STATES = (".quant_state.bitsandbytes__nf4", ".quant_state.bitsandbytes__fp4")
BYTES = 0.5 + 1 / 64  # per weight: a code, and a one-byte absmax for 64 weights
_SCALE = 0.007874015718698502  # bitsandbytes' constant for 1 / 127: scale of a row = SCB * _SCALE


def describe(stored: Stored) -> Described | None:
    if "SCB" in stored.auxiliary:
        return Described(stored.main.shape, "int8 (bitsandbytes)")
    if not any("absmax" in word for word in stored.auxiliary):
        return None
    shape, state = None, _state_tensor(stored)
    if state and state.here:
        with suppress(ModelError):  # reading the values raises it again
            shape = _shape(_state(stored))
    return Described(shape, "4-bit (bitsandbytes)")


def integers(stored: Stored) -> Integers | None:
    if "SCB" not in stored.auxiliary or stored.main.dtype != "I8" or len(stored.main.shape) != 2:
        return None
    scales = numbers(stored.auxiliary["SCB"], stored).reshape(-1, 1) * np.float32(_SCALE)
    if len(scales) != stored.main.shape[0]:
        what = f"{stored.auxiliary['SCB'].name} {list(stored.auxiliary['SCB'].shape)} is not one for each row"
        raise ModelError(f"{what} of {stored.name} {list(stored.main.shape)}")

    def codes(rows: NDArray[np.int64]) -> NDArray[np.int32]:
        return stored.main.take_rows(rows).numpy().astype(np.int32) + 128

    columns = np.zeros(stored.main.shape[1], np.int64)
    return Integers(stored.name, codes, np.full(scales.shape, 128, np.int32), scales, columns, 8)


def keep(stored: Stored) -> Repacked | None:
    """A 4-bit weight with NF4 or FP4 levels whose blocks and rows are multiples of 32 or 64 columns; else None."""
    if "SCB" in stored.auxiliary:
        return None
    columns, size, levels, largest, flat = _parts(stored)
    group = next((each for each in (64, 32) if columns % each == 0 and size % each == 0), 0)
    name = next((each for each in ("NF4", "FP4") if np.allclose(LEVELS[each], levels, rtol=0, atol=1e-7)), None)
    if not group or not name:
        return None
    layout, each = Layout(name, group, "F32"), flat.shaped(flat.nbytes * 2 // columns, columns // 2)

    def rows(chosen: NDArray[np.int64]) -> NDArray[np.uint8]:
        codes = each.take_rows(chosen).data.view(np.uint8)
        places = chosen[:, None] * columns + np.arange(0, columns, group)
        return joined(layout, (codes >> 4 | codes << 4).astype(np.uint8), largest(places // size))

    return Repacked(layout.name, rows)


def decode(stored: Stored) -> Decode | None:
    """A 4-bit weight with blocks of any size."""
    if "SCB" in stored.auxiliary:
        return None
    columns, size, levels, largest, flat = _parts(stored)

    def values(rows: NDArray[np.int64]) -> NDArray[np.float32]:
        places = rows[:, None] * columns + np.arange(columns)
        both = flat.data.view(np.uint8)[places // 2]
        return np.asarray(levels[np.where(places % 2, both & 15, both >> 4)] * largest(places // size))

    return values


Magnitudes = Callable[[NDArray[np.int64]], NDArray[np.float32]]  # indices of blocks -> their absmax


class _Parts(NamedTuple):
    """The parts of a 4-bit weight."""

    columns: int  # of a row
    size: int  # values of a block
    levels: NDArray[np.float32]  # [16], value of each code
    largest: Magnitudes
    flat: Tensor  # all codes, uint8 [bytes]


def _parts(stored: Stored) -> _Parts:
    state = _state(stored)
    shape, size = _shape(state), int(state["blocksize"])
    count = math.prod(shape)
    if stored.main.dtype not in ("U8", "I8") or stored.main.nbytes != -(-count // 2):
        raise ModelError(f"{stored.name}: {stored.main.nbytes} bytes of {stored.main.dtype} do not hold {list(shape)}")
    blocks = math.prod(_beside(stored, ".absmax").shape)
    if blocks != -(-count // size):
        raise ModelError(f"{stored.name}: {blocks} magnitudes do not fit {list(shape)} in blocks of {size}")
    levels, largest = _levels(stored), _largest(stored, state)
    return _Parts(shape[-1], size, levels, largest, stored.main.shaped(stored.main.nbytes))


def _state_tensor(stored: Stored) -> Tensor | None:
    return next((stored.auxiliary[word] for word in STATES if word in stored.auxiliary), None)


def _state(stored: Stored) -> dict[str, Any]:
    """The JSON object in `quant_state`. Raises ModelError if it is missing or invalid."""
    tensor = _state_tensor(stored)
    if tensor is None:
        raise ModelError(f"{stored.name} is 4-bit (bitsandbytes), but its quant_state is missing")
    try:
        state = json.loads(bytes(tensor.data))
        sizes = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 1)]
        if not all(type(size) is int and size > 0 for size in sizes) or len(sizes) < 4:
            raise ValueError(f"sizes are {sizes}")
        return dict(state)
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{tensor.name} cannot be read: {error}", "download the model again") from error


def _shape(state: dict[str, Any]) -> tuple[int, ...]:
    return tuple(state["shape"])


def _beside(stored: Stored, word: str) -> Tensor:
    if word not in stored.auxiliary:
        raise ModelError(f"{stored.name} is 4-bit (bitsandbytes), but its {word[1:]} is missing")
    return stored.auxiliary[word]


def _levels(stored: Stored) -> NDArray[np.float32]:
    levels = numbers(_beside(stored, ".quant_map"), stored).reshape(-1)
    if len(levels) != 16:
        raise ModelError(f"{stored.name}: a quant_map of {len(levels)} levels, not 16")
    return levels


def _largest(stored: Stored, state: dict[str, Any]) -> Magnitudes:
    """The absmax of each block. With double quantization it is nested_quant_map[code] * nested_absmax + offset."""
    kept = _beside(stored, ".absmax")
    if kept.dtype != "U8":
        whole = numbers(kept, stored).reshape(-1)
        return lambda at: np.asarray(whole[at])
    levels = numbers(_beside(stored, ".nested_quant_map"), stored).reshape(-1)
    outer, codes = numbers(_beside(stored, ".nested_absmax"), stored).reshape(-1), kept.data.reshape(-1)
    size = int(state.get("nested_blocksize", 256))
    if len(levels) != 256 or len(outer) != -(-len(codes) // size):
        raise ModelError(f"{stored.name}: {len(levels)} levels and {len(outer)} scales of {len(codes)} magnitudes")
    offset = np.float32(state.get("nested_offset", 0.0))
    return lambda at: np.asarray(levels[codes[at]] * outer[at // size] + offset)


QUANTIZATION = Quantization(
    detect=lambda settings: settings.get("quant_method") == "bitsandbytes",
    excludes={"bitsandbytes": "llm_int8_skip_modules"},
    auxiliary=("SCB", "weight_format"),
    after=(".absmax", ".quant_map", ".nested_absmax", ".nested_quant_map", *STATES),
    describe=describe,
    integers=integers,
    decode=decode,
    keep=keep,
    bits=4,
    plans={"nf4": WeightBytes(BYTES, BYTES, BYTES, 2)},
)
