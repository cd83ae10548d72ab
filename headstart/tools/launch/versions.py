"""Versions of engines as tuples of numbers: 0.32.0rc1 is (0, 32, 0, 1), llama.cpp's b11434 is (11434,)."""

from __future__ import annotations

import re

from headstart.errors import UsageError

Version = tuple[int, ...]


def parse(text: str) -> Version:
    """Raises UsageError for a text without a number. Local parts (+cu129) do not count."""
    numbers = re.findall(r"\d+", text.partition("+")[0])
    if not numbers:
        raise UsageError(f"{text!r} is not a version", "for example 0.32.0, or b11434 for llama.cpp")
    return tuple(int(number) for number in numbers)


def at_least(version: Version, bound: str) -> bool:
    """Missing places count as 0: 0.32 is at least 0.32.0."""
    other = parse(bound)
    width = max(len(version), len(other))
    return padded(version, width) >= padded(other, width)


def padded(version: Version, width: int) -> Version:
    return version + (0,) * (width - len(version))


def text_of(version: Version) -> str:
    return ".".join(map(str, version))
