"""Records a terminal session with headstart: python docs/recording/make.py [--keep]

Types the commands of SCENES into a shell and writes the output with its times to headstart.cast (asciicast, version 2);
`--keep` uses the existing file. headstart.svg is drawn from it: an image of text lines, animated by its style sheet.
Needs pyte, a terminal emulator in memory.
"""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import pyte

HERE = Path(__file__).parent
PLACES = {str(HERE.parents[1]): ".", str(Path.home()): "~"}
"""Folders of the recording machine and their displayed names."""
COLUMNS, LINES = 104, 24
KEY_S, THINK_S = 0.02, 0.3
READ_S = 1.5
"""Pause after the output of a command."""
LONGEST_S = 300
FRAME_S = 0.2
IDLE_S = 1.5
"""Longer waits, such as program starts, are shortened to this, as in players."""
PROMPT = "$ "
WAITING = re.compile(r"\x1b\[\?2004h[$>] $")
"""End of the output while bash or `headstart chat` waits for a line: both enable bracketed paste first."""
QUESTION = "Write a Python function that reverses a list, with an example."
COLOURED = r'.choices[].speculation[]?.tokens[] | if .accepted then "\u001b[32m\(.text)\u001b[0m" else .text end'
"""jq filter that colours accepted tokens green."""
ASKED = '{"prompt": "1, 2, 3, 4,", "max_tokens": 40, "temperature": 0, "stream": true, "speculation": {"events": true}}'
SCENES = (
    f'headstart generate --max-tokens 72 --prompt "{QUESTION}"',
    f'headstart generate --max-tokens 72 --no-mtp --prompt "{QUESTION}"   # without drafts: the same text',
    "clear; headstart chat --system 'Answer in one sentence.'",
    "What is the capital of France?",
    "And of Italy?",
    "/exit",
    'headstart verify --prompts <(echo "Why?") --max-tokens 16 --depths 0,3,auto 2>/dev/null | tail -6   # always?',
    "clear; headstart serve --port 8123 2>/dev/null &",
    "until curl -sf localhost:8123/ready >/dev/null; do sleep 0.2; done",
    f"curl -sN localhost:8123/v1/completions --json '{ASKED}' | sed -n 's/^data: {{/{{/p' |"
    f" jq -rj '{COLOURED}'; echo   # drafts are green",
    "headstart bench --url http://localhost:8123 --workload code --concurrency 1 --requests 4 2>/dev/null | head -7",
    "kill %1; clear; headstart inspect | head -18     # where the drafts come from",
)
FONT, WIDE, HIGH, EDGE = 14, 8.43, 19, 14
PLAIN = "#d1d5db"
COLOURS = {"green": "#86efac", "red": "#fca5a5", "yellow": "#fde68a", "brown": "#fde68a",
           "blue": "#93c5fd", "magenta": "#d8b4fe", "cyan": "#67e8f9", "black": "#6b7280"}  # fmt: skip


class Event(NamedTuple):
    """Output and its time."""

    seconds: float
    text: str


def record() -> Iterator[Event]:
    """Events of a shell in a pseudo-terminal."""
    child, terminal = pty.fork()
    if child == 0:
        environment = os.environ | {
            "PS1": PROMPT,
            "TERM": "xterm-256color",
            "COLUMNS": str(COLUMNS),
            "LINES": str(LINES),
        }
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "+m"], environment)
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    begun, letters = time.monotonic(), codecs.getincrementaldecoder("utf-8")("replace")

    def read(seconds: float, *, answered: bool = False) -> Iterator[Event]:
        """Output of the next `seconds`, or until a program waits for input."""
        text, end = "", time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and not (answered and WAITING.search(text)):
            if select.select([terminal], [], [], left)[0]:
                piece = letters.decode(os.read(terminal, 65536))
                text = (text + piece)[-200:]
                yield Event(time.monotonic() - begun, piece)

    yield from read(5, answered=True)
    for scene in SCENES:
        for key in scene:
            os.write(terminal, key.encode())
            yield from read(KEY_S)
        yield from read(THINK_S)
        os.write(terminal, b"\n")
        yield from read(LONGEST_S, answered=True)
        yield from read(READ_S)
    os.write(terminal, b"exit\n")
    os.waitpid(child, 0)


def write_cast(path: Path, events: list[Event]) -> None:
    header = {"version": 2, "width": COLUMNS, "height": LINES, "idle_time_limit": IDLE_S}
    lines = [json.dumps(header)]
    for seconds, text in events:
        for place, shown in PLACES.items():
            text = text.replace(place, shown)
        lines.append(json.dumps([round(seconds, 3), "o", text]))
    path.write_text("\n".join(lines) + "\n", "utf-8")


def read_cast(path: Path) -> list[Event]:
    """Events of a recording, with long waits shortened."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()[1:]]
    events, now, before = [], 0.0, 0.0
    for seconds, _, text in rows:
        now, before = now + min(seconds - before, IDLE_S), seconds
        events.append(Event(now, text))
    return events


def frames(events: list[Event]) -> Iterator[tuple[float, list[str]]]:
    """(time, lines as SVG) of each screen change; changes in quick succession are one."""
    import pyte

    screen = pyte.Screen(COLUMNS, LINES)
    stream = pyte.Stream(screen)
    shown, last = [""], -1.0
    for place, each in enumerate(events):
        stream.feed(each.text)
        following = events[place + 1].seconds if place + 1 < len(events) else float("inf")
        if following - each.seconds < FRAME_S / 4 and each.seconds - last < FRAME_S:
            continue
        lines = [line_of(screen, number) for number in range(LINES)]
        if lines != shown:
            shown, last = lines, each.seconds
            yield each.seconds, lines


def line_of(screen: pyte.Screen, number: int) -> str:
    """A line as SVG text with runs of one style; empty for a blank line."""
    line = "".join(screen.buffer[number][column].data for column in range(COLUMNS))
    if not line.strip():
        return ""
    runs: list[tuple[tuple[str, bool], str]] = []
    for column in range(len(line.rstrip())):
        letter = screen.buffer[number][column]
        look = (letter.fg, letter.bold)
        if runs and runs[-1][0] == look:
            runs[-1] = (look, runs[-1][1] + letter.data)
        else:
            runs.append((look, letter.data))
    spans = "".join(
        f"<tspan{style_of(colour, bold)}>{escape(text)}</tspan>" if style_of(colour, bold) else escape(text)
        for (colour, bold), text in runs
    )
    return f'<text x="{EDGE}" y="{EDGE + HIGH * (number + 0.75):g}">{spans}</text>'


def style_of(colour: str, bold: bool) -> str:
    fill = f' fill="{COLOURS[colour]}"' if colour in COLOURS else ""
    return fill + (' font-weight="bold"' if bold else "")


def svg(events: list[Event]) -> str:
    """The animated picture: each line is written once and shown while it is on the screen."""
    found = list(frames(events))
    length = events[-1].seconds + READ_S
    width, height = round(2 * EDGE + COLUMNS * WIDE), 2 * EDGE + LINES * HIGH
    spans: list[tuple[str, float, float]] = []
    for number in range(LINES):
        begin, shown = 0.0, ""
        for seconds, lines in [*found, (length, [""] * LINES)]:
            if lines[number] != shown:
                spans += [(shown, begin, seconds)] if shown else []
                begin, shown = seconds, lines[number]
    rules, parts = [], []
    for index, (line, begin, end) in enumerate(spans):
        first, last = 100 * begin / length, 100 * end / length
        after = f"{last:.3f}%,to{{visibility:hidden}}" if end < length else ""
        rules.append(f"@keyframes k{index}{{0%{{visibility:hidden}}{first:.3f}%{{visibility:visible}}{after}}}")
        parts.append(line.replace("<text ", f'<text style="animation-name:k{index}" ', 1))
    style = (
        f"text{{fill:{PLAIN};white-space:pre;visibility:hidden;animation:{length:.2f}s step-end infinite}}"
        + "".join(rules)
    )
    head = (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" font-size="{FONT}" '
            'font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,\'DejaVu Sans Mono\',monospace">')  # fmt: skip
    title = "<title>headstart in a terminal: with drafting and without, chat, verify, a server, bench, inspect</title>"
    ground = f'<rect width="{width}" height="{height}" rx="8" fill="#111827"/>'
    return "\n".join([head, title, f"<style>{style}</style>", ground, *parts, "</svg>", ""])


def main(arguments: list[str]) -> int:
    cast = HERE / "headstart.cast"
    if "--keep" not in arguments:
        write_cast(cast, list(record()))
    events = read_cast(cast)
    (HERE / "headstart.svg").write_text(svg(events), "utf-8")
    print(f"{events[-1].seconds:.0f} s, {len(events)} events")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
