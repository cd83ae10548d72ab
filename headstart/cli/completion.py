"""`headstart completion`: what a shell needs to complete commands, options and models."""

from __future__ import annotations

from typing import Annotated

import typer
from typer.completion import get_completion_script

from headstart.errors import UsageError

EXAMPLES = ("headstart completion bash", "headstart completion fish")
SHELLS = ("bash", "zsh", "fish")
COMPLETION_VARIABLE = "_HEADSTART_COMPLETE"
"""Set by these scripts when they ask."""


def run(shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")]) -> int:
    """Print a script that completes commands, options and models, to be sourced by the shell.

    bash: in ~/.bashrc, eval "$(headstart completion bash)". fish: a file in ~/.config/fish/completions."""
    if shell not in SHELLS:
        raise UsageError(f"shell is {shell!r}, which is unknown", f"choose from: {', '.join(SHELLS)}")
    print(get_completion_script(prog_name="headstart", complete_var=COMPLETION_VARIABLE, shell=shell))
    return 0
