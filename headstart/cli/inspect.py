"""`headstart inspect`: what is inside a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from headstart.cli.options import Model, OptionGroup, OutputOptions, option

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

    head: str | None = option("A head directory to look at beside the model.")
    target: str | None = option("A model: does this drafter, or this model's head, fit it?")
    deep: bool = option(
        "Measure acceptance on a few hundred tokens, where the model can run here; a repo is downloaded.", default=False
    )


def run(model: Model = None, *, flags: InspectFlags, output: OutputOptions) -> int:
    """Show what a checkpoint holds, and whether its multi-token-prediction heads are really there and whole.

    Reads headers only: of a model on the Hub nothing else is downloaded. The exit code is 1 when the config promises
    heads that are not all there, when a drafter does not fit, or when a measured head is dead."""
    from headstart.tools.inspect import run as inspect

    options = inspect.InspectOptions(model=model, **vars(flags))
    return output.run("inspecting", partial(inspect.run, options))
