"""`headstart verify`: is the text with drafting really that of plain decoding?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from headstart.cli.options import EngineOptions, Model, OptionGroup, OutputOptions, as_depth, comma_list, read_text
from headstart.cli.render import finish, progress
from headstart.config import flag_of
from headstart.errors import UsageError

EXAMPLES = (
    "headstart verify",
    "headstart verify --temperatures 0,0.7 --depths 1,3,5 --drafters mtp,ngram --batch-sizes 1,8",
    "headstart verify --full --prompts prompts.jsonl",
    "headstart verify ./my-model --head ./my-head --prompts prompts.jsonl --json",
    "headstart verify --numerics",
    "headstart verify --against transformers",
)
SWITCH = {"on": True, "off": False}
VARIED = {
    "depth": "--depths",
    "drafter": "--drafters",
    "seed": "--seeds",
    "max_num_batched_tokens": "--chunk-sizes",
    "enable_prefix_caching": "--prefix-cache",
}
"""Engine options that verify varies by itself."""


def _levels(doc: str, flag: str, default: str) -> Any:
    return typer.Option(
        flag, help=f"{doc}, comma-separated. Default: {default}.", rich_help_panel="Levels", show_default=False
    )


@dataclass(frozen=True, kw_only=True)
class LevelOptions(OptionGroup):
    """What verify varies; each is a comma-separated list. Defaults are VerifyOptions'."""

    temperatures: Annotated[str | None, _levels("Temperatures", "--temperatures", "0,0.7,1.0")] = None
    depths: Annotated[str | None, _levels("Depths", "--depths", "0,1,3,5,auto")] = None
    drafters: Annotated[str | None, _levels("Drafters", "--drafters", "mtp,ngram,mixed and other shipped heads")] = None
    batch_sizes: Annotated[str | None, _levels("Prompts at the same time", "--batch-sizes", "1,8")] = None
    chunk_sizes: Annotated[str | None, _levels("Rows per pass", "--chunk-sizes", "32,512")] = None
    prefix_cache: Annotated[str | None, _levels("Prefix cache", "--prefix-cache", "on,off")] = None
    preemption: Annotated[
        str | None, _levels("Too few KV blocks for all (on), or enough (off)", "--preemption", "on,off")
    ] = None
    thread_counts: Annotated[
        str | None, _levels("CPU threads", "--thread-counts", "1,2; on the reference backend one level, --threads")
    ] = None
    seeds: Annotated[str | None, _levels("Seeds", "--seeds", "0")] = None
    full: Annotated[
        bool,
        typer.Option(
            "--full",
            help="The big grid: temperatures 0,0.7,1.0,1.5, depths 0 to 5 and auto, batches 1,4,16, chunks 1,37,512, "
            "and 2000 texts or more. Levels given by hand win.",
            rich_help_panel="Levels",
        ),
    ] = False

    def parsed(self) -> dict[str, Any]:
        """The lists that were given, by the names that VerifyOptions has for them."""
        settings = {
            "temperatures": comma_list("--temperatures", self.temperatures, float),
            "depths": comma_list("--depths", self.depths, as_depth),
            "drafters": comma_list("--drafters", self.drafters, str),
            "batch_sizes": comma_list("--batch-sizes", self.batch_sizes, int),
            "chunk_sizes": comma_list("--chunk-sizes", self.chunk_sizes, int),
            "prefix_caching": comma_list("--prefix-cache", self.prefix_cache, SWITCH.__getitem__),
            "preemption": comma_list("--preemption", self.preemption, SWITCH.__getitem__),
            "thread_counts": comma_list("--thread-counts", self.thread_counts, int),
            "seeds": comma_list("--seeds", self.seeds, int),
        }
        return {name: levels for name, levels in settings.items() if levels}


@dataclass(frozen=True, kw_only=True)
class CaseOptions(OptionGroup):
    """What verify decodes and what it compares with."""

    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Text file with a prompt per line, or .jsonl; none: built-in ones.")
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="Without the chat template.")] = False
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens per prompt.")] = 64
    numerics: Annotated[
        bool, typer.Option("--numerics", help="Compare this backend's logits with float32 (needs torch).")
    ] = False
    against: Annotated[
        str | None, typer.Option("--against", help="Compare greedy text with another implementation: transformers.")
    ] = None


def run(
    model: Model = None,
    *,
    case: CaseOptions,
    levels: LevelOptions,
    engine: EngineOptions,
    output: OutputOptions,
) -> int:
    """Compare token ids with plain decoding over pairs of all levels; exit 1 on a difference that is not a tie."""
    _check(case, levels, engine)
    parsed = levels.parsed()
    prompts = _read_prompts(case.prompts) if case.prompts else None

    from headstart.tools.verify import numerics, run as verify

    common: dict[str, Any] = {
        "model": model,
        "config": engine.config,
        "prompts": prompts,
        "raw": case.raw,
        "max_tokens": case.max_tokens,
    }
    with progress("verifying", quiet=output.as_json) as report_progress:
        if case.numerics:
            report = numerics.run(numerics.NumericsOptions(**common), report_progress)
        else:
            preset = verify.FULL if levels.full else {}
            options = verify.VerifyOptions(**common, against=case.against, **{**preset, **parsed})
            report = verify.run(options, report_progress)
    return finish(report, output.as_json)


def _check(case: CaseOptions, levels: LevelOptions, engine: EngineOptions) -> None:
    """Raises UsageError for options that contradict each other."""
    if case.against not in (None, "transformers"):
        raise UsageError(f"--against is {case.against!r}, which is unknown", "choose from: transformers")
    if fixed := sorted(engine.given & VARIED.keys()):
        raise UsageError(f"verify goes through values of {flag_of(fixed[0])}", f"use {VARIED[fixed[0]]}")
    if "threads" in engine.given and levels.thread_counts:
        raise UsageError("--threads and --thread-counts are both given", "give one of them")
    asked = [
        flag
        for flag, given in (("--numerics", case.numerics), ("--against", case.against), ("--full", levels.full))
        if given
    ]
    if len(asked) > 1:
        raise UsageError(f"{asked[0]} and {asked[1]} are both given", "give one of them")


def _read_prompts(path: Path) -> tuple[str, ...]:
    lines = [line for line in read_text(path, "--prompts").splitlines() if line.strip()]
    if path.suffix == ".jsonl":
        lines = [_prompt_of(line, path, number) for number, line in enumerate(lines, 1)]
    if not lines:
        raise UsageError(f"--prompts: {path} holds no prompt", "one prompt per line")
    return tuple(lines)


def _prompt_of(line: str, path: Path, number: int) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"--prompts: {path} line {number} is not JSON: {error.msg}") from None
    prompt = record.get("prompt") if isinstance(record, dict) else record
    if not isinstance(prompt, str):
        hint = """a record is "text" or {"prompt": "text"}"""
        raise UsageError(f"--prompts: {path} line {number} has no prompt", hint)
    return prompt
