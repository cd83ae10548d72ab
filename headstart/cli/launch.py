"""`headstart launch`: another engine, with the flags that make it draft."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headstart.cli.options import OptionGroup, OutputOptions, _option
from headstart.cli.render import finish, progress
from headstart.errors import UsageError

if TYPE_CHECKING:
    from headstart.tools.launch.run import LaunchOptions

EXAMPLES = (
    "headstart launch vllm org/model --gpus h100x1 --dry-run",
    "headstart launch llamacpp model.gguf --program ./build/bin --check",
    "headstart launch sglang deepseek-ai/DeepSeek-V3 --gpus h200x8 --nodes 2 --head-node 10.0.0.1 --dry-run",
    "headstart launch vllm ./my-model -- --enable-log-requests",
    """headstart launch --translate "vllm serve m --speculative-model '[ngram]' --num-speculative-tokens 4" """.strip(),
)


@dataclass(frozen=True, kw_only=True)
class RunFlags(OptionGroup):
    """What to do with the command."""

    dry_run: Annotated[bool, _option("--dry-run", help="Print the commands; start nothing.")] = False
    docker: Annotated[bool, _option("--docker", help="Print the commands for the engine's container image.")] = False
    check: Annotated[bool, _option("--check", help="Start it, say whether it drafts, and end it again.")] = False
    translate: Annotated[
        str | None, _option("--translate", help="Instead: an old command line, in quotes, for the current version.")
    ] = None
    engine_version: Annotated[
        str | None, _option("--engine-version", help="Write for this version. Default: the one installed.")
    ] = None
    program: Annotated[
        str | None, _option("--program", help="The engine's program, or its folder. Default: looked up in PATH.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class PlaceFlags(OptionGroup):
    """Devices, nodes, and which half of a divided server."""

    gpus: Annotated[
        str | None, _option("--gpus", help="GPUs of a node, such as h200x8, or none. Default: this machine's.")
    ] = None
    tp: Annotated[int | None, _option("--tp", help="Tensor parallelism. Default: as few GPUs as hold it.")] = None
    dp: Annotated[int | None, _option("--dp", help="Copies of the model side by side. Default: 1.")] = None
    nodes: Annotated[int, _option("--nodes", help="Machines that hold one model together.")] = 1
    head_node: Annotated[str, _option("--head-node", help="Address of the first of them.")] = "HEAD_NODE"
    role: Annotated[
        str | None, _option("--role", help="prefill or decode, where they run apart; MTP goes to decode.")
    ] = None
    kv_offload: Annotated[int | None, _option("--kv-offload", help="GB of host memory that the cache may use.")] = None


@dataclass(frozen=True, kw_only=True)
class ServerFlags(OptionGroup):
    """Options that every engine has under some name."""

    depth: Annotated[int | None, _option("--depth", help="Tokens drafted. Default: tuned, else by the head.")] = None
    head: Annotated[str | None, _option("--head", help="A drafter of its own, in the engine's layout.")] = None
    depth_by_batch: Annotated[
        str | None,
        _option("--depth-by-batch", help="Depth by running requests, as JSON: a list of rows from, to, depth."),
    ] = None
    host: Annotated[str, _option("--host", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, _option("--port", help="Port.")] = 8000
    max_model_len: Annotated[int | None, _option("--max-model-len", help="Longest prompt plus output.")] = None
    max_num_seqs: Annotated[int | None, _option("--max-num-seqs", help="Requests that run together.")] = None
    served_model_name: Annotated[str | None, _option("--served-model-name", help="Name that requests use.")] = None
    api_key: Annotated[str | None, _option("--api-key", help="Key that requests must bring.")] = None

    def settings(self) -> dict[str, Any]:
        names = ("max_model_len", "max_num_seqs", "served_model_name", "api_key")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}


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
        finish(launch.translate(flags.translate, flags.engine_version, flags.program), output.as_json)
        return 0
    if engine is None or model is None:
        raise UsageError("which engine and which model?", "for example: headstart launch vllm ./my-model --dry-run")
    options = options_of(engine, model, tuple(extra or ()), flags, server, place)
    if flags.dry_run or flags.docker:
        return finish(launch.run(options, docker=flags.docker), output.as_json)
    return started(options, stay=not flags.check, as_json=output.as_json)


def options_of(
    engine: str, model: str, extra: tuple[str, ...], flags: RunFlags, server: ServerFlags, place: PlaceFlags
) -> LaunchOptions:
    """What the flags ask for."""
    from headstart.tools.launch.run import LaunchOptions

    return LaunchOptions(
        engine=engine,
        model=model,
        engine_version=flags.engine_version,
        program=flags.program,
        depth=server.depth,
        head=server.head,
        gpus=place.gpus,
        tp=place.tp,
        dp=place.dp,
        nodes=place.nodes,
        head_node=place.head_node,
        role=place.role,
        kv_offload_gb=place.kv_offload,
        depth_by_batch=server.depth_by_batch,
        host=server.host,
        port=server.port,
        settings=server.settings(),
        extra=extra,
    )


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
            engine.stay()
    return code
