"""Some rows and columns of a stored tensor, copied at each access: a slice of nested weights needs no copy of them."""

from dataclasses import dataclass, replace

import numpy as np

from headstart.core import Bytes, Int64
from headstart.formats.base import ITEM_BYTES, File, Tensor


@dataclass(frozen=True, eq=False, kw_only=True)
class Cut(File):
    """The bytes of rows [n] and columns [m] of a stored tensor, both ascending. columns: None for all."""

    stored: Tensor
    rows: Int64
    columns: Int64 | None

    def bytes_at(self, begin: int, nbytes: int) -> Bytes:
        """uint8 [nbytes] from byte `begin` of the cut tensor on, a new array."""
        row_bytes, item = self.stored.row_bytes, ITEM_BYTES[self.stored.dtype]
        width = row_bytes if self.columns is None else item * len(self.columns)
        first = begin // width
        rows = self.rows[first : -(-(begin + nbytes) // width)]
        data = self.stored.read_bytes(rows[0] * row_bytes, (rows[-1] + 1 - rows[0]) * row_bytes)
        kept = data.reshape(-1, row_bytes // item, item)[rows - rows[0]]
        kept = kept if self.columns is None else kept[:, self.columns]
        return np.ascontiguousarray(kept).reshape(-1)[begin - first * width :][:nbytes]

    def read(self, begin: int, nbytes: int) -> bytes:
        return self.bytes_at(begin, nbytes).tobytes()


def cut(tensor: Tensor, rows: Int64, columns: Int64 | None = None) -> Tensor:
    """A tensor of these rows (indices of the first dimension), and of these columns of the last. Its type is one of
    ITEM_BYTES."""
    source = Cut(tensor.file, tensor.here, mapped=False, stored=tensor, rows=rows, columns=columns)
    shape = (len(rows), *tensor.shape[1:]) if columns is None else (len(rows), *tensor.shape[1:-1], len(columns))
    nbytes = int(np.prod(shape)) * ITEM_BYTES[tensor.dtype]
    return replace(tensor, shape=shape, source=source, begin=0, nbytes=nbytes)
