"""Commands that train: `headstart train` (a head, or a small model with one), `data` (its text) and `adapt`."""

import importlib.util
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

from headstart.cli.options import EngineOptions, OutputOptions
from headstart.cli.parser import command
from headstart.cli.render import finish, progress
from headstart.config import config_fields
from headstart.errors import UsageError
from headstart.tools.options import AdaptFlags
from headstart.train.flags import DataFlags, TrainFlags

SCRATCH_OPTIONS = ("from_scratch", "out", "data", "minutes", "tokens", "depth", "threads", "seed")
DECODING_OPTIONS = {"backend", "quantization", "kv_cache_dtype", "dtype", "device", "threads", "numa", "portable_bits",
                    "max_model_len", "max_num_seqs", "max_num_batched_tokens", "kv_blocks", "block_size",
                    "seed", "lora"}  # fmt: skip
"""Engine options of `data`, which decodes without drafts."""


@dataclass(frozen=True, kw_only=True)
class DataEngineOptions(EngineOptions):
    """EngineOptions of `data`."""

    refused: ClassVar[frozenset[str]] = frozenset(config_fields()) - DECODING_OPTIONS


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
    _check_torch()
    if flags.from_scratch:
        from headstart.train import scratch

        return output.run("training", partial(scratch.run, scratch.ScratchOptions(**_scratch_fields(flags))))

    from headstart.train.options import TrainOptions, check
    from headstart.train.records import check_files

    options = TrainOptions(**flags.chosen())
    writes = not options.data and not options.prompts
    check(replace(options, data=(options.own_text,)) if writes else options)  # before torch is imported
    if options.data:
        check_files(options.data)
    if writes:
        from headstart.train.self_distillation import with_own_text

        with progress("the model's own text") as report_progress:
            options = with_own_text(options, report_progress)

    from headstart.train.run import run

    return output.run("training", partial(run, options))


def _check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise UsageError("training needs torch, which is not installed", "pip install torch==2.13.*")


def _scratch_fields(flags: TrainFlags) -> dict[str, Any]:
    """The options that a new model has. Raises UsageError for an option of heads only."""
    given = {each.name: value for each in fields(flags) if (value := getattr(flags, each.name)) != each.default}
    if others := [name for name in given if name not in SCRATCH_OPTIONS]:
        labels = {each.name: each.label for each in TrainFlags.options()} | {"model": flags.model}
        raise UsageError(f"{labels[others[0]]} does not go with --from-scratch", "it makes a new model with its head")
    return given


@command(
    "headstart data --out texts --tokens 1000000",
    "headstart data ./my-model --out texts --minutes 60 --text ./docs --licence MIT",
    "headstart data --out texts --prompts prompts.jsonl --only-prompts",
    "headstart train --data texts --out smollm2-head --minutes 60",
)
def data(flags: DataFlags, engine: DataEngineOptions, output: OutputOptions) -> int:
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
    _check_torch()

    from headstart.tools.adapt.run import AdaptOptions, run as adapt_run

    return output.run("adapting", partial(adapt_run, AdaptOptions(**vars(flags))))


def _forget(flags: AdaptFlags, as_json: bool) -> int:
    from headstart.core import Report
    from headstart.formats.adapter import digest_of
    from headstart.tools.saved import forget

    kinds, unfinished = forget(flags.model, flags.kind, digest_of(flags.lora) if flags.lora else "")
    line = f"forgotten: {', '.join(kinds)}; a running server after kill -HUP PID" if kinds else "nothing was adapted"
    left = [f"removed files of interrupted runs: {', '.join(unfinished)}"] if unfinished else []
    return finish(Report(True, {"forgotten": kinds, "unfinished": unfinished}, [line, *left]), as_json)
