"""`headstart launch`: another engine, with the flags that make it draft."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from headstart.cli.options import OptionGroup, OutputOptions, option
from headstart.cli.render import finish, progress
from headstart.errors import UsageError

if TYPE_CHECKING:
    from headstart.tools.launch.run import LaunchOptions

EXAMPLES = (
    "headstart launch vllm org/model --gpus h100x1 --dry-run",
    "headstart launch llamacpp model.gguf --program ./build/bin --check",
    "headstart launch sglang deepseek-ai/DeepSeek-V3 --gpus h200x8 --nodes 2 --head-node 10.0.0.1 --dry-run",
    "headstart launch sglang deepseek-ai/DeepSeek-V3 --gpus h200x8 --nodes 2 --emit k8s",
    "headstart launch vllm org/model --gpus h100x2 --disaggregate 1:1 --dry-run",
    "headstart launch vllm ./my-model -- --enable-log-requests",
    """headstart launch --translate "vllm serve m --speculative-model '[ngram]' --num-speculative-tokens 4" """.strip(),
)
SETTINGS = ("max_model_len", "max_num_seqs", "served_model_name", "api_key")
"""Options of the server that launchers translate."""


@dataclass(frozen=True, kw_only=True)
class RunFlags(OptionGroup):
    """What to do with the command."""

    dry_run: bool = option("Print the commands; start nothing.", default=False)
    docker: bool = option("Print the commands for the engine's container image.", default=False)
    emit: str | None = option("Write them for compose, k8s, kuberay or slurm; start nothing.")
    check: bool = option("Start it, say whether it drafts, and end it again.", default=False)
    translate: str | None = option("Instead: an old command line, in quotes, for the current version.")
    engine_version: str | None = option("Write for this version. Default: the one installed.")
    program: str | None = option("The engine's program, or its folder. Default: looked up in PATH.")


@dataclass(frozen=True, kw_only=True)
class PlaceFlags(OptionGroup):
    """Devices, nodes, and which half of a divided server."""

    gpus: str | None = option("GPUs of a node, such as h200x8, or none. Default: this machine's.")
    tp: int | None = option("Tensor parallelism. Default: as few GPUs as hold it; on a CPU 1.")
    dp: int | None = option("Copies of the model side by side, behind a router where the engine has none. Default: 1.")
    disaggregate: str | None = option("PREFILL:DECODE servers apart, such as 1:1, behind a router.")
    nodes: int = option("Machines that hold one model together.", default=1, min=1, max=1024)
    head_node: str = option("Address of the first of them.", default="HEAD_NODE")
    role: str | None = option("prefill or decode, where they run apart; MTP goes to decode.")
    kv_offload_gb: int | None = option("GB of host memory that the cache may use.", "--kv-offload")


@dataclass(frozen=True, kw_only=True)
class ServerFlags(OptionGroup):
    """Options that every engine has under some name."""

    depth: int | None = option("Tokens drafted. Default: tuned, else by the head.")
    head: str | None = option("A drafter of its own, in the engine's layout.")
    depth_by_batch: str | None = option("Depth by running requests, as JSON: a list of rows from, to, depth.")
    host: str = option("Address to listen on.", default="127.0.0.1")
    port: int = option("Port.", default=8000)
    max_model_len: int | None = option("Longest prompt plus output.")
    max_num_seqs: int | None = option("Requests that run together.")
    served_model_name: str | None = option("Name that requests use.")
    api_key: str | None = option("Key that requests must bring.")


def run(
    engine: Annotated[
        str | None, typer.Argument(help="vllm, sglang, trtllm, xllm or llamacpp.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Argument(help="A directory, a .gguf file or a repo id.", show_default=False)
    ] = None,
    extra: Annotated[
        list[str] | None, typer.Argument(help="After --: the engine's own flags, as they are.", show_default=False)
    ] = None,
    *,
    flags: RunFlags,
    server: ServerFlags,
    place: PlaceFlags,
    output: OutputOptions,
) -> int:
    """Print or run the exact command that makes another engine draft, then check by its metrics that it does.

    Reads model and machine, knows each version's flags and their traps. --translate brings old commands up to date."""
    from headstart.tools.launch import run as launch

    if flags.translate is not None:
        if engine is not None:
            raise UsageError("--translate takes no ENGINE: the command line says which", "leave ENGINE and MODEL out")
        return finish(launch.translate(flags.translate, flags.engine_version, flags.program), output.as_json)
    if engine is None or model is None:
        raise UsageError("which engine and which model?", "for example: headstart launch vllm ./my-model --dry-run")
    own = {name: value for name, value in vars(server).items() if name not in SETTINGS}
    settings = {name: getattr(server, name) for name in SETTINGS if getattr(server, name) is not None}
    options = launch.LaunchOptions(
        engine=engine,
        model=model,
        engine_version=flags.engine_version,
        program=flags.program,
        emit=flags.emit,
        **vars(place),
        **own,
        settings=settings,
        extra=tuple(extra or ()),
    )
    if flags.dry_run or flags.docker or flags.emit:
        return finish(launch.run(options, docker=flags.docker), output.as_json)
    return started(options, stay=not flags.check, as_json=output.as_json)


def started(options: LaunchOptions, *, stay: bool, as_json: bool) -> int:
    """Run an engine, print what its check found as soon as it is there, and stay with it."""
    from headstart.tools.launch import run as launch

    with launch.started(options) as engine:
        with progress("starting", quiet=as_json) as report_progress:
            report = engine.check(report_progress)
        code = finish(report, as_json)
        sys.stdout.flush()
        if stay:
            print("serving; Ctrl-C ends it", file=sys.stderr)
            engine.stay(lambda text: print(text, file=sys.stderr, flush=True))
    return code
