"""`headstart train`: a multi-token-prediction head for a frozen model, or a small model with its head."""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headstart.cli.options import REQUIRED, Model, OptionGroup, OutputOptions, option
from headstart.cli.render import finish, progress
from headstart.errors import UsageError

if TYPE_CHECKING:
    from headstart.train.run import TrainOptions

EXAMPLES = (
    "headstart train ./my-model --out my-head --minutes 20",
    "headstart train --data texts.jsonl --out my-head --minutes 60",
    "headstart train ./my-model --prompts prompts.jsonl --out my-head --tokens 2000000",
    "headstart generate ./my-model --head my-head --prompt Hello",
    "headstart train --from-scratch mimo --out my-model --minutes 5",
)
Paths = list[Path] | None
SCRATCH = ("out", "data", "minutes", "tokens", "depth", "threads", "seed")
"""The options that --from-scratch takes."""


@dataclass(frozen=True, kw_only=True)
class TrainFlags(OptionGroup):
    """TrainOptions from the command line; what is not given keeps the default written there."""

    out: Path = option("Directory for the head; a second run goes on from it.", default=REQUIRED)
    from_scratch: str | None = option(
        "Train a small model of a family, with its own head, from plain text; without --data, from Python's.",
        metavar="FAMILY",
    )
    kind: str | None = option("mtp, eagle3, medusa or block. Default: mtp.")
    finetune: bool = option("Begin with the head that goes with the model, or with --head.", default=False)
    head: Path | None = option("With --finetune: the head to begin with.")
    data: Paths = option("JSONL file or folder of texts; may be repeated. Without it the model writes its own.")
    prompts: Paths = option("JSONL prompts that the model answers first.")
    minutes: float | None = option("Stop after this time.")
    tokens: int | None = option("Stop after this many training tokens.")
    depth: int | None = option("Unrolled draft steps, or rows of a block. Default: 3, of a block 8.")
    modules: int | None = option("Layers of an mtp head, one for each draft step. Default: 1.")
    draft_vocab: int | None = option("Most frequent tokens that the head can draft. Default: 8192.")
    threads: int | None = option("CPU threads.")
    seed: int | None = option("Order of data and initial weights. Default: 0.")
    device: str | None = option("cpu or cuda. Default: cpu.")
    restart: bool = option("Start over instead of going on from --out.", default=False)

    def chosen(self) -> dict[str, Any]:
        """The options that were given, by the names of TrainOptions."""
        values = super().chosen()
        values["resume"] = not values.pop("restart")
        values.pop("from_scratch", None)
        return values

    def for_scratch(self, family: str, model: str | None) -> dict[str, Any]:
        """The options that were given, by the names of ScratchOptions. Raises UsageError for those of a head alone."""
        given = self.chosen()
        taken: dict[str, Any] = {name: given.pop(name) for name in SCRATCH if name in given}
        others = [f"--{name.replace('_', '-')}" for name, value in given.items() if name != "resume" and value]
        others += ["--restart"] if self.restart else []
        others += [model] if model else []
        if others:
            raise UsageError(f"{others[0]} does not go with --from-scratch", "it makes a new model, head and all")
        return {"family": family, **taken}


def run(model: Model = None, *, flags: TrainFlags, output: OutputOptions) -> int:
    """Train a head by self-distillation; the model itself stays as it is. Or train a small model of a family."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError("training needs torch, which is not installed", "pip install 'headstart[torch]'")
    if flags.from_scratch:
        from headstart.train import scratch

        return finish(
            scratch.run(scratch.ScratchOptions(**flags.for_scratch(flags.from_scratch, model))), output.as_json
        )

    from headstart import hub
    from headstart.train.run import TrainOptions, check, run as train

    options = TrainOptions(model=model or hub.DEFAULT_MODEL, **flags.chosen())
    if not options.data and not options.prompts:
        check(replace(options, data=(options.own_text,)))  # before anything is written
        options = _with_own_text(options, quiet=output.as_json)
    return finish(train(options), output.as_json)


WRITING_SHARE = 0.3
"""Of a run without --data or --prompts, the part in which the model writes its own text."""


def _with_own_text(options: TrainOptions, *, quiet: bool) -> TrainOptions:
    """Have the model write what its head learns from, beside the checkpoints; a second run writes more."""
    from headstart.config import EngineConfig
    from headstart.train import own_data as data

    begun = time.monotonic()
    wanted = data.DataOptions(
        model=options.model,
        config=EngineConfig(threads=options.threads, device=options.device),
        out=options.own_text,
        minutes=options.minutes and options.minutes * WRITING_SHARE,
        tokens=options.tokens,
        seed=options.seed,
    )
    with progress("the model's own text", quiet=quiet) as report_progress:
        written = data.run(wanted, report_progress)
    if not written.ok:
        what = f"the model has written nothing to learn from; {written.lines[-1]}"
        raise UsageError(what, "give --data or --prompts")
    left = options.minutes and options.minutes - (time.monotonic() - begun) / 60
    return replace(options, data=(options.own_text,), minutes=left)
