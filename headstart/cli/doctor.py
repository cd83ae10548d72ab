"""`headstart doctor`: what this machine and installation offer."""

from __future__ import annotations

from headstart.cli.options import OutputOptions
from headstart.cli.render import finish

EXAMPLES = ("headstart doctor", "headstart doctor --json")


def run(*, output: OutputOptions) -> int:
    """Show the backend and why, CPU, threads, memory, compiler, GPU, versions and cached models."""
    from headstart.tools import doctor

    return finish(doctor.run(), output.as_json)
