"""Images of a request: `decode_image` makes pixels of a file's bytes.

Decoders of image formats are a common target of attacks, so a child process (`_image_process.py`) runs them with
limits of time, memory and pixels. It is started with the first image.
"""

import hashlib
import json
import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart import system
from headstart.errors import UsageError
from headstart.files import read_regular, user_path
from headstart.text._child import ChildProcess, ChildQueue
from headstart.text._image_process import CHUNK, SIGNALLED, ImageLimits, to_rgb

LIMITS = ImageLimits()
_MODULE = "headstart.text._image_process"


class ImageError(UsageError):
    """An image that cannot be read."""


@dataclass(frozen=True, eq=False)
class Image:
    """A decoded image."""

    pixels: NDArray[np.uint8] = field(repr=False)  # [height, width, 3] RGB
    digest: bytes = field(repr=False)  # SHA-256 over size and pixels

    @classmethod
    def of(cls, pixels: NDArray[np.uint8]) -> "Image":
        """The image with these pixels [height, width, 3]. Raises ImageError for another shape or type."""
        if pixels.ndim != 3 or pixels.shape[2] != 3 or pixels.dtype != np.uint8 or not pixels.size:
            raise ImageError(f"an image has shape {pixels.shape} and type {pixels.dtype}", "give uint8 [h, w, 3]")
        pixels = np.ascontiguousarray(pixels)
        height, width, _ = pixels.shape
        digest = hashlib.sha256(b"%dx%d:" % (width, height))
        digest.update(pixels.data)
        return cls(pixels, digest.digest())

    @property
    def size(self) -> tuple[int, int]:
        """Width and height."""
        return self.pixels.shape[1], self.pixels.shape[0]


def decode_image(data: bytes) -> Image:
    """The image in the bytes of a PNG, JPEG, WebP, GIF, BMP, TIFF, AVIF or PPM file: its first frame, upright as EXIF
    says, over white where it is transparent. Raises ImageError if it cannot be read or exceeds LIMITS, BusyError if too
    many images wait, CapacityError if the child process does not start."""
    if not data:
        raise ImageError("the image is empty", "send the bytes of an image file")
    if find_spec("PIL") is None:
        raise UsageError("reading images needs Pillow, which is not installed", "pip install pillow")
    return Image.of(_decoder.decode(data))


def read_image(source: Any) -> Image:
    """The image of a path, of a file's bytes, of a Pillow image, or an Image. Raises ImageError, as `decode_image`,
    and for another type."""
    if isinstance(source, Image):
        return source
    if isinstance(source, bytes | bytearray):
        return decode_image(bytes(source))
    if isinstance(source, str | os.PathLike):
        return read_image_file(user_path(source))[1]
    if hasattr(source, "getchannel"):
        try:
            return Image.of(np.asarray(to_rgb(source)))
        except (ValueError, OSError) as error:
            raise ImageError(f"the image cannot be read: {error}") from None
    raise ImageError(f"an image is {type(source).__name__}", "give a path, bytes, a Pillow image or an Image")


def read_image_file(path: Path) -> tuple[bytes, Image]:
    """The bytes of an image file, and the image. Raises ImageError, as `decode_image`, and for an unreadable file."""
    try:
        data = read_regular(path)
    except OSError as error:
        raise ImageError(f"cannot read {path}: {error.strerror}", "is the path right?") from None
    try:
        return data, decode_image(data)
    except ImageError as error:
        raise ImageError(f"{path}: {error.message}", error.hint) from None


class _Decoder(ChildQueue):
    """Decodes images in a process with limits, one at a time."""

    def __init__(self, limits: ImageLimits = LIMITS) -> None:
        super().__init__(_MODULE, "decodes images", limits.waiting, "images wait to be decoded")
        self._limits = limits

    def decode(self, data: bytes) -> NDArray[np.uint8]:
        """Pixels [height, width, 3]."""
        with self.reserve():
            return self._ask((data, self._limits), self._pixels)

    def _check_exit(self, code: int) -> None:
        if code > SIGNALLED:
            raise self._limit_error(code - SIGNALLED)

    def _pixels(self, process: ChildProcess) -> NDArray[np.uint8]:
        """The reply. Raises EOFError or OSError if the process ends before it is complete."""
        if not process.replies.poll(self._limits.wall_seconds + 5):  # systems without forks have no other limit
            self._process = None
            process.end()
            raise self._limit_error(None)
        reply = json.loads(process.replies.recv_bytes())
        if message := reply.get("error"):
            raise ImageError(f"the image cannot be read: {message}", reply["hint"])
        pixels = np.empty((reply["height"], reply["width"], 3), np.uint8)
        flat, start = pixels.data.cast("B"), 0
        while start < len(flat):
            start += process.replies.recv_bytes_into(flat[start : start + CHUNK])
        return pixels

    def _limit_error(self, signal_number: int | None) -> ImageError:
        if signal_number is None or signal_number in system.TIMEOUT_SIGNALS:
            return ImageError(f"decoding the image takes more than {self._limits.seconds:g} s", "make it smaller")
        return ImageError("decoding the image takes too much memory, or it is damaged", "send a PNG or JPEG file")


_decoder = _Decoder()
