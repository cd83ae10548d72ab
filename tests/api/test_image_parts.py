"""Images in prompts of the Python API: message parts, sources, lists of images, refused values."""

import base64
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from headstart.api.images import open_image, per_prompt, split_images
from headstart.errors import UsageError


def test_images_are_split_from_message_parts() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:a"}}, {"type": "text", "text": "What?"},
        {"type": "image_url", "image_url": "data:b"}, {"type": "image", "path": "c.png"},
        {"type": "image", "image": b"d"},
        {"type": "input_image", "image_url": "data:e"}, {"type": "text", "text": ""},
    ]  # fmt: skip
    texts = [{"type": "text", "text": "So"}, {"type": "refusal", "refusal": "?"}, {"type": "input_text", "text": "!"}]
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts, "name": "x"}]
    shown, images = split_images([*messages, {"role": "user", "content": texts}, {"role": "assistant"}])
    image = {"type": "image"}
    assert shown[1]["content"] == [
        image,
        {"type": "text", "text": "What?"},
        *[image] * 4,
        {"type": "text", "text": ""},
    ]
    assert [each.get("content") for each in (shown[0], *shown[2:])] == ["Be brief.", "So?!", None]
    assert shown[1]["name"] == "x" and images == ["data:a", "data:b", "c.png", b"d", "data:e"]


@pytest.mark.parametrize(("part", "message"), [
    ({"type": "video_url"}, "a part of type 'video_url'"), ("a text", "a part of type 'str'"),
    ({"type": "text", "content": "a"}, "a part of type text has no text"),
    ({"type": "text", "text": 5}, "a part of type text has no text"),
    ({"type": "image"}, "has no image"), ({"type": "image_url", "image_url": {"detail": "low"}}, "has no image"),
])  # fmt: skip
def test_unsupported_parts_are_refused(part: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        split_images([{"role": "user", "content": [part]}])


def test_image_sources(tmp_path: Path) -> None:
    path = tmp_path / "a.bmp"
    Image.new("RGB", (2, 1)).save(path)
    text = base64.b64encode(path.read_bytes()).decode()
    found = [
        open_image(each) for each in (path, str(path), path.read_bytes(), f"data:;base64,{text}", Image.open(path))
    ]
    assert len({each.digest for each in found}) == 1
    for source, message in (("https://a.org/b.png", "nothing is downloaded here"), ("data:image/png,x", "no ;base64,"),
                            ("data:;base64,x!", "base64 is not valid"), (None, "is NoneType")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            open_image(source)


def test_images_of_each_prompt() -> None:
    assert per_prompt(None, ["a", "b"], False) == [(), ()]
    assert per_prompt(["x"], ["a"], True) == [["x"]]
    assert per_prompt([["x"], []], ["a", "b"], False) == [["x"], []]
    for images, single, message in (("x.png", True, "images is str"), (["x"], False, "for each of the 1 prompts"),
                                    ([[], []], False, "for each of the 1 prompts")):  # fmt: skip
        with pytest.raises(UsageError, match=message):
            per_prompt(images, ["a"], single)
