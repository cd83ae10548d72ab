"""Joint training of heads of several kinds on text that the trunk generates.

In a round a chunk of new text is generated. All heads are trained on its answers and on a chunk of some rounds ago,
with the same batches. Hidden states are computed per batch and not stored. State (weights, optimizers, round and batch)
is written every minute and at the end; a restarted run continues with the same batch. On a machine without the state,
`start` names the folder of heads returned from an earlier machine, with their schedule.

Estimated (not measured) cost of the defaults, for the default model on one H100: a pass of the writer reads 23 kB of KV
for each of 2,048 x 384 positions, 18 GB or 6 ms at 3 TB/s, and has 0.55 TFLOP and some 800 small kernels; 12 to 14 ms
per pass are about 150,000 tokens/s. Training takes 0.8 GFLOP per token for the trunk and three heads, and 5 MB of
traffic for logits: 100 M tokens take 400 s at 200 TFLOP/s and 180 s of traffic. Each text is used twice, so 40 M answer
tokens are generated, in 270 s. The total is about 15 of 24 minutes; a slower machine ends by time.
"""

from __future__ import annotations

import io
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from device.card import write_card
from device.clock import Clock, Results, say, table
from device.parts import PART_BYTES, archive
from device.texts import LONG, SHORT, Prompts, Texts
from device.writer import Writer
from headstart import hub
from headstart.config import EngineConfig
from headstart.engine.load import Model, load_model
from headstart.files import write_atomic
from headstart.heads.base import HeadSpec
from headstart.heads.kind import HeadCheckpoint, head_kind
from headstart.kernels.backend import ORACLE
from headstart.layers.decoder import tapped_layers
from headstart.layers.weights import trunk_fingerprint
from headstart.models.shipped_heads import shipped_heads
from headstart.train.dataset import Batch, collate, plan_epoch
from headstart.train.evaluate import Acceptance, evaluate
from headstart.train.frozen_model import FrozenModel, make_frozen_model
from headstart.train.head_weights import existing_head, export_head, first_weights, stream_scale
from headstart.train.hidden_states import TorchTrunk
from headstart.train.objective import DistillationTarget, LossConfig
from headstart.train.records import Example, draft_vocabulary, vocabulary_coverage
from headstart.train.torch_weights import build_modules, round_weights
from headstart.train.trainer import Recipe, Trainer, rate_factor

KINDS = ("mtp", "eagle3", "block")
SCHEDULE_FILE = "stood.json"
"""File beside exported heads with the state of the schedule."""
LAG = 3
"""Rounds after which a chunk is used again."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """`tokens`: training tokens of each head; `minutes`: time over all calls, generation included. The first limit ends
    the schedule. `chunk`: answer tokens per round. `start`: "shipped", "new", or a folder of heads by kind."""

    model: str = hub.DEFAULT_MODEL
    device: str = "cuda"
    dtype: str = "bfloat16"
    kinds: Sequence[str] = KINDS
    tokens: int = 100_000_000
    minutes: float | None = None
    chunk: int = 3_000_000
    held_out: int = 40_000
    every: int = 50
    batch_tokens: int = 32_768
    slots: int = 2048
    answer: int = 256
    files: Sequence[Path] = ()
    start: str = "shipped"
    draft_vocab: int = 12_288
    seed: int = 0
    save_every: float = 60.0


@dataclass(eq=False)
class HeadInTraining:
    """One head in training: the columns of the streams that it taps, and its best held-out acceptance length."""

    kind: str
    trainer: Trainer
    columns: list[int]
    vocabulary: np.ndarray
    best: float = 0.0
    loss: Tensor | None = None  # moving average, on the device
    results: dict[str, Acceptance] = field(default_factory=dict)

    def view(self, batch: Batch, width: int) -> Batch:
        """The batch with the tapped streams of this head only."""
        parts = [batch.tapped[..., i * width : (i + 1) * width] for i in self.columns]
        return replace(batch, tapped=torch.cat(parts, -1) if parts else batch.tapped[..., :0])

    def learn(self, batch: Batch) -> None:
        loss = self.trainer.learn(batch)
        self.loss = loss.clone() if self.loss is None else self.loss.lerp_(loss, 0.02)


class TappedTrunk:
    """The trunk's states with the streams of one head, for evaluation."""

    def __init__(self, trunk: TorchTrunk, columns: list[int]) -> None:
        self._trunk, self._columns, self.hidden_size = trunk, columns, trunk.hidden_size

    def batch_features(self, *asked: Any) -> tuple[Tensor, Tensor]:
        hidden, best = self._trunk.batch_features(*asked)
        width = self.hidden_size
        parts = [hidden[..., i * width : (i + 1) * width] for i in (*self._columns, hidden.shape[-1] // width - 1)]
        return torch.cat(parts, -1), best


class JointTraining:
    """A training run. `work` has text and state, `out` the files to return."""

    def __init__(self, plan: Plan, work: Path, out: Path, clock: Clock, results: Results) -> None:
        self.plan, self.work, self.out, self.clock, self.results = plan, work, out, clock, results
        if plan.device == "cuda":
            torch.set_float32_matmul_precision("high")
        config = EngineConfig(backend=ORACLE, device=plan.device, dtype=plan.dtype, drafter="none", seed=0)
        self.model: Model = load_model(plan.model, config)
        self.frozen_models: dict[str, FrozenModel] = {
            kind: make_frozen_model(self.model, config, kind, _depth(kind)) for kind in plan.kinds
        }
        self.text = next(iter(self.frozen_models.values())).text
        self.state = work / "state.pt"
        self.round, self.batch, self.seconds, self.written = 1, 0, 0.0, 0
        ends = sorted(self.text.end_ids)
        sizes = ((plan.slots, SHORT, plan.slots // 4), (max(1, plan.slots // 2), LONG, 0))
        writers = [
            Writer(self.model.decoder, ends, slots, prompt + max(plan.answer, 192), narrow)
            for slots, prompt, narrow in sizes
        ]
        prompts = Prompts(self.model.tokenizer, self.text, plan.files, plan.seed, plan.every, plan.answer)
        self.texts = Texts(prompts, (writers[0], writers[1]), work, plan.chunk, plan.seed)

    def run(self) -> bool:
        """Trains until the schedule or the time ends. True at the end of the schedule."""
        self._begun = self._saved = time.monotonic()
        for number, tokens in ((0, self.plan.held_out), (self.round_kept, self.plan.chunk)):
            self._write(number, tokens)
            if not self.texts.there(number):
                say("the time was over before there was text to learn from: the same command goes on")
                return False
        self._prepare()
        while self._share < 1 and not self._is_over():
            if not self._round():
                break
        self._save()
        self._evaluate()
        self._report()
        return self._share >= 1

    @property
    def round_kept(self) -> int:
        return int(torch.load(self.state, weights_only=False, mmap=True)["round"]) if self.state.exists() else 1

    def _is_over(self) -> bool:
        return self.clock.left < 0

    @property
    def _share(self) -> float:
        return min(trained_head.trainer.share_done for trained_head in self.heads)

    def _write(self, number: int, tokens: int) -> None:
        begun = time.monotonic()
        count = self.texts.write(number, tokens, _set_seed, self._is_over)
        self.written += count
        if count:
            spent = time.monotonic() - begun
            self.results.add("text", chunk=number, tokens=count, seconds=spent, tokens_per_s=count / spent)

    # Start.

    def _prepare(self) -> None:
        first = self.texts.examples(1 if self.texts.there(1) else self.round_kept)
        self.held_out = self.texts.examples(0)
        union = sorted({layer for s in self.frozen_models.values() for layer in tapped_layers(s.spec.tap)})
        shipped = {kind: self._initial_head(kind) for kind in self.plan.kinds}
        union = sorted({*union, *(layer for spec, *_ in shipped.values() for layer in tapped_layers(spec.tap))})
        base = next(iter(self.frozen_models.values())).trunk
        self.trunk = TorchTrunk(base.model, base.lm_head, tuple(union))
        self.heads = [self._make_head(kind, *shipped[kind], union, first) for kind in self.plan.kinds]
        if self.state.exists():
            self._load()
            return
        schedule = Path(self.plan.start) / SCHEDULE_FILE
        if schedule.is_file():
            self._continue_schedule(json.loads(schedule.read_text("utf-8")))
        self._evaluate()

    def _continue_schedule(self, schedule: dict[str, Any]) -> None:
        """Continues the schedule of heads from another machine, with new optimizers and new text."""
        self.round, self.seconds, self.written = schedule["round"] + 1, schedule["seconds"], schedule["written"]
        for trained_head in self.heads:
            progress = trained_head.trainer.progress
            progress.tokens, progress.step, progress.seconds = schedule["tokens"], schedule["step"], schedule["seconds"]

    def _initial_head(self, kind: str) -> tuple[HeadSpec, dict[str, Tensor] | None, np.ndarray | None]:
        frozen_model, start = self.frozen_models[kind], self.plan.start
        path = shipped_heads(self.model.checkpoint).get(kind) if start == "shipped" else Path(start) / kind
        if start == "new" or path is None or not path.is_dir():
            return frozen_model.spec, None, None
        found = existing_head(frozen_model, kind, path)
        assert not found.own, "its LM head or embedding is not the trunk's"
        weights = {name: each.to(self.plan.device) for name, each in found.weights.items()}
        return found.spec, weights, found.draft_token_ids

    def _make_head(
        self,
        kind: str,
        spec: HeadSpec,
        start: dict[str, Tensor] | None,
        known: np.ndarray | None,
        union: list[int],
        first: list[Example],
    ) -> HeadInTraining:
        config, training = self.model.config, head_kind(kind).training
        assert training is not None
        size = min(self.plan.draft_vocab, config.vocab_size)
        vocabulary = known if known is not None else draft_vocabulary(first, size, self.text.end_ids)
        if spec.block and start is None:
            sizes = {"vocab_size": config.vocab_size, "draft_vocab_size": len(vocabulary)}
            mask = min(self.text.end_ids, default=0)
            spec = replace(spec, block=replace(spec.block, mask_token_id=mask, **sizes))
        tokens = torch.from_numpy(max(first, key=len).tokens).long().to(self.plan.device)
        masters = start or first_weights(training, spec, self.model, stream_scale(self.trunk.model, tokens))
        loss_config = (LossConfig.of_block if spec.block else LossConfig.of)(_depth(kind))
        recipe = Recipe(
            tokens=self.plan.tokens, minutes=self.plan.minutes, batch_tokens=self.plan.batch_tokens,
            loss=loss_config, seed=self.plan.seed, dtype=self.trunk.dtype, int4_drafts=True,
        )  # fmt: skip
        ids = torch.from_numpy(np.asarray(vocabulary)).to(self.plan.device)
        target = DistillationTarget.of(self.trunk, ids, int4_drafts=True)
        columns = [union.index(layer) for layer in tapped_layers(spec.tap)]
        return HeadInTraining(kind, Trainer(masters, spec, target, recipe), columns, np.asarray(vocabulary))

    # Rounds.

    def _round(self) -> bool:
        """Runs or continues a round. False if the time is over."""
        self._write(self.round, self.plan.chunk)
        if not self.texts.there(self.round):
            return False
        numbers = [n for n in (self.round, self.round - LAG) if n >= 1 and self.texts.there(n)]
        examples = [example for n in numbers for example in self.texts.examples(n)]
        plan = plan_epoch([len(each) for each in examples], self.plan.batch_tokens, self.plan.seed, self.round)
        width = self.trunk.hidden_size
        while self.batch < len(plan):
            if self._is_over() or self._share >= 1:
                return False
            step = self.heads[0].trainer.progress.step
            chosen = [examples[i] for i in plan[self.batch]]
            batch = collate(chosen, self.trunk, self.trunk.dtype, self.trunk.lm_head.device, step)
            for trained_head in self.heads:
                trained_head.learn(trained_head.view(batch, width))
            self.batch += 1
            self._count_time()
        self.round, self.batch = self.round + 1, 0
        return True

    def _count_time(self) -> None:
        now = time.monotonic()
        self.seconds += now - self._begun
        self._begun = now
        for trained_head in self.heads:
            trained_head.trainer.progress.seconds = self.seconds
        if now - self._saved > self.plan.save_every:
            self._save()
            self._evaluate()
            self._saved = self._begun = time.monotonic()

    def _save(self) -> None:
        state = {
            "round": self.round,
            "batch": self.batch,
            "seconds": self.seconds,
            "written": self.written,
            "heads": {
                s.kind: {"trainer": s.trainer.state(), "best": s.best, "loss": s.loss} for s in self.heads
            },
        }  # fmt: skip
        content = io.BytesIO()
        torch.save(state, content)
        write_atomic(self.state, content.getbuffer())

    def _load(self) -> None:
        state = torch.load(self.state, map_location=self.plan.device, weights_only=False)
        self.round, self.batch = state["round"], state["batch"]
        self.seconds, self.written = state["seconds"], state["written"]
        for trained_head in self.heads:
            kept = state["heads"][trained_head.kind]
            trained_head.trainer.load_state(kept["trainer"])
            trained_head.best, trained_head.loss = kept["best"], kept["loss"]
        say(f"going on from round {self.round}, batch {self.batch}, {self._tokens:,} tokens")

    @property
    def _tokens(self) -> int:
        return self.heads[0].trainer.progress.tokens

    # Results.

    def _evaluate(self) -> None:
        """Evaluates all heads on held-out text and exports improved ones."""
        row: dict[str, Any] = {"tokens": self._tokens, "seconds": round(self.seconds, 1), "written": self.written}
        before = [trained_head.best for trained_head in self.heads]
        for trained_head in self.heads:
            trainer = trained_head.trainer
            weights, recipe = round_weights(trainer.average), trainer.recipe
            modules = build_modules(weights, trainer.spec, self.trunk.hidden_size, recipe.dtype)
            states = TappedTrunk(self.trunk, trained_head.columns)
            trained_head.results = evaluate(modules, trainer.spec, trainer.target, self.held_out, states, recipe.loss)
            overall = trained_head.results["all"]
            loss = None if trained_head.loss is None else round(float(trained_head.loss), 4)
            row[trained_head.kind] = {"loss": loss, **overall.data()}
            if overall.length > trained_head.best:
                trained_head.best = overall.length
                self._export(trained_head)
        row["rate_factor"] = round(rate_factor(self.heads[0].trainer.recipe, self._share), 4)
        self.out.mkdir(parents=True, exist_ok=True)
        with (self.out / "train-log.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        if before != [trained_head.best for trained_head in self.heads]:
            schedule = {**row, "round": self.round, "step": self.heads[0].trainer.progress.step}
            write_atomic(self.work / "heads" / SCHEDULE_FILE, json.dumps(schedule) + "\n")
            archive(self.work / "heads", self.out, "heads", PART_BYTES)
        lengths = "  ".join(f"{s.kind} {row[s.kind]['length']:.3f} (loss {row[s.kind]['loss']})" for s in self.heads)
        say(f"{self._tokens:,} tokens, {self.seconds:.0f} s: held-out acceptance length {lengths}")

    def _export(self, trained_head: HeadInTraining) -> None:
        config, trainer = self.model.config, trained_head.trainer
        facts = {
            "command": f"gpu.py train --tokens {self.plan.tokens} --start {Path(self.plan.start).name}",
            "tokens": self._tokens,
            "distinct_answer_tokens": self.written,
            "steps": trainer.progress.step,
            "minutes": round(self.seconds / 60, 1),
            "draft_coverage": {
                kind: round(share, 4)
                for kind, share in vocabulary_coverage(self.held_out, trained_head.vocabulary).items()
            },
            "held_out": {kind: each.data() for kind, each in trained_head.results.items()},
        }
        head = HeadCheckpoint(
            spec=trainer.spec, hidden_size=config.hidden_size, vocab_size=config.vocab_size,
            draft_token_ids=trained_head.vocabulary, trunk=self.plan.model,
            trunk_fingerprint=trunk_fingerprint(self.model.weights.tensors), training=facts,
        )  # fmt: skip
        folder = self.work / "heads" / trained_head.kind
        folder.parent.mkdir(parents=True, exist_ok=True)
        export_head(folder, head, trainer.average)
        write_card(folder, trained_head.kind, facts, self.plan)

    def _report(self) -> None:
        rows = []
        for trained_head in self.heads:
            overall = trained_head.results["all"]
            rate = self._tokens / max(self.seconds, 1e-9)
            facts = {"tokens": self._tokens, "seconds": self.seconds, "tokens_per_s": rate, **overall.data()}
            self.results.add("train", kind=trained_head.kind, best=trained_head.best, share_done=self._share, **facts)
            rows.append((trained_head.kind, f"{self._tokens:,}", rate, overall.length, trained_head.best))
        table(("head", "tokens seen", "tokens/s, all heads", "held-out length", "best"), rows)


def _depth(kind: str) -> int:
    training = head_kind(kind).training
    assert training is not None
    return training.depth


def _set_seed(seed: int) -> None:
    torch.manual_seed(seed)
