"""`ImageProcessor`: resizes and normalizes images, and puts their rows into prompts."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headstart.core import Float32, ImageInput, Picture
from headstart.errors import UsageError
from headstart.text.images import Image, ImageError
from headstart.text.tokenizer import Tokenizer

MAX_RATIO = 200  # of the sides of an image that keeps its shape


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """How a family prepares an image, and the tokens that it takes in a prompt."""

    image_size: int = 0  # width and height in pixels after resizing; 0: as `min_pixels` and `max_pixels` say
    min_pixels: int = 0  # images keep their shape, with so many pixels at least and at most after resizing
    max_pixels: int = 0
    resample: int = 2  # Pillow's number of the filter; 2: bilinear
    patch_size: int  # width and height of a patch in pixels
    merge: int  # patches in a row and in a column of a token
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of red, green and blue, subtracted from values in 0..1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)  # divides them
    placeholder: str  # what the chat template writes for an image
    marker: str  # special token in it, which is replaced by `begin`, the rows and `end`
    begin: str = ""  # special tokens before and behind the rows; empty: none
    end: str = ""
    around: str = ""  # newlines before `begin` and behind `end`
    token_id: int  # of the rows, whose embeddings are not used
    is_bidirectional: bool = False  # see core.Picture
    has_axes: bool = False  # see core.Picture

    @property
    def max_tokens(self) -> int:
        """Positions of the largest image."""
        side = self.patch_size * self.merge
        return (self.image_size**2 or self.max_pixels) // side**2

    def size_of(self, width: int, height: int) -> tuple[int, int]:
        """Width and height after resizing, multiples of a token's (transformers 5.24, smart_resize of Qwen2-VL). Raises
        ImageError for an image that is too long."""
        if self.image_size:
            return self.image_size, self.image_size
        if max(width, height) > MAX_RATIO * min(width, height):
            what = f"it has {width} x {height} pixels, and one side may be {MAX_RATIO} times the other at most"
            raise ImageError(what, "cut it into parts")
        unit = self.patch_size * self.merge
        sizes = [round(each / unit) * unit for each in (width, height)]
        if sizes[0] * sizes[1] > self.max_pixels:
            factor = math.sqrt(width * height / self.max_pixels)
            sizes = [max(unit, math.floor(each / factor / unit) * unit) for each in (width, height)]
        elif sizes[0] * sizes[1] < self.min_pixels:
            factor = math.sqrt(self.min_pixels / (width * height))
            sizes = [math.ceil(each * factor / unit) * unit for each in (width, height)]
        return sizes[0], sizes[1]


@dataclass(frozen=True)
class ImageProcessor:
    """Prepares images for one model. Implements text.images.VisionTower."""

    format: ImageFormat
    tokenizer: Tokenizer

    @property
    def placeholder(self) -> str:
        return self.format.placeholder

    def prepare(self, image: Image) -> ImageInput:
        """The resized image (antialiased) as patches."""
        from PIL import Image as Pillow  # only images need it

        about = self.format
        width, height = about.size_of(*image.size)
        resized = Pillow.fromarray(image.pixels).resize((width, height), Pillow.Resampling(about.resample))
        values = np.asarray(resized, np.float32) / np.float32(255)
        mean, std = (np.asarray(each, np.float32) for each in (about.mean, about.std))
        pixels: Float32 = ((values - mean) / std).astype(np.float32)
        digest = hashlib.sha256(f"{about}".encode() + image.digest).digest()
        unit = about.patch_size * about.merge
        return ImageInput(to_patches(pixels, about.patch_size, about.merge), (height // unit, width // unit), digest)

    def expand(self, prompt_ids: Sequence[int], images: Sequence[ImageInput]) -> tuple[list[int], tuple[Picture, ...]]:
        """See text.images.VisionTower.expand. Newlines around an image become one token with those next to them, as
        in the tokens of the whole text."""
        about, marker, found = self.format, self._id_of(self.format.marker), list[Picture]()
        if (count := sum(token == marker for token in prompt_ids)) != len(images):
            message = f"the prompt has {count} placeholders {about.marker} for {len(images)} images"
            raise UsageError(message, "each image needs one; the chat template writes them")
        ids: list[int] = []
        is_behind = False  # only newlines since the end of an image
        for token in prompt_ids:
            if token == marker:
                self._add_newlines(ids, len(about.around))
                ids += [self._id_of(about.begin)] if about.begin else []
                image = images[len(found)]
                found.append(Picture(len(ids), image, about.is_bidirectional, about.has_axes))
                ids += [about.token_id] * image.num_tokens + ([self._id_of(about.end)] if about.end else [])
                self._add_newlines(ids, len(about.around))
                is_behind = bool(about.around)
            elif is_behind and (newlines := self._newlines.get(token)):
                self._add_newlines(ids, newlines)
            else:
                ids.append(token)
                is_behind = False
        return ids, tuple(found)

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
    channels, side, side] has them."""
    height, width, channels = pixels.shape
    unit = side * merge
    cut = pixels.reshape(height // unit, merge, side, width // unit, merge, side, channels)
    return np.ascontiguousarray(cut.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, channels * side * side))
