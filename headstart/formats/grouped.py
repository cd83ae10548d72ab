"""Types for weights of small codes in groups of columns that share a scale. Kernels compute on them directly.

A type is spelled `codes:group:scale`, such as `E4M3:64:F32`. A row is a sequence of units of `group` columns; the last
unit is padded with zeros. A unit holds the scale, a zero point (one byte, only U4 and U8), and the codes. Codes of 4
bits are two in a byte, the even column in the low half. A row with E4M3 scales begins with a float32 factor, which
multiplies its scales. The value of a column is

    E4M3, E2M1, NF4, FP4    level of the code * scale
    U4, U8                  (code - zero point) * scale
    I8                      (code - 128) * scale

in float32, rounded once. csrc/packing_sources.cpp names the types that the kernels support.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from headstart.core import Bytes, Float32

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
NF4 = np.array(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0], np.float32,
)  # fmt: skip
FP4 = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3, -0.0, -0.0625, -8, -12, -4, -6, -2, -3], np.float32) / np.float32(12)
LEVELS = {"E2M1": E2M1, "NF4": NF4, "FP4": FP4}  # codes -> float32 [16], the value of each code
_SCALE_TYPES = {"F16": "<f2", "F32": "<f4", "BF16": "<u2", "E4M3": "u1"}


class Layout(NamedTuple):
    """The byte layout of a row: type of the codes, columns in a unit, and type of the scales."""

    codes: str
    group: int
    scale: str

    @property
    def name(self) -> str:
        return f"{self.codes}:{self.group}:{self.scale}"

    @property
    def code_bytes(self) -> int:
        """Bytes of the codes of a unit."""
        return self.group // (1 if self.codes in ("E4M3", "U8", "I8") else 2)

    @property
    def scale_bytes(self) -> int:
        return np.dtype(_SCALE_TYPES[self.scale]).itemsize

    @property
    def has_points(self) -> bool:
        return self.codes in ("U4", "U8")

    @property
    def unit_bytes(self) -> int:
        return self.scale_bytes + self.has_points + self.code_bytes

    @property
    def head_bytes(self) -> int:
        return 4 * (self.scale == "E4M3")


@cache
def layout_of(dtype: str) -> Layout | None:
    """The layout of a type's name; None for other types."""
    codes, _, rest = dtype.partition(":")
    group, _, scale = rest.partition(":")
    return Layout(codes, int(group), scale) if scale else None


def joined(layout: Layout, codes: Bytes, scales: NDArray[Any], points: Any = None, factors: Any = None) -> Bytes:
    """Encode rows in a layout, uint8 [n, bytes of a row]. codes: [n, bytes of the codes of a row]. scales: [n, units],
    as the layout stores them. points: zero points [n, units] for U4 and U8. factors: [n] for E4M3 scales."""
    rows, units = scales.shape
    out = np.zeros((rows, layout.head_bytes + units * layout.unit_bytes), np.uint8)
    if factors is not None:
        out[:, : layout.head_bytes] = np.asarray(factors, "<f4").reshape(rows, 1).view(np.uint8)
    body = out[:, layout.head_bytes :].reshape(rows, units, layout.unit_bytes)
    stored = np.ascontiguousarray(scales, _SCALE_TYPES[layout.scale])
    body[..., : layout.scale_bytes] = stored.reshape(rows, units, 1).view(np.uint8)
    if points is not None:
        body[..., layout.scale_bytes] = points
    last, rest = divmod(codes.shape[1], layout.code_bytes)
    at = layout.scale_bytes + layout.has_points
    body[:, :last, at:] = codes[:, : last * layout.code_bytes].reshape(rows, last, layout.code_bytes)
    if rest:
        body[:, last, at : at + rest] = codes[:, last * layout.code_bytes :]
    return out


def split(layout: Layout, rows: Bytes, e4m3: Float32) -> tuple[Bytes, Float32, Bytes | None]:
    """Decode rows of a layout: codes [n, units, bytes], scales [n, units] times the row's factor, and zero points
    [n, units] or None. `e4m3`: float32 [256], the value of each E4M3 code."""
    body = rows[:, layout.head_bytes :].reshape(len(rows), -1, layout.unit_bytes)
    scales = _scales(layout, np.ascontiguousarray(body[..., : layout.scale_bytes]), e4m3)
    if layout.head_bytes:
        scales = scales * np.ascontiguousarray(rows[:, : layout.head_bytes]).view("<f4")
    points = body[..., layout.scale_bytes] if layout.has_points else None
    return body[..., layout.scale_bytes + layout.has_points :], scales, points


def values(layout: Layout, rows: Bytes, columns: int, e4m3: Float32) -> Float32:
    """The values of rows of a layout, [n, columns]; `e4m3` as in `split`."""
    codes, scales, points = split(layout, rows, e4m3)
    if layout.code_bytes < layout.group:
        codes = np.stack((codes & 15, codes >> 4), axis=-1).reshape(*codes.shape[:2], -1)
    numbers: NDArray[Any] = codes
    if layout.codes == "E4M3":
        numbers = e4m3[codes]
    elif layout.codes in LEVELS:
        numbers = LEVELS[layout.codes][codes]
    else:
        numbers = codes.astype(np.float32) - (np.uint8(128) if points is None else points[..., None])
    with np.errstate(over="ignore", invalid="ignore"):
        found = np.asarray(numbers * scales[..., None], np.float32)
    return found.reshape(len(rows), -1)[:, :columns]


def _scales(layout: Layout, stored: Bytes, e4m3: Float32) -> Float32:
    """Scales of stored bytes [n, units, bytes], float32 [n, units]."""
    numbers = stored.view(_SCALE_TYPES[layout.scale])[..., 0]
    if layout.scale == "E4M3":
        return np.asarray(e4m3[numbers])
    if layout.scale == "BF16":
        return (numbers.astype(np.uint32) << 16).view(np.float32)
    return numbers.astype(np.float32)
