"""`headstart train --from-scratch`: a small model of a family, and its own MTP head with it, from plain text.

The trunk learns to say the next token; the head, unrolled as at run time, to say what the trunk says (see
train.objective). Gradients of both go everywhere. What is trained are the family's own tensors, and what runs is the
family's own code, so the result is a checkpoint like any other.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from headstart import registry
from headstart.config import MAX_DEPTH
from headstart.core import Int32, Report
from headstart.engine.attach import native_head
from headstart.errors import UsageError
from headstart.files import written_aside
from headstart.formats.base import Checkpoint
from headstart.heads.base import Head
from headstart.kernels.ops import StepInputs
from headstart.layers.build import DecoderConfig
from headstart.layers.decoder import Decoder, Tap
from headstart.models.base import Family
from headstart.models.small import SCRATCH
from headstart.models.tensors import canonical_tensors
from headstart.train import corpus
from headstart.train.batches import Batch
from headstart.train.checkpoint import save_model
from headstart.train.data import Problems, Record
from headstart.train.evaluate import Acceptance
from headstart.train.loop import Recipe, check_bound, command_line, optimizers, update
from headstart.train.masters import named, weights_of
from headstart.train.objective import Target, Weighting, assess, cumulative
from headstart.train.ops import DraftMemory, TrainOps
from headstart.train.progress import note, shown

VOCABULARY = 2048
ROWS, LENGTH = 4, 256
"""Of a batch."""
HEAD_SHARE = 0.1
"""Of the head's loss, which sums several steps and terms, beside the trunk's."""
HELD_OUT_BATCHES = 16
FEWEST_TOKENS = 20 * LENGTH


@dataclass(frozen=True, kw_only=True)
class ScratchOptions:
    """What to make. Exactly one of `minutes` (of training) and `tokens`."""

    family: str
    out: Path
    data: tuple[Path, ...] = ()
    minutes: float | None = None
    tokens: int | None = None
    depth: int = 3  # unrolled steps of the head
    threads: int | None = None
    seed: int = 0

    @property
    def weighting(self) -> Weighting:
        return Weighting.of(self.depth)

    @property
    def command(self) -> str:
        """The command line that says the same, for the record."""
        words = ["--from-scratch", self.family, "--out", self.out.name]
        words += [word for path in self.data for word in ("--data", path.name)]
        return command_line(self, words, ("minutes", "tokens", "depth", "seed"))


@dataclass(frozen=True, eq=False)
class Text:
    """A tokenizer and the documents in its tokens."""

    tokenizer: Any
    training: list[Int32]
    held_out: list[Int32]

    @staticmethod
    def of(records: Sequence[Record], vocab_size: int) -> Text:
        training = [record for record in records if not record.held_out]
        held_out = [record for record in records if record.held_out] or training[:1]
        tokenizer = corpus.train_tokenizer((record.text for record in training), vocab_size)
        text = Text(tokenizer, corpus.encode(tokenizer, training), corpus.encode(tokenizer, held_out))
        if (count := sum(map(len, text.training))) < FEWEST_TOKENS:
            raise UsageError(f"the text has {count} tokens, too few to learn from", f"give {FEWEST_TOKENS} or more")
        return text


class ScratchModel:
    """A family's small model over float32 masters under Hugging Face names."""

    def __init__(self, name: str, family: Family, changes: dict[str, Any], dtype: torch.dtype) -> None:
        self.family, self.dtype = family, dtype
        self.config, arrays = family.tiny(**{**SCRATCH, **family.scratch, **changes})
        self.sizes: DecoderConfig = family.read(self.config)
        self.masters = {key: torch.nn.Parameter(torch.from_numpy(value)) for key, value in arrays.items()}
        self._checkpoint = Checkpoint(Path(name), "safetensors", self.config, named(self.masters), False)  # type: ignore[arg-type]

    def build(self) -> tuple[Decoder, Head | None]:
        """Trunk and head over the masters as they are now."""
        tensors = canonical_tensors(self._checkpoint, self.family, self.sizes)
        weights = weights_of(tensors, self.dtype, self._checkpoint.path.name)  # type: ignore[arg-type]
        return self.family.build(weights, self.sizes), native_head(self.family, weights, self.sizes)

    def losses(self, tokens: Tensor, weighting: Weighting) -> tuple[Tensor, Tensor, Acceptance | None]:
        """tokens [B, T] -> (the trunk's loss, the head's loss, what of its drafts is right: without gradients)."""
        trunk, head = self.build()
        ops, positions = TrainOps(tokens.device, self.dtype), torch.arange(tokens.shape[1], device=tokens.device)
        kv, states = [DraftMemory() for _ in trunk.kv_specs], [None] * len(trunk.state_specs)
        tap: Tap = "streams" if head and head.spec.tap == "streams" else "post_norm"
        results = trunk.program(kv, tap=tap, state_pools=states)(ops, StepInputs(tokens, positions, slice(None)))
        logits: Tensor = results["logits"]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        if head is None:
            return loss, torch.zeros(()), None
        everywhere = torch.ones_like(tokens, dtype=torch.bool)
        read = results["streams" if tap == "streams" else "hidden"]
        batch = Batch(tokens, read, results["hidden"], logits.argmax(-1), everywhere, everywhere, (), tokens.numel())
        outcome = assess(head.modules, head.spec, _whole_vocabulary(trunk), batch, weighting)
        if torch.is_grad_enabled():
            return loss, outcome.loss, None
        accepted, expected, tried = (each.sum(0) for each in cumulative(outcome, len(tokens)))
        return loss, outcome.loss, Acceptance(tuple(accepted.tolist()), int(tried), tuple(expected.tolist()))


def _whole_vocabulary(trunk: Decoder) -> Target:
    lm_head = trunk.lm_head.weight
    ids = torch.arange(len(lm_head), device=lm_head.device)
    return Target(trunk.embedding, trunk.norm.weight, ids, lm_head.detach(), lm_head.detach(), ids)


@dataclass
class Standing:
    """Where a run stands; losses in nats per token."""

    steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    loss: float = math.nan  # of the trunk, smoothed
    held_out: float = math.nan
    acceptance: Acceptance | None = None

    def share_done(self, options: ScratchOptions) -> float:
        if options.tokens:
            return min(1.0, self.tokens / options.tokens)
        return min(1.0, self.seconds / 60 / (options.minutes or 1))


def train(model: ScratchModel, text: Text, options: ScratchOptions) -> Standing:
    """Run to the end of the schedule."""
    standing = Standing()
    recipe = Recipe(matrix_rate=2e-2, vector_rate=1e-2, weight_decay=0.01, warmup=0.05)
    chosen = optimizers(model.masters, recipe)
    with shown("training") as show:
        for tokens in corpus.batches(text.training, ROWS, LENGTH, options.seed):
            started, done = time.monotonic(), standing.share_done(options)
            if done >= 1:
                break
            trunk_loss, head_loss, _ = model.losses(torch.from_numpy(tokens), options.weighting)
            (trunk_loss + HEAD_SHARE * head_loss).backward()
            update(model.masters, chosen, recipe, done)
            loss = trunk_loss.item()
            standing.seconds += time.monotonic() - started
            standing.steps, standing.tokens = standing.steps + 1, standing.tokens + tokens.size
            standing.loss = loss if math.isnan(standing.loss) else 0.98 * standing.loss + 0.02 * loss
            show(done, f"{standing.tokens:,} tokens, loss {standing.loss:.3f}")
    _evaluate(model, text, options, standing)
    return standing


@torch.no_grad()
def _evaluate(model: ScratchModel, text: Text, options: ScratchOptions, standing: Standing) -> None:
    results = [
        model.losses(torch.from_numpy(tokens), options.weighting)
        for tokens in islice(corpus.batches(text.held_out, ROWS, LENGTH, 0), HELD_OUT_BATCHES)
    ]
    standing.held_out = float(np.mean([loss.item() for loss, _, _ in results]))
    for _, _, accepted in results:
        if accepted is not None:
            standing.acceptance = standing.acceptance + accepted if standing.acceptance else accepted


def check(options: ScratchOptions) -> None:
    """Raises UsageError for options that cannot work."""
    check_bound(options.minutes, options.tokens, options.seed)
    if options.family not in (families := registry.available("models")):
        raise UsageError(f"there is no family {options.family!r}", f"choose one of {', '.join(families)}")
    if not 1 <= options.depth <= MAX_DEPTH:
        raise UsageError(f"--depth is {options.depth}, but must be between 1 and {MAX_DEPTH}")
    if options.out.exists():
        raise UsageError(f"{options.out} exists", "give --out a new name")


def run(options: ScratchOptions) -> Report:
    """Train and write the checkpoint at `options.out`. Raises UsageError for what cannot work."""
    check(options)
    with written_aside(options.out) as folder:
        return _train_into(folder, options)


def _train_into(folder: Path, options: ScratchOptions) -> Report:
    if options.threads:
        torch.set_num_threads(options.threads)
    family: Family = registry.find("models", options.family).FAMILY
    problems = Problems()
    text = Text.of(corpus.read_documents(options.data, problems), VOCABULARY)
    vocabulary = text.tokenizer.get_vocab_size()
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    model = ScratchModel(options.family, family, {"vocab_size": vocabulary, **ends}, torch.float32)
    size = sum(each.numel() for each in model.masters.values())
    note(f"{options.family}: {size:,} parameters, {sum(map(len, text.training)):,} tokens of text, {vocabulary} in all")
    standing = train(model, text, options)
    facts = _facts(options, size, standing)
    save_model(folder, model.config, model.masters, text.tokenizer, facts)
    return Report(True, {"out": str(options.out), **facts}, [*_lines(options, facts), *problems.lines()])


def _facts(options: ScratchOptions, size: int, standing: Standing) -> dict[str, Any]:
    return {
        "family": options.family,
        "command": options.command,
        "parameters": size,
        "steps": standing.steps,
        "tokens": standing.tokens,
        "minutes": round(standing.seconds / 60, 2),
        "loss": round(standing.loss, 4),
        "held_out_loss": round(standing.held_out, 4),
        "held_out": standing.acceptance.data() if standing.acceptance else None,
    }


def _lines(options: ScratchOptions, facts: dict[str, Any]) -> list[str]:
    held_out = facts["held_out"]
    lines = [
        f"{options.out}: {facts['parameters']:,} parameters, {facts['tokens']:,} tokens in {facts['minutes']:.1f} "
        f"minutes; held-out loss {facts['held_out_loss']:.3f}",
        "no head: the family has none of its own",
    ]
    if held_out:
        hits = "  ".join(f"{x:.3f}" for x in held_out["cumulative"])
        lines[1] = f"held-out acceptance of its head: {hits}  ({held_out['length']:.2f})"
    return lines
