"""The training loop over loaded objects: optimizer steps, evaluations, checkpoints."""

import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headstart.files import write_atomic
from headstart.heads.base import HeadSpec
from headstart.train.dataset import Batch, TrainingData, collate, plan_epoch
from headstart.train.evaluate import Acceptance, evaluate
from headstart.train.hidden_states import FeatureSource
from headstart.train.objective import DistillationTarget, LossConfig, score_batch
from headstart.train.options import MAX_SEED
from headstart.train.records import Example
from headstart.train.torch_weights import build_modules, round_weights

INT4_FROM = 0.85
"""Share of the schedule after which training rounds matrices to int4: that slows steps, and the end is enough."""
TOKEN_TABLES = ("embed_tokens.weight", "lm_head.weight", "markov.embed.weight", "markov.out.weight")
"""Matrices with a row per token: Muon, which makes matrices orthogonal, is not meant for them."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyper-parameters. The schedule ends at `tokens` or after `minutes` of training, whichever comes first."""

    tokens: int | None = None
    minutes: float | None = None
    batch_tokens: int = 2048
    matrix_rate: float = 2e-3  # learning rate of Muon, scaled to match AdamW's update size
    vector_rate: float = 2e-3  # learning rate of AdamW: norms, biases, token tables
    weight_decay: float = 0.0
    warmup: float = 0.02  # share of the schedule
    floor: float = 0.02  # final learning rate, as a share of the highest
    clip: float = 1.0
    ema: float = 0.995
    update_share: float = 1.0  # share of the learned change in the evaluated and exported weights
    loss: LossConfig = field(default_factory=LossConfig)
    seed: int = 0
    dtype: torch.dtype = torch.bfloat16
    int4_drafts: bool = False  # evaluate, and finally train, with matrices in int4 as the native backend drafts


@dataclass
class TrainingProgress:
    """State of a run beside its weights; stored in checkpoints."""

    step: int = 0
    epoch: int = 0  # epoch and batch are the data cursor, valid for `data_id` only
    batch: int = 0
    data_id: str = ""
    tokens: int = 0
    seconds: float = 0.0
    loss: float = math.nan  # smoothed
    rate: float = 0.0  # tokens per second, smoothed
    accepted: list[float] = field(default_factory=list)  # held-out acceptance, cumulative per step

    def share_done(self, recipe: Recipe) -> float:
        """Share of the schedule that is done, 0 to 1."""
        by_tokens = self.tokens / recipe.tokens if recipe.tokens else 0.0
        by_time = self.seconds / 60 / (recipe.minutes or 60) if recipe.minutes or not recipe.tokens else 0.0
        return min(1.0, max(by_tokens, by_time))

    def record_time(self, loss: Tensor | None, tokens: int, seconds: float) -> None:
        """Add the time of a step over `tokens`, and its loss if that is known."""
        self.seconds += seconds
        if loss is not None:
            value = loss.item()
            self.loss = value if math.isnan(self.loss) else 0.98 * self.loss + 0.02 * value
        rate = tokens / max(seconds, 1e-9)
        self.rate = rate if not self.rate else 0.95 * self.rate + 0.05 * rate


class Trainer:
    """Weights, their moving average, optimizers and progress; `state` and `load_state` cover all of it."""

    def __init__(self, masters: dict[str, Tensor], spec: HeadSpec, target: DistillationTarget, recipe: Recipe) -> None:
        self.spec, self.target, self.recipe = spec, target, recipe
        self.masters = {name: torch.nn.Parameter(tensor) for name, tensor in masters.items()}
        self.average = {name: tensor.clone() for name, tensor in masters.items()}
        self._start = {name: tensor.clone() for name, tensor in masters.items()} if recipe.update_share < 1 else {}
        self.optimizers = make_optimizers(self.masters, recipe)
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
        """See `TrainingProgress.share_done`."""
        return self.progress.share_done(self.recipe)

    def step(self, examples: Sequence[Example], features: FeatureSource) -> Tensor:
        """One optimizer step on these examples; returns the loss, which a GPU may still be computing."""
        seed = (self.recipe.seed << 32) + self.progress.step
        return self.learn(collate(examples, features, self.recipe.dtype, self.target.ids.device, seed % MAX_SEED))

    def learn(self, batch: Batch) -> Tensor:
        """One optimizer step on a batch; returns the loss."""
        modules = self._modules(self.masters, self.recipe.int4_drafts and self.share_done >= INT4_FROM)
        result = score_batch(modules, self.spec, self.target, batch, self.recipe.loss)
        result.loss.backward()
        apply_gradients(self.masters, self.optimizers, self.recipe, self.share_done)
        self._update_average()
        self.progress.step += 1
        self.progress.tokens += batch.num_tokens
        return result.loss.detach()

    def _modules(self, weights: Mapping[str, Tensor], int4: bool) -> Sequence[Any]:
        if int4:
            weights = round_weights(weights)
        return build_modules(weights, self.spec, len(self.target.norm), self.recipe.dtype)

    @torch.no_grad()
    def _update_average(self) -> None:
        # a young average must forget its start quickly
        decay = min(self.recipe.ema, (1 + self.progress.step) / (10 + self.progress.step))
        for name, weight in self.masters.items():
            self.average[name].lerp_(weight, 1 - decay)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights to evaluate and export: the average, or a point between it and the start (`update_share`)."""
        share = self.recipe.update_share
        return {name: start.lerp(self.average[name], share) for name, start in self._start.items()} or self.average

    def evaluate(self, examples: Sequence[Example], features: FeatureSource) -> dict[str, Acceptance]:
        """Held-out acceptance of the exported head, per kind and over "all"."""
        modules = self._modules(self.weights, self.recipe.int4_drafts)
        return evaluate(modules, self.spec, self.target, examples, features, self.recipe.loss)


def rate_factor(recipe: Recipe, done: float) -> float:
    """Learning rate as a share of the highest at `done` of the schedule: linear warm-up, cosine down to the floor."""
    # at least one step's worth, or the first step of a time-based run would have rate 0
    ramp = min(1.0, (done + 1e-3) / recipe.warmup)
    return ramp * (recipe.floor + (1 - recipe.floor) * (1 + math.cos(math.pi * done)) / 2)


def apply_gradients(
    masters: Mapping[str, torch.nn.Parameter], chosen: Sequence[torch.optim.Optimizer], recipe: Recipe, done: float
) -> None:
    """Step the optimizers at the learning rate where `done` of the schedule is over, and clear the gradients."""
    torch.nn.utils.clip_grad_norm_(masters.values(), recipe.clip)
    factor = rate_factor(recipe, done)
    for optimizer in chosen:
        for group in optimizer.param_groups:
            group["lr"] = group["base_lr"] * factor
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


class Muon(torch.optim.Muon):
    """torch's Muon at AdamW's learning rates. Its iterations run in `dtype`, that of the training's products."""

    def __init__(self, params: Any, dtype: torch.dtype, **options: Any) -> None:
        super().__init__(params, **options)
        self._dtype = dtype

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            rate, momentum = group["lr"], group["momentum"]
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                state = self.state[weight]
                average = state.setdefault("momentum_buffer", torch.zeros_like(weight.grad))
                average.lerp_(weight.grad, 1 - momentum)
                step = weight.grad.lerp(average, momentum).to(self._dtype)
                update = _orthogonalize(step, *group["ns_coefficients"]).to(weight.dtype)
                weight.mul_(1 - rate * group["weight_decay"])
                weight.add_(update, alpha=-0.2 * math.sqrt(max(weight.shape)) * rate)


def _orthogonalize(matrix: Tensor, a: float, b: float, c: float) -> Tensor:
    """About the nearest orthogonal matrix, by Newton-Schulz iterations (Jordan et al. 2024, "Muon")."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def make_optimizers(masters: Mapping[str, torch.nn.Parameter], recipe: Recipe) -> list[torch.optim.Optimizer]:
    """Muon for matrices, AdamW for other weights. Either may have none."""
    is_matrix = {name: weight.ndim == 2 and not name.endswith(TOKEN_TABLES) for name, weight in masters.items()}
    matrices = [{"params": [weight for name, weight in masters.items() if is_matrix[name]]}]
    vectors = [{"params": [weight for name, weight in masters.items() if not is_matrix[name]]}]
    decay, rate = recipe.weight_decay, recipe.matrix_rate
    first = Muon(matrices, recipe.dtype, lr=rate, weight_decay=decay)
    second = torch.optim.AdamW(vectors, lr=recipe.vector_rate, weight_decay=0.0, betas=(0.9, 0.95))
    for optimizer in (first, second):
        for group in optimizer.param_groups:
            group["base_lr"] = group["lr"]
    return [first, second]


@dataclass(frozen=True, kw_only=True)
class TrainingHooks:
    """Callbacks of `train`."""

    on_checkpoint: Callable[[Trainer], None]
    on_evaluation: Callable[[Trainer, dict[str, Acceptance]], bool]  # returns whether to stop
    on_step: Callable[[Trainer], None]
    checkpoint_seconds: float = 120.0
    evaluation_seconds: float = 240.0


def train(trainer: Trainer, data: TrainingData, hooks: TrainingHooks) -> None:
    """Run to the end of the schedule. An interrupt saves a checkpoint and is raised again."""
    progress = trainer.progress
    data_id = f"{data.identity}/{trainer.recipe.batch_tokens}"  # another batch size is another order of the data
    if progress.data_id != data_id:  # other data than before: the cursor is not valid for it
        progress.data_id, progress.batch = data_id, 0
        progress.epoch += progress.step > 0
    if progress.step == 0:  # acceptance before training
        hooks.on_evaluation(trainer, trainer.evaluate(data.held_out, data.features))
    try:
        _run_steps(trainer, data, hooks)
    except KeyboardInterrupt:
        hooks.on_checkpoint(trainer)
        raise
    hooks.on_checkpoint(trainer)
    hooks.on_evaluation(trainer, trainer.evaluate(data.held_out, data.features))


def _run_steps(trainer: Trainer, data: TrainingData, hooks: TrainingHooks) -> None:
    progress, lengths = trainer.progress, [len(example) for example in data.training]
    previous: Tensor | None = None  # loss of the previous step: a GPU finishes it while the next step is prepared
    last_checkpoint = last_evaluation = time.monotonic()
    while trainer.share_done < 1:
        plan = plan_epoch(lengths, trainer.recipe.batch_tokens, trainer.recipe.seed, progress.epoch)
        while progress.batch < len(plan) and trainer.share_done < 1:
            started, before = time.monotonic(), progress.tokens
            loss = trainer.step([data.training[i] for i in plan[progress.batch]], data.features)
            progress.batch += 1
            finished, previous = (loss, None) if loss.device.type == "cpu" else (previous, loss)
            progress.record_time(finished, progress.tokens - before, time.monotonic() - started)
            hooks.on_step(trainer)
            now = time.monotonic()
            if now - last_checkpoint > hooks.checkpoint_seconds:
                hooks.on_checkpoint(trainer)
                last_checkpoint = time.monotonic()
            if now - last_evaluation > hooks.evaluation_seconds:
                if hooks.on_evaluation(trainer, trainer.evaluate(data.held_out, data.features)):
                    return
                last_evaluation = time.monotonic()
        if progress.batch >= len(plan):
            progress.epoch, progress.batch = progress.epoch + 1, 0


def save_checkpoint(trainer: Trainer, path: Path) -> None:
    """Write a checkpoint file, completely or not at all."""
    content = io.BytesIO()
    torch.save(trainer.state(), content)  # torch.save into a file hides the reason of a full disk
    write_atomic(path, content.getbuffer())
