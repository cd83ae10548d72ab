"""Commands that train: `headstart train` (a head, or a small model with one), `data` (its text) and `adapt`."""

import importlib.util
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.options import EngineOptions, OutputOptions
from headstart.cli.parser import command
from headstart.cli.render import finish, progress
from headstart.config import MAX_DEPTH, flag_of
from headstart.errors import UsageError
from headstart.options import REQUIRED, ModelOptions, option
from headstart.tools.options import AdaptFlags

if TYPE_CHECKING:
    from headstart.train.options import TrainOptions

Paths = list[Path] | None
SCRATCH_OPTIONS = ("out", "data", "minutes", "tokens", "depth", "threads", "seed")
WRITING_SHARE = 0.3  # share of a run without --data or --prompts in which the model writes its training text
DECODING_OPTIONS = {"backend", "quantization", "kv_cache_dtype", "dtype", "device", "threads", "numa", "portable_bits",
                    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_blocks", "block_size",
                    "seed", "lora"}  # fmt: skip
"""Engine options of `data`, which decodes without drafts."""


@dataclass(frozen=True, kw_only=True)
class TrainFlags(ModelOptions):
    """TrainOptions from the command line; options that are not given keep the defaults there."""

    out: Path = option("Directory for the head; another run continues there.", default=REQUIRED, is_output=True)
    from_scratch: str | None = option(
        "Train a small model of this family with its head from text; without --data, from Python's documentation.",
        metavar="FAMILY",
    )
    kind: str | None = option("mtp, eagle3, medusa or block. Default: mtp.")
    finetune: bool = option("Begin with the model's head, or with --head.", default=False)
    head: Path | None = option("The head that --finetune begins with.", must_exist=True)
    lora: Path | None = option("LoRA adapter that the model runs with.", metavar="PATH", must_exist=True)
    data: Paths = option(
        "JSONL file or folder of texts; may be repeated. Default: texts that the model writes.", must_exist=True
    )
    prompts: Paths = option("JSONL file of prompts; the model's answers are added to the data.", must_exist=True)
    minutes: float | None = option("Time limit in minutes.")
    tokens: int | None = option("Maximum number of training tokens.")
    depth: int | None = option(
        "Unrolled draft steps (default: 3), or rows of a block (default: 8).", min=1, max=MAX_DEPTH
    )
    modules: int | None = option("Layers of an mtp head, one for each draft step. Default: 1.")
    draft_vocab: int | None = option("Size of the draft vocabulary: the most frequent tokens. Default: 8192.", min=2)
    threads: int | None = option("CPU threads.")
    seed: int | None = option("Order of data and initial weights. Default: 0.")
    device: str | None = option("cpu or cuda. Default: cpu.", choices=("cpu", "cuda"))
    restart: bool = option("Start over instead of continuing --out.", default=False)

    def chosen(self) -> dict[str, Any]:
        """The given options as fields of TrainOptions."""
        values = super().chosen()
        values["resume"] = not values.pop("restart")
        values.pop("from_scratch", None)
        return values

    def for_scratch(self) -> dict[str, Any]:
        """The given options as fields of ScratchOptions. Raises UsageError for options of heads only."""
        given = self.chosen()
        model = given.pop("model", None)
        taken: dict[str, Any] = {name: given.pop(name) for name in SCRATCH_OPTIONS if name in given}
        others = [flag_of(name) for name, value in given.items() if name != "resume" and value]
        others += ["--restart"] if self.restart else []
        others += [model] if model else []
        if others:
            raise UsageError(f"{others[0]} does not go with --from-scratch", "it makes a new model with its head")
        return {"family": self.from_scratch, **taken}


@dataclass(frozen=True, kw_only=True)
class DataFlags(ModelOptions):
    """DataOptions from the command line; options that are not given keep the defaults there."""

    out: Path = option("Folder for the data; another run continues there.", default=REQUIRED, is_output=True)
    tokens: int | None = option("Stop at this number of tokens in answers.")
    minutes: float | None = option("Time limit in minutes.")
    prompts: Paths = option("JSONL file of prompts to answer first; may be repeated.", must_exist=True)
    text: Paths = option(
        "Folder of documentation or source code to make prompts of; other languages than English are translated. May "
        "be repeated.",
        must_exist=True,
    )
    licence: str | None = option("Licence of --text, for the record.")
    only_prompts: bool = option("Only answer --prompts.", default=False)
    language: str | None = option(
        "Language of prompts that the model writes itself: en or any. Default: en.", choices=("en", "any")
    )
    max_tokens: int | None = option("Maximum tokens of an answer. Default: 256.", min=2)


@command(
    "headstart train ./my-model --out my-head --minutes 20",
    "headstart train --data texts.jsonl --out smollm2-head --minutes 60",
    "headstart train ./my-model --prompts prompts.jsonl --out my-head --tokens 2000000",
    "headstart generate ./my-model --head my-head --prompt Hello",
    "headstart train ./my-model --lora ./my-adapter --out adapter-head --minutes 20",
    "headstart train --from-scratch mimo --out tiny-mimo --minutes 5",
)
def train(flags: TrainFlags, output: OutputOptions) -> int:
    """Train a head for a model by self-distillation, or a small model with its head (--from-scratch)."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("training needs torch, which is not installed", "pip install torch==2.13.*")
    if flags.from_scratch:
        from headstart.train import scratch

        return finish(scratch.run(scratch.ScratchOptions(**flags.for_scratch())), output.as_json)

    from headstart import hub
    from headstart.train.options import TrainOptions, check
    from headstart.train.records import check_files

    options = TrainOptions(**{"model": hub.DEFAULT_MODEL} | flags.chosen())
    writes = not options.data and not options.prompts
    check(replace(options, data=(options.own_text,)) if writes else options)  # before torch is imported
    if options.data:
        check_files(options.data)
    if writes:
        options = _with_own_text(options)

    from headstart.train.run import run

    return finish(run(options), output.as_json)


def _with_own_text(options: "TrainOptions") -> "TrainOptions":
    """Let the model write the training text of its head; another run adds to it."""
    from headstart.config import EngineConfig, one_adapter
    from headstart.train import self_distillation
    from headstart.train.options import check_amount

    begun = time.monotonic()
    data_options = self_distillation.DataOptions(
        model=options.model,
        config=EngineConfig(threads=options.threads, device=options.device, lora=one_adapter(options.lora)),
        out=options.own_text,
        minutes=options.minutes and options.minutes * WRITING_SHARE,
        tokens=options.tokens and max(options.tokens, 2 * options.min_text_tokens),  # some answers are of no use
        seed=options.seed,
    )
    with progress("the model's own text") as report_progress:
        report = self_distillation.run(data_options, report_progress)
    if not report.ok:
        what = f"the model has written no training text; {report.lines[-1]}"
        raise UsageError(what, "give --data or --prompts")
    check_amount(report.data["answer_tokens"], options.min_text_tokens)
    left = options.minutes and options.minutes - (time.monotonic() - begun) / 60
    return replace(options, data=(options.own_text,), minutes=left)


@command(
    "headstart data --out texts --tokens 1000000",
    "headstart data ./my-model --out texts --minutes 60 --text ./docs --licence MIT",
    "headstart data --out texts --prompts prompts.jsonl --only-prompts",
    "headstart train --data texts --out smollm2-head --minutes 60",
)
def data(flags: DataFlags, engine: EngineOptions, output: OutputOptions) -> int:
    """Let a model write training text for a head.

    Answers to prompts of its own, second turns, and templates of writing, roleplay, reasoning, math, coding,
    extraction, stem, humanities, translation, summarization, qa, word problems, rag, JSON and tools."""
    engine.refuse_others(DECODING_OPTIONS, "writing data")

    from headstart.train import self_distillation

    options = self_distillation.DataOptions(config=engine.config, seed=engine.config.seed or 0, **flags.chosen())
    return output.run("data", partial(self_distillation.run, options))


@command(
    "headstart serve --record my-records",
    "headstart adapt my-records --minutes 30",
    "headstart adapt my-records --model ./my-model --head my-head",
    "headstart adapt my-records --model ./my-model --lora ./my-adapter",
    "headstart adapt --forget",
)
def adapt(flags: AdaptFlags, output: OutputOptions) -> int:
    """Train the head on records of a server, and keep the result if it is better on held-out records."""
    if flags.forget:
        if flags.records is not None:
            raise UsageError("--forget takes no folder of records", "leave it out: they are yours to delete")
        return _forget(flags, output.as_json)
    if flags.records is None:
        raise UsageError("adapt needs a folder of records", "make one: headstart serve --record DIR")
    if importlib.util.find_spec("torch") is None:
        raise UsageError("adapting needs torch, which is not installed", "pip install torch==2.13.*")

    from headstart.tools.adapt.run import AdaptOptions, run as adapt_run

    return finish(adapt_run(AdaptOptions(**vars(flags))), output.as_json)


def _forget(flags: AdaptFlags, as_json: bool) -> int:
    from headstart.core import Report
    from headstart.formats.adapter import digest_of
    from headstart.tools.saved import forget

    kinds, unfinished = forget(flags.model, flags.kind, digest_of(flags.lora) if flags.lora else "")
    line = f"forgotten: {', '.join(kinds)}; a running server after kill -HUP PID" if kinds else "nothing was adapted"
    left = [f"removed files of interrupted runs: {', '.join(unfinished)}"] if unfinished else []
    return finish(Report(True, {"forgotten": kinds, "unfinished": unfinished}, [line, *left]), as_json)
