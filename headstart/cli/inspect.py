"""`headstart inspect`: what is inside a checkpoint."""

from __future__ import annotations

from typing import Annotated

import typer

from headstart.cli.options import Model, OutputOptions
from headstart.cli.render import finish

EXAMPLES = ("headstart inspect", "headstart inspect ./my-model", "headstart inspect model.gguf --json")


def run(
    model: Model = None,
    *,
    head: Annotated[str | None, typer.Option("--head", help="A head directory to look at beside the model.")] = None,
    output: OutputOptions,
) -> int:
    """Show architecture, sizes, weight types and which multi-token-prediction heads a checkpoint really holds."""
    from headstart.tools import inspect

    return finish(inspect.run(model, head=head), output.as_json)
