"""`headstart train --from-scratch`: a small model of a family and its own MTP head, from plain text.

The trunk learns the next token. The head, unrolled as at run time, learns the trunk's prediction (see `objective`).
Gradients of both losses reach all weights. The family's own code runs over the family's own tensors, so the result is a
checkpoint like any other.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn.functional import cross_entropy

from headstart import registry
from headstart.core import Int32, Progress, Report, no_progress
from headstart.engine.load import native_head
from headstart.errors import UsageError
from headstart.files import atomic_folder
from headstart.formats import safetensors
from headstart.formats.base import Checkpoint
from headstart.heads.base import Head
from headstart.layers.build import DecoderConfig, build_decoder
from headstart.layers.decoder import Decoder, Tap
from headstart.models.base import Family
from headstart.models.small import SCRATCH
from headstart.models.tensors import canonical_tensors
from headstart.train.dataset import Batch
from headstart.train.evaluate import Acceptance
from headstart.train.flags import TrainFlags
from headstart.train.objective import DistillationTarget, LossConfig, count_accepted, score_batch
from headstart.train.ops import trunk_outputs
from headstart.train.options import check_bound, command_line
from headstart.train.plain_text import read_documents
from headstart.train.progress import print_line
from headstart.train.records import SkippedRecords, TrainingRecord
from headstart.train.torch_weights import as_tensors, cast_weights
from headstart.train.trainer import Recipe, TrainingProgress, apply_gradients, make_optimizers
from headstart.version import __version__

VOCAB_SIZE = 2048
END = "<|endoftext|>"  # token 0: before and after every document
BATCH_ROWS, BATCH_LENGTH = 4, 256
HEAD_LOSS_WEIGHT = 0.1  # of the head's loss, a sum over steps and terms, against the trunk's
HELD_OUT_BATCHES = 16
MIN_TEXT_TOKENS = 20 * BATCH_LENGTH


@dataclass(frozen=True, kw_only=True)
class ScratchOptions(TrainFlags):
    """TrainFlags of `--from-scratch`. Exactly one of `minutes` (of training) and `tokens` is given."""

    from_scratch: str  # the family
    depth: int = 3  # unrolled steps of the head

    @property
    def loss(self) -> LossConfig:
        return LossConfig.of(self.depth)

    @property
    def command(self) -> str:
        """The equivalent command line, for the record."""
        words = ["--from-scratch", self.from_scratch, "--out", self.out.name]
        words += [word for path in self.data for word in ("--data", path.name)]
        return command_line(self, words, ("minutes", "tokens", "depth", "seed"))


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """Documents as tokens of a tokenizer trained on them."""

    tokenizer: Any
    training: list[Int32]
    held_out: list[Int32]

    @staticmethod
    def of(records: Sequence[TrainingRecord], vocab_size: int) -> "TokenizedText":
        """Raises UsageError for too little text."""
        training = [record for record in records if not record.held_out]
        held_out = [record for record in records if record.held_out] or training[:1]
        tokenizer = train_tokenizer((record.text for record in training), vocab_size)
        text = TokenizedText(tokenizer, _encode_documents(tokenizer, training), _encode_documents(tokenizer, held_out))
        if (count := sum(map(len, text.training))) < MIN_TEXT_TOKENS:
            raise UsageError(f"the text has {count} tokens, too few to learn from", f"give {MIN_TEXT_TOKENS} or more")
        return text


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizers.Tokenizer:
    """Byte-level BPE of `vocab_size` ids (fewer if the texts have no more to merge); END is 0."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _encode_documents(tokenizer: tokenizers.Tokenizer, records: Sequence[TrainingRecord]) -> list[Int32]:
    """Each document's tokens, with END before them."""
    encoded = tokenizer.encode_batch([record.text for record in records], add_special_tokens=False)
    return [np.asarray([0, *each.ids], np.int32) for each in encoded]


def token_batches(documents: Sequence[Int32], rows: int, length: int, seed: int) -> Iterator[NDArray[np.int64]]:
    """Endless batches [rows, length]: the documents concatenated, in another order each epoch."""
    epoch, stream = 0, np.empty(0, np.int64)
    while True:
        while len(stream) < rows * length:
            order = np.random.default_rng((seed, epoch)).permutation(len(documents))
            stream, epoch = np.concatenate([stream, *(documents[i] for i in order)]), epoch + 1
        count = len(stream) // (rows * length)
        whole, stream = stream[: count * rows * length], stream[count * rows * length :]
        yield from whole.reshape(count, rows, length).astype(np.int64)


class ScratchModel:
    """A family's small model over float32 masters under Hugging Face names."""

    def __init__(self, name: str, family: Family, changes: dict[str, Any], dtype: torch.dtype) -> None:
        self.family, self.dtype = family, dtype
        self.config, arrays = family.tiny(**{**SCRATCH, **family.scratch, **changes})
        self.sizes: DecoderConfig = family.read(self.config)
        self.masters = {key: torch.nn.Parameter(torch.from_numpy(value)) for key, value in arrays.items()}
        tensors: Any = as_tensors(self.masters)
        self._checkpoint = Checkpoint(Path(name), "safetensors", self.config, tensors, False)

    def build(self) -> tuple[Decoder, Head | None]:
        """Trunk and head over the current masters."""
        tensors: Any = canonical_tensors(self._checkpoint, self.family, self.sizes)
        weights = cast_weights(tensors, self.dtype, self._checkpoint.path.name)
        return build_decoder(weights, self.sizes), native_head(self.family, weights, self.sizes)

    def losses(self, tokens: Tensor, config: LossConfig) -> tuple[Tensor, Tensor, Acceptance | None]:
        """tokens [B, T] -> (the trunk's loss, the head's loss, and without gradients the acceptance of its drafts)."""
        trunk, head = self.build()
        tap: Tap = "streams" if head and head.spec.tap == "streams" else "post_norm"
        results = trunk_outputs(trunk, tokens, self.dtype, tap, logits=True)
        logits: Tensor = results["logits"]
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        if head is None:
            return loss, torch.zeros(()), None
        all_rows = torch.ones_like(tokens, dtype=torch.bool)
        tapped = results["streams" if tap == "streams" else "hidden"]
        batch = Batch(tokens, tapped, results["hidden"], logits.argmax(-1), all_rows, all_rows, (), tokens.numel())
        result = score_batch(head.modules, head.spec, _full_vocabulary_target(trunk), batch, config)
        if torch.is_grad_enabled():
            return loss, result.loss, None
        accepted, expected, tried = (each.sum(0) for each in count_accepted(result, len(tokens)))
        return loss, result.loss, Acceptance(tuple(accepted.tolist()), int(tried), tuple(expected.tolist()))


def _full_vocabulary_target(trunk: Decoder) -> DistillationTarget:
    lm_head = trunk.lm_head.weight
    ids = torch.arange(len(lm_head), device=lm_head.device)
    return DistillationTarget(trunk.embedding, trunk.norm.weight, ids, lm_head.detach(), lm_head.detach(), ids)


@dataclass
class ScratchResult:
    """Results of a run; losses in nats per token."""

    progress: TrainingProgress  # with the trunk's loss
    held_out_loss: float  # of the trunk
    acceptance: Acceptance | None  # of held-out text; None without a head


def train(model: ScratchModel, text: TokenizedText, options: ScratchOptions, progress: Progress) -> ScratchResult:
    """Run to the end of the schedule, then evaluate on held-out text."""
    state = TrainingProgress()
    recipe = Recipe(
        tokens=options.tokens, minutes=options.minutes, matrix_rate=2e-2, vector_rate=1e-2, weight_decay=0.01,
        warmup=0.05, dtype=torch.float32,
    )  # fmt: skip
    optimizers = make_optimizers(model.masters, recipe)
    for tokens in token_batches(text.training, BATCH_ROWS, BATCH_LENGTH, options.seed):
        started, done = time.monotonic(), state.share_done(recipe)
        if done >= 1:
            break
        trunk_loss, head_loss, _ = model.losses(torch.from_numpy(tokens), options.loss)
        (trunk_loss + HEAD_LOSS_WEIGHT * head_loss).backward()
        apply_gradients(model.masters, optimizers, recipe, done)
        state.step, state.tokens = state.step + 1, state.tokens + tokens.size
        state.record_time(trunk_loss, tokens.size, time.monotonic() - started)
        progress(round(100 * done), 100, f"training, {state.tokens:,} tokens, loss {state.loss:.3f}")
    with torch.no_grad():
        batches = islice(token_batches(text.held_out, BATCH_ROWS, BATCH_LENGTH, 0), HELD_OUT_BATCHES)
        results = [model.losses(torch.from_numpy(tokens), options.loss) for tokens in batches]
    losses, _, accepted = zip(*results, strict=True)
    parts = [each for each in accepted if each is not None]
    acceptance = reduce(Acceptance.__add__, parts) if parts else None
    return ScratchResult(state, float(torch.stack(losses).mean()), acceptance)


def check(options: ScratchOptions) -> None:
    """Raises UsageError for options that cannot work."""
    check_bound(options.minutes, options.tokens, options.seed)
    if options.from_scratch not in (families := registry.available("models")):
        raise UsageError(f"there is no family {options.from_scratch!r}", f"choose one of {', '.join(families)}")
    if options.out.exists():
        raise UsageError(f"{options.out} exists", "give --out a new name")


def run(options: ScratchOptions, progress: Progress = no_progress) -> Report:
    """Train and write the checkpoint at `options.out`. Raises UsageError for bad options or data."""
    check(options)
    with atomic_folder(options.out) as folder:
        if options.threads:
            torch.set_num_threads(options.threads)
        family: Family = registry.find("models", options.from_scratch).FAMILY
        skipped = SkippedRecords()
        text = TokenizedText.of(read_documents(options.data, skipped), VOCAB_SIZE)
        vocab_size, tokens = text.tokenizer.get_vocab_size(), sum(map(len, text.training))
        changes = {"vocab_size": vocab_size, "bos_token_id": 0, "eos_token_id": 0}
        model = ScratchModel(options.from_scratch, family, changes, torch.float32)
        size = sum(each.numel() for each in model.masters.values())
        print_line(f"{options.from_scratch}: {size:,} parameters, {tokens:,} tokens of text, {vocab_size} in all")
        facts = _facts(options, size, train(model, text, options, progress))
        save_model(folder, model.config, model.masters, text.tokenizer, facts)
        return Report(True, {"out": str(options.out), **facts}, [*_lines(options, facts), *skipped.lines()])


def _facts(options: ScratchOptions, size: int, result: ScratchResult) -> dict[str, Any]:
    state = result.progress
    return {
        "family": options.from_scratch, "command": options.command, "parameters": size, "steps": state.step,
        "tokens": state.tokens, "minutes": round(state.seconds / 60, 2), "loss": round(state.loss, 4),
        "held_out_loss": round(result.held_out_loss, 4),
        "held_out": result.acceptance.data() if result.acceptance else None,
    }  # fmt: skip


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


def save_model(
    folder: Path, config: Mapping[str, Any], masters: Mapping[str, Tensor], tokenizer: tokenizers.Tokenizer,
    facts: Mapping[str, Any],
) -> None:  # fmt: skip
    """Write a Hugging Face directory: weights in bfloat16, configs, tokenizer, and `facts` about the training."""
    tensors = {name: safetensors.bfloat16(master.detach().cpu().numpy()) for name, master in masters.items()}
    safetensors.save(folder / "model.safetensors", tensors, {"format": "pt"})
    documents = {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "model_max_length": config["max_position_embeddings"],
        },
        "training.json": {"headstart_version": __version__, **facts},
    }
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
