"""Image decoding: formats, modes, orientation, damaged files, limits of the decoder process."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from image_files import bomb, file_of
from PIL import Image as Pillow

from headstart.errors import UsageError
from headstart.text import images
from headstart.text.images import Image, ImageError, ImageLimits, decode_image, read_image

COLORS = np.random.default_rng(0).integers(0, 256, (6, 9, 3), np.uint8)
IMAGE = Pillow.fromarray(COLORS)


def pixels_of(data: bytes) -> np.ndarray:
    return decode_image(data).pixels


@pytest.mark.parametrize(("kind", "options"), [
    ("PNG", {}), ("BMP", {}), ("TIFF", {}), ("PPM", {}), ("WEBP", {"lossless": True}),
])  # fmt: skip
def test_lossless_formats_keep_the_pixels(kind: str, options: dict[str, Any]) -> None:
    assert np.array_equal(pixels_of(file_of(IMAGE, kind, **options)), COLORS)


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "AVIF", "GIF"])
def test_lossy_formats_nearly_keep_the_pixels(kind: str) -> None:
    data = file_of(Pillow.new("RGB", (9, 6), (200, 60, 20)), kind)
    assert np.abs(pixels_of(data).astype(int) - [200, 60, 20]).max() <= 8


def test_color_modes_become_rgb() -> None:
    """Gray, 16 bits, 1 bit, palette, CMYK and transparency."""
    gray = COLORS[..., 0]
    assert np.array_equal(pixels_of(file_of(Pillow.fromarray(gray)))[..., 2], gray)
    deep = np.arange(65536, dtype=np.uint16).reshape(256, 256)
    assert np.array_equal(pixels_of(file_of(Pillow.fromarray(deep)))[..., 1], deep >> 8)
    assert np.array_equal(pixels_of(file_of(Pillow.new("1", (1, 1), 1))), [[[255] * 3]])
    palette = IMAGE.quantize(256)
    assert np.array_equal(pixels_of(file_of(palette)), np.asarray(palette.convert("RGB")))
    cmyk = pixels_of(file_of(Pillow.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG"))
    assert np.abs(cmyk.astype(int) - [255, 0, 0]).max() <= 3
    glass = Pillow.new("RGBA", (3, 1))
    for x, alpha in enumerate((0, 255, 51)):
        glass.putpixel((x, 0), (0, 100, 0, alpha))
    assert pixels_of(file_of(glass)).tolist() == [[[255] * 3, [0, 100, 0], [204, 224, 204]]]
    hole = file_of(Pillow.new("RGB", (1, 1), (1, 2, 3)), transparency=(1, 2, 3))
    assert pixels_of(hole).tolist() == [[[255] * 3]]


@pytest.mark.parametrize(("orientation", "turn"), [
    (3, lambda a: a[::-1, ::-1]), (6, lambda a: np.rot90(a, -1)), (2, lambda a: a[:, ::-1]), (9, lambda a: a),
])  # fmt: skip
def test_exif_orientation_is_applied(orientation: int, turn: Callable[[np.ndarray], np.ndarray]) -> None:
    exif = Pillow.Exif()
    exif[0x0112] = orientation
    assert np.array_equal(pixels_of(file_of(IMAGE, exif=exif)), turn(COLORS))


def test_first_frame_of_an_animation() -> None:
    frames = [Pillow.new("RGB", (4, 4), color) for color in ("red", "blue")]
    for kind in ("GIF", "WEBP", "PNG"):
        data = file_of(frames[0], kind, save_all=True, append_images=frames[1:])
        assert (pixels_of(data)[..., 0] > 200).all(), kind


def test_digest_depends_on_size_and_pixels() -> None:
    first, other_format = decode_image(file_of(IMAGE)), decode_image(file_of(IMAGE, "BMP"))
    assert first.digest == other_format.digest and len(first.digest) == 32
    assert Image.of(COLORS.reshape(9, 6, 3)).digest != first.digest
    assert first.size == (9, 6)


BAD = {
    "empty": (b"", "is empty"),
    "text": (b"hello " * 20, "no image in a known format"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "no image in a known format"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "no image in a known format"),
    "truncated PNG": (file_of(IMAGE)[:80], "damaged or cut off"),
    "truncated JPEG": (file_of(Pillow.fromarray(np.tile(COLORS, (9, 9, 1))), "JPEG")[:-200], "damaged or cut off"),
    "only a header": (file_of(IMAGE)[:16], "cannot be read"),
    "bomb": (bomb(), "60000 x 60000 pixels, and 50 million are allowed"),
    "floats": (file_of(Pillow.new("F", (2, 2)), "TIFF"), "32-bit numbers"),
}


@pytest.mark.parametrize("name", BAD)
def test_unreadable_files_are_refused(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(ImageError, match=message):
        decode_image(data)
    assert np.array_equal(pixels_of(file_of(IMAGE)), COLORS)


@pytest.mark.parametrize(("limits", "message"), [
    (ImageLimits(seconds=0.05), "takes more than 0.05 s"),
    (ImageLimits(address_space=16 * 2**20), "too much memory"),
])  # fmt: skip
def test_decoder_limits_time_and_memory(limits: ImageLimits, message: str) -> None:
    decoder = images._Decoder(limits)
    with pytest.raises(ImageError, match=message):
        decoder.decode(file_of(Pillow.new("L", (6000, 6000))))
    assert np.array_equal(decoder.decode(file_of(IMAGE)), COLORS)


def test_killed_decoder_process_is_restarted() -> None:
    decoder = images._Decoder()
    decoder.decode(file_of(IMAGE))
    assert decoder._process is not None
    os.kill(decoder._process._popen.pid, signal.SIGKILL)
    assert np.array_equal(decoder.decode(file_of(IMAGE)), COLORS)


def test_image_sources(tmp_path: Path) -> None:
    data, path = file_of(IMAGE), tmp_path / "a.png"
    path.write_bytes(data)
    found = [read_image(each) for each in (data, path, str(path), IMAGE, decode_image(data))]
    assert len({each.digest for each in found}) == 1
    path.write_bytes(b"no image")
    for source, message in ((path, r"a\.png: the image cannot"), (tmp_path, "Is a directory"), (3, "is int")):
        with pytest.raises(ImageError, match=message):
            read_image(source)
    with pytest.raises(ImageError, match="uint8"):
        Image.of(np.zeros((2, 2, 4), np.uint8))


def test_without_pillow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="needs Pillow") as caught:
        decode_image(b"x")
    assert caught.value.hint == "pip install pillow"
