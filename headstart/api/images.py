"""Images in prompts: `split_images` takes them out of OpenAI's messages, `encode_images` puts them into a prompt.

A chat template gets `{"type": "image"}` for each image, as in transformers, and writes a placeholder. The model's
vision tower replaces the placeholders by the rows of the images.
"""

import base64
import binascii
from collections.abc import Callable, Mapping, Sequence as Seq
from dataclasses import dataclass
from typing import Any

from headstart.core import PlacedImage
from headstart.engine.load import Model
from headstart.errors import CapacityError, ContextError, ParameterError, UsageError
from headstart.text.image_prompt import ImageProcessor
from headstart.text.images import Image, ImageError, read_image

Message = Mapping[str, Any]
IMAGES = ("image_url", "image", "input_image")
"""Types of content parts that are images: OpenAI's, transformers' and the Responses API's."""
_SOURCES = ("image_url", "image", "url", "path")  # members that hold the image
QUOTED = 80  # characters of a type or URL that an error quotes


@dataclass(frozen=True)
class EncodedPrompt:
    """A prompt as the engine takes it."""

    ids: list[int]  # with the rows of the images
    text: str = ""  # of the rendered chat template
    images: tuple[PlacedImage, ...] = ()  # at their places in `ids`


def split_images(messages: Seq[Message]) -> tuple[list[dict[str, Any]], list[Any]]:
    """The messages for the chat template, and the images of all messages in order (URLs, paths, bytes, ...). Content
    without images becomes one text. Raises UsageError for a part that is neither text nor image."""
    found, images = list[dict[str, Any]](), list[Any]()
    for number, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, list | tuple):
            found.append(dict(message))
            continue
        parts, before = list[dict[str, str]](), len(images)
        for place, part in enumerate(content):
            name = f"messages.{number}.content.{place}"
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            if kind in IMAGES:
                images.append(_source(part))
                parts.append({"type": "image"})
            elif kind in ("text", "refusal") or (kind == "input_text" and "text" in part):
                if not isinstance(text := part.get("refusal" if kind == "refusal" else "text"), str):
                    what = f"is wrong: a part of type {kind} has no text"
                    raise ParameterError(name, what, 'give {"type": "text", "text": "Hi"}')
                parts.append({"type": "text", "text": text})
            else:
                what = f"is a part of type {str(kind)[:QUOTED]!r}, which is not read"
                raise ParameterError(name, what, "give parts of type text or image_url")
        has_images = len(images) > before
        found.append({**message, "content": parts if has_images else "".join(part["text"] for part in parts)})
    return found, images


def _source(part: Mapping[str, Any]) -> Any:
    source = next((part[name] for name in _SOURCES if part.get(name) is not None), None)
    source = source.get("url") if isinstance(source, Mapping) else source
    if source is None or source == "":
        raise ImageError(f"a part of type {part['type']!r} has no image", 'give {"image_url": {"url": "data:..."}}')
    return source


def data_of(source: Any) -> bytes | None:
    """The bytes of a data URL; None for anything else. Raises ImageError if it is not valid base64."""
    if not isinstance(source, str) or source[:5].lower() != "data:":
        return None
    head, comma, text = source.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise ImageError("its data URL has no ;base64, part", "send data:image/png;base64,...")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"its base64 is not valid: {error}", "encode the file's bytes as base64") from None


def open_image(source: Any) -> Image:
    """The image of a path, data URL, bytes, Pillow image or Image. Raises ImageError, also for other URLs."""
    if (data := data_of(source)) is not None:
        return read_image(data)
    if isinstance(source, str) and source.lower().startswith(("http://", "https://")):
        raise ImageError(f"{source[:QUOTED]} is a URL, and nothing is downloaded here", "give its bytes or a path")
    return read_image(source)


def require_image_processor(model: Model) -> ImageProcessor:
    """The image processor of a model. Raises UsageError without one."""
    if model.image_processor is not None:
        return model.image_processor
    why = ": " + model.no_tower if model.no_tower else ""
    hint = "leave the images out, or take a model with a vision tower"
    raise UsageError(f"{model.name} reads text only" + why, hint)


def encode_images(
    processor: ImageProcessor, prompt: tuple[Seq[int], str], sources: Seq[Any], max_tokens: int,
    read: Callable[[Any], Image] = open_image,
) -> EncodedPrompt:  # fmt: skip
    """The prompt (token ids with placeholders, and its text) with the images that `read` makes of the sources. Raises
    the errors of `read` and of the processor, with the image's number, and ContextError for more than `max_tokens`."""
    inputs = []
    for number, source in enumerate(sources, 1):
        try:
            # one by one: their pixels take far more memory than the inputs
            inputs.append(processor.prepare(read(source)))
        except (ImageError, CapacityError) as error:
            raise type(error)(f"image {number} of {len(sources)}: {error.message}", error.hint) from None
    ids, images = processor.expand(list(prompt[0]), inputs)
    if len(ids) >= max_tokens:
        some = "image" if len(sources) == 1 else f"{len(sources)} images"
        what = f"the prompt with its {some} has {len(ids)} tokens"
        raise ContextError(what, max_tokens, "send fewer or smaller images")
    return EncodedPrompt(ids, prompt[1], tuple(images))


def with_placeholders(processor: ImageProcessor, text: str, count: int) -> str:
    """A raw text with one placeholder for each image. Missing placeholders are put before the text."""
    return processor.placeholder * (count - text.count(processor.placeholder)) + text


def per_prompt(images: Seq[Any] | None, prompts: Seq[Any], is_single: bool) -> list[Seq[Any]]:
    """The images of each prompt. `images`: those of the single prompt, else a list for each prompt. Raises
    UsageError if the numbers differ."""
    if images is None:
        return [()] * len(prompts)
    if isinstance(images, str | bytes) or not isinstance(images, Seq):
        raise UsageError(f"images is {type(images).__name__}", "give a list of images: images=[path]")
    if is_single:
        return [images]
    if len(images) != len(prompts) or not all(isinstance(each, list | tuple) for each in images):
        what = f"images must be a list of images for each of the {len(prompts)} prompts"
        raise UsageError(what, "for example images=[[path], []]")
    return list(images)
