"""Scripts of engines' repositories that guides name, and the commands that do their work today."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePath

from headstart.tools.launch.commands import Edit
from headstart.tools.launch.shell import Token


@dataclass(frozen=True)
class Script:
    """`program`: what is run instead of it. `flags`: old -> new; empty: the value alone stays, as a positional word."""

    program: str
    flags: Mapping[str, str] = field(default_factory=dict)
    adds: str = ""
    gone: Mapping[str, str] = field(default_factory=dict)
    """Flags without a successor -> what a person has to decide."""


DATASET = {"--dataset": "it is --dataset-name (random, sharegpt, custom, ...) and --dataset-path now"}
SCRIPTS: Mapping[str, Script] = {
    "export_mtp.py": Script(
        "headstart export", {"--input-dir": "", "--output-dir": "--out", "--input_dir": "", "--output_dir": "--out"},
        adds="--to xllm",
    ),
    "benchmark_serving.py": Script("vllm bench serve", gone=DATASET),
    "benchmark_throughput.py": Script("vllm bench throughput", gone=DATASET),
    "benchmark_latency.py": Script("vllm bench latency", gone={
        "--speculative-model": "it is \"model\" in --speculative-config now",
        "--num-speculative-tokens": "it is a key of --speculative-config now",
    }),
}  # fmt: skip


def is_script(tokens: Sequence[Token]) -> bool:
    return _place(tokens) is not None


def _place(tokens: Sequence[Token]) -> int | None:
    return next((place for place, token in enumerate(tokens) if PurePath(token.value).name in SCRIPTS), None)


def rewritten(text: str, tokens: Sequence[Token]) -> tuple[list[Edit], list[str], list[str]]:
    """The edits of a command that runs one of SCRIPTS, lines on what changed, and on what a person must decide."""
    place = _place(tokens)
    assert place is not None
    name = PurePath(tokens[place].value).name
    script = SCRIPTS[name]
    begin = tokens[place].begin
    if place and PurePath(tokens[place - 1].value).name.startswith("python"):
        begin = tokens[place - 1].begin
    edits: list[Edit] = [(begin, tokens[place].end, script.program)]
    warnings = []
    for index, token in enumerate(tokens[place + 1 :], place + 1):
        flag, equals, _ = token.value.partition("=")
        if flag in script.gone:
            warnings.append(f"{flag}: {script.gone[flag]}")
        elif script.flags.get(flag):
            edits.append((token.begin, token.begin + len(flag), script.flags[flag]))
        elif flag in script.flags:
            end = token.begin + len(flag) + 1 if equals or index + 1 == len(tokens) else tokens[index + 1].begin
            edits.append((token.begin, end, ""))
    if script.adds:
        edits.append((tokens[-1].end, tokens[-1].end, f" {script.adds}"))
    return edits, [f"{name} -> {script.program}"], warnings
