"""`headstart demo`: the same prompts with and without MTP, side by side."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer

from headstart.cli.options import EngineOptions, Model, OutputOptions
from headstart.cli.render import print_table
from headstart.errors import UsageError

EXAMPLES = ("headstart demo", "headstart demo --depth 5 --max-tokens 128", "headstart demo --drafter ngram --json")


def run(
    model: Model = None,
    *,
    max_tokens: Annotated[
        int | None, typer.Option("--max-tokens", min=1, help="Tokens per prompt. Default: up to 64, as time allows.")
    ] = None,
    engine: EngineOptions,
    output: OutputOptions,
) -> int:
    """Decode the same prompts with drafting off and on: is the text the same, what does it save?"""
    if engine.config.depth == 0 or engine.config.drafter == "none":
        raise UsageError("demo compares with drafting, but drafting is switched off", "leave out --no-mtp or --depth 0")

    from headstart.tools import demo

    options = demo.DemoOptions(model=model, config=engine.config, max_tokens=max_tokens)
    return output.run("decoding", partial(demo.run, options), _print_table)


def print_demo(data: dict[str, Any]) -> None:
    """What the command prints for a document of --json."""
    from headstart.tools.demo import lines_of

    _print_table(data)
    for line in lines_of(data):
        print(line)


def _print_table(data: dict[str, Any]) -> None:
    columns = ("prompt", "same\ntext", "tokens", "passes", "passes\n/token", "accept.\nlength", "tokens/s", "ratio")
    rows = [
        (
            row["kind"],
            "yes" if row["identical"] else f"no, at {row['first_difference']}",
            row["tokens"],
            f"{row['passes_off']} → {row['passes_on']}",
            f"{row['passes_per_token']:.2f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_s_off']:.1f} → {row['tokens_per_s_on']:.1f}",
            f"{row['speed_ratio']:.2f}x",
        )
        for row in data["prompts"]
    ]
    print_table(columns, rows)
