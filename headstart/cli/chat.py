"""`headstart chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.documents import print_stream
from headstart.cli.options import EngineOptions, Model, SamplingOptions
from headstart.cli.render import print_error, progress, stderr
from headstart.errors import CapacityError, UsageError

if TYPE_CHECKING:
    from headstart.api import LLM
    from headstart.core import SamplingParams

EXAMPLES = (
    "headstart chat",
    "headstart chat --system 'Answer in one sentence.' --temperature 0.7",
    "printf 'Hello!\\nAnd again?\\n' | headstart chat",
)
HELP = "/reset forgets the conversation, /exit ends it"


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
        llm = LLM(model, engine.config, report_progress)
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    for line in _lines():
        if line == "/exit":
            break
        if line == "/reset":
            messages = list(start)
        elif line.startswith("/"):
            print_error(f"unknown command {line.split()[0]}", HELP)
        elif line:
            messages = _turn(llm, messages, line, params)
    return 0


def _turn(llm: LLM, messages: list[dict[str, str]], text: str, params: SamplingParams) -> list[dict[str, str]]:
    """Answer one line; returns the conversation after it, unchanged if it does not fit the context."""
    asked = [*messages, {"role": "user", "content": text}]
    try:
        answer = print_stream(llm.stream(asked, params))
    except CapacityError as error:
        print_error(error.message, "/reset starts a new conversation")
        return messages
    return [*asked, {"role": "assistant", "content": answer}]


def _lines() -> Iterator[str]:
    """Stripped input lines, with a prompt and line editing on a terminal."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin)
        return
    import readline  # noqa: F401  # importing it gives input() editing and history

    stderr().print(HELP, style="dim")
    while True:
        try:
            yield input("> ").strip()
        except EOFError:
            print()
            return
