"""`headstart graft`: a head put back into a checkpoint that lost it, or taken out."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.options import REQUIRED, OptionGroup, OutputOptions, option

EXAMPLES = (
    "headstart graft ./my-finetune --from ./original -o my-finetune-mtp",
    "headstart graft ./my-finetune --from org/original --quantize-head -o my-finetune-mtp",
    "headstart graft ./model --strip -o model-without-head",
)


@dataclass(frozen=True, kw_only=True)
class GraftFlags(OptionGroup):
    """What to write where."""

    out: Path = option("Directory to write.", "--out", "-o", default=REQUIRED)
    base: str | None = option("Path or repo id of the model that still has its head.", "--from", metavar="BASE")
    strip: bool = option("Write the checkpoint without its head.", default=False)
    quantize_head: bool = option("Write the head in FP8 blocks (vLLM, SGLang, transformers).", default=False)
    no_measure: bool = option("Do not load the result to measure whether the head helps.", default=False)
    force: bool = option("Replace what an earlier run has written there.", default=False)


def run(
    model: Annotated[str, typer.Argument(help="Path or repo id of the fine-tuned or quantized checkpoint.")],
    *,
    flags: GraftFlags,
    output: OutputOptions,
) -> int:
    """Put the MTP head of the original model back into a fine-tuned or quantized one, and measure whether it helps."""
    from headstart.tools.graft import run as graft

    return output.run("grafting", partial(graft.run, graft.GraftOptions(model=model, **vars(flags))))
