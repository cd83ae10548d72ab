"""`headstart data`: text to train a head on, written by the model itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from headstart.cli.options import REQUIRED, EngineOptions, Model, OptionGroup, OutputOptions, option
from headstart.errors import UsageError

EXAMPLES = (
    "headstart data --out texts --tokens 1000000",
    "headstart data ./my-model --out texts --minutes 60 --text ./docs --licence MIT",
    "headstart data --out texts --prompts prompts.jsonl --only-prompts",
    "headstart train --data texts --out my-head --minutes 60",
)
USES = {"backend", "quantization", "kv_cache_dtype", "dtype", "device", "threads", "numa", "max_model_len",
        "max_num_seqs", "max_num_batched_tokens", "kv_blocks", "block_size", "seed"}  # fmt: skip
"""Engine options that matter to plain decoding; the others are refused."""
Paths = list[Path] | None


@dataclass(frozen=True, kw_only=True)
class DataFlags(OptionGroup):
    """DataOptions from the command line; what is not given keeps the default written there."""

    out: Path = option("Folder for the data; a second run goes on in it.", default=REQUIRED)
    tokens: int | None = option("Stop when the answers hold so many tokens.")
    minutes: float | None = option("Stop after this time.")
    prompts: Paths = option("JSONL prompts to answer first; may be repeated.")
    text: Paths = option(
        "Folder of documentation or source code to learn from; what is not English there is to be translated. May be "
        "repeated."
    )
    licence: str | None = option("Licence of --text, for the record.")
    only_prompts: bool = option("Answer --prompts and nothing else.", default=False)
    language: str | None = option("Of prompts that the model writes itself: en or any. Default: en.")
    max_tokens: int | None = option("Of an answer. Default: 256.", min=2)

    def chosen(self) -> dict[str, Any]:
        """The options that were given, by the names of DataOptions."""
        if self.language not in (None, "en", "any"):
            raise UsageError(f"--language is {self.language!r}, which is unknown", "choose en or any")
        return super().chosen()


def run(model: Model = None, *, flags: DataFlags, engine: EngineOptions, output: OutputOptions) -> int:
    """Have a model write text that a head can learn from: answers to prompts of its own, second turns, and templates of
    writing, roleplay, reasoning, math, coding, extraction, stem, humanities, translation, summarization, qa, word
    problems, rag, JSON and tools."""
    engine.refuse_others(USES, "writing data")

    from headstart.train import own_data as data

    options = data.DataOptions(model=model, config=engine.config, seed=engine.config.seed or 0, **flags.chosen())
    return output.run("data", partial(data.run, options))
