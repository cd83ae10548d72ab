"""`headstart verify`: is the text with drafting really that of plain decoding?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from headstart.cli.options import EngineOptions, Model, OptionGroup, OutputOptions, read_text
from headstart.cli.render import finish, progress
from headstart.config import flag_of
from headstart.errors import UsageError

EXAMPLES = (
    "headstart verify",
    "headstart verify --temperatures 0,0.7 --depths 1,3,5 --drafters mtp,ngram --batch-sizes 1,8",
    "headstart verify ./my-model --head ./my-head --prompts prompts.jsonl --json",
    "headstart verify --against transformers",
)
T = TypeVar("T")
SWITCH = {"on": True, "off": False}
VARIED = {
    "depth": "--depths",
    "drafter": "--drafters",
    "seed": "--seeds",
    "max_num_batched_tokens": "--chunk-sizes",
    "enable_prefix_caching": "--prefix-cache",
}
"""Engine options that verify varies by itself."""


def _levels(doc: str, flag: str) -> Any:
    return typer.Option(flag, help=f"{doc}, comma-separated.", rich_help_panel="Levels")


@dataclass(frozen=True, kw_only=True)
class LevelOptions(OptionGroup):
    """What verify varies; each is a comma-separated list."""

    temperatures: Annotated[str, _levels("Temperatures", "--temperatures")] = "0,0.7,1.0"
    depths: Annotated[str, _levels("Depths", "--depths")] = "1,3,5"
    drafters: Annotated[str, _levels("Drafters", "--drafters")] = "mtp,ngram"
    batch_sizes: Annotated[str, _levels("Prompts at the same time", "--batch-sizes")] = "1,8"
    chunk_sizes: Annotated[str, _levels("Rows per pass", "--chunk-sizes")] = "32,512"
    prefix_cache: Annotated[str, _levels("Prefix cache", "--prefix-cache")] = "on,off"
    seeds: Annotated[str, _levels("Seeds", "--seeds")] = "0"

    def parsed(self) -> dict[str, tuple[Any, ...]]:
        """The lists, by the names that VerifyOptions has for them."""
        return {
            "temperatures": _split("--temperatures", self.temperatures, float),
            "depths": _split("--depths", self.depths, int),
            "drafters": _split("--drafters", self.drafters, str),
            "batch_sizes": _split("--batch-sizes", self.batch_sizes, int),
            "chunk_sizes": _split("--chunk-sizes", self.chunk_sizes, int),
            "prefix_caching": _split("--prefix-cache", self.prefix_cache, SWITCH.__getitem__),
            "seeds": _split("--seeds", self.seeds, int),
        }


@dataclass(frozen=True, kw_only=True)
class CaseOptions(OptionGroup):
    """What verify decodes and what it compares with."""

    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="Text file with a prompt per line, or .jsonl; none: built-in ones.")
    ] = None
    raw: Annotated[bool, typer.Option("--raw", help="Without the chat template.")] = False
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Tokens per prompt.")] = 64
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
    if case.against not in (None, "transformers"):
        raise UsageError(f"--against is {case.against!r}, which is unknown", "choose from: transformers")
    if fixed := sorted(engine.given & VARIED.keys()):
        raise UsageError(f"verify goes through values of {flag_of(fixed[0])}", f"use {VARIED[fixed[0]]}")
    parsed = levels.parsed()
    prompts = _read_prompts(case.prompts) if case.prompts else None

    from headstart.tools import verify

    options = verify.VerifyOptions(
        model=model,
        config=engine.config,
        prompts=prompts,
        raw=case.raw,
        max_tokens=case.max_tokens,
        against=case.against,
        **parsed,
    )
    with progress("verifying", quiet=output.as_json) as report_progress:
        report = verify.run(options, report_progress)
    return finish(report, output.as_json)


def _split(flag: str, text: str, parse: Callable[[str], T]) -> tuple[T, ...]:
    try:
        return tuple(parse(item.strip()) for item in text.split(","))
    except (ValueError, KeyError):
        hint = "see headstart verify --help"
        raise UsageError(f"{flag} is {text!r}, which is not a list of such values", hint) from None


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
