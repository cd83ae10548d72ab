"""The training loop over objects that are already built: step, evaluate, checkpoint, export."""

from __future__ import annotations

import io
import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.errors import UsageError
from headstart.files import write_whole
from headstart.heads.base import HeadSpec
from headstart.train.batches import Batch, collate, plan_epoch
from headstart.train.data import Example
from headstart.train.evaluate import Acceptance, evaluate
from headstart.train.features import States
from headstart.train.head import modules_of
from headstart.train.objective import Target, Weighting, assess
from headstart.train.rounding import rounded


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyper-parameters. The schedule runs over `tokens` and over `minutes` of training time, whichever ends first."""

    tokens: int | None = None
    minutes: float | None = None
    batch_tokens: int = 2048
    matrix_rate: float = 2e-3  # Muon, scaled to match AdamW's update size
    vector_rate: float = 2e-3  # AdamW, norms and biases
    weight_decay: float = 0.0
    warmup: float = 0.02  # share of the schedule
    floor: float = 0.02  # last learning rate, as a share of the highest
    clip: float = 1.0
    ema: float = 0.995
    learned: float = 1.0  # share of what was learned in the head that is judged and written; the rest is the start
    weighting: Weighting = field(default_factory=Weighting)
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    rounded: bool = False  # judge, and at last train, what runs: drafts of the native backend have int4 matrices


ROUNDED_FROM = 0.85
"""Share of the schedule after which matrices are rounded in training: it slows steps down, and the end is enough."""

MOST_SEED = 2**63 - 1


def check_bound(minutes: float | None, tokens: int | None, seed: int) -> None:
    """Raises UsageError unless exactly one of them is given, above 0, and for what is no seed."""
    if not 0 <= seed <= MOST_SEED:
        raise UsageError(f"--seed is {seed}, but must be between 0 and {MOST_SEED}")
    if (minutes is None) == (tokens is None):
        raise UsageError("train needs a bound: exactly one of --minutes and --tokens", "for example --minutes 60")
    flag, bound = ("--minutes", minutes) if minutes is not None else ("--tokens", tokens)
    if bound is None or not (math.isfinite(bound) and bound > 0):
        raise UsageError(f"{flag} is {bound}, but must be a finite number above 0")


def command_line(options: object, words: Sequence[str], names: Sequence[str]) -> str:
    """`headstart train` with these words and those of the named options that have a value."""
    words = ["headstart", "train", *words]
    for name in names:
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", f"{value:g}" if isinstance(value, float) else str(value)]
    return shlex.join(words)


@dataclass
class TrainingProgress:
    """Where the run stands. `epoch` and `batch` are the data cursor, valid for `data_id` only."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    data_id: str = ""
    tokens: int = 0
    seconds: float = 0.0
    loss: float = math.nan  # smoothed
    rate: float = 0.0  # tokens per second, smoothed
    accepted: list[float] = field(default_factory=list)  # held-out, cumulative per step


class Trainer:
    """Weights, their moving average, optimizers and cursor; `state` and `load_state` are all of it."""

    def __init__(self, masters: dict[str, Tensor], spec: HeadSpec, target: Target, recipe: Recipe) -> None:
        self.spec, self.target, self.recipe = spec, target, recipe
        self.masters = {name: torch.nn.Parameter(tensor) for name, tensor in masters.items()}
        self.average = {name: tensor.clone() for name, tensor in masters.items()}
        self._start = {name: tensor.clone() for name, tensor in masters.items()} if recipe.learned < 1 else {}
        self.optimizers = optimizers(self.masters, recipe)
        self.progress = TrainingProgress()

    def state(self) -> dict[str, Any]:
        return {
            "masters": {name: weight.detach() for name, weight in self.masters.items()},
            "average": self.average,
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": dict(vars(self.progress)),
            "vocabulary": self.target.ids,
        }

    def load_state(self, state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, weight in state["masters"].items():
                self.masters[name].copy_(weight)
                self.average[name].copy_(state["average"][name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.progress = TrainingProgress(**state["progress"])

    @property
    def share_done(self) -> float:
        """Of the schedule, 0 to 1."""
        tokens, minutes = self.recipe.tokens, self.recipe.minutes
        by_tokens = self.progress.tokens / tokens if tokens else 0.0
        by_time = self.progress.seconds / 60 / (minutes or 60) if minutes or not tokens else 0.0
        return min(1.0, max(by_tokens, by_time))

    def step(self, examples: Sequence[Example], cache: States) -> Tensor:
        """One optimizer step on these examples; returns the loss, which a GPU may still be computing."""
        seed = (self.recipe.seed << 32) + self.progress.step
        return self.learn(collate(examples, cache, self.recipe.dtype, self.target.ids.device, seed % MOST_SEED))

    def learn(self, batch: Batch) -> Tensor:
        """One optimizer step on a batch."""
        modules = self._modules(self.masters, self.recipe.rounded and self.share_done >= ROUNDED_FROM)
        outcome = assess(modules, self.spec, self.target, batch, self.recipe.weighting)
        outcome.loss.backward()
        update(self.masters, self.optimizers, self.recipe, self.share_done)
        self._update_average()
        self.progress.step += 1
        self.progress.tokens += batch.num_tokens
        return outcome.loss.detach()

    def _modules(self, weights: Mapping[str, Tensor], as_run: bool) -> Sequence[Any]:
        if as_run:
            weights = rounded(weights)
        return modules_of(weights, self.spec, len(self.target.norm), self.recipe.dtype)

    @torch.no_grad()
    def _update_average(self) -> None:
        # a young average must forget its start quickly
        decay = min(self.recipe.ema, (1 + self.progress.step) / (10 + self.progress.step))
        for name, weight in self.masters.items():
            self.average[name].lerp_(weight, 1 - decay)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Of the head: the average, or a point on the way to it from the start."""
        return {name: start.lerp(self.average[name], self.recipe.learned) for name, start in self._start.items()} or (
            self.average
        )

    def evaluate(self, examples: Sequence[Example], cache: States) -> dict[str, Acceptance]:
        """Of the head as it would be written, per kind and over "all"."""
        modules = self._modules(self.weights, self.recipe.rounded)
        return evaluate(modules, self.spec, self.target, examples, cache, self.recipe.weighting)


def rate_factor(recipe: Recipe, done: float) -> float:
    """Of the highest learning rate, where so much of the schedule is done: linear warm-up, then a cosine down to the
    floor."""
    # at least one step's worth, or the first step of a time-based run would have rate 0
    ramp = min(1.0, (done + 1e-3) / recipe.warmup)
    return ramp * (recipe.floor + (1 - recipe.floor) * (1 + math.cos(math.pi * done)) / 2)


def update(
    masters: Mapping[str, torch.nn.Parameter], chosen: Sequence[torch.optim.Optimizer], recipe: Recipe, done: float
) -> None:
    """Use up the gradients, at the learning rate of a schedule of which so much is done."""
    torch.nn.utils.clip_grad_norm_(masters.values(), recipe.clip)
    factor = rate_factor(recipe, done)
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


TABLES = ("embed_tokens.weight", "lm_head.weight", "markov.embed.weight", "markov.out.weight")
"""One row for each token: to make them orthogonal, as Muon does with matrices, would mean nothing."""


def optimizers(masters: Mapping[str, torch.nn.Parameter], recipe: Recipe) -> list[torch.optim.Optimizer]:
    """For matrices, and for all else: groups that may be empty, for a kind of head may have none of either."""
    is_matrix = {name: weight.ndim == 2 and not name.endswith(TABLES) for name, weight in masters.items()}
    matrices = [{"params": [weight for name, weight in masters.items() if is_matrix[name]]}]
    vectors = [{"params": [weight for name, weight in masters.items() if not is_matrix[name]]}]
    decay, rate = recipe.weight_decay, recipe.matrix_rate
    first = torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
    second = torch.optim.AdamW(vectors, lr=recipe.vector_rate, weight_decay=0.0, betas=(0.9, 0.95))
    for optimizer in (first, second):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [first, second]


@dataclass(frozen=True, kw_only=True)
class Hooks:
    """What happens beside the steps, each every so many seconds. `shown` hears every step; `evaluated` says whether
    it is time to stop."""

    checkpoint: Callable[[Trainer], None]
    evaluated: Callable[[Trainer, dict[str, Acceptance]], bool]
    shown: Callable[[Trainer], None]
    checkpoint_every: float = 120.0
    evaluate_every: float = 240.0


def train(
    trainer: Trainer,
    training: Sequence[Example],
    held_out: Sequence[Example],
    cache: States,
    data_id: str,
    hooks: Hooks,
) -> None:
    """Run to the end of the schedule. An interrupt saves a checkpoint first, then goes on up."""
    progress = trainer.progress
    if progress.data_id != data_id:  # other data than before: the cursor means nothing there
        progress.data_id, progress.batch = data_id, 0
        progress.epoch += progress.step > 0
    if progress.step == 0:  # what the head knows before it learns
        hooks.evaluated(trainer, trainer.evaluate(held_out, cache))
    try:
        _steps(trainer, training, held_out, cache, hooks)
    except KeyboardInterrupt:
        hooks.checkpoint(trainer)
        raise
    hooks.checkpoint(trainer)
    hooks.evaluated(trainer, trainer.evaluate(held_out, cache))


def _steps(
    trainer: Trainer, training: Sequence[Example], held_out: Sequence[Example], cache: States, hooks: Hooks
) -> None:
    progress, lengths = trainer.progress, [len(example) for example in training]
    behind: Tensor | None = None  # the loss of the step before: a GPU has it while the next step is prepared
    last_checkpoint = last_evaluation = time.monotonic()
    while trainer.share_done < 1:
        plan = plan_epoch(lengths, trainer.recipe.batch_tokens, trainer.recipe.seed, progress.epoch)
        while progress.batch < len(plan) and trainer.share_done < 1:
            started, before = time.monotonic(), progress.tokens
            loss = trainer.step([training[i] for i in plan[progress.batch]], cache)
            progress.batch += 1
            told, behind = (loss, None) if loss.device.type == "cpu" else (behind, loss)
            _note(progress, told, progress.tokens - before, time.monotonic() - started)
            hooks.shown(trainer)
            now = time.monotonic()
            if now - last_checkpoint > hooks.checkpoint_every:
                hooks.checkpoint(trainer)
                last_checkpoint = time.monotonic()
            if now - last_evaluation > hooks.evaluate_every:
                if hooks.evaluated(trainer, trainer.evaluate(held_out, cache)):
                    return
                last_evaluation = time.monotonic()
        if progress.batch >= len(plan):
            progress.epoch, progress.batch = progress.epoch + 1, 0


def _note(progress: TrainingProgress, loss: Tensor | None, tokens: int, seconds: float) -> None:
    progress.seconds += seconds
    if loss is not None:
        now = loss.item()
        progress.loss = now if math.isnan(progress.loss) else 0.98 * progress.loss + 0.02 * now
    rate = tokens / max(seconds, 1e-9)
    progress.rate = rate if not progress.rate else 0.95 * progress.rate + 0.05 * rate


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Complete or not at all."""
    content = io.BytesIO()
    torch.save(trainer.state(), content)  # straight into a file, a full disk would be a RuntimeError without a reason
    write_whole(path, content.getbuffer())
