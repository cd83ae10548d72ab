"""`headstart graft`: a head put back into a checkpoint that lost it, or taken out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.options import OptionGroup, OutputOptions
from headstart.cli.render import finish, progress

EXAMPLES = (
    "headstart graft ./my-finetune --from ./original -o my-finetune-mtp",
    "headstart graft ./my-finetune --from org/original --quantize-head -o my-finetune-mtp",
    "headstart graft ./model --strip -o model-without-head",
)


@dataclass(frozen=True, kw_only=True)
class GraftFlags(OptionGroup):
    """What to write where."""

    out: Annotated[Path, typer.Option("--out", "-o", help="Directory to write.")]
    base: Annotated[
        str | None, typer.Option("--from", help="Path or repo id of the model that still has its head.", metavar="BASE")
    ] = None
    strip: Annotated[bool, typer.Option("--strip", help="Write the checkpoint without its head.")] = False
    quantize_head: Annotated[
        bool, typer.Option("--quantize-head", help="Write the head in FP8 blocks (vLLM, SGLang, transformers).")
    ] = False
    force: Annotated[bool, typer.Option("--force", help="Replace a directory that exists.")] = False


def run(
    model: Annotated[str, typer.Argument(help="Path or repo id of the fine-tuned or quantized checkpoint.")],
    *,
    flags: GraftFlags,
    output: OutputOptions,
) -> int:
    """Put the MTP head of the original model back into a fine-tuned or quantized one, and measure whether it helps."""
    from headstart.tools.graft import run as graft

    with progress("grafting", quiet=output.as_json) as report_progress:
        report = graft.run(graft.GraftOptions(model=model, **vars(flags)), report_progress)
    return finish(report, output.as_json)
