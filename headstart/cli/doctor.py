"""`headstart doctor`: what this machine and installation offer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from headstart.cli.options import OutputOptions
from headstart.cli.render import finish
from headstart.cli.settings import Settings, of_context
from headstart.core import Report

EXAMPLES = ("headstart doctor", "headstart doctor --json", "headstart doctor --config my-settings.toml")


def run(context: typer.Context, *, output: OutputOptions) -> int:
    """Show the backend and why, CPU, threads, memory, compiler, GPU, versions, cached models, and what is set where."""
    from headstart.tools import doctor

    return finish(_with_settings(doctor.run(), of_context(context)), output.as_json)


def _with_settings(report: Report, settings: Settings) -> Report:
    found: list[dict[str, Any]] = []
    for each in (*settings.environment, *settings.of_file):
        by = settings.hidden_by(each)
        found.append({
            "option": f"{each.scope} --{each.name}".strip(), "value": each.shown, "place": each.place,
            "hidden_by": by.place if by else None,
        })  # fmt: skip
    data = {"file": str(settings.file) if settings.file else None, "set": found, "models": list(settings.models)}
    order = f"command line > environment > {data['file'] or 'headstart.toml (none here)'} > default"
    lines = [f"{'settings':10} {order}"]
    for row in found:
        hidden = f" ({row['hidden_by']} comes first)" if row["hidden_by"] else ""
        lines.append(f"{'':10} {row['option']} {row['value']}: {row['place']}{hidden}")
    lines += [f"{'':10} model {name}: {settings.file} [models.{name}]" for name in settings.models]
    return replace(report, data=report.data | {"settings": data}, lines=[*report.lines, *lines])
