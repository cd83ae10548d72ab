"""`headstart train`: trains a head for a frozen model, and exports it with a report.

Beside the head `OUT`, the folder `OUT.training/` holds checkpoint.pt, log.jsonl, answers/ and the cache of hidden
states. The same command continues from them; data files are read again, so that new records are used.
"""

import json
import shlex
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from headstart.config import Device, EngineConfig, one_adapter
from headstart.core import Progress, Report, no_progress
from headstart.errors import CapacityError, ModelError
from headstart.files import DISK_FULL, locked_folder
from headstart.heads.files import read_head
from headstart.heads.kind import HeadCheckpoint
from headstart.layers.weights import trunk_fingerprint
from headstart.train.dataset import TrainingData, prepare_data
from headstart.train.evaluate import Acceptance, evaluate, measure_speedup
from headstart.train.frozen_model import FrozenModel, load_frozen_model
from headstart.train.generate import answer_files
from headstart.train.head_weights import (
    EMBEDDING,
    LM_HEAD,
    InitialHead,
    existing_head,
    export_head,
    first_weights,
    initial_head,
    resumed_spec,
    stream_scale,
)
from headstart.train.objective import DistillationTarget, LossConfig
from headstart.train.options import TrainOptions, check, training_of
from headstart.train.progress import draw_acceptance, print_line
from headstart.train.records import draft_vocabulary, drop_partial_line, vocabulary_coverage
from headstart.train.torch_weights import build_modules, round_weights
from headstart.train.trainer import Recipe, Trainer, TrainingHooks, rate_factor, save_checkpoint, train

RESTART_HINT = "train with --restart, or another --out"
PATIENCE, PATIENT_SHARE = 10, 0.5
"""A run ends early after PATIENCE evaluations without improvement, counted from PATIENT_SHARE of its schedule on: at
the high learning rates before, fine-tuned heads are worse than at their start."""
LABEL_SHARE = 0.45  # share of a run bounded by minutes that computing hidden states may take
STEPS, MIN_BATCH_TOKENS = 1500, 512
TOKENS_PER_SECOND: Mapping[Device, int] = {"cpu": 1_000, "cuda": 100_000}
"""Approximate training speed: decides whether a run is short."""
MAX_BATCH_TOKENS: Mapping[Device, int] = {"cpu": Recipe.batch_tokens, "cuda": 32_768}
"""A GPU needs large batches to be busy."""


def run(options: TrainOptions, progress: Progress = no_progress) -> Report:
    """Train, export to `options.out`; the report's data holds tokens seen, minutes and held-out acceptance."""
    check(options)
    with _resume_hints(options), locked_folder(options.work):
        started = time.monotonic()
        frozen_model = load_frozen_model(options)
        spec = frozen_model.spec
        start = existing_head(frozen_model, options.kind, options.head) if options.finetune else None
        if start:
            spec = start.spec
            if start.own:
                print_line(f"the head's own {' and '.join(start.own)} stay as they are")
        elif options.resume and options.checkpoint.exists():
            spec = resumed_spec(spec, options.out)
        frozen_model = frozen_model.with_spec(spec)
        answers = options.work / frozen_model.answers
        if options.prompts:
            answer_files(frozen_model.llm, options.prompts, answers, options.seed, progress)
            started = time.monotonic()
        files = (*options.data, *sorted(answers.glob("*.jsonl")))
        label_seconds = options.minutes * 60 * LABEL_SHARE if options.minutes else None
        data = prepare_data(
            frozen_model, files, options.work, options.seed, label_seconds, options.tokens, options.min_text_tokens,
            progress,
        )  # fmt: skip
        return _TrainingRun(options, frozen_model, data, start, progress).train((time.monotonic() - started) / 60)


def batch_tokens(options: TrainOptions) -> int:
    """Tokens of a step. Short runs take smaller batches: they need steps more than low gradient noise. Depends on the
    run's bound, not on the remaining time, so that a resumed run keeps the order of its batches."""
    training_s = 60 * (1 - LABEL_SHARE) * (options.minutes or 0)
    expected = options.tokens or int(training_s * TOKENS_PER_SECOND[options.device])
    return min(MAX_BATCH_TOKENS[options.device], max(MIN_BATCH_TOKENS, expected // STEPS))


class _TrainingRun:
    """One training run with all the files it writes."""

    def __init__(
        self, options: TrainOptions, frozen_model: FrozenModel, data: TrainingData, start: InitialHead | None,
        progress: Progress,
    ) -> None:  # fmt: skip
        self.options, self.frozen_model, self.data, self._progress = options, frozen_model, data, progress
        self.int4_drafts = frozen_model.native_model is not None  # the native backend drafts in int4
        self.spec, self.start, self.checkpoint = frozen_model.spec, start, options.checkpoint
        self.vocabulary = self._vocabulary()
        if block := self.spec.block:
            block = replace(
                block,
                # nothing is drafted after a token that ends an answer: it can serve as the mask token
                mask_token_id=block.mask_token_id if self.start else min(frozen_model.text.end_ids, default=0),
                vocab_size=frozen_model.config.vocab_size,
                draft_vocab_size=len(self.vocabulary),
            )
            self.spec = replace(self.spec, block=block)
        self.coverage = vocabulary_coverage(data.training, self.vocabulary)
        for kind, share in self.coverage.items():
            print_line(f"draft vocabulary of {len(self.vocabulary)} covers {share:.1%} of {kind}")
        self.log = options.work / "log.jsonl"
        self.results: dict[str, Acceptance] = {}
        self.before = self._evaluate_existing()
        self.best, self.since_best = self.before["all"].length if self.before else 0.0, 0
        if not options.resume:
            self.checkpoint.unlink(missing_ok=True)
            self.log.unlink(missing_ok=True)
        elif self.log.exists():
            drop_partial_line(self.log)

    def _vocabulary(self) -> NDArray[np.int64]:
        """Draft token ids: of a resumed run, or of an initial head whose weights belong to its tokens; else those of
        the initial head, and the most frequent tokens of the text."""
        whole = self.frozen_model.config.vocab_size
        if self.options.resume and self.checkpoint.exists():
            saved = self._load_checkpoint("cpu", mmap=True).get("vocabulary")
            if saved is not None:
                return np.asarray(saved.cpu())
        ids = self.start.draft_token_ids if self.start else None
        if self.start and self.start.has_fixed_vocabulary:
            return np.arange(whole) if ids is None else ids
        known = () if ids is None else ids.tolist()
        size = min(max(self.options.draft_vocab, len(known)), whole)
        return draft_vocabulary(self.data.training, size, self.frozen_model.text.end_ids, known)

    def _evaluate_existing(self) -> dict[str, Acceptance] | None:
        """Held-out acceptance of the head at `out`, if any."""
        out, config, trunk = self.options.out, self.frozen_model.config, self.frozen_model.trunk
        if not (out / "config.json").exists():
            return None
        head = read_head(out)
        existing = initial_head(self.frozen_model, head)
        weights = {name: each.to(trunk.lm_head.device) for name, each in existing.weights.items()}
        if self.int4_drafts:
            weights = round_weights(weights)
        ids = existing.draft_token_ids
        target = self._target(np.arange(config.vocab_size) if ids is None else ids, existing)
        modules = build_modules(weights, existing.spec, head.hidden_size, trunk.dtype)
        results = evaluate(modules, existing.spec, target, self.data.held_out, self.data.features, self._loss_config)
        print_line(f"the head in {out}: held-out acceptance length {results['all'].length:.3f}")
        return results

    def _target(self, ids: NDArray[np.int64], start: InitialHead | None) -> DistillationTarget:
        trunk, own = self.frozen_model.trunk, start.own if start else {}
        return DistillationTarget.of(
            trunk, torch.from_numpy(ids).to(trunk.lm_head.device), int4_drafts=self.int4_drafts,
            own_lm_head=own.get(LM_HEAD), own_embedding=own.get(EMBEDDING),
        )  # fmt: skip

    @property
    def _loss_config(self) -> LossConfig:
        return (LossConfig.of_block if self.spec.block else LossConfig.of)(self.options.steps)

    def train(self, minutes_used: float) -> Report:
        options = self.options
        minutes = max(options.minutes - minutes_used, 0.1) if options.minutes else None
        recipe = Recipe(
            tokens=options.tokens, minutes=minutes, batch_tokens=batch_tokens(options), loss=self._loss_config,
            seed=options.seed, dtype=self.frozen_model.trunk.dtype, int4_drafts=self.int4_drafts,
            update_share=options.update_share,
        )  # fmt: skip
        trainer = self._trainer(recipe)
        save = partial(save_checkpoint, path=self.checkpoint)
        hooks = TrainingHooks(on_checkpoint=save, on_evaluation=self._on_evaluation, on_step=self._on_step)
        train(trainer, self.data, hooks)
        return self._report(trainer)

    def _on_step(self, trainer: Trainer) -> None:
        p = trainer.progress
        hits = " ".join(f"{x:.2f}" for x in p.accepted) or "not yet"
        text = f"training, loss {p.loss:.3f}, {p.rate:.0f} tok/s, held-out acceptance {hits}"
        self._progress(round(100 * trainer.share_done), 100, text)

    def _trainer(self, recipe: Recipe) -> Trainer:
        trunk, device = self.frozen_model.trunk, self.frozen_model.trunk.lm_head.device
        longest = max(self.data.training, key=len)
        scale = stream_scale(trunk.model, torch.from_numpy(longest.tokens).long().to(device))
        training = training_of(self.options.kind)
        first = self.start.weights if self.start else first_weights(training, self.spec, self.frozen_model.model, scale)
        trainer = Trainer(first, self.spec, self._target(self.vocabulary, self.start), recipe)
        if self.checkpoint.exists():
            try:
                trainer.load_state(self._load_checkpoint(device))
            except (KeyError, RuntimeError, TypeError, ValueError) as error:
                raise ModelError(f"{self.checkpoint} does not fit this model: {error}", RESTART_HINT) from error
            print_line(f"going on from step {trainer.progress.step}, {trainer.progress.tokens:,} tokens seen")
            if trainer.share_done >= 1:
                print_line("earlier runs reached the limit: nothing is trained without more --minutes or --tokens")
        return trainer

    def _load_checkpoint(self, device: torch.device | str, *, mmap: bool = False) -> dict[str, Any]:
        try:
            return dict(torch.load(self.checkpoint, map_location=device, mmap=mmap))
        except (OSError, RuntimeError, ValueError, EOFError, UnpicklingError) as error:
            what = f"{self.checkpoint} cannot be read: {str(error).partition(chr(10))[0]}"
            raise ModelError(what, RESTART_HINT) from error

    def _on_evaluation(self, trainer: Trainer, results: dict[str, Acceptance]) -> bool:
        """Log the results, and export a head that is better than before. True: the run ends
        early (PATIENCE)."""
        self.results, p = results, trainer.progress
        p.accepted = results["all"].cumulative
        row = {
            "step": p.step, "epoch": p.epoch, "tokens": p.tokens, "minutes": round(p.seconds / 60, 2), "loss": p.loss,
            "tokens_per_second": round(p.rate), "rate_factor": rate_factor(trainer.recipe, trainer.share_done),
            "held_out": {kind: each.data() for kind, each in results.items()},
        }  # fmt: skip
        with self.log.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        hits = " ".join(f"{x:.3f}" for x in p.accepted)
        length = results["all"].length
        print_line(f"step {p.step}, {p.tokens:,} tokens: held-out acceptance {hits}, length {length:.3f}")
        if length < self.best:  # the head at `out` is better
            self.since_best += trainer.share_done > PATIENT_SHARE
            return self.since_best >= PATIENCE
        self.best, self.since_best = length, 0
        config = self.frozen_model.config
        head = HeadCheckpoint(
            spec=self.spec, hidden_size=config.hidden_size, vocab_size=config.vocab_size,
            draft_token_ids=self.vocabulary, trunk=self.options.model_name,
            trunk_fingerprint=trunk_fingerprint(self.frozen_model.tensors), training=self._facts(trainer),
        )  # fmt: skip
        export_head(self.options.out, head, trainer.weights, self.start.own if self.start else None)
        return False

    def _facts(self, trainer: Trainer) -> dict[str, Any]:
        p = trainer.progress
        return {
            "command": self.options.command,
            "tokens": p.tokens,
            "steps": p.step,
            "minutes": round(p.seconds / 60, 1),
            "data": self.data.counts,
            "draft_coverage": {kind: round(share, 4) for kind, share in self.coverage.items()},
            "held_out": {kind: each.data() for kind, each in self.results.items()},
        }

    def _report(self, trainer: Trainer) -> Report:
        facts, options, p = self._facts(trainer), self.options, trainer.progress
        gain = None
        if options.measure_speedup:
            config = EngineConfig(
                head=str(options.out), depth=options.steps, threads=options.threads, seed=0,
                lora=one_adapter(options.lora),
            )  # fmt: skip
            gain = measure_speedup(options.model, config, self.data.held_out, self._progress)
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
        draw_acceptance(self.log, plot)
        lines += [*(gain.lines() if gain else []), f"plot: {plot}", *self.data.skipped]
        lora = ["--lora", str(options.lora)] if options.lora else []
        use = ["headstart", "generate", options.model, *lora, "--head", str(options.out), "--prompt", "Hello"]
        lines.append(f"use it: {shlex.join(use)}")
        data = {"out": str(options.out), "log": str(self.log), **facts, "gain": gain.data() if gain else None}
        return Report(gain is None or gain.pays, data, lines)


@contextmanager
def _resume_hints(options: TrainOptions) -> Iterator[None]:
    """Adds to an interrupt, and to an error of the file system, how to resume. Every file is written aside and renamed,
    so completed files stay complete."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"the same command goes on from what is in {options.work}") from None
    except OSError as error:
        what = f"cannot write to {options.work} or {options.out}: {error.strerror or error}"
        hint = "may you write there? give --out another place"
        if error.errno in DISK_FULL:
            hint = "make room and run the same command again: it goes on from the last checkpoint"
        raise CapacityError(what, hint) from error
