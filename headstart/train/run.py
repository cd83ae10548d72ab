"""`headstart train`: options in, a trained head directory and a report out.

Beside the head `OUT` stands `OUT.training/`: checkpoint.pt, log.jsonl, answers/ and the cache of hidden states.
Running the same command again goes on from there; data files are read anew, so new ones are taken up.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.config import MAX_DEPTH, Device
from headstart.core import Report
from headstart.errors import CapacityError, ModelError, UsageError
from headstart.files import alone_in
from headstart.heads.base import HeadSpec
from headstart.heads.files import read_head
from headstart.heads.kind import HeadCheckpoint, Training, head_kind, trained_kinds
from headstart.layers.fingerprint import trunk_fingerprint
from headstart.train.begin import EMBEDDING, LM_HEAD, Begun, begun, continued_spec, existing_head
from headstart.train.data import coverage, draft_vocabulary
from headstart.train.evaluate import Acceptance, evaluate
from headstart.train.export import export_head
from headstart.train.gain import measure
from headstart.train.head import first_weights, modules_of, stream_scale
from headstart.train.loop import Hooks, Recipe, Trainer, check_bound, command_line, rate_factor, save_checkpoint, train
from headstart.train.objective import Target, Weighting
from headstart.train.plot import draw
from headstart.train.progress import note, shown
from headstart.train.rounding import rounded
from headstart.train.setup import Corpus, Subject, load_subject, prepare, write_answers

PATIENCE = 10
"""Evaluations without a better one after which a run ends early."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """What `headstart train` takes. `data` files hold JSONL records (see train.data); `prompts` files are answered by
    the model first (see train.generate). Exactly one of `minutes` (of labelling and training) and `tokens` bounds the
    run; a later run with a larger bound goes on."""

    model: str
    out: Path
    kind: str = "mtp"
    finetune: bool = False  # begin with the head that goes with the model, or with `head`
    head: Path | None = None
    data: tuple[Path, ...] = ()  # files or folders of .jsonl
    prompts: tuple[Path, ...] = ()
    minutes: float | None = None
    tokens: int | None = None
    depth: int | None = None  # unrolled steps, or rows of a block; None: as the kind says
    modules: int = 1  # mtp: so many layers, each for a draft step of its own
    draft_vocab: int = 8192
    threads: int | None = None
    seed: int = 0
    resume: bool = True  # go on from a checkpoint beside `out`; False starts over
    device: Device = "cpu"
    measured: bool = True  # what it is worth on this machine
    learned: float = 1.0  # see Recipe

    @property
    def work(self) -> Path:
        return self.out.with_name(self.out.name + ".training")

    @property
    def checkpoint(self) -> Path:
        return self.work / "checkpoint.pt"

    @property
    def steps(self) -> int:
        """Draft steps that are trained."""
        return _training(self.kind).depth if self.depth is None else self.depth

    @property
    def own_text(self) -> Path:
        """What the model writes to learn from, where no text is given."""
        return self.work / "text"

    @property
    def command(self) -> str:
        """The command line that says the same, for the record."""
        words = [self.model, "--out", self.out.name, *(["--finetune"] if self.finetune else [])]
        files = {"--data": self.data, "--prompts": self.prompts, "--head": (self.head,) if self.head else ()}
        words += [word for flag, paths in files.items() for path in paths for word in (flag, path.name)]
        return command_line(self, words, ("kind", "minutes", "tokens", "depth", "modules", "draft_vocab", "seed"))


def check(options: TrainOptions) -> None:
    """Raises UsageError for options that cannot work."""
    check_bound(options.minutes, options.tokens, options.seed)
    if not options.data and not options.prompts:
        raise UsageError("train needs text to learn from", "give --data or --prompts")
    if options.head is not None and not options.finetune:
        raise UsageError("--head says what to begin with, which only --finetune does", "add --finetune")
    if options.kind not in (kinds := trained_kinds()):
        raise UsageError(f"--kind is {options.kind!r}, which is unknown", f"choose {' or '.join(kinds)}")
    if not 1 <= options.steps <= MAX_DEPTH:
        raise UsageError(f"--depth is {options.steps}, but must be between 1 and {MAX_DEPTH}")
    if options.modules != 1 and not (1 < options.modules <= options.steps and _training(options.kind).stacks):
        raise UsageError(
            f"--modules is {options.modules} at --kind {options.kind} and --depth {options.steps}",
            "a head of kind mtp may have a layer for each draft step; others decide it themselves",
        )
    if options.draft_vocab < 2:
        raise UsageError(f"--draft-vocab is {options.draft_vocab}, but must be at least 2")
    if options.out.exists() and not _is_head(options.out):
        # exporting replaces the directory: never one that holds something else
        raise UsageError(f"{options.out} exists and is not a head", "give --out a new name")


def _training(kind: str) -> Training:
    training = head_kind(kind).training
    assert training is not None, "check has been called"
    return training


def _is_head(path: Path) -> bool:
    try:
        read_head(path)
    except ModelError:
        return path.is_dir() and not any(path.iterdir())
    return True


def run(options: TrainOptions) -> Report:
    """Train, export to `options.out`; the report's data holds tokens seen, minutes and held-out acceptance."""
    check(options)
    with _told_where_to_go_on(options), alone_in(options.work):
        started = time.monotonic()
        subject = load_subject(
            options.model, options.threads, options.device, options.kind, options.steps, options.modules
        )
        start = existing_head(subject, options.kind, options.head) if options.finetune else None
        if start and start.own:
            note(f"the head's own {' and '.join(start.own)} stay as they are")
        subject = subject.reading(start.spec if start else _continued(options, subject.spec))
        answers = options.work / "answers"
        if options.prompts:
            write_answers(subject, options.prompts, answers, options.seed)
            started = time.monotonic()
        files = (*options.data, *([answers] if answers.exists() else []))
        label_seconds = options.minutes * 60 * LABEL_SHARE if options.minutes else None
        corpus = prepare(subject, files, options.work, options.seed, label_seconds, options.tokens)
        return _Run(options, subject, corpus, start).train((time.monotonic() - started) / 60)


def _continued(options: TrainOptions, spec: HeadSpec) -> HeadSpec:
    goes_on = options.resume and options.checkpoint.exists()
    return continued_spec(spec, options.out) if goes_on else spec


LABEL_SHARE = 0.45
"""Of a run bounded by minutes, the part that computing hidden states may take."""


STEPS, FEWEST_TOKENS = 1500, 512
RATES: Mapping[Device, int] = {"cpu": 1_000, "cuda": 100_000}
"""Training tokens a second, roughly: only to know whether a run is short."""
MOST_TOKENS: Mapping[Device, int] = {"cpu": Recipe.batch_tokens, "cuda": 32_768}
"""Of a step: a GPU needs so many to be busy."""


def batch_tokens(options: TrainOptions) -> int:
    """Tokens of a step: short runs need steps more than they need quiet ones. Decided by the run's bound, not by the
    time that is left: a resumed run must go on in the same order."""
    training_s = 60 * (1 - LABEL_SHARE) * (options.minutes or 0)
    expected = options.tokens or int(training_s * RATES[options.device])
    return min(MOST_TOKENS[options.device], max(FEWEST_TOKENS, expected // STEPS))


class _Run:
    """One training run with everything it writes."""

    def __init__(self, options: TrainOptions, subject: Subject, corpus: Corpus, start: Begun | None) -> None:
        self.options, self.subject, self.corpus = options, subject, corpus
        self.spec, self.start, self.checkpoint = subject.spec, start, options.checkpoint
        if start and not self.spec.block and self.spec.module_of(options.steps - 1) is None:
            raise UsageError(
                f"--depth is {options.steps}, but the head to begin with has {self.spec.num_modules} module(s)"
            )
        self.vocabulary = self._vocabulary()
        if block := self.spec.block:
            block = replace(
                block,
                # behind a token that ends an answer nothing is drafted: it can stand for the mask
                mask_token_id=block.mask_token_id if self.start else min(subject.text.end_ids, default=0),
                vocab_size=subject.config.vocab_size,
                draft_vocab_size=len(self.vocabulary),
            )
            self.spec = replace(self.spec, block=block)
        self.coverage = coverage(corpus.training, self.vocabulary)
        for kind, share in self.coverage.items():
            note(f"draft vocabulary of {len(self.vocabulary)} covers {share:.1%} of {kind}")
        self.log = options.work / "log.jsonl"
        self.results: dict[str, Acceptance] = {}
        self.before = self._standing()
        self.best, self.since_best = self.before["all"].length if self.before else 0.0, 0
        if not options.resume:
            self.checkpoint.unlink(missing_ok=True)
            self.log.unlink(missing_ok=True)

    def _vocabulary(self) -> NDArray[np.int64]:
        """Of the run that goes on, or of a head to begin with, where weights belong to its tokens; else of this text,
        filled up with what that head can draft."""
        whole = self.subject.config.vocab_size
        if self.options.resume and self.checkpoint.exists():
            kept = torch.load(self.checkpoint, mmap=True).get("vocabulary")
            if kept is not None:
                return np.asarray(kept.cpu())
        ids = self.start.draft_token_ids if self.start else None
        if self.start and self.start.keeps_vocabulary:
            return np.arange(whole) if ids is None else ids
        known = () if ids is None else ids.tolist()
        size = min(max(self.options.draft_vocab, len(known)), whole)
        return draft_vocabulary(self.corpus.training, size, self.subject.text.end_ids, known)

    def _standing(self) -> dict[str, Acceptance] | None:
        """Held-out acceptance of the head at `out`. Raises UsageError for one that is not ours to replace."""
        out, config, trunk = self.options.out, self.subject.config, self.subject.trunk
        if not (out / "config.json").exists():
            return None
        head = read_head(out)
        sizes = (head.spec.kind, head.hidden_size, head.vocab_size)
        if sizes != (self.spec.kind, config.hidden_size, config.vocab_size):
            raise UsageError(
                f"{out} holds another head: kind {sizes[0]}, hidden size {sizes[1]}, vocabulary {sizes[2]}",
                "give --out a new name",
            )
        standing = begun(self.subject, head)
        if standing.spec.tap != self.spec.tap:
            raise UsageError(
                f"{out} holds another head: it taps {standing.spec.tap}, not {self.spec.tap}", "give --out a new name"
            )
        weights = {name: each.to(trunk.lm_head.device) for name, each in standing.weights.items()}
        if self._rounded:
            weights = rounded(weights)
        ids = standing.draft_token_ids
        target = self._target(np.arange(config.vocab_size) if ids is None else ids, standing)
        modules = modules_of(weights, standing.spec, head.hidden_size, trunk.dtype)
        results = evaluate(modules, standing.spec, target, self.corpus.held_out, self.corpus.cache, self._weighting)
        note(f"the head in {out}: held-out acceptance length {results['all'].length:.3f}")
        return results

    def _target(self, ids: NDArray[np.int64], start: Begun | None) -> Target:
        trunk, own = self.subject.trunk, start.own if start else {}
        where = torch.from_numpy(ids).to(trunk.lm_head.device)
        lm_head, embedding = own.get(LM_HEAD), own.get(EMBEDDING)
        return Target.of(trunk, where, rounded=self._rounded, own_lm_head=lm_head, own_embedding=embedding)

    @property
    def _rounded(self) -> bool:
        """Will the head run on the native backend, whose drafts are rounded?"""
        return self.subject.runner is not None

    @property
    def _weighting(self) -> Weighting:
        return (Weighting.of_block if self.spec.block else Weighting.of)(self.options.steps)

    def train(self, minutes_gone: float) -> Report:
        options = self.options
        minutes = max(options.minutes - minutes_gone, 0.1) if options.minutes else None
        recipe = Recipe(
            tokens=options.tokens,
            minutes=minutes,
            batch_tokens=batch_tokens(options),
            weighting=self._weighting,
            seed=options.seed,
            dtype=self.subject.trunk.dtype,
            rounded=self._rounded,
            learned=options.learned,
        )
        trainer = self._trainer(recipe)
        with shown("training") as show:

            def update(each: Trainer) -> None:
                p = each.progress
                hits = " ".join(f"{x:.2f}" for x in p.accepted) or "not yet"
                show(each.share_done, f"loss {p.loss:.3f}  {p.rate:.0f} tok/s  held-out acceptance {hits}")

            hooks = Hooks(
                checkpoint=partial(save_checkpoint, path=self.checkpoint), evaluated=self._evaluated, shown=update
            )
            # batches of another size are another order of the data
            identity = f"{self.corpus.identity}/{recipe.batch_tokens}"
            train(trainer, self.corpus.training, self.corpus.held_out, self.corpus.cache, identity, hooks)
        return self._report(trainer)

    def _trainer(self, recipe: Recipe) -> Trainer:
        trunk, device = self.subject.trunk, self.subject.trunk.lm_head.device
        longest = max(self.corpus.training, key=len)
        scale = stream_scale(trunk.model, torch.from_numpy(longest.tokens).long().to(device))
        training = _training(self.options.kind)
        first = self.start.weights if self.start else first_weights(training, self.spec, trunk.model, scale)
        trainer = Trainer(first, self.spec, self._target(self.vocabulary, self.start), recipe)
        if self.checkpoint.exists():
            try:
                trainer.load_state(torch.load(self.checkpoint, map_location=device))
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise ModelError(
                    f"{self.checkpoint} does not fit this model: {error}", "train with --restart, or another --out"
                ) from error
            note(f"going on from step {trainer.progress.step}, {trainer.progress.tokens:,} tokens seen")
        return trainer

    def _evaluated(self, trainer: Trainer, results: dict[str, Acceptance]) -> bool:
        """Log, tell, and export what is better than before: it can be tried while training goes on. True when it has
        not got better for long."""
        self.results, p = results, trainer.progress
        p.accepted = results["all"].cumulative
        row = {
            "step": p.step,
            "epoch": p.epoch,
            "tokens": p.tokens,
            "minutes": round(p.seconds / 60, 2),
            "loss": p.loss,
            "tokens_per_second": round(p.rate),
            "rate_factor": rate_factor(trainer.recipe, trainer.share_done),
            "held_out": {kind: each.data() for kind, each in results.items()},
        }
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        hits = " ".join(f"{x:.3f}" for x in p.accepted)
        note(f"step {p.step}, {p.tokens:,} tokens: held-out acceptance {hits}, length {results['all'].length:.3f}")
        if results["all"].length < self.best:  # what stands at `out` is better
            self.since_best += 1
            return self.since_best >= PATIENCE
        self.best, self.since_best = results["all"].length, 0
        config = self.subject.config
        head = HeadCheckpoint(
            spec=self.spec,
            hidden_size=config.hidden_size,
            vocab_size=config.vocab_size,
            draft_token_ids=self.vocabulary,
            trunk=self.options.model,
            trunk_fingerprint=trunk_fingerprint(self.subject.tensors),
            training=self._facts(trainer),
        )
        copied = {LM_HEAD: trainer.target.exact} if _training(self.options.kind).own_lm_head else {}
        own = self.start.own if self.start else {}
        export_head(self.options.out, head, {**trainer.weights, **copied, **own})
        return False

    def _facts(self, trainer: Trainer) -> dict[str, Any]:
        p = trainer.progress
        return {
            "command": self.options.command,
            "tokens": p.tokens,
            "steps": p.step,
            "minutes": round(p.seconds / 60, 1),
            "data": self.corpus.counts,
            "draft_coverage": {kind: round(share, 4) for kind, share in self.coverage.items()},
            "held_out": {kind: each.data() for kind, each in self.results.items()},
        }

    def _report(self, trainer: Trainer) -> Report:
        facts, options = self._facts(trainer), self.options
        p = trainer.progress
        gain = None
        if options.measured:
            gain = measure(options.model, options.out, self.corpus.held_out, options.steps, options.threads)
        lines = [
            f"{self.options.out}: {p.tokens:,} tokens in {p.seconds / 60:.1f} minutes, {p.step} steps",
            "held-out acceptance, all of the first 1, 2, ... drafts right (acceptance length):",
        ]
        for kind, result in self.results.items():
            hits = "  ".join(f"{x:.3f}" for x in result.cumulative)
            before = f", {self.before[kind].length:.2f} before" if self.before and kind in self.before else ""
            lines.append(f"  {kind:<20} {hits}  ({result.length:.2f}{before})")
        if self.results and self.results["all"].length < self.best:
            lines.append(f"an earlier head is better ({self.best:.3f}): {options.out} keeps it")
        plot = options.work / "acceptance.svg"
        draw(self.log, plot)
        lines += [*(gain.lines() if gain else []), f"plot: {plot}", *self.corpus.problems]
        data = {"out": str(options.out), "log": str(self.log), **facts, "gain": gain.data() if gain else None}
        return Report(gain is None or gain.pays, data, lines)


@contextmanager
def _told_where_to_go_on(options: TrainOptions) -> Iterator[None]:
    """Every file is written aside and renamed, so what was complete before still is."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command goes on from what is in {options.work}") from None
    except OSError as error:
        raise CapacityError(
            f"cannot write to {options.work} or {options.out}: {error.strerror or error}",
            "make room and run the same command again: it goes on from the last checkpoint",
        ) from error
