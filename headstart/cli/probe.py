"""`headstart probe`: does an endpoint draft, and is it exact?"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import typer

from headstart.cli.options import OptionGroup, OutputOptions, option
from headstart.cli.render import print_table
from headstart.errors import UsageError

EXAMPLES = (
    "headstart probe http://localhost:8000",
    "headstart probe http://localhost:8000/v1 --no-metrics --json",
    "headstart probe http://localhost:8000 --exact --minutes 5",
    "headstart probe http://localhost:8000 --exact --against http://localhost:8001 --max-tokens 128",
)
MOST_MINUTES = 7 * 24 * 60
MOST_TOKENS = 2**20


@dataclass(frozen=True, kw_only=True)
class ExactFlags(OptionGroup):
    """How `--exact` looks; defaults are ExactOptions'."""

    panel = "With --exact"

    against: str | None = option("A second server: the same model, served without drafting.", metavar="URL")
    max_tokens: int | None = option("Longest answer, in tokens. Default: 64.")
    minutes: float | None = option("Stop after so long. Default: 3.")

    def check(self, exact: bool) -> None:
        """Raises UsageError."""
        given = [f"--{name.replace('_', '-')}" for name in self.chosen()]
        if given and not exact:
            raise UsageError(f"{given[0]} is for --exact", "give both, or leave it out")
        if self.minutes is not None and not 0 < self.minutes <= MOST_MINUTES:
            raise UsageError(f"--minutes is {self.minutes}, but must be above 0 and at most {MOST_MINUTES:,}")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= MOST_TOKENS:
            raise UsageError(f"--max-tokens is {self.max_tokens}, but must be between 1 and {MOST_TOKENS:,}")


def run(
    url: Annotated[str, typer.Argument(help="Address of an OpenAI-compatible server, with or without /v1.")],
    *,
    model: Annotated[str | None, typer.Option("--model", help="Model to ask for. Default: the first it lists.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Bearer token that the server wants. Or $HEADSTART_API_KEY.")
    ] = None,
    no_metrics: Annotated[bool, typer.Option("--no-metrics", help="Judge by times alone.")] = False,
    exact: Annotated[
        bool, typer.Option("--exact", help="Does the same request get the same text, whatever happens around it?")
    ] = False,
    flags: ExactFlags,
    output: OutputOptions,
) -> int:
    """Find out whether speculative decoding is on at an endpoint, whatever engine is behind it.

    Exit code 0: it is on and drafts are accepted; 1: it is not, or it cannot be told.

    With --exact: whether it gives the same text alone and in company, with a cold and a warm prefix cache, streamed,
    with drafting and without, greedy and with a seed, with tools and schemas. Exit code 0: nothing differs; 1:
    something does; 2: nothing could be compared."""
    flags.check(exact)
    if exact:
        if no_metrics:
            raise UsageError("--no-metrics is not for --exact", "leave it out")
        from headstart.tools.probe import exact as probe_exact

        asked = probe_exact.ExactOptions(url=url, model=model, api_key=api_key, **flags.chosen())
        return output.run("probing", partial(probe_exact.run, asked), _print_conditions)
    from headstart.tools.probe import run as probe

    options = probe.ProbeOptions(url=url, model=model, api_key=api_key, use_metrics=not no_metrics)
    return output.run("probing", partial(probe.run, options))


def _print_conditions(data: dict[str, Any]) -> None:
    from headstart.tools.probe.told import table

    print_table(*table(data))
