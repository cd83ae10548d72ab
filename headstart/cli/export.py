"""`headstart export`: a model and its head for another engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headstart.cli.options import REQUIRED, Model, OptionGroup, OutputOptions, option

EXAMPLES = (
    "headstart export ./DeepSeek-V3 -o deepseek-v3-mtp",
    "headstart export --to vllm-mimo -o smollm2-mimo",
    "headstart export ./my-model --head my-head --to vllm-eagle3 -o my-eagle3",
)
LAYOUTS = (
    "xllm, vllm-eagle, speculators or gguf (the head alone); vllm-mimo (trunk and MTP head); vllm-eagle3, vllm-dflash, "
    "vllm-dspark (a head)"
)


@dataclass(frozen=True, kw_only=True)
class ExportFlags(OptionGroup):
    """What to write where."""

    out: Path = option("Directory to write.", "--out", "-o", default=REQUIRED)
    to: str = option(f"Layout: {LAYOUTS}.", default="xllm")
    model_type: str | None = option("With --to xllm: what config.json should say.")
    head: Path | None = option("Head directory; none: the model's own.")
    force: bool = option("Replace what an earlier run has written there.", default=False)


def run(model: Model = None, *, flags: ExportFlags, output: OutputOptions) -> int:
    """Write a model with its head so that another engine can run it."""
    from headstart.tools.export import run as export

    options = export.ExportOptions(model=model, **vars(flags))
    return output.run("exporting", partial(export.run, options))
