"""`headstart export`: a model and its head for another engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.options import Model, OptionGroup, OutputOptions
from headstart.cli.render import finish, progress

EXAMPLES = (
    "headstart export ./DeepSeek-V3 -o deepseek-v3-mtp",
    "headstart export --to vllm-mimo -o smollm2-mimo",
    "headstart export ./my-model --head my-head --to vllm-eagle3 -o my-eagle3",
)
LAYOUTS = "xllm, vllm-eagle, speculators or gguf (the head alone); vllm-mimo (trunk and MTP head); vllm-eagle3 (a head)"


@dataclass(frozen=True, kw_only=True)
class ExportFlags(OptionGroup):
    """What to write where."""

    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")]
    to: Annotated[str, typer.Option("--to", help=f"Layout: {LAYOUTS}.")] = "xllm"
    model_type: Annotated[
        str | None, typer.Option("--model-type", help="With --to xllm: do not ask config.json, such as deepseek_v32.")
    ] = None
    head: Annotated[Path | None, typer.Option("--head", help="Head directory; none: the model's own.")] = None
    force: Annotated[bool, typer.Option("--force", help="Replace a directory that exists.")] = False


def run(model: Model = None, *, flags: ExportFlags, output: OutputOptions) -> int:
    """Write a model with its head so that another engine can run it."""
    from headstart.tools.export import run as export

    options = export.ExportOptions(model=model, **vars(flags))
    with progress("exporting", quiet=output.as_json) as report_progress:
        report = export.run(options, report_progress)
    return finish(report, output.as_json)
