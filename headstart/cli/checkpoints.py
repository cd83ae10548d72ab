"""`headstart inspect`, `export` and `graft`: the content of a checkpoint, its layout for another engine, its head."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from headstart.cli.options import ModelOptions, OutputOptions
from headstart.cli.parser import REQUIRED, OptionGroup, argument, command, option

LAYOUTS = (
    "xllm, vllm-eagle, speculators or gguf (the head alone); vllm-mimo (trunk and MTP head); vllm-eagle3, vllm-dflash, "
    "vllm-dspark (a head)"
)


@dataclass(frozen=True, kw_only=True)
class InspectFlags(ModelOptions):
    """InspectOptions from the command line."""

    head: str | None = option("A head directory to inspect with the model.")
    target: str | None = option("A model that the drafter or head must fit.")
    deep: bool = option(
        "Measure acceptance on a few hundred tokens. A model beyond memory is read once, layer by layer. A repo is "
        "downloaded.",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class ExportFlags(ModelOptions):
    """ExportOptions from the command line."""

    out: Path = option("Directory to write.", "--out", "-o", default=REQUIRED, is_output=True)
    to: str = option(f"Layout: {LAYOUTS}.", default="xllm")
    model_type: str | None = option("With --to xllm: the model type in config.json.")
    head: Path | None = option("Head directory. Default: the model's own head.")
    force: bool = option("Replace files of an earlier run.", default=False)


@dataclass(frozen=True, kw_only=True)
class GraftFlags(OptionGroup):
    """GraftOptions from the command line."""

    model: str = argument("Path or repo id of the fine-tuned or quantized checkpoint.", default=REQUIRED)
    out: Path = option("Directory to write.", "--out", "-o", default=REQUIRED, is_output=True)
    base: str | None = option("Path or repo id of the original model with its head.", "--from", metavar="BASE")
    strip: bool = option("Write the checkpoint without its head.", default=False)
    quantize_head: bool = option("Write the head in FP8 blocks (vLLM, SGLang, transformers).", default=False)
    no_measure: bool = option("Do not measure whether the head helps.", default=False)
    force: bool = option("Replace files of an earlier run.", default=False)


@command(
    "headstart inspect",
    "headstart inspect ./my-model",
    "headstart inspect org/model --json",
    "headstart inspect ./my-eagle3 --target ./my-model",
    "headstart inspect ./my-model --deep",
)
def inspect(flags: InspectFlags, output: OutputOptions) -> int:
    """Show the content of a checkpoint, and whether its multi-token-prediction heads are present and complete.

    Reads headers only, also of a model on the Hub. Exit code 1: heads of the config are missing or incomplete, a
    drafter does not fit, or a measured head is dead."""
    from headstart.tools.inspect import run

    return output.run("inspecting", partial(run.run, run.InspectOptions(**vars(flags))))


@command(
    "headstart export ./DeepSeek-V3 -o deepseek-v3-mtp",
    "headstart export --to vllm-mimo -o smollm2-mimo",
    "headstart export ./my-model --head my-head --to vllm-eagle3 -o my-eagle3",
)
def export(flags: ExportFlags, output: OutputOptions) -> int:
    """Write a model with its head in the layout of another engine."""
    from headstart.tools.export import run

    return output.run("exporting", partial(run.run, run.ExportOptions(**vars(flags))))


@command(
    "headstart graft ./my-finetune --from ./original -o my-finetune-mtp",
    "headstart graft ./my-finetune --from org/original --quantize-head -o my-finetune-mtp",
    "headstart graft ./model --strip -o model-without-head",
)
def graft(flags: GraftFlags, output: OutputOptions) -> int:
    """Put the MTP head of the original model back into a fine-tuned or quantized model, and measure whether it
    helps."""
    from headstart.tools.graft import run

    return output.run("grafting", partial(run.run, run.GraftOptions(**vars(flags))))
