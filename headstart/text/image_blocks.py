"""Blocks of an image's tokens and of learned rows around and between them (DeepSeek-V4 and V4.1).

A block has a start row, the lines of tokens with a newline row after each, and an end row. In V4 two neighbouring lines
are interleaved column by column, so a line of pads follows an odd number of them. Pads in front put the first token at
a position that is a multiple of 4, and pads behind fill the last 4: an entry of compressed attention then covers two
columns of two lines. Sizes are limited by the number of positions of the block.

Formulas: DeepSeek's `inference/image_processor.py` of DeepSeek-V4-Flash-Vision-Exp, as in llama.cpp's
`tools/mtmd/mtmd-image.cpp` and `clip-impl.h`; V4.1: transformers `models/deepseek_v41` and vLLM `models/deepseek_v41`.
"""

import math
from dataclasses import dataclass

import numpy as np

from headstart.core import Int32

START, END, NEWLINE, PAD = range(4)
"""Learned rows, behind the tokens of the image."""
ALIGNED = 4  # positions of an entry


@dataclass(frozen=True, kw_only=True)
class BlockFormat:
    """The block of an image, and how its size follows from the image's."""

    max_rows: int  # positions of a block
    paired: bool  # rows are interleaved in pairs, and the first token is aligned (V4)
    max_ratio: int = 0  # limit of width / height, from which images are squeezed; 0: none

    @property
    def num_leading(self) -> int:
        """Rows of pads in front of a block in `order`, of which a prompt takes those that align it."""
        return ALIGNED - 1 if self.paired else 0

    def squeezes(self, width: int, height: int) -> bool:
        """Whether an image of this size, in pixels, loses its aspect ratio."""
        return 0 < self.max_ratio * height <= width

    def order(self, grid: tuple[int, int]) -> Int32:
        """The rows of a block: numbers of tokens row by row, and beyond them of the learned rows."""
        rows, columns = grid
        first = rows * columns
        num_below, num_behind = self._padding(rows, columns)
        lines = np.full((rows + num_below, columns + 1), first + PAD, np.int32)
        lines[:rows, :columns] = np.arange(first).reshape(grid)
        lines[:rows, columns] = first + NEWLINE
        inside = lines.reshape(-1, 2 if self.paired else 1, columns + 1).swapaxes(1, 2).reshape(-1)
        before, behind = ([first + PAD] * count for count in (self.num_leading, num_behind))
        return np.array([*before, first + START, *inside, *behind, first + END], np.int32)

    def leading_at(self, position: int) -> int:
        """Pads in front of a block that begins at this position."""
        return self.num_leading - position % ALIGNED if self.paired else 0

    def size_of(self, width: int, height: int, *, min_pixels: int, patch: int, merge: int) -> tuple[int, int]:
        """Width and height of the resized image in pixels, multiples of `patch`: rounded up, or the largest of this
        aspect ratio whose block has at most `max_rows` rows."""
        if self.squeezes(width, height):
            width = height * self.max_ratio
        if width * height < min_pixels:
            factor = math.sqrt(min_pixels / (width * height))
            width, height = int(width * factor), int(height * factor)
        sizes = -(-width // patch) * patch, -(-height // patch) * patch
        limit = budget = self.max_rows - self.num_leading
        while self._num_rows(*(-(-each // patch // merge) for each in sizes)) > limit:
            sizes = self._largest(width, height, budget, patch, merge)
            budget -= 1
        return sizes

    def _padding(self, rows: int, columns: int) -> tuple[int, int]:
        """Lines of pads below the tokens, and pads behind the last line."""
        if not self.paired:
            return 0, 0
        num_below = rows % 2
        return num_below, -(rows + num_below) * (columns + 1) % ALIGNED

    def _num_rows(self, columns: int, rows: int) -> int:
        """Rows of a block of so many tokens, without the pads in front."""
        num_below, num_behind = self._padding(rows, columns)
        return (rows + num_below) * (columns + 1) + num_behind + 2

    def _largest(self, width: int, height: int, budget: int, patch: int, merge: int) -> tuple[int, int]:
        """Width and height of an image of `budget` positions: columns c and rows r of tokens with r (c + 1) + 2 of them
        and the shape of the image."""
        unit, step, ratio = patch * merge, 2 if self.paired else 1, height / width
        columns = math.sqrt((budget - 2) / ratio + 0.25) - 0.5
        rows = columns * ratio
        if columns < 1:
            return unit, (budget - 2) // 2 // step * step * unit
        if rows < step:
            return ((budget - 2) // step - 1) * unit, step * unit
        factor = min(math.floor(columns) * unit / width, math.floor(rows) // step * step * unit / height)
        return math.floor(width * factor / patch) * patch, math.floor(height * factor / patch) * patch
