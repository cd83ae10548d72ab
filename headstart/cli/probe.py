"""`headstart probe`: does an endpoint draft?"""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from headstart.cli.options import OutputOptions

EXAMPLES = (
    "headstart probe http://localhost:8000",
    "headstart probe http://localhost:8000/v1 --no-metrics --json",
)


def run(
    url: Annotated[str, typer.Argument(help="Address of an OpenAI-compatible server, with or without /v1.")],
    *,
    model: Annotated[str | None, typer.Option("--model", help="Model to ask for. Default: the first it lists.")] = None,
    api_key: Annotated[
        str | None, typer.Option("--api-key", help="Bearer token that the server wants. Or $HEADSTART_API_KEY.")
    ] = None,
    no_metrics: Annotated[bool, typer.Option("--no-metrics", help="Judge by times alone.")] = False,
    output: OutputOptions,
) -> int:
    """Find out whether speculative decoding is on at an endpoint, whatever engine is behind it.

    Exit code 0: it is on and drafts are accepted; 1: it is not, or it cannot be told."""
    from headstart.tools.probe import run as probe

    options = probe.ProbeOptions(url=url, model=model, api_key=api_key, use_metrics=not no_metrics)
    return output.run("probing", partial(probe.run, options))
