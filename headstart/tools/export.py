"""`headstart export`: a model and its head in the layout of another engine."""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from headstart.core import Report
from headstart.errors import CapacityError, ModelError, UsageError
from headstart.formats import open_checkpoint
from headstart.formats.head import read_head
from headstart.hub import resolve_alias
from headstart.tools.exports import vllm_eagle3, vllm_mtp
from headstart.tools.exports._source import Source

Progress = Callable[[int, int, str], None]
LAYOUTS = {"vllm-mimo": vllm_mtp, "vllm-eagle3": vllm_eagle3}


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """What to write. `head` None: the one that goes with the model."""

    model: str | None = None
    head: Path | None = None
    to: str
    out: Path
    force: bool = False


def run(options: ExportOptions, progress: Progress = lambda done, total, text: None) -> Report:
    """Write a directory, whole or not at all. Raises UsageError or ModelError before anything is written."""
    if options.to not in LAYOUTS:
        raise UsageError(f"--to is {options.to!r}, which is unknown", f"choose {' or '.join(LAYOUTS)}")
    if options.out.exists() and not options.force:
        raise UsageError(f"{options.out} exists", "give --out a new name, or --force to replace it")
    alias = resolve_alias(options.model)
    head = options.head or alias.head
    if head is None:
        raise ModelError(f"{alias.name} has no head of its own directory", "give one with --head")
    source = Source.of(alias.name, open_checkpoint(alias.trunk), read_head(head), head)
    aside = options.out.with_name(f".{options.out.name}.{secrets.token_hex(6)}")
    try:
        aside.mkdir(parents=True)
        LAYOUTS[options.to].write(source, aside, progress)
        if options.out.exists():
            shutil.rmtree(options.out)
        aside.rename(options.out)
    except OSError as error:
        hint = "is there room, and may you write?"
        raise CapacityError(f"cannot write {options.out}: {error.strerror}", hint) from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    size = sum(path.stat().st_size for path in options.out.iterdir())
    use = LAYOUTS[options.to].USE.format(out=options.out)
    return Report(
        True,
        {"out": str(options.out), "to": options.to, "bytes": size, "use": use},
        [f"{options.out}: {size / 1e6:.0f} MB", f"use it with: {use}"],
    )
