"""Image files, requests with images for all APIs, and fields of their answers."""

import base64
import io
import struct
import zlib
from collections.abc import Sequence as Seq
from functools import cache
from typing import Any

import numpy as np
from PIL import Image as Pillow


def png(seed: int = 0, size: tuple[int, int] = (40, 30), kind: str = "PNG", **options: Any) -> bytes:
    """An image file with squares of random colours."""
    colours = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), np.uint8)
    return file_of(Pillow.fromarray(colours).resize(size, Pillow.Resampling.NEAREST), kind, **options)


def file_of(image: Pillow.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@cache
def bomb(side: int = 60_000) -> bytes:
    """A small PNG file of side x side black pixels, of one bit each."""
    deflate = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    num_bands, rest = divmod(side, 1000)
    assert not rest
    row = 1 + (side + 7) // 8  # filter type, pixels
    band = deflate.compress(bytes(1000 * row)) + deflate.flush(zlib.Z_FULL_FLUSH)
    checksum = side * row % 65521 << 16 | 1  # Adler-32 of zeros
    data = b"\x78\x01" + num_bands * band + deflate.flush() + struct.pack(">I", checksum)
    parts = {b"IHDR": struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0), b"IDAT": data, b"IEND": b""}
    chunks = [struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
              for kind, body in parts.items()]  # fmt: skip
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def data_url(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def requests(files: Seq[bytes], text: str, **sampling: Any) -> dict[str, tuple[str, dict[str, Any]]]:
    """API -> path and body of one question about images."""
    texts, urls = [base64.b64encode(each).decode() for each in files], [data_url(each) for each in files]
    size, model = sampling.pop("max_tokens", 8), sampling.pop("model")
    source = [{"type": "base64", "media_type": "image/png", "data": each} for each in texts]
    return {
        "openai": ("/v1/chat/completions", {
            "model": model, "max_tokens": size, **sampling,
            "messages": [{"role": "user", "content": [
                *({"type": "image_url", "image_url": {"url": each, "detail": "high"}} for each in urls),
                {"type": "text", "text": text},
            ]}],
        }),
        "responses": ("/v1/responses", {
            "model": model, "max_output_tokens": size, **sampling,
            "input": [{"role": "user", "content": [
                *({"type": "input_image", "image_url": each, "detail": "auto"} for each in urls),
                {"type": "input_text", "text": text},
            ]}],
        }),
        "anthropic": ("/v1/messages", {
            "model": model, "max_tokens": size, **sampling,
            "messages": [{"role": "user", "content": [
                *({"type": "image", "source": each} for each in source), {"type": "text", "text": text},
            ]}],
        }),
        "ollama": ("/api/chat", {
            "model": model, "options": {"num_predict": size, **sampling}, "stream": False,
            "messages": [{"role": "user", "content": text, "images": texts}],
        }),
        "ollama generate": ("/api/generate", {
            "model": model, "options": {"num_predict": size, **sampling}, "stream": False, "prompt": text,
            "images": texts,
        }),
    }  # fmt: skip


def text_of(api: str, answer: dict[str, Any]) -> str:
    """The text of an API's answer."""
    if api == "openai":
        return str(answer["choices"][0]["message"]["content"])
    if api == "responses":
        return "".join(part["text"] for item in answer["output"] for part in item["content"])
    if api == "anthropic":
        return "".join(part["text"] for part in answer["content"])
    return str(answer["message"]["content"] if api == "ollama" else answer["response"])


def prompt_tokens(api: str, answer: dict[str, Any]) -> int:
    """Prompt tokens in an API's usage, including those of images."""
    usage = answer.get("usage", answer)
    if api == "anthropic":
        return int(usage["input_tokens"] + usage["cache_read_input_tokens"])
    return int(usage[{"openai": "prompt_tokens", "responses": "input_tokens"}.get(api, "prompt_eval_count")])


def message_of(answer: Any) -> str:
    """The error message in any API's answer."""
    error = answer["error"]
    return str(error if isinstance(error, str) else error["message"])
