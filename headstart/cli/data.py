"""`headstart data`: text to train a head on, written by the model itself."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import typer

from headstart.cli.options import EngineOptions, Model, OptionGroup, OutputOptions
from headstart.cli.render import finish, progress
from headstart.errors import UsageError

EXAMPLES = (
    "headstart data --out texts --tokens 1000000",
    "headstart data ./my-model --out texts --minutes 60 --text ./docs --licence MIT",
    "headstart data --out texts --prompts prompts.jsonl --only-prompts",
    "headstart train --data texts --out my-head --minutes 60",
)
USES = {"backend", "quantization", "kv_cache_dtype", "dtype", "device", "threads", "max_model_len", "max_num_seqs",
        "max_num_batched_tokens", "kv_blocks", "block_size", "seed"}  # fmt: skip
"""Engine options that matter to plain decoding; the others are refused."""
Paths = list[Path] | None


@dataclass(frozen=True, kw_only=True)
class DataFlags(OptionGroup):
    """DataOptions from the command line; what is not given keeps the default written there."""

    out: Annotated[Path, typer.Option("--out", help="Folder for the data; a second run goes on in it.")]
    tokens: Annotated[int | None, typer.Option("--tokens", help="Stop when the answers hold so many tokens.")] = None
    minutes: Annotated[float | None, typer.Option("--minutes", help="Stop after this time.")] = None
    prompts: Annotated[Paths, typer.Option("--prompts", help="JSONL prompts to answer first; may be repeated.")] = None
    text: Annotated[
        Paths, typer.Option("--text", help="Folder of documentation or source code to learn from; may be repeated.")
    ] = None
    licence: Annotated[str | None, typer.Option("--licence", help="Licence of --text, for the record.")] = None
    only_prompts: Annotated[bool, typer.Option("--only-prompts", help="Answer --prompts and nothing else.")] = False
    language: Annotated[
        str | None, typer.Option("--language", help="Of prompts that the model writes itself: en or any. Default: en.")
    ] = None
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=2, help="Of an answer. Default: 256.")] = None

    def chosen(self) -> dict[str, Any]:
        """The options that were given, by the names of DataOptions."""
        if self.language not in (None, "en", "any"):
            raise UsageError(f"--language is {self.language!r}, which is unknown", "choose en or any")
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values |= {name: tuple(values[name]) for name in ("prompts", "text") if values[name]}
        return {name: value for name, value in values.items() if value is not None}


def run(model: Model = None, *, flags: DataFlags, engine: EngineOptions, output: OutputOptions) -> int:
    """Have a model write text that a head can learn from."""
    engine.refuse_others(USES, "writing data")

    from headstart.train import own_data as data

    options = data.DataOptions(model=model, config=engine.config, seed=engine.config.seed or 0, **flags.chosen())
    with progress("data", quiet=output.as_json) as report_progress:
        report = data.run(options, report_progress)
    return finish(report, output.as_json)
