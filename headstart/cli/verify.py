"""`headstart verify` and `probe`: check exactness and drafting, of this engine or of another endpoint."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from headstart.cli.options import EngineOptions, OutputOptions, number_or_word
from headstart.cli.parser import command
from headstart.cli.render import print_table
from headstart.config import AUTO
from headstart.errors import UsageError
from headstart.files import read_text
from headstart.options import ModelOptions, OptionGroup, option
from headstart.tools.options import MAX_MINUTES, ProbedServer
from headstart.wording import LEAVE_OUT, flag_of

SWITCH = {"on": True, "off": False}.__getitem__
VARIED = {
    "depth": "--depths",
    "drafter": "--drafters",
    "seed": "--seeds",
    "max_num_batched_tokens": "--chunk-sizes",
    "enable_prefix_caching": "--prefix-cache",
}
"""Engine option that verify varies -> flag that sets its levels."""


@dataclass(frozen=True, kw_only=True)
class VerifyEngineOptions(EngineOptions):
    """EngineOptions of verify."""

    refused: ClassVar[frozenset[str]] = EngineOptions.refused | VARIED.keys()


def _depth(text: str) -> Any:
    if (depth := number_or_word(text)) != AUTO and not isinstance(depth, int):
        raise ValueError(text)
    return depth


def _levels(doc: str, default: str, *flags: str, **more: Any) -> Any:
    """Declares a comma-separated option of levels; an empty value means the default of VerifyOptions."""
    return option(f"{doc}, comma-separated. Default: {default}.", *flags, **more)


@dataclass(frozen=True, kw_only=True)
class LevelOptions(OptionGroup):
    """Levels that verify varies; defaults are those of VerifyOptions."""

    panel = "Levels"

    temperatures: tuple[float, ...] = _levels("Temperatures", "0,0.7,1.0")
    depths: tuple[Any, ...] = _levels("Depths", "0,1,3,5,auto", parse=_depth)
    drafters: tuple[str, ...] = _levels("Drafters", "all heads of the model, ngram, mixed")
    batch_sizes: tuple[int, ...] = _levels("Prompts at the same time", "1,8", min=1)
    chunk_sizes: tuple[int, ...] = _levels("Rows per pass", "32,512", min=1)
    prefix_caching: tuple[bool, ...] = _levels("Prefix cache", "on,off", "--prefix-cache", parse=SWITCH)
    preemption: tuple[bool, ...] = _levels("Too few KV blocks for all (on), or enough (off)", "on,off", parse=SWITCH)
    thread_counts: tuple[int, ...] = _levels("CPU threads", "1,2; on the reference backend one level, --threads", min=1)
    seeds: tuple[int, ...] = _levels("Seeds", "0", min=0)
    full: bool = option(
        "A larger grid: temperatures 0,0.7,1.0,1.5, depths 0 to 5 and auto, batches 1,4,16, chunks 1,37,512, and at "
        "least 2000 texts. Other options change its levels.",
        default=False,
    )

    def chosen(self) -> dict[str, Any]:
        """The lists that were given, by the names of VerifyOptions."""
        return {name: levels for name, levels in vars(self).items() if levels and name != "full"}


@dataclass(frozen=True, kw_only=True)
class CaseOptions(ModelOptions):
    """Prompts, and the reference of the comparison."""

    prompts: Path | None = option("Text file with a prompt per line, or .jsonl. Default: built-in prompts.")
    raw: bool = option("Without the chat template.", default=False)
    max_tokens: int = option("Tokens per prompt.", default=64, min=1)
    numerics: bool = option("Compare the backend's logits with float32 (needs torch).", default=False)
    against: str | None = option(
        "Compare greedy text with transformers, or tokens with a --transcript of another machine.",
        metavar="transformers|FILE",
    )
    transcript: Path | None = option(
        "Write the tokens of all prompts at all temperatures and seeds to a file, for --against elsewhere.",
        metavar="FILE", is_output=True,
    )  # fmt: skip


@command(
    "headstart verify",
    "headstart verify --temperatures 0,0.7 --depths 1,3,5 --drafters mtp,ngram --batch-sizes 1,8",
    "headstart verify --full --prompts prompts.jsonl",
    "headstart verify ./my-model --head ./my-head --prompts prompts.jsonl --json",
    "headstart verify --numerics",
    "headstart verify --against transformers",
    "headstart verify --portable-bits --transcript here.json",
    "headstart verify --portable-bits --against here.json",
)
def verify(case: CaseOptions, levels: LevelOptions, engine: VerifyEngineOptions, output: OutputOptions) -> int:
    """Compare token ids with plain decoding, over pairs of all levels; exit code 1: a difference that is no tie."""
    _check(case, levels, engine)
    values = vars(case) | {"prompts": _read_prompts(case.prompts) if case.prompts else None}
    del values["numerics"]

    from headstart.tools.verify import numerics, run as verify_run
    from headstart.tools.verify.options import FULL, VerifyOptions

    options = VerifyOptions(config=engine.config, **values, **{**(FULL if levels.full else {}), **levels.chosen()})
    return output.run("verifying", partial((numerics if case.numerics else verify_run).run, options))


def _check(case: CaseOptions, levels: LevelOptions, engine: EngineOptions) -> None:
    """Raises UsageError for options that contradict each other."""
    if fixed := sorted(engine.given & VARIED.keys()):
        raise UsageError(f"verify varies {flag_of(fixed[0])}", f"use {VARIED[fixed[0]]}")
    if "threads" in engine.given and levels.thread_counts:
        raise UsageError("--threads and --thread-counts are both given", "give one of them")
    modes = (
        ("--numerics", case.numerics), ("--against", case.against), ("--transcript", case.transcript),
        ("--full", levels.full),
    )  # fmt: skip
    given = [flag for flag, value in modes if value]
    if len(given) > 1:
        raise UsageError(f"{given[0]} and {given[1]} are both given", "give one of them")
    if case.against == "transformers" and engine.config.slice is not None:
        what = "--against transformers reads the whole model, not --slice"
        raise UsageError(what, "write the smaller model first: headstart export --slice")
    used = {"temperatures", "seeds"} if case.transcript else set[str]()
    is_file = case.against not in (None, "transformers")
    if (case.numerics or case.against or case.transcript) and (unused := sorted(levels.chosen().keys() - used)):
        raise UsageError(f"{flag_of(unused[0])} has no meaning with {given[0]}", LEAVE_OUT)
    if is_file and case.prompts:
        raise UsageError("--prompts has no meaning with --against FILE: the prompts are in it", LEAVE_OUT)


def _read_prompts(path: Path) -> tuple[str, ...]:
    from headstart.tools.bench.workloads import read_tasks

    if path.suffix == ".jsonl":
        return tuple(task.turns[0] for task in read_tasks(path))
    lines = [line for line in read_text(path, flag="--prompts").splitlines() if line.strip()]
    if not lines:
        raise UsageError(f"--prompts: {path} holds no prompt", "one prompt per line")
    return tuple(lines)


@dataclass(frozen=True, kw_only=True)
class ProbeFlags(OptionGroup):
    """The kind of probe."""

    no_metrics: bool = option("Judge by response times only.", default=False)
    exact: bool = option("Check that equal requests get equal texts.", default=False)


@dataclass(frozen=True, kw_only=True)
class ExactFlags(OptionGroup):
    """ExactOptions from the command line."""

    panel = "With --exact"

    against: str | None = option("A second server with the same model, without drafting.", metavar="URL")
    max_tokens: int | None = option("Longest answer, in tokens. Default: 64.", min=1, max=2**20)
    minutes: float | None = option("Time limit in minutes. Default: 3.", above=0, max=MAX_MINUTES)


@command(
    "headstart probe http://localhost:8000",
    "headstart probe http://localhost:8000/v1 --no-metrics --json",
    "headstart probe http://localhost:8000 --exact --minutes 5",
    "headstart probe http://localhost:8000 --exact --against http://localhost:8001 --max-tokens 128",
)
def probe(server: ProbedServer, flags: ProbeFlags, limits: ExactFlags, output: OutputOptions) -> int:
    """Find out whether an endpoint of any engine uses speculative decoding.

    Exit code 0: drafts are accepted; 1: there are none, or they cannot be detected.

    With --exact: whether the endpoint gives the same text alone and in a batch, with a cold and a warm prefix cache,
    streamed, with and without drafting, greedy and with a seed, with tools and schemas. Exit code 0: all texts are
    equal; 1: some differ; 2: nothing could be compared."""
    if flags.exact:
        if flags.no_metrics:
            raise UsageError("--no-metrics is not for --exact", LEAVE_OUT)
        from headstart.tools.probe import exact

        exact_options = exact.ExactOptions(**vars(server), **limits.chosen())
        return output.run("probing", partial(exact.run, exact_options), lambda data: print_table(*exact.table(data)))
    for name in limits.chosen():
        raise UsageError(f"{flag_of(name)} is for --exact", "give both, or " + LEAVE_OUT)
    from headstart.tools.probe import run as probe_run

    options = probe_run.ProbeOptions(**vars(server), use_metrics=not flags.no_metrics)
    return output.run("probing", partial(probe_run.run, options))
