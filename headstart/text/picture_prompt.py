"""`PictureProcessor`: resizes and normalizes pictures, and puts their rows into prompts."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from headstart.core import Float32, ImageInput, Picture
from headstart.errors import UsageError
from headstart.text.images import Image
from headstart.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class PictureFormat:
    """How a family prepares a picture, and the tokens that it takes in a prompt."""

    image_size: int  # width and height in pixels after resizing
    patch_size: int  # width and height of a patch in pixels
    num_tokens: int  # positions of a picture
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)  # of red, green and blue, subtracted from values in 0..1
    std: tuple[float, ...] = (0.5, 0.5, 0.5)  # divides them
    marker: str  # special token that the chat template writes for a picture, and that begins its rows
    end: str  # special token behind the rows
    around: str = ""  # newlines before the marker and behind the end
    token_id: int  # of the rows, whose embeddings are not used
    is_bidirectional: bool = False  # see core.Picture


@dataclass(frozen=True)
class PictureProcessor:
    """Prepares pictures for one model. Implements text.images.VisionTower."""

    format: PictureFormat
    tokenizer: Tokenizer

    @property
    def placeholder(self) -> str:
        return self.format.marker

    def prepare(self, image: Image) -> ImageInput:
        """The resized picture (bilinear, antialiased, without regard to its shape) as patches."""
        from PIL import Image as Pillow  # only pictures need it

        about = self.format
        size, side = about.image_size, about.patch_size
        resized = Pillow.fromarray(image.pixels).resize((size, size), Pillow.Resampling.BILINEAR)
        values = np.asarray(resized, np.float32) / np.float32(255)
        mean, std = (np.asarray(each, np.float32) for each in (about.mean, about.std))
        pixels: Float32 = ((values - mean) / std).astype(np.float32)
        digest = hashlib.sha256(f"{about}".encode() + image.digest).digest()
        return ImageInput(to_patches(pixels, side), about.num_tokens, digest)

    def expand(self, prompt_ids: Sequence[int], images: Sequence[ImageInput]) -> tuple[list[int], tuple[Picture, ...]]:
        """See text.images.VisionTower.expand. Newlines around a picture become one token with those next to them, as
        in the tokens of the whole text."""
        about, marker, found = self.format, self._id_of(self.format.marker), list[Picture]()
        if (count := sum(token == marker for token in prompt_ids)) != len(images):
            message = f"the prompt has {count} placeholders {about.marker} for {len(images)} pictures"
            raise UsageError(message, "each picture needs one; the chat template writes them")
        ids: list[int] = []
        is_behind = False  # only newlines since the end of a picture
        for token in prompt_ids:
            if token == marker:
                self._add_newlines(ids, len(about.around))
                ids.append(marker)
                image = images[len(found)]
                found.append(Picture(len(ids), image, about.is_bidirectional))
                ids += [about.token_id] * image.num_tokens + [self._id_of(about.end)]
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
            raise UsageError(f"the tokenizer has no token {token}, which pictures need")
        return found


def to_patches(pixels: Float32, side: int) -> Float32:
    """Pixels [height, width, channels] -> patches [P, channels * side * side], row by row; in a patch, channel by
    channel, as a convolution's weight [out, channels, side, side] has them."""
    height, width, channels = pixels.shape
    cut = pixels.reshape(height // side, side, width // side, side, channels)
    return np.ascontiguousarray(cut.transpose(0, 2, 4, 1, 3).reshape(-1, channels * side * side))
