"""`headstart inspect`: what is inside a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from headstart.cli.options import Model, OptionGroup, OutputOptions
from headstart.cli.render import finish, progress

EXAMPLES = (
    "headstart inspect",
    "headstart inspect ./my-model",
    "headstart inspect org/model --json",
    "headstart inspect ./my-eagle3 --target ./my-model",
    "headstart inspect ./my-model --deep",
)


@dataclass(frozen=True, kw_only=True)
class InspectFlags(OptionGroup):
    """What to look at."""

    head: Annotated[str | None, typer.Option("--head", help="A head directory to look at beside the model.")] = None
    target: Annotated[
        str | None, typer.Option("--target", help="A model: does this drafter, or this model's head, fit it?")
    ] = None
    deep: Annotated[
        bool,
        typer.Option(
            "--deep",
            help="Measure acceptance on a few hundred tokens, where the model can run here; a repo is downloaded.",
        ),
    ] = False


def run(model: Model = None, *, flags: InspectFlags, output: OutputOptions) -> int:
    """Show what a checkpoint holds, and whether its multi-token-prediction heads are really there and whole.

    Reads headers only: of a model on the Hub nothing else is downloaded. The exit code is 1 when the config promises
    heads that are not all there, when a drafter does not fit, or when a measured head is dead."""
    from headstart.tools.inspect import run as inspect

    options = inspect.InspectOptions(model=model, head=flags.head, target=flags.target, deep=flags.deep)
    with progress("inspecting", quiet=output.as_json) as report_progress:
        report = inspect.run(options, report_progress)
    return finish(report, output.as_json)
