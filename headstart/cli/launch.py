"""`headstart launch`: another engine, with the flags that make it draft."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.cli.options import OutputOptions
from headstart.cli.parser import command
from headstart.cli.render import finish, progress
from headstart.errors import UsageError
from headstart.options import OptionGroup, option
from headstart.tools.options import LaunchFlags, ServerFlags

if TYPE_CHECKING:
    from headstart.tools.launch.prepare import LaunchOptions


@dataclass(frozen=True, kw_only=True)
class ActionFlags(OptionGroup):
    """The action, instead of starting the engine."""

    dry_run: bool = option("Print the commands without running them.", default=False)
    docker: bool = option("Print the commands for the engine's container image.", default=False)
    check: bool = option("Start the engine, check that it drafts, and stop it.", default=False)
    translate: str | None = option("Instead: translate an old command line, in quotes, to the current version.")


@dataclass(frozen=True, kw_only=True)
class SettingFlags(OptionGroup):
    """Options of every engine, each with its own name there."""

    max_model_len: int | None = option("Maximum length of prompt plus output, in tokens.")
    max_num_seqs: int | None = option("Maximum number of running requests.")
    served_model_name: str | None = option("Name of the model in requests.")
    api_key: str | None = option("API key of requests.")


@command(
    "headstart launch vllm org/model --gpus h100x1 --dry-run",
    "headstart launch llamacpp model.gguf --program ./build/bin --check",
    "headstart launch sglang deepseek-ai/DeepSeek-V3 --gpus h200x8 --nodes 2 --head-node 10.0.0.1 --dry-run",
    "headstart launch sglang deepseek-ai/DeepSeek-V3 --gpus h200x8 --nodes 2 --emit k8s",
    "headstart launch vllm org/model --gpus h100x2 --disaggregate 1:1 --dry-run",
    "headstart launch vllm ./my-model -- --enable-log-requests",
    """headstart launch --translate "vllm serve m --speculative-model '[ngram]' --num-speculative-tokens 4" """.strip(),
)
def run(
    flags: LaunchFlags, action: ActionFlags, server: ServerFlags, settings: SettingFlags, output: OutputOptions
) -> int:
    """Print or run the command that makes another engine draft, and check by its metrics that it does.

    Derives the flags of the engine's version from model and machine. --translate updates old command lines."""
    from headstart.tools.launch import run as launch
    from headstart.tools.launch.prepare import LaunchOptions
    from headstart.tools.launch.translate import translate_text

    if action.translate is not None:
        if flags.engine is not None:
            raise UsageError("--translate takes no ENGINE: the command line says which", "leave ENGINE and MODEL out")
        done = translate_text(action.translate, flags.engine_version, flags.program)
        return finish(done.report(), output.as_json)
    if flags.engine is None or flags.model is None:
        missing = "ENGINE and MODEL are" if flags.engine is None else "MODEL is"
        raise UsageError(f"{missing} missing", "for example: headstart launch vllm ./my-model --dry-run")
    options = LaunchOptions(**vars(flags), **vars(server), settings=settings.chosen())
    if action.dry_run or action.docker or flags.emit:
        return finish(launch.run(options, docker=action.docker), output.as_json)
    return start(options, stay=not action.check, as_json=output.as_json)


def start(options: "LaunchOptions", *, stay: bool, as_json: bool) -> int:
    """Start an engine, print its check as soon as it is ready, and stay until the engine ends."""
    from headstart.tools.launch import run as launch

    with launch.started(options) as engine:
        with progress("starting") as report_progress:
            report = engine.check(report_progress)
        code = finish(report, as_json)
        sys.stdout.flush()
        if stay:
            print("serving; Ctrl-C ends it", file=sys.stderr)
            engine.servers.supervise(lambda text: print(text, file=sys.stderr, flush=True))
    return code
