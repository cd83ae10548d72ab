"""Write the pictures of ../how-it-works.md, which explain and measure nothing: python docs/pictures/make.py"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
INK, SOFT, OWN, RIGHT, WRONG = "#374151", "#9ca3af", "#dbeafe", "#bbf7d0", "#fecaca"
HIGH, GAP = 26, 6

PLAIN = ("from", "the", "sun", "is", "scattered", "by", "air", ".")
DRAFTED = (
    (("from", "right"), ("the", "right"), ("moon", "wrong"), ("sun", "own")),
    (("is", "right"), ("blue", "wrong"), ("scattered", "own")),
    (("by", "right"), ("air", "right"), (".", "own")),
)
"""Of each pass: what was guessed, and the token that the pass itself gives."""
COLOURS = {"own": OWN, "right": RIGHT, "wrong": WRONG}

TOKENS = ("river", "sea", "sky", "hill")
NOISE = (1.2, 0.3, 2.0, 0.6)
LOGITS = {"the head": (1.6, 2.6, 1.9, 1.2), "the model": (2.0, 2.4, 2.2, 0.8)}

CHANCES = (0.78, 0.56, 0.38, 0.24, 0.14, 0.08)
COSTS = (0.12, 0.14, 0.17, 0.21, 0.26, 0.32)


def text(x: float, y: float, words: str, *, anchor: str = "middle", size: int = 13, fill: str = INK) -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{fill}">{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, fill: str, stroke: str = SOFT) -> str:
    place = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
    return f'<rect {place} rx="4" fill="{fill}" stroke="{stroke}"/>'


def picture(width: int, height: int, title: str, parts: Iterator[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" role="img">'
    )
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#fff"/>'
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>", ""])


def passes() -> Iterator[str]:
    wide = 84
    yield text(20, 28, "Plain: a pass over the weights for each token", anchor="start", size=15)
    for index, token in enumerate(PLAIN):
        x = 20 + index * (wide + GAP)
        yield text(x + wide / 2, 52, f"pass {index + 1}", size=11, fill=SOFT)
        yield box(x, 60, wide, HIGH, OWN) + text(x + wide / 2, 78, token)
    yield text(20, 128, "With drafts: the same tokens", anchor="start", size=15)
    for index, rows in enumerate(DRAFTED):
        x = 20 + index * (2 * wide + 4 * GAP)
        yield text(x + wide / 2, 152, f"pass {index + 1}", size=11, fill=SOFT)
        for row, (token, kind) in enumerate(rows):
            y = 160 + row * (HIGH + GAP)
            yield box(x, y, wide, HIGH, COLOURS[kind]) + text(x + wide / 2, y + 18, token)
            note = {"right": "guessed, right", "wrong": "guessed, wrong", "own": "the pass's own"}[kind]
            yield text(x + wide + GAP, y + 18, note, anchor="start", size=11, fill=SOFT)


def noise() -> Iterator[str]:
    unit, wide = 36, 44
    for side, (who, logits) in enumerate(LOGITS.items()):
        left = 30 + side * 300
        yield text(left + 110, 28, who, size=15)
        sums = [logit + more for logit, more in zip(logits, NOISE, strict=True)]
        for index, (token, logit, more) in enumerate(zip(TOKENS, logits, NOISE, strict=True)):
            x, floor = left + index * (wide + 12), 220
            best = sums[index] == max(sums)
            yield box(x, floor - logit * unit, wide, logit * unit, OWN)
            yield box(x, floor - (logit + more) * unit, wide, more * unit, "#fef3c7")
            yield text(x + wide / 2, floor + 20, token, fill=INK if best else SOFT)
            if best:
                yield text(x + wide / 2, floor - (logit + more) * unit - 8, "taken", size=12)
    yield box(30, 258, 14, 14, OWN) + text(50, 270, "logit", anchor="start", size=12)
    yield box(110, 258, 14, 14, "#fef3c7")
    yield text(
        130, 270, "noise: of the seed, the position and the token, so the same for both", anchor="start", size=12
    )


def depth() -> Iterator[str]:
    unit, wide, floor = 200, 56, 220
    last = sum(chance > cost for chance, cost in zip(CHANCES, COSTS, strict=True))
    for index, (chance, cost) in enumerate(zip(CHANCES, COSTS, strict=True)):
        x = 40 + index * (wide + 24)
        yield box(x, floor - chance * unit, wide / 2, chance * unit, RIGHT if index < last else "#f3f4f6")
        yield box(x + wide / 2, floor - cost * unit, wide / 2, cost * unit, WRONG)
        yield text(x + wide / 2, floor + 20, f"guess {index + 1}", fill=INK if index < last else SOFT)
    x = 40 + last * (wide + 24) - 12
    yield f'<line x1="{x:g}" y1="40" x2="{x:g}" y2="{floor}" stroke="{INK}" stroke-dasharray="4 4"/>'
    yield text(x + 6, 52, "here the draft ends", anchor="start", size=12)
    yield box(40, 256, 14, 14, RIGHT) + text(
        60, 268, "chance to be right, times what a token is worth", anchor="start", size=12
    )
    yield box(350, 256, 14, 14, WRONG) + text(370, 268, "cost of its row now", anchor="start", size=12)


PICTURES = {
    "passes.svg": (760, 300, "Plain decoding takes eight passes; with drafts the same tokens take three", passes),
    "noise.svg": (580, 286, "The head and the model add the same noise and take the same token", noise),
    "depth.svg": (540, 284, "The chance of a guess falls, its cost rises; the draft ends where they meet", depth),
}


def write(folder: Path) -> None:
    for name, (width, height, title, parts) in PICTURES.items():
        (folder / name).write_text(picture(width, height, title, parts()), "utf-8")


if __name__ == "__main__":
    write(HERE)
    sys.exit(0)
