"""`headstart gate`: compare a new server or checkpoint with the old one."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headstart.cli.options import OutputOptions
from headstart.cli.parser import command
from headstart.cli.render import print_table
from headstart.core import Progress, Report
from headstart.options import OptionGroup, option
from headstart.tools.gate import outputs
from headstart.tools.options import GateFlags


@dataclass(frozen=True, kw_only=True)
class GateFiles(OptionGroup):
    """Files that the gate writes."""

    panel = "Files"

    save: Path | None = option("The answers of NEW, as the OLD of a later run (.json).")
    junit: Path | None = option("The checks as a JUnit test suite.")
    report: Path | None = option("The checks as an HTML page.")
    badge: Path | None = option("An SVG badge; a paragraph for the model card is printed, too.")
    force: bool = option("Replace existing files.", default=False)

    @property
    def paths(self) -> dict[str, Path]:
        return {name: path for name in outputs.WRITERS if (path := getattr(self, name)) is not None}


@command(
    "headstart gate http://localhost:8000 http://localhost:8001 --junit gate.xml",
    "headstart gate http://localhost:8000 http://localhost:8000 --save baseline.json",
    "headstart gate baseline.json http://localhost:8000",
    "headstart gate ./parent ./quantized --allow-text-changes --floor 0.95 --badge mtp.svg",
)
def gate(flags: GateFlags, files: GateFiles, output: OutputOptions) -> int:
    """Compare a new server or checkpoint with the old one before users meet it.

    Both answer the same prompts alone and in company: same texts, valid JSON and tool calls, tokens per pass by kind of
    text, speed. Exit code 0: no check failed; 1: one did."""
    if not files.force:
        outputs.refuse_existing(files.paths)
    from headstart.tools.gate.run import GateOptions, run

    options = GateOptions(**vars(flags))

    def work(progress: Progress) -> Report:
        report = run(options, progress)
        outputs.write(report.data, files.paths)
        lines = [*report.lines, *([outputs.paragraph(report.data)] if files.badge else [])]
        return Report(report.ok, {name: part for name, part in report.data.items() if name != "record"}, lines)

    return output.run("comparing", work, _print_checks)


def _print_checks(data: dict[str, Any]) -> None:
    rows = [
        [each["name"], each["old"], each["new"], outputs.WORDS[each["ok"]], each["note"]] for each in data["checks"]
    ]
    print_table(["check", "old", "new", "result", "interval or reason"], rows)
