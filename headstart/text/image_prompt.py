"""`ImageProcessor`: resizes and normalizes images, and puts their rows into prompts."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from headstart.core import Float32, ImageInput, PlacedImage
from headstart.errors import UsageError
from headstart.text.image_blocks import BlockFormat
from headstart.text.images import Image, ImageError
from headstart.text.tokenizer import Tokenizer

MAX_RATIO = 200  # of the sides of an image that keeps its shape
GRAY = (127, 127, 127)  # beside an image that does not fill its patches


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """How a family prepares an image, and the image's tokens in a prompt."""

    image_size: int = 0  # width and height in pixels after resizing; 0: images keep their shape
    is_cut: bool = False  # a larger image is also given as squares of `image_size`, which precede the whole image
    min_pixels: int = 0  # minimum number of pixels after resizing
    max_pixels: int = 0  # maximum number of pixels after resizing; 0: no limit
    is_filled: bool = False  # smaller images are enlarged to `max_pixels` too
    # longest side in pixels after resizing; with `image_size`: after a first resizing that keeps the shape; 0: no limit
    longest: int = 0
    resample: int = 2  # Pillow's number of the filter; 2: bilinear
    patch_size: int  # width and height of a patch in pixels
    merge: int  # patches in a row and in a column of a token
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of red, green and blue, subtracted from values in 0..1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)  # divides them
    placeholder: str  # the chat template's text for an image
    marker: str  # special token in it, which is replaced by `begin`, the rows and `end`
    begin: str = ""  # special tokens before and after the rows; empty: none
    end: str = ""
    row_end: str = ""  # special token after each row of tokens but the last
    around: str = ""  # newlines before `begin` and after `end`
    token_id: int | None = None  # of the rows, whose embeddings only heads read; None: that of `marker`
    is_bidirectional: bool = False  # see core.PlacedImage
    has_axes: bool = False  # see core.PlacedImage
    is_marked: bool = False  # see core.PlacedImage
    widens_windows: bool = False  # see core.PlacedImage
    block: BlockFormat | None = None  # learned rows around and between tokens; None: there are none

    @property
    def token_side(self) -> int:
        """Width and height of a token in pixels."""
        return self.patch_size * self.merge

    @property
    def max_patches(self) -> int:
        """Patches that the tower computes at once."""
        if self.block:
            return self.block.max_rows * self.merge**2
        return (self.image_size**2 or self.max_pixels or self.longest**2) // self.patch_size**2

    @property
    def max_tokens(self) -> int:
        """Positions of the largest image."""
        squares = 1 + (math.ceil(self.longest / self.image_size) ** 2 if self.is_cut else 0)
        return squares * self.max_patches // self.merge**2

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing, multiples of a token's (transformers 5.24, smart_resize of Qwen2-VL,
        get_resize_output_image_size of Pixtral, get_aspect_ratio_preserving_size of Gemma 4). Raises ImageError for an
        image that is too long."""
        if self.image_size:
            return self.image_size, self.image_size
        if self.block:
            return self.block.size_of(
                width, height, min_pixels=self.min_pixels, patch=self.patch_size, merge=self.merge
            )
        unit = self.token_side
        if self.longest:
            ratio = max(width, height, self.longest) / self.longest
            return -(-math.floor(width / ratio) // unit) * unit, -(-math.floor(height / ratio) // unit) * unit
        if self.is_filled:
            factor, longest = math.sqrt(self.max_pixels / (width * height)), self.max_pixels // unit**2
            tokens = [math.floor(factor * each / unit) for each in (width, height)]
            if min(tokens) == 0:  # one row or column of tokens
                tokens = [min(max(each // min(width, height), 1), longest) for each in (width, height)]
            return tokens[0] * unit, tokens[1] * unit
        if max(width, height) > MAX_RATIO * min(width, height):
            what = f"it has {width} x {height} pixels, and one side may be {MAX_RATIO} times the other at most"
            raise ImageError(what, "cut it into parts")
        sizes = [round(each / unit) * unit for each in (width, height)]
        if sizes[0] * sizes[1] > self.max_pixels:
            factor = math.sqrt(width * height / self.max_pixels)
            sizes = [max(unit, math.floor(each / factor / unit) * unit) for each in (width, height)]
        elif sizes[0] * sizes[1] < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (width * height))
            sizes = [math.ceil(each * factor / unit) * unit for each in (width, height)]
        return sizes[0], sizes[1]

    def squares_of(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """Width and height after the first and the second resizing of an image that is cut, the latter multiples of
        image_size (transformers 5.24, SmolVLMImageProcessor.resize and resize_for_vision_encoder)."""
        ratio, side = width / height, self.image_size
        short = int(self.longest / ratio if width >= height else self.longest * ratio)
        short = max(short + short % 2, 1)
        first = (self.longest, short) if width >= height else (short, self.longest)
        ratio, long = first[0] / first[1], -(-max(first) // side) * side
        short = -(-int(long / ratio if first[0] >= first[1] else long * ratio) // side) * side
        return first, (long, short) if first[0] >= first[1] else (short, long)


@dataclass(frozen=True)
class Piece:
    """Features offset .. offset + count - 1 of an image, and the text before them."""

    before: str
    image: ImageInput
    offset: int
    count: int


@dataclass(frozen=True)
class PreparedImage:
    """The features and special tokens of one image, in the order of the prompt."""

    pieces: tuple[Piece, ...]
    after: str  # text after them


@dataclass(frozen=True)
class ImageProcessor:
    """Prepares images for one model. `prepare` may run in several threads at once."""

    format: ImageFormat
    tokenizer: Tokenizer

    @property
    def placeholder(self) -> str:
        """The text for one image in a prompt."""
        return self.format.placeholder

    @property
    def max_patches(self) -> int:
        """Patches that the tower computes at once."""
        return self.format.max_patches

    def prepare(self, image: Image) -> PreparedImage:
        """The resized image (antialiased) as patches. Raises ImageError for a size that the tower does not take."""
        from PIL import Image as Pillow, ImageOps  # only images need it

        spec, pixels = self.format, Pillow.fromarray(image.pixels)
        filter_ = Pillow.Resampling(spec.resample)
        if spec.image_size and spec.longest:
            first, second = spec.squares_of(*image.size)
            pixels = pixels.resize(first, filter_)
            return self._cut(pixels.resize(second, filter_) if spec.is_cut else pixels, filter_, image.digest)
        size = spec.size_of(*image.size)
        if spec.block and not spec.block.squeezes(*image.size):
            resized = ImageOps.pad(pixels, size, filter_, color=GRAY)
        else:
            resized = pixels.resize(size, filter_)
        whole = self._input(resized, image.digest)
        rows, columns = whole.grid if spec.row_end else (1, whole.num_rows)
        before = (spec.begin, *[spec.row_end] * (rows - 1))
        return PreparedImage(
            tuple(Piece(text, whole, row * columns, columns) for row, text in enumerate(before)), spec.end
        )

    def _cut(self, pixels: Any, filter_: int, digest: bytes) -> PreparedImage:
        """The squares of a Pillow image, row by row, then all of it as one square, unless it is one (SmolVLM)."""
        spec, side = self.format, self.format.image_size
        columns, rows = (size // side if spec.is_cut else 0 for size in pixels.size)
        pieces = list[Piece]()
        for row in range(rows if rows * columns > 1 else 0):
            for column in range(columns):
                box = (column * side, row * side, (column + 1) * side, (row + 1) * side)
                square = self._input(pixels.crop(box), digest + f"{row},{column}".encode())
                name = f"{spec.begin}<row_{row + 1}_col_{column + 1}>"
                pieces.append(Piece("\n" + name if row and not column else name, square, 0, square.num_tokens))
        whole = self._input(pixels.resize((side, side), filter_), digest)
        name = ("\n\n" if pieces else "") + f"{spec.begin}<global-img>"
        return PreparedImage((*pieces, Piece(name, whole, 0, whole.num_tokens)), spec.end)

    def _input(self, resized: Any, digest: bytes) -> ImageInput:
        """A Pillow image as patches. `digest` names its content among all images of this format."""
        spec, unit = self.format, self.format.token_side
        values = np.asarray(resized, np.float32) / np.float32(255)
        mean, std = (np.asarray(each, np.float32) for each in (spec.mean, spec.std))
        grid, patch_grid = ((-(-resized.height // side), -(-resized.width // side)) for side in (unit, spec.patch_size))
        patches = to_patches(((values - mean) / std).astype(np.float32), spec.patch_size, spec.merge)
        digest = hashlib.sha256(f"{spec}".encode() + digest).digest()
        order = spec.block.order(grid) if spec.block else None
        return ImageInput(patches, grid, digest, patch_grid, order)

    def expand(
        self, prompt_ids: Sequence[int], images: Sequence[PreparedImage]
    ) -> tuple[list[int], tuple[PlacedImage, ...]]:
        """Token ids with the rows of each image in place of its placeholder, and the images for `Request.images`.
        Newlines around an image become one token with those next to them, as in the tokens of the whole text. Raises
        UsageError if the numbers of placeholders and images differ."""
        spec, marker, found = self.format, self._id_of(self.format.marker), list[PlacedImage]()
        if (count := sum(token == marker for token in prompt_ids)) != len(images):
            message = f"the prompt has {count} placeholders {spec.marker} for {len(images)} images"
            raise UsageError(message, "each image needs one; the chat template writes them")
        ids: list[int] = []
        is_behind, remaining = False, iter(images)  # is_behind: only newlines since the end of an image
        for token in prompt_ids:
            if token == marker:
                self._add_newlines(ids, len(spec.around))
                prepared = next(remaining)
                for piece in prepared.pieces:
                    ids += self._ids_of(piece.before)
                    placed = self._place(piece, len(ids))
                    found += placed
                    ids += [token if spec.token_id is None else spec.token_id] * (placed[-1].end - len(ids))
                ids += self._ids_of(prepared.after)
                self._add_newlines(ids, len(spec.around))
                is_behind = bool(spec.around)
            elif is_behind and (newlines := self._newlines.get(token)):
                self._add_newlines(ids, newlines)
            else:
                ids.append(token)
                is_behind = False
        return ids, tuple(found)

    def _place(self, piece: Piece, first: int) -> list[PlacedImage]:
        """The features of a piece at positions from `first` on. Pads in front of a block attend as text does."""
        spec, pads = self.format, list[PlacedImage]()
        placed = PlacedImage(first, piece.image, offset=piece.offset, count=piece.count, is_marked=spec.is_marked)
        if spec.block:
            skipped = spec.block.num_leading
            if leading := spec.block.leading_at(first):
                pads.append(replace(placed, offset=skipped - leading, count=leading))
            placed = replace(placed, first=first + leading, offset=skipped, count=piece.count - skipped)
        return [*pads, replace(
            placed, is_bidirectional=spec.is_bidirectional, widens_windows=spec.widens_windows, has_axes=spec.has_axes,
        )]  # fmt: skip

    def _ids_of(self, text: str) -> list[int]:
        """Token ids of special tokens and newlines."""
        return self.tokenizer.encode(text) if text else []

    def _add_newlines(self, ids: list[int], count: int) -> None:
        """Appends `count` newlines to token ids, joined with those at their end."""
        while count and ids and (before := self._newlines.get(ids[-1])):
            count += before
            ids.pop()
        ids += self.tokenizer.encode("\n" * count) if count else []

    @cached_property
    def _newlines(self) -> dict[int, int]:
        """Token ids of newlines -> their number."""
        vocabulary = self.tokenizer.vocabulary().values()
        texts = ((token, self.tokenizer.token_bytes(token)) for token in vocabulary)
        return {token: len(text) for token, text in texts if text and not text.strip(b"\n")}

    def _id_of(self, token: str) -> int:
        found = self.tokenizer.id_of(token)
        if found is None:
            raise UsageError(f"the tokenizer has no token {token}, which images need")
        return found


def to_patches(pixels: Float32, side: int, merge: int) -> Float32:
    """Pixels [height, width, channels] -> patches [P, channels * side * side]: squares of merge * merge patches row by
    row, and in a square its patches row by row; in a patch, channel by channel, as a convolution's weight [out,
    channels, side, side] has them. Squares at the lower and right edge lack the patches beyond the pixels."""
    height, width, channels = pixels.shape
    unit = side * merge
    rows, columns = -(-height // unit), -(-width // unit)
    padded = np.pad(pixels, ((0, rows * unit - height), (0, columns * unit - width), (0, 0)))
    squares = padded.reshape(rows, merge, side, columns, merge, side, channels).transpose(0, 3, 1, 4, 6, 2, 5)
    tops, lefts = (np.arange(0, count * unit, side) for count in (rows, columns))
    is_inside = np.logical_and.outer(tops < height, lefts < width).reshape(rows, merge, columns, merge).swapaxes(1, 2)
    return np.ascontiguousarray(squares[is_inside].reshape(-1, channels * side * side))
