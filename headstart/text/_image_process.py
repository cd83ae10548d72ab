"""The child process of `images.decode_image`: holds Pillow and forks for each image.

A fork that exceeds its limits, or crashes inside a decoder, ends this process, whose exit code names the signal.
"""

import io
import json
import os
import struct
import zlib
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

from headstart import system
from headstart.text._child import child_pipes

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
"""Pillow's names of the formats that are read: those with a decoder inside Pillow and its libraries."""
FAILURES = (
    OSError, ValueError, TypeError, LookupError, SyntaxError, EOFError, ArithmeticError, AttributeError, RuntimeError,
    NotImplementedError, struct.error, zlib.error,
)  # fmt: skip
"""Errors that Pillow raises for damaged files."""
CHUNK = 4 * 2**20  # bytes of pixels in one message
SIGNALLED = 128  # exit code of this process, less the signal that ended a fork
MESSAGE = 300  # characters
DEEP_MODES = ("I;16", "I;16L", "I;16B", "I;16N")  # gray with 16 bits


@dataclass(frozen=True)
class ImageLimits:
    """Limits of one image."""

    pixels: int = 50_000_000  # cameras of phones have up to 48 million in their largest common mode
    seconds: float = 10.0  # processor time
    wall_seconds: int = 60
    address_space: int = 1024 * 2**20  # bytes beyond those of the child process at its start
    waiting: int = 32  # callers that may wait


def main() -> None:
    """Answer requests until the pipe is closed."""
    requests, replies = child_pipes()
    system.lower_priority()
    from PIL import Image

    Image.MAX_IMAGE_PIXELS = None  # `_decode` has its own limit
    Image.init()
    while True:
        try:
            data, limits = requests.recv()
        except EOFError:
            return
        work = partial(_reply, replies, data, limits)
        if not system.CAN_FORK:
            work()
        elif ended := system.run_in_fork(work):
            os._exit(SIGNALLED + ended)  # sys.exit would close the pipe before the exit code is set


def _reply(replies: Connection, data: bytes, limits: ImageLimits) -> None:
    if system.CAN_FORK:
        system.limit_resources(limits.seconds, limits.wall_seconds, limits.address_space)
    try:
        image = _decode(data, limits)
        pixels = image.tobytes()
    except _RefusedError as error:
        replies.send_bytes(json.dumps({"error": str(error)[:MESSAGE], "hint": error.hint}).encode())
        return
    except MemoryError:
        os._exit(1)
    width, height = image.size
    replies.send_bytes(json.dumps({"width": width, "height": height}).encode())
    for start in range(0, len(pixels), CHUNK):
        replies.send_bytes(memoryview(pixels)[start : start + CHUNK])


class _RefusedError(Exception):
    """The image cannot be read, for the reason that the message gives."""

    def __init__(self, message: str, hint: str = "send a PNG or JPEG file") -> None:
        super().__init__(message)
        self.hint = hint


def _decode(data: bytes, limits: ImageLimits) -> Any:
    """The first frame of a file as an upright Pillow image of mode RGB."""
    from PIL import Image, UnidentifiedImageError

    try:
        known = [name for name in FORMATS if name in Image.OPEN]
        image = Image.open(io.BytesIO(data), formats=known)
    except UnidentifiedImageError:
        raise _RefusedError(f"it is no image in a known format ({', '.join(known)})") from None
    except FAILURES as error:
        raise _RefusedError(f"it is damaged: {error}") from None
    width, height = image.size
    if width * height > limits.pixels:
        most = limits.pixels // 10**6
        raise _RefusedError(f"it has {width} x {height} pixels, and {most} million are allowed", "make it smaller")
    try:
        image.load()
        return to_rgb(image)
    except FAILURES as error:
        raise _RefusedError(f"it is damaged or cut off: {error}") from None


def to_rgb(image: Any) -> Any:
    """A Pillow image as an upright one of mode RGB: EXIF's orientation is applied, transparent parts are white, and 16
    bits become the upper 8. Raises ValueError for floating-point pixels."""
    from PIL import Image, ImageOps

    image = ImageOps.exif_transpose(image)
    if image.mode in DEEP_MODES or (image.mode == "I" and image.format in ("PNG", "PPM")):
        image = image.point(lambda value: value * (1 / 256)).convert("L")
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers, whose range is unknown")
    if not image.has_transparency_data:
        return image.convert("RGB")
    image = image.convert("RGBA")
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white
