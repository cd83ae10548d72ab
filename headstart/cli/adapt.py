"""`headstart adapt`: the head learns from what the user's own server writes."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from headstart.cli.options import OptionGroup, OutputOptions, option
from headstart.cli.render import finish
from headstart.config import AUTO, EngineConfig
from headstart.core import Report
from headstart.errors import UsageError

EXAMPLES = (
    "headstart serve --record my-records",
    "headstart adapt my-records --minutes 30",
    "headstart adapt my-records --model ./my-model --head my-head",
    "headstart adapt --forget",
)
MOST_MINUTES = 7 * 24 * 60
Records = Annotated[
    Path | None, typer.Argument(metavar="DIR", help="Folder of headstart serve --record.", show_default=False)
]


@dataclass(frozen=True, kw_only=True)
class AdaptFlags(OptionGroup):
    """AdaptOptions from the command line."""

    model: str | None = option("The model that wrote the records. Default: the default model.")
    head: Path | None = option("Begin with this head. Default: the one in use.")
    kind: str | None = option("Which of the model's heads: mtp, eagle3, ... Default: the one in use.")
    minutes: float = option("Of the whole run.", default=30.0)
    forget: bool = option("Remove what was adapted: the model's own head is used again.", default=False)
    threads: int | None = option("CPU threads.")
    seed: int = option("Order of data.", default=0)


def run(records: Records = None, *, flags: AdaptFlags, output: OutputOptions) -> int:
    """Continue the head on records of a server; keep the result if it is better on records held out."""
    if flags.forget:
        if records is not None:
            raise UsageError("--forget takes no folder of records", "leave it out: they are yours to delete")
        return finish(_forgotten(flags), output.as_json)
    if records is None:
        raise UsageError("adapt needs a folder of records", "make one: headstart serve --record DIR")
    if not 0 < flags.minutes <= MOST_MINUTES:
        raise UsageError(f"--minutes is {flags.minutes}, but must be above 0 and at most {MOST_MINUTES:,}")
    if importlib.util.find_spec("torch") is None:
        raise UsageError("adapting needs torch, which is not installed", "pip install 'headstart[torch]'")

    from headstart.tools.adapt.run import AdaptOptions, run as adapt

    options = {name: value for name, value in flags.chosen().items() if name != "forget"}
    return finish(adapt(AdaptOptions(records=records, **options)), output.as_json)


def _forgotten(flags: AdaptFlags) -> Report:
    from headstart.tools.adapt.kept import forget

    kinds, unfinished = forget(flags.model, flags.kind)
    line = f"forgotten: {', '.join(kinds)}; a running server after kill -HUP PID" if kinds else "nothing was adapted"
    left = [f"removed what interrupted runs had left: {', '.join(unfinished)}"] if unfinished else []
    return Report(True, {"forgotten": kinds, "unfinished": unfinished}, [line, *left])


def with_adapted(model: str | None, config: EngineConfig) -> EngineConfig:
    """With the head that `headstart adapt` has made for this model, saying so; one that the user names comes first."""
    from headstart.tools.adapt.kept import kept_head

    if (found := kept_head(model, config)) is None:
        return config
    path, adapted = found
    print(f"headstart: adapted head: {adapted}", file=sys.stderr)
    # it has a draft vocabulary of its own: what the head before it needed would be refused
    vocabulary = AUTO if isinstance(config.draft_vocab, int) else config.draft_vocab
    return replace(config, head=str(path), draft_vocab=vocabulary)
