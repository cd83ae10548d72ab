"""Options of `headstart train` and `data`, for the commands and the runs.

Imports nothing heavy, since every start of the command line reads it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headstart.config import MAX_DEPTH, Device
from headstart.options import REQUIRED, ModelOptions, option

Language = Literal["en", "any"]
ANSWER_TOKENS = 256


@dataclass(frozen=True, kw_only=True)
class TrainFlags(ModelOptions):
    """Options of `headstart train`. `minutes` or `tokens` bounds the run; one with a larger bound continues it."""

    out: Path = option("Directory for the head; another run continues there.", default=REQUIRED, is_output=True)
    from_scratch: str | None = option(
        "Train a small model of this family with its head from text; without --data, from Python's documentation.",
        metavar="FAMILY",
    )
    kind: str = option("mtp, eagle3, medusa or block.", default="mtp")
    finetune: bool = option("Begin with the model's head, or with --head.", default=False)
    head: Path | None = option("The head that --finetune begins with.", must_exist=True)
    lora: Path | None = option("LoRA adapter that the model runs with.", metavar="PATH", must_exist=True)
    data: Sequence[Path] = option(
        "JSONL file or folder of texts; may be repeated. Default: texts that the model writes.",
        default=(), must_exist=True,
    )  # fmt: skip
    prompts: Sequence[Path] = option(
        "JSONL file of prompts; the model's answers are added to the data.", default=(), must_exist=True
    )
    minutes: float | None = option("Time limit in minutes.")
    tokens: int | None = option("Maximum number of training tokens.")
    depth: int | None = option(
        "Unrolled draft steps (default: 3), or rows of a block (default: 8).", min=1, max=MAX_DEPTH
    )
    modules: int = option("Layers of an mtp head, one for each draft step.", default=1)
    draft_vocab: int = option(
        "Size of the draft vocabulary: the most frequent tokens, after those of the head that --finetune begins with.",
        default=8192, min=2,
    )  # fmt: skip
    threads: int | None = option("CPU threads.")
    seed: int = option("Order of data and initial weights.", default=0)
    device: Device = option("cpu or cuda.", default="cpu", choices=("cpu", "cuda"), metavar="TEXT")
    resume: bool = option("Start over instead of continuing --out.", "--restart", default=True)


@dataclass(frozen=True, kw_only=True)
class DataFlags(ModelOptions):
    """Options of `headstart data`, without the engine's."""

    out: Path = option("Folder for the data; another run continues there.", default=REQUIRED, is_output=True)
    tokens: int | None = option("Stop at this number of tokens in answers.")
    minutes: float | None = option("Time limit in minutes.")
    prompts: Sequence[Path] = option(
        "JSONL file of prompts to answer first; may be repeated.", default=(), must_exist=True
    )
    text: Sequence[Path] = option(
        "Folder of documentation or source code to make prompts of; other languages than English are translated. May "
        "be repeated.",
        default=(), must_exist=True,
    )  # fmt: skip
    licence: str = option("Licence of --text, for the record.", default="unknown")
    only_prompts: bool = option("Only answer --prompts.", default=False)
    language: Language = option(
        "Language of prompts that the model writes itself: en or any.", default="en", metavar="TEXT"
    )
    max_tokens: int = option("Maximum tokens of an answer.", default=ANSWER_TOKENS, min=2)
