"""Options of the tools: what a command reads and the tool takes. Some tools add fields (`...Options(...Flags)`).

Imports nothing heavy, since every start of the command line reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from headstart.config import MAX_DEPTH
from headstart.options import REQUIRED, ModelOptions, OptionGroup, argument, option

MAX_MINUTES = 7 * 24 * 60
MAX_COUNT, MAX_TOKENS = 1_000_000, 10_000_000  # more requests or runs, and more tokens, are a typing error
CHUNKED = {"on": (True,), "off": (False,), "both": (True, False)}
LAYOUTS = (
    "xllm, vllm-eagle, speculators or gguf (the head alone); vllm-mimo (trunk and MTP head); vllm-eagle3, vllm-dflash, "
    "vllm-dspark (a head); slice (a smaller model inside a nested one)"
)


@dataclass(frozen=True, kw_only=True)
class InspectOptions(ModelOptions):
    """Options of `headstart inspect`."""

    head: str | None = option("A head directory to inspect with the model.")
    target: str | None = option("A model that the drafter or head must fit.")
    deep: bool = option(
        "Measure acceptance on a few hundred tokens. A model beyond memory is read once, layer by layer. A repo is "
        "downloaded.",
        default=False,
    )


@dataclass(frozen=True, kw_only=True)
class ExportOptions(ModelOptions):
    """Options of `headstart export`."""

    out: Path = option("Directory to write.", "--out", "-o", default=REQUIRED, is_output=True)
    to: str = option(f"Layout: {LAYOUTS}.", default="xllm")
    model_type: str | None = option("With --to xllm: the model type in config.json.")
    slice: str | None = option(
        "With --to slice, its default: config.json of the smaller model, its folder or repo.", metavar="CONFIG"
    )
    head: Path | None = option("Head directory. Default: the model's own head.")
    force: bool = option("Replace files of an earlier run.", default=False)


@dataclass(frozen=True, kw_only=True)
class GraftOptions(OptionGroup):
    """Options of `headstart graft`."""

    model: str = argument("Path or repo id of the fine-tuned or quantized checkpoint.", default=REQUIRED)
    out: Path = option("Directory to write.", "--out", "-o", default=REQUIRED, is_output=True)
    base: str | None = option("Path or repo id of the original model with its head.", "--from", metavar="BASE")
    strip: bool = option("Write the checkpoint without its head.", default=False)
    quantize_head: bool = option("Write the head in FP8 blocks.", default=False)
    no_measure: bool = option("Do not measure whether the head helps.", default=False)
    force: bool = option("Replace files of an earlier run.", default=False)


@dataclass(frozen=True, kw_only=True)
class GateFlags(OptionGroup):
    """Options of `headstart gate`."""

    old: str = argument("URL, checkpoint, or a file that --save wrote.", default=REQUIRED)
    new: str = argument("URL or checkpoint.", default=REQUIRED)
    model: str | None = option("Model of a server with several. Default: the first that it lists.")
    api_key: str | None = option("Bearer token of the servers. Or $HEADSTART_API_KEY.")
    floor: float = option("Least tokens per pass, as a share of the old one.", default=0.9, above=0, max=1)
    allow_text_changes: bool = option("Different texts are no failure, for changed weights or engines.", default=False)
    max_tokens: int = option("Longest answer, in tokens.", default=64, min=1, max=2**20)
    trials: int = option(
        "Prompts of each form, greedy and sampled. Below 6, lost JSON is not always noticed.",
        default=6,
        min=1,
        max=100,
    )


@dataclass(frozen=True, kw_only=True)
class ProbedServer(OptionGroup):
    """The server of `headstart probe`."""

    url: str = argument("Address of an OpenAI-compatible server, with or without /v1.", default=REQUIRED)
    model: str | None = option("Model of the requests. Default: the first that the server lists.")
    api_key: str | None = option("Bearer token of the server. Or $HEADSTART_API_KEY.")


@dataclass(frozen=True, kw_only=True)
class AdaptFlags(OptionGroup):
    """Options of `headstart adapt`."""

    records: Path | None = argument("Folder of records of headstart serve --record.", metavar="DIR")
    model: str | None = option("The model that wrote the records. Default: the default model.")
    head: Path | None = option("Head to begin with. Default: the one in use.")
    kind: str | None = option("Kind of the model's head: mtp, eagle3, ... Default: the one in use.")
    lora: Path | None = option("LoRA adapter that wrote the records: the head drafts for it alone.", metavar="PATH",
                               must_exist=True)  # fmt: skip
    minutes: float = option("Duration of the run.", default=30.0, above=0, max=MAX_MINUTES)
    forget: bool = option("Remove the adapted head, so that the model's own head is used again.", default=False)
    threads: int | None = option("CPU threads.")
    seed: int = option("Order of data.", default=0)


@dataclass(frozen=True, kw_only=True)
class DemoFlags(ModelOptions):
    """Options of `headstart demo`, without the engine's."""

    max_tokens: int | None = option("Tokens per prompt. Default: up to 64, as time allows.", min=1)


@dataclass(frozen=True, kw_only=True)
class TuneFlags(ModelOptions):
    """Options of `headstart tune`, without the engine's."""

    workload: str = option("A workload of headstart bench, or FILE.jsonl.", default="mixed")
    concurrency: tuple[int, ...] = option("Requests at a time, comma-separated.", default=(1, 4), min=1)
    minutes: float = option("Time limit in minutes.", default=5.0, above=0, max=MAX_MINUTES)
    retune: bool = option("Measure again, ignoring earlier results.", default=False)
    url: str | None = option("Tune the OpenAI-compatible server at this address.")
    api_key: str | None = option("API key of the server.")
    start: str | None = option("Command that starts the server; {depth} stands for the depth. Run for each depth.")
    start_off: str | None = option("Command that starts the server without drafting.")


@dataclass(frozen=True, kw_only=True)
class StepFlags(ModelOptions):
    """Options of `headstart bench step`, without the engine's."""

    rows: tuple[int, ...] = option(
        "Rows per pass, comma-separated. Default: 1 to 512, as far as the context goes.", default=(), min=1
    )
    context: int = option("Cached positions before the rows.", default=128, min=0)
    repeats: int | None = option("Passes of each kind. Default: 5 to 50, as time allows.", min=1)
    profile: bool = option("Also show the time of each part of passes and engine steps.", default=False)


@dataclass(frozen=True, kw_only=True)
class BenchFlags(ModelOptions):
    """Options of `headstart bench`, without the engine's."""

    workloads: tuple[str, ...] = option(
        "Comma-separated: code, prose, high-temperature, json, tools, repetitive, long-context, agent, mixed, "
        "synthetic, FILE.jsonl, FILE.jsonl:CATEGORY or FILE.jsonl:each. Default: mixed.",
        "--workload",
        default=(),
    )
    preset: str | None = option("Named load: sharegpt-2500-1500 (80 long requests).")
    scale: float = option("Multiplies the lengths of --preset, --input-tokens.", default=1.0, above=0, max=1000)
    concurrency: tuple[int, ...] = option(
        "Requests at a time, comma-separated. Default: 1,4,16; slow models: fewer.", default=(), min=1, max=MAX_COUNT
    )
    rates: tuple[float, ...] = option(
        "Instead: requests per second, at random (Poisson) times.", "--request-rate", default=(), above=0, max=MAX_COUNT
    )
    requests: int | None = option("Requests of a run. Default: 8, or two per client.", min=1, max=MAX_COUNT)
    input_tokens: int | None = option("Length of prompts in tokens; they are then plain text.", min=1, max=MAX_TOKENS)
    output_tokens: int | None = option(
        "Maximum length of answers; the exact length with --input-tokens.", min=1, max=MAX_TOKENS
    )
    prompts: Path | None = option("JSONL file of texts for --input-tokens.")
    temperatures: tuple[float, ...] = option(
        "Comma-separated; each workload is run at each temperature.", "--temperature", default=()
    )
    modes: tuple[str, ...] = option("Comma-separated: off, depths such as 3, auto. Default: off,auto.", default=())
    pairs: int = option("Runs of each mode, in alternating order.", default=3, min=1, max=MAX_COUNT)
    chunked_prefill: str = option("on, off (a prompt is one chunk) or both.", default="on", choices=tuple(CHUNKED))
    url: str | None = option("Measure the OpenAI-compatible server at this address.")
    off_url: str | None = option("Address of a second server without drafting, for mode off.")
    api_key: str | None = option("API key of the server.", repr=False)
    price_per_hour: float | None = option(
        "Dollars for the machine; gives the cost of a million tokens.", above=0, max=MAX_COUNT
    )
    out: Path | None = option(
        "Write the JSON document to this file; an interrupted run keeps its results.", is_output=True
    )
    report: Path | None = option("Write an HTML report to this file.", is_output=True)
    force: bool = option("Replace files of an earlier run.", default=False)
    compare: tuple[Path, Path] | None = option("Compare two documents instead of measuring.")


@dataclass(frozen=True, kw_only=True)
class LaunchFlags(OptionGroup):
    """Options of `headstart launch`: engine, model and devices."""

    engine: str | None = argument("vllm, sglang, trtllm, xllm or llamacpp.")
    model: str | None = argument("A directory, a .gguf file or a repo id.")
    extra: Sequence[str] = argument("After --: flags that are passed to the engine unchanged.", default=())
    emit: str | None = option("Print manifests for compose, k8s, kuberay or slurm.")
    engine_version: str | None = option("Engine version. Default: the installed one.")
    program: str | None = option("Path of the engine's program or its folder. Default: found in PATH.")
    depth: int | None = option("Tokens drafted per pass. Default: the tuned depth, else by the head.")
    gpus: str | None = option("GPUs of a node, such as h200x8, or none. Default: those of this machine.")
    tp: int | None = option("Tensor parallelism. Default: the fewest GPUs that hold the model; 1 on a CPU.")
    dp: int | None = option(
        "Data parallelism: copies of the model, behind a router unless the engine has one. Default: 1."
    )
    disaggregate: str | None = option("Numbers of prefill and decode servers behind a router, such as 1:1.")
    nodes: int = option("Machines that share one model.", default=1, min=1, max=1024)
    head_node: str = option("Address of the first machine.", default="HEAD_NODE")


@dataclass(frozen=True, kw_only=True)
class ServerFlags(OptionGroup):
    """Options of `headstart launch` that every launcher gets unchanged."""

    head: str | None = option("A separate drafter in the engine's layout.")
    depth_by_batch: str | None = option("Depth by number of running requests, as JSON: a list of [from, to, depth].")
    role: str | None = option("prefill or decode, for disaggregated servers; decode servers use MTP.")
    kv_offload_gb: int | None = option("GB of host memory for the KV cache.", "--kv-offload")
    host: str = option("Address to listen on.", default="127.0.0.1")
    port: int = option("Port.", default=8000)


@dataclass(frozen=True, kw_only=True)
class PlanFlags(OptionGroup):
    """Options of `headstart plan`."""

    model: str | None = argument(
        "A card such as deepseek-v4, a directory, a .gguf file or a repo id; none: the default model."
    )
    gpu: str = option("Device and count, such as h200x4; here: this machine, as measured.", default="here")
    batches: tuple[int, ...] = option(
        "Sequences decoded together, comma-separated.", "--batch", default=(1, 4, 8), min=1, max=MAX_COUNT
    )
    context: int | None = option(
        "Positions per sequence, with the prompt. Default: 2048, or the model's maximum.", min=1, max=MAX_TOKENS
    )
    drafter: str | None = option(
        "mtp, eagle3, medusa, dflash, ngram, draft_model, none, all; comma-separated. Default: the model's own."
    )
    head: str | None = option("A separate drafter, or a draft model.")
    acceptance: str | None = option(
        "Acceptance rate by position (given that the tokens before were accepted), or an acceptance length."
    )
    depths: tuple[int, ...] = option(
        "Tokens drafted, comma-separated. Default: the best of 0 to 8.", "--depth", default=(), min=0, max=MAX_DEPTH
    )
    weights: str | None = option("bf16, fp8, int8, int4, nvfp4, ... Default: the checkpoint's own.")
    kv_dtype: str | None = option("KV cache: bf16 (default), fp8, int8, ...")
    tp: int | None = option("Tensor parallelism. Default: all devices.")
    ep: int | None = option("Expert parallelism: all devices, or 1 (default).")
    price_per_hour: str | float | None = option(
        "Dollars for one device, or on-demand or spot; gives the cost of tokens."
    )
    api_price: str | float | None = option("Price of an API in dollars per million tokens, or list, to compare with.")
    price_list: str | None = option("TOML file of prices, in the format of the built-in one.")
    fleet: str | None = option(
        "A load, such as '100 req/s, 1500 in, 300 out, TTFT 1 s, TPOT 40 ms' (limits for p95, or with p99 for p99): "
        "gives the number of machines, and whether disaggregation pays (at 100 Gbit/s, or with 25 Gbit/s at that)."
    )
    recalibrate: bool = option("Measure this machine again.", default=False)
