"""Documents as YAML, written by what JSON and YAML share: strings that could be anything else are quoted as in JSON."""

from __future__ import annotations

import json
import re
from typing import Any

PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
BLOCKS_BREAK = re.compile(r"[^\S\n ]| $", re.MULTILINE)
"""What a block of text cannot hold, or readers would not see."""
UNSEEN = re.compile("[\x7f-\x9f\u2028\u2029\ufeff]")
"""What JSON leaves as it is in a string, and YAML takes for the end of a line, or not at all."""
WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off", "y", "n"})


def dumped(document: Any) -> str:
    """A dictionary or list, as a block."""
    return "\n".join(_lines(document)) + "\n"


def _lines(value: Any, indent: int = 0) -> list[str]:
    blank, lines = " " * indent, []
    if isinstance(value, dict):
        for key, item in value.items():
            lines += _entry(f"{blank}{_scalar(str(key))}:", item, indent)
        return lines
    for item in value:
        if isinstance(item, dict) and item:
            first, *rest = _lines(item, indent + 2)
            lines += [f"{blank}- {first.lstrip()}", *rest]
        else:
            lines += _entry(f"{blank}-", item, indent)
    return lines


def _entry(head: str, item: Any, indent: int) -> list[str]:
    if isinstance(item, dict | list) and item:
        return [head, *_lines(item, indent + 2)]
    if isinstance(item, str) and re.fullmatch(r"[^\s].*[^\s]\n", item, re.DOTALL) and not BLOCKS_BREAK.search(item):
        return [f"{head} |", *(f"{' ' * (indent + 2)}{line}" if line else "" for line in item.splitlines())]
    return [f"{head} {_scalar(item)}"]


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)
    if PLAIN.fullmatch(value) and value.lower() not in WORDS:
        return value
    return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))
