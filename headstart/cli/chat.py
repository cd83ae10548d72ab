"""`headstart chat`: a conversation in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.adapt import with_adapted
from headstart.cli.documents import print_stream
from headstart.cli.options import EngineOptions, Model, SamplingOptions
from headstart.cli.render import print_error, progress, stderr
from headstart.errors import CapacityError, UsageError
from headstart.system import edit_lines, input_follows

if TYPE_CHECKING:
    from headstart.api import LLM
    from headstart.core import SamplingParams

EXAMPLES = (
    "headstart chat",
    "headstart chat --system 'Answer in one sentence.' --temperature 0.7",
    "printf 'Hello!\\nAnd again?\\n' | headstart chat",
)
HELP = "/reset forgets the conversation, /exit ends it; Ctrl-C ends an answer"
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
    params = sampling.params(engine.config.seed)
    if params.n > 1:
        raise UsageError("chat gives one answer per turn", "leave out --n")

    from headstart.api import LLM

    with progress("loading") as report_progress:
        llm = LLM(model, with_adapted(model, engine.config), report_progress)
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    for text in _turns():
        if text == "/exit":
            break
        if text == "/reset":
            messages = list(start)
        elif text.startswith("/"):
            print_error(f"unknown command {text.split()[0]}", HELP)
        elif text:
            messages = _turn(llm, messages, text, params)
    return 0


def _turn(llm: LLM, messages: list[dict[str, str]], text: str, params: SamplingParams) -> list[dict[str, str]]:
    """Answer one line; returns the conversation after it, unchanged if it does not fit the context."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        with _one_ctrl_c() as pressed:
            answer = print_stream(llm.stream(asked, params), pressed)
    except CapacityError as error:
        print_error(error.message, "/reset starts a new conversation")
        return messages
    return [*asked, {"role": "assistant", "content": answer}]


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
    """What the user says, stripped: a line of a pipe; at a terminal, with line editing, a line or a pasted text."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    edit_lines()
    stderr().print(HELP, style="dim")
    leaving = False
    while True:
        try:
            lines = [input("> ")]
            while not lines[-1].startswith("/") and input_follows(PASTE_S):
                lines.append(input())
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            if leaving:
                raise
            leaving = True
            stderr().print("\nCtrl-C again, or /exit, ends the conversation", style="dim")
            continue
        leaving = False
        command = [lines.pop()] if lines[-1].startswith("/") else []
        yield from (text.strip() for text in ("\n".join(lines), *command) if text)
