"""`headstart stop`: a model leaves the memory of a server that runs."""

from __future__ import annotations

from typing import Annotated

import typer

from headstart.cli.options import OutputOptions
from headstart.cli.ps import ServerOptions
from headstart.cli.render import finish

EXAMPLES = ("headstart stop small", "headstart stop small --url http://localhost:9000")


def run(
    name: Annotated[str, typer.Argument(help="As headstart ps lists it.")],
    *,
    server: ServerOptions,
    output: OutputOptions,
) -> int:
    """Let a model leave the memory of a server that has several; exit code 1: requests of it still run."""
    from headstart.tools import loaded

    return finish(loaded.stop(name, server.url, server.api_key), output.as_json)
