"""`headstart launch`: another engine, with the flags that make it draft."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headstart.cli.options import OutputOptions
from headstart.cli.parser import command
from headstart.cli.render import finish, progress
from headstart.errors import UsageError
from headstart.options import OptionGroup, argument, option

if TYPE_CHECKING:
    from headstart.tools.launch.prepare import LaunchOptions

SETTINGS = ("max_model_len", "max_num_seqs", "served_model_name", "api_key")  # server options that launchers translate


@dataclass(frozen=True, kw_only=True)
class LaunchFlags(OptionGroup):
    """Engine, model, and the action."""

    engine: str | None = argument("vllm, sglang, trtllm, xllm or llamacpp.")
    model: str | None = argument("A directory, a .gguf file or a repo id.")
    extra: list[str] | None = argument("After --: flags that are passed to the engine unchanged.")
    dry_run: bool = option("Print the commands without running them.", default=False)
    docker: bool = option("Print the commands for the engine's container image.", default=False)
    emit: str | None = option("Print manifests for compose, k8s, kuberay or slurm.")
    check: bool = option("Start the engine, check that it drafts, and stop it.", default=False)
    translate: str | None = option("Instead: translate an old command line, in quotes, to the current version.")
    engine_version: str | None = option("Engine version. Default: the installed one.")
    program: str | None = option("Path of the engine's program or its folder. Default: found in PATH.")


@dataclass(frozen=True, kw_only=True)
class PlaceFlags(OptionGroup):
    """Devices, nodes, and the role in a disaggregated server."""

    gpus: str | None = option("GPUs of a node, such as h200x8, or none. Default: those of this machine.")
    tp: int | None = option("Tensor parallelism. Default: the fewest GPUs that hold the model; 1 on a CPU.")
    dp: int | None = option(
        "Data parallelism: copies of the model, behind a router unless the engine has one. Default: 1."
    )
    disaggregate: str | None = option("Numbers of prefill and decode servers behind a router, such as 1:1.")
    nodes: int = option("Machines that share one model.", default=1, min=1, max=1024)
    head_node: str = option("Address of the first machine.", default="HEAD_NODE")
    role: str | None = option("prefill or decode, for disaggregated servers; decode servers use MTP.")
    kv_offload_gb: int | None = option("GB of host memory for the KV cache.", "--kv-offload")


@dataclass(frozen=True, kw_only=True)
class ServerFlags(OptionGroup):
    """Options of every engine, each with its own name there."""

    depth: int | None = option("Tokens drafted per pass. Default: the tuned depth, else by the head.")
    head: str | None = option("A separate drafter in the engine's layout.")
    depth_by_batch: str | None = option("Depth by number of running requests, as JSON: a list of [from, to, depth].")
    host: str = option("Address to listen on.", default="127.0.0.1")
    port: int = option("Port.", default=8000)
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
def run(flags: LaunchFlags, server: ServerFlags, place: PlaceFlags, output: OutputOptions) -> int:
    """Print or run the command that makes another engine draft, and check by its metrics that it does.

    Derives the flags of the engine's version from model and machine. --translate updates old command lines."""
    from headstart.tools.launch import run as launch
    from headstart.tools.launch.prepare import LaunchOptions

    if flags.translate is not None:
        if flags.engine is not None:
            raise UsageError("--translate takes no ENGINE: the command line says which", "leave ENGINE and MODEL out")
        return finish(launch.translate(flags.translate, flags.engine_version, flags.program), output.as_json)
    if flags.engine is None or flags.model is None:
        missing = "ENGINE and MODEL are" if flags.engine is None else "MODEL is"
        raise UsageError(f"{missing} missing", "for example: headstart launch vllm ./my-model --dry-run")
    fields = {name: getattr(flags, name) for name in ("engine", "model", "engine_version", "program", "emit")}
    fields |= {**vars(place), **{name: value for name, value in vars(server).items() if name not in SETTINGS}}
    settings = {name: getattr(server, name) for name in SETTINGS if getattr(server, name) is not None}
    options = LaunchOptions(**fields, settings=settings, extra=tuple(flags.extra or ()))
    if flags.dry_run or flags.docker or flags.emit:
        return finish(launch.run(options, docker=flags.docker), output.as_json)
    return start(options, stay=not flags.check, as_json=output.as_json)


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
