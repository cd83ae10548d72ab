"""`headstart train`: options in, a trained head directory and a report out."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from headstart.core import Report


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `headstart train` takes. `data` files hold JSONL records (see train.data); `prompts` files are answered by
    the model first (see train.generate). Exactly one of `minutes` and `tokens` bounds the run."""

    model: str
    out: Path
    data: tuple[Path, ...] = ()  # files or folders of .jsonl
    prompts: tuple[Path, ...] = ()
    minutes: float | None = None
    tokens: int | None = None
    depth: int = 3  # unrolled steps
    draft_vocab: int = 8192
    threads: int | None = None
    seed: int = 0
    resume: bool = True  # go on from a checkpoint in `out`; False starts over
    device: str = "cpu"


def run(options: TrainOptions) -> Report:
    """Train, export to `options.out`; the report's data holds tokens seen, minutes and held-out acceptance."""
    raise NotImplementedError
