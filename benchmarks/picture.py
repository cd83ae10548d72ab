"""docs/demo.svg: the answer to one prompt with its drafted tokens in colour, and the demo's speeds.

    python benchmarks/picture.py --machine "2 cores of an Intel Xeon"    # record the tokens of each pass
    python benchmarks/results.py                                         # draw them from docs/results.json

The depth is fixed, so that passes and tokens are equal on all machines."""

from __future__ import annotations

import argparse
import json
import sys
from html import escape
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs" / "results.json"
KIND, DEPTH, TOKENS = "explain", 3, 64
WIDTH, MARGIN, LINE, LETTER = 760, 24, 22, 8.4
FONT = "ui-monospace, SFMono-Regular, Menlo, Consolas, monospace"
PAPER, INK, PALE, GREEN, GREY = "#ffffff", "#1f2937", "#6b7280", "#b7ebc6", "#d1d5db"
BAR, GAP, FIRST_BAR = 9, 30, 90


def record(machine: str) -> dict[str, Any]:
    """Decodes the prompt with the default model; the tokens of each pass as text."""
    from headstart.api import LLM
    from headstart.config import EngineConfig
    from headstart.core import SamplingParams
    from headstart.tools.prompts import builtin_prompts
    from headstart.version import __version__

    prompt = dict(builtin_prompts())[KIND]
    llm = LLM(None, EngineConfig(depth=DEPTH))
    passes, ids, before = [], [], ""
    for delta in llm.stream(prompt, SamplingParams(max_tokens=TOKENS)):
        tokens = []
        for token in delta.token_ids:
            ids.append(token)
            text = llm.tokenizer.decode(ids)
            tokens.append(text[len(before) :])
            before = text
        passes.append(tokens)
    plain = llm.generate([prompt], SamplingParams(max_tokens=TOKENS), depth=0)[0]
    document = {"prompt": prompt, "depth": DEPTH, "passes": passes, "identical": list(plain.token_ids) == ids}
    command = "python benchmarks/picture.py"
    return {"command": command, "machine": machine, "version": __version__, "document": document}


def draw(results: dict[str, Any]) -> str:
    """The picture as SVG text."""
    found = results["runs"]["picture"]["document"]
    demo = results["runs"]["demo"]
    body, height = _answer(found, MARGIN + 8)
    bars, height = _bars(demo["document"]["prompts"], height + 30)
    tokens = sum(map(len, found["passes"]))
    saved = f"{tokens} tokens in {len(found['passes'])} passes over the weights instead of {tokens}"
    foot = f"Speeds: headstart {demo['version']}, {demo['machine']}, default model; the texts are identical."
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height + 34}" width="{WIDTH}" role="img" '
        f'aria-label="{escape(saved)}" font-family="{FONT}" font-size="14">',
        f'<rect width="{WIDTH}" height="{height + 34}" rx="8" fill="{PAPER}" stroke="{GREY}"/>',
        *body,
        *bars,
        _text(MARGIN, height + 16, foot, size=11, fill=PALE),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _answer(found: dict[str, Any], y: float) -> tuple[list[str], float]:
    """The prompt, and the answer with accepted drafted tokens on green."""
    parts = [_text(MARGIN, y, f"> {found['prompt']}", fill=PALE)]
    x, y = float(MARGIN), y + LINE + 6
    for tokens in found["passes"]:
        for index, token in enumerate(tokens):
            for piece in _pieces(token):
                if piece == "\n" or x + len(piece) * LETTER > WIDTH - MARGIN:
                    x, y = float(MARGIN), y + LINE
                if piece == "\n":
                    continue
                width = len(piece) * LETTER
                if index < len(tokens) - 1:  # the last token of a pass is not drafted
                    parts.append(f'<rect x="{x:.1f}" y="{y - 15:.1f}" width="{width:.1f}" height="19" fill="{GREEN}"/>')
                parts.append(_text(x, y, piece, length=width))
                x += width
    tokens = sum(map(len, found["passes"]))
    y += LINE + 8
    parts.append(f'<rect x="{MARGIN}" y="{y - 11}" width="14" height="14" fill="{GREEN}"/>')
    note = f"drafted by the model's own head, and right: {len(found['passes'])} passes for {tokens} tokens"
    parts.append(_text(MARGIN + 22, y, note, size=12, fill=PALE))
    return parts, y


def _pieces(token: str) -> list[str]:
    """A token's text, split at line ends."""
    return [
        piece
        for line in token.splitlines(keepends=True)
        for piece in (line.rstrip("\n"), "\n" * line.endswith("\n"))
        if piece
    ]


def _bars(rows: list[dict[str, Any]], y: float) -> tuple[list[str], float]:
    """Two bars per prompt: plain decoding, and decoding with the head."""
    most = max(max(row["tokens_per_s_off"], row["tokens_per_s_on"]) for row in rows)
    scale = (WIDTH - 2 * MARGIN - FIRST_BAR - 190) / most
    parts = [_text(MARGIN, y, "tokens/s without and with drafting", size=12, fill=PALE)]
    y += 10
    for row in rows:
        parts.append(_text(MARGIN, y + 14, row["kind"], size=12))
        for index, (key, colour) in enumerate((("tokens_per_s_off", GREY), ("tokens_per_s_on", "#00855f"))):
            width = row[key] * scale
            top = y + 3 + index * (BAR + 1)
            parts.append(
                f'<rect x="{MARGIN + FIRST_BAR}" y="{top:.1f}" width="{width:.1f}" height="{BAR}" fill="{colour}"/>'
            )
        longer = max(row["tokens_per_s_off"], row["tokens_per_s_on"]) * scale
        label = f"{row['tokens_per_s_off']:.0f} → {row['tokens_per_s_on']:.0f}  {row['speed_ratio']:.2f}x"
        parts.append(_text(MARGIN + FIRST_BAR + longer + 8, y + 16, label, size=12))
        y += GAP
    return parts, y


def _text(x: float, y: float, text: str, *, size: int = 14, fill: str = INK, length: float = 0) -> str:
    fixed = f' textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs"' if length else ""
    space = ' xml:space="preserve"' if text != text.strip() or length else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{fill}"{fixed}{space}>{escape(text)}</text>'


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", required=True, help="description of the machine")
    asked = parser.parse_args()
    results = json.loads(RESULTS.read_text("utf-8"))
    results["runs"]["picture"] = record(asked.machine)
    RESULTS.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
