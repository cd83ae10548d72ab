"""`headstart verify`: is the text with drafting really that of plain decoding?"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headstart.cli.options import (
    EngineOptions,
    Model,
    OptionGroup,
    OutputOptions,
    as_depth,
    option,
    read_text,
)
from headstart.config import AUTO, flag_of
from headstart.errors import UsageError

EXAMPLES = (
    "headstart verify",
    "headstart verify --temperatures 0,0.7 --depths 1,3,5 --drafters mtp,ngram --batch-sizes 1,8",
    "headstart verify --full --prompts prompts.jsonl",
    "headstart verify ./my-model --head ./my-head --prompts prompts.jsonl --json",
    "headstart verify --numerics",
    "headstart verify --against transformers",
)
SWITCH = {"on": True, "off": False}.__getitem__
VARIED = {
    "depth": "--depths",
    "drafter": "--drafters",
    "seed": "--seeds",
    "max_num_batched_tokens": "--chunk-sizes",
    "enable_prefix_caching": "--prefix-cache",
}
"""Engine options that verify varies by itself."""


def _levels(doc: str, default: str, *flags: str) -> Any:
    return option(f"{doc}, comma-separated. Default: {default}.", *flags, show_default=False)


@dataclass(frozen=True, kw_only=True)
class LevelOptions(OptionGroup):
    """What verify varies; each is a comma-separated list. Defaults are VerifyOptions'."""

    panel = "Levels"
    temperatures: str | None = _levels("Temperatures", "0,0.7,1.0")
    depths: str | None = _levels("Depths", "0,1,3,5,auto")
    drafters: str | None = _levels("Drafters", "mtp,ngram,mixed and other shipped heads")
    batch_sizes: str | None = _levels("Prompts at the same time", "1,8")
    chunk_sizes: str | None = _levels("Rows per pass", "32,512")
    prefix_caching: str | None = _levels("Prefix cache", "on,off", "--prefix-cache")
    preemption: str | None = _levels("Too few KV blocks for all (on), or enough (off)", "on,off")
    thread_counts: str | None = _levels("CPU threads", "1,2; on the reference backend one level, --threads")
    seeds: str | None = _levels("Seeds", "0")
    full: bool = option(
        "The big grid: temperatures 0,0.7,1.0,1.5, depths 0 to 5 and auto, batches 1,4,16, chunks 1,37,512, "
        "and 2000 texts or more. Levels given by hand win.",
        default=False,
    )

    def chosen(self) -> dict[str, Any]:
        """The lists that were given, by the names that VerifyOptions has for them."""
        values = self.parsed(
            temperatures=float, depths=_depth, drafters=str, batch_sizes=int, chunk_sizes=int,
            prefix_caching=SWITCH, preemption=SWITCH, thread_counts=int, seeds=int,
        )  # fmt: skip
        if any(seed < 0 for seed in values["seeds"]):
            raise UsageError(f"--seeds is {self.seeds}, but a seed must be at least 0")
        del values["full"]
        return {name: levels for name, levels in values.items() if levels}


def _depth(text: str) -> Any:
    if (depth := as_depth(text)) != AUTO and not isinstance(depth, int):
        raise ValueError(text)
    return depth


@dataclass(frozen=True, kw_only=True)
class CaseOptions(OptionGroup):
    """What verify decodes and what it compares with."""

    prompts: Path | None = option("Text file with a prompt per line, or .jsonl; none: built-in ones.")
    raw: bool = option("Without the chat template.", default=False)
    max_tokens: int = option("Tokens per prompt.", default=64, min=1)
    numerics: bool = option("Compare this backend's logits with float32 (needs torch).", default=False)
    against: str | None = option("Compare greedy text with another implementation: transformers.")


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
    chosen = levels.chosen()
    prompts = _read_prompts(case.prompts) if case.prompts else None

    from headstart.tools.verify import numerics, run as verify
    from headstart.tools.verify.options import FULL, VerifyOptions

    options = VerifyOptions(
        model=model,
        config=engine.config,
        prompts=prompts,
        raw=case.raw,
        max_tokens=case.max_tokens,
        against=case.against,
        **{**(FULL if levels.full else {}), **chosen},
    )
    return output.run("verifying", partial((numerics if case.numerics else verify).run, options))


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
