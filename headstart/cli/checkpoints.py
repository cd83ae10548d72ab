"""`headstart inspect`, `export` and `graft`: the content of a checkpoint, its layout for another engine, its head."""

from functools import partial

from headstart.cli.options import OutputOptions
from headstart.cli.parser import command
from headstart.tools.options import ExportOptions, GraftOptions, InspectOptions


@command(
    "headstart inspect",
    "headstart inspect ./my-model",
    "headstart inspect org/model --json",
    "headstart inspect ./my-eagle3 --target ./my-model",
    "headstart inspect ./my-model --deep",
)
def inspect(flags: InspectOptions, output: OutputOptions) -> int:
    """Show the content of a checkpoint, and whether its multi-token-prediction heads are present and complete.

    Reads headers only, also of a model on the Hub. Exit code 1: heads of the config are missing or incomplete, a
    drafter does not fit, or a measured head is dead."""
    from headstart.tools.inspect import run

    return output.run("inspecting", partial(run.run, flags))


@command(
    "headstart export ./DeepSeek-V3 -o deepseek-v3-mtp",
    "headstart export --to vllm-mimo -o smollm2-mimo",
    "headstart export ./my-model --head my-head --to vllm-eagle3 -o my-eagle3",
)
def export(flags: ExportOptions, output: OutputOptions) -> int:
    """Write a model with its head in the layout of another engine."""
    from headstart.tools.export import run

    return output.run("exporting", partial(run.run, flags))


@command(
    "headstart graft ./my-finetune --from ./original -o my-finetune-mtp",
    "headstart graft ./my-finetune --from org/original --quantize-head -o my-finetune-mtp",
    "headstart graft ./model --strip -o model-without-head",
)
def graft(flags: GraftOptions, output: OutputOptions) -> int:
    """Put the MTP head of the original model back into a fine-tuned or quantized model, and measure whether it
    helps."""
    from headstart.tools.graft import run

    return output.run("grafting", partial(run.run, flags))
