"""`headstart chat`: a conversation in the terminal."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.adapt import with_adapted
from headstart.cli.chat_commands import Talk
from headstart.cli.documents import print_stream
from headstart.cli.options import EngineOptions, Model, SamplingOptions
from headstart.cli.render import print_aside, print_error, progress
from headstart.cli.wrap import Wrap
from headstart.errors import CapacityError, UsageError
from headstart.hub import cache_dir
from headstart.system import edited_lines, input_follows

if TYPE_CHECKING:
    from headstart.api import LLM

EXAMPLES = (
    "headstart chat",
    "headstart chat --system 'Answer in one sentence.' --temperature 0.7",
    "printf 'Hello!\\nAnd again?\\n' | headstart chat",
)
HELP = "/help lists commands, /exit ends the conversation; Ctrl-C ends an answer"
QUOTES = '"""'
"""Around a text of several lines."""
MOST_LINES = 1000
"""Of what was typed, for the arrow keys of the next conversation."""
COLUMNS = 80
"""Of a terminal that does not tell."""
PASTE_S = 0.05
"""Nobody types a second line so soon after the first: it was pasted with it."""


def run(
    model: Model = None,
    *,
    system: Annotated[str | None, typer.Option("--system", help="A system message.")] = None,
    sampling: SamplingOptions,
    engine: EngineOptions,
) -> int:
    """Talk with a model, turn by turn; reads lines from a terminal or a pipe."""
    if sampling.params(engine.config.seed).n > 1:
        raise UsageError("chat gives one answer per turn", "leave out --n")

    from headstart.api import LLM

    with progress("loading") as report_progress:
        llm = LLM(model, with_adapted(model, engine.config), report_progress)
    talk = Talk(sampling.params(engine.config.seed, llm.recommended), system)
    for text in _turns():
        if text == "/exit":
            break
        try:
            asked = talk.command(text) if text.startswith("/") else text
        except UsageError as error:
            print_error(error.message, error.hint)
            continue
        if asked:
            _turn(llm, talk, asked)
    return 0


def _turn(llm: LLM, talk: Talk, text: str) -> None:
    """Answer one text; the conversation stays as it was if it does not fit the context."""
    try:
        with _one_ctrl_c() as pressed:
            wrap = Wrap(_columns) if sys.stdout.isatty() else None
            talk.answered(text, print_stream(llm.stream(talk.asking(text), talk.params), pressed, wrap))
    except CapacityError as error:
        print_error(error.message, "/reset starts a new conversation")


def _columns() -> int:
    return os.get_terminal_size(sys.stdout.fileno()).columns or COLUMNS


@contextmanager
def _one_ctrl_c() -> Iterator[Callable[[], bool]]:
    """Was Ctrl-C pressed? At a terminal the first one asks the answer to end, as a step of the engine must not be cut;
    the second one ends the chat."""
    pressed: list[int] = []

    def note(number: int, frame: object) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(number)

    if not sys.stdin.isatty():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(pressed)
    finally:
        signal.signal(signal.SIGINT, before)


def _turns() -> Iterator[str]:
    """What the user says, stripped: a line of a pipe; at a terminal, with line editing, a line or a pasted text; what
    stands between QUOTES."""
    if not sys.stdin.isatty():
        for line in sys.stdin:
            yield "\n".join(_quoted(line.strip(), lambda: next(sys.stdin, QUOTES).rstrip("\n")))
        return
    with edited_lines(cache_dir() / "chat_history", MOST_LINES):
        yield from _typed()


def _quoted(first: str, more: Callable[[], str]) -> list[str]:
    """The lines of a text that begins with QUOTES, without them; else the one line."""
    if not first.startswith(QUOTES):
        return [first]
    lines = [first.removeprefix(QUOTES)]
    while not lines[-1].rstrip().endswith(QUOTES):
        lines.append(more())
    lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return lines


def _typed() -> Iterator[str]:
    print_aside(HELP)
    leaving = False
    while True:
        try:
            lines = _quoted(input("> "), lambda: input("... "))
            while not lines[-1].startswith("/") and input_follows(PASTE_S):
                lines.append(input())
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if leaving:
                raise
            leaving = True
            print_aside("\nCtrl-C again, or /exit, ends the conversation")
            continue
        leaving = False
        command = [lines.pop()] if lines[-1].startswith("/") else []
        yield from (text.strip() for text in ("\n".join(lines), *command) if text)
