"""What matters when a head is trained: short runs that differ from a base run in one thing.

    headstart train --kind block --data texts --out block --tokens 3000000     # leaves hidden states behind
    python benchmarks/ablations.py --data texts --cache block.training/cache-* --tokens 400000 --json ablations.json

The cache of a run of kind K holds the streams that K taps and the final states, so variants of K and of kinds that tap
nothing train on the same examples in the same order (those of other kinds are left out). Every run: `--tokens`
training tokens from the start, one seed, the same held-out examples; the number is the held-out acceptance length over
three draft steps, greedy, teacher-forced, in int4 as drafts run, and the expected one at T = 1. `--begin CHECKPOINT`:
runs of kind block go on from a training run's, which shows what counts later on. A run that is in the JSON file is not
made again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads.kind import EMBEDDING_SHARE, head_kind
from headstart.layers.decoder import LayerConfig
from headstart.train.batches import plan_epoch
from headstart.train.data import Example, Problems, draft_vocabulary, encode_records, read_records
from headstart.train.evaluate import evaluate
from headstart.train.features import FeatureCache
from headstart.train.head import first_weights, modules_of
from headstart.train.loop import Recipe, Trainer, TrainingProgress
from headstart.train.losses import Terms
from headstart.train.objective import Target, Weighting
from headstart.train.rounding import rounded
from headstart.train.setup import Subject, load_subject

STEPS = (1.0, 0.8, 0.6)
WRITTEN_BY_OTHERS = ("text", "code")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One run. `keeps`: which examples are used; `tokens`, `batch` and `rate`: shares of the base run's."""

    kind: str = "mtp"
    steps: tuple[float, ...] = STEPS
    vocabulary: int = 12_288
    modules: int = 1
    random_start: bool = False
    embedding: float = EMBEDDING_SHARE
    keeps: Callable[[Example], bool] = lambda example: True
    tokens: float = 1.0
    top1: float = 0.5
    variation: float = 0.0
    candidates: int = 0
    rounded: bool = True
    anchors: float = 0.5
    rate: float = 1.0
    batch: float = 1.0
    block: Mapping[str, Any] = field(default_factory=dict)  # fields of BlockSpec
    layer: Callable[[LayerConfig], LayerConfig] | None = None  # None: as the kind has it


def own(example: Example) -> bool:
    """Text that the model wrote itself."""
    return not example.kind.startswith(WRITTEN_BY_OTHERS)


BLOCK = Variant(kind="block", steps=Weighting.of_block(8).steps, candidates=3072, variation=1.0)
VARIANTS: dict[str, Variant] = {
    "base": Variant(),
    "half the tokens": Variant(tokens=0.5),
    "a quarter of the tokens": Variant(tokens=0.25),
    "own text only": Variant(keeps=own),
    "others' text only": Variant(keeps=lambda example: not own(example)),
    "answers to questions only": Variant(keeps=lambda example: example.kind in ("qa", "stem", "humanities")),
    "one step, not unrolled": Variant(steps=(1.0,)),
    "two steps": Variant(steps=(1.0, 0.8)),
    "4,096 draft tokens": Variant(vocabulary=4_096),
    "24,576 draft tokens": Variant(vocabulary=24_576),
    "random start": Variant(random_start=True),
    "embedding at full share": Variant(embedding=1.0),
    "a layer for each step": Variant(modules=3),
    "soft loss only": Variant(top1=0.0),
    "not trained for int4": Variant(rounded=False),
    "candidates, not all draft tokens": Variant(candidates=3072),
    "total variation": Variant(variation=1.0),
    "random start, candidates, total variation": Variant(random_start=True, candidates=3072, variation=1.0),
    "EAGLE-3": Variant(kind="eagle3"),
    "Medusa": Variant(kind="medusa"),
    "block": BLOCK,
    "block: one layer": replace(BLOCK, block={"num_layers": 1}),
    "block: three layers": replace(BLOCK, block={"num_layers": 3}),
    "block: norms of taps": replace(BLOCK, block={"tap_norms": True}),
    "block: the trunk's own block": replace(BLOCK, layer=lambda layer: layer),
    "block: norms of taps, and the trunk's own block": replace(
        BLOCK, block={"tap_norms": True}, layer=lambda layer: layer
    ),
    "block: no Markov head": replace(BLOCK, block={"markov_rank": 0, "confidence_markov": False}),
    "block: all draft tokens": replace(BLOCK, candidates=0),
    "block: without total variation": replace(BLOCK, variation=0.0),
    "block: total variation counts three times": replace(BLOCK, variation=3.0),
    "block: anchors at a quarter of the places": replace(BLOCK, anchors=0.25),
    "block: double learning rate": replace(BLOCK, rate=2.0),
    "block: half the batch": replace(BLOCK, batch=0.5),
}


def train(
    variant: Variant,
    subject: Subject,
    training: list[Example],
    held_out: list[Example],
    cache: FeatureCache,
    tokens: int,
    batch_tokens: int,
    begin: Mapping[str, Any],
) -> dict[str, Any]:
    """One run, to the end of its schedule."""
    training_of, config = head_kind(variant.kind).training, subject.config
    assert training_of is not None
    begin = begin if variant.kind == "block" else {}
    spec = replace(
        training_of.spec(config.num_layers, len(variant.steps)),
        layer=(variant.layer or training_of.layer)(config.head_layer),
    )
    if variant.modules > 1:
        spec = replace(spec, num_modules=variant.modules, beyond="last")
    chosen = [example for example in training if variant.keeps(example)]
    found_ids = torch.from_numpy(draft_vocabulary(training, variant.vocabulary, subject.text.end_ids))
    ids = begin.get("vocabulary", found_ids)
    if spec.block:
        sizes: dict[str, Any] = {"vocab_size": config.vocab_size, "draft_vocab_size": len(ids)}
        sizes |= {"mask_token_id": min(subject.text.end_ids), **variant.block}
        spec = replace(spec, block=replace(spec.block, **sizes))
    start = first_weights(training_of, spec, subject.trunk.model, 1.0)
    if variant.embedding != EMBEDDING_SHARE:
        columns = slice(None, config.hidden_size)  # the embedding's come first (HeadSpec.hidden_first is False)
        start["mtp.0.projection.weight"][:, columns] *= variant.embedding / EMBEDDING_SHARE
    if variant.random_start:
        start = {name: _random(tensor) for name, tensor in start.items()}
    recipe = Recipe(
        tokens=round(tokens * variant.tokens),
        batch_tokens=round(batch_tokens * variant.batch),
        matrix_rate=Recipe.matrix_rate * variant.rate,
        vector_rate=Recipe.vector_rate * variant.rate,
        weighting=Weighting(variant.steps, Terms(variant.top1, variant.variation), variant.candidates, variant.anchors),
        dtype=subject.trunk.dtype,
        rounded=variant.rounded,
    )
    trainer = Trainer(start, spec, Target.of(subject.trunk, ids, rounded=variant.rounded), recipe)
    if begin:
        trainer.load_state({**begin, "progress": vars(TrainingProgress())})
    lengths, begun, epoch = [len(example) for example in chosen], time.monotonic(), 0
    while trainer.share_done < 1:
        for batch in plan_epoch(lengths, recipe.batch_tokens, 0, epoch):
            trainer.step([chosen[i] for i in batch], cache)
            if trainer.share_done >= 1:
                break
        epoch += 1
    modules = modules_of(rounded(trainer.average), spec, config.hidden_size, recipe.dtype)
    target = Target.of(subject.trunk, ids, rounded=True)
    found = evaluate(modules, spec, target, held_out, cache, Weighting(STEPS))["all"]
    return {
        "length": found.length,
        "sampled": found.data()["sampled_length"],
        "by_position": found.cumulative,
        "tokens": trainer.progress.tokens,
        "distinct": min(sum(lengths), trainer.progress.tokens),
        "seconds": time.monotonic() - begun,
    }


def _random(tensor: Tensor) -> Tensor:
    """Norms stay; matrices are drawn with the usual 1 / sqrt(fan in)."""
    if tensor.ndim < 2:
        return tensor
    return torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0)) / tensor.shape[1] ** 0.5


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--cache", type=Path, required=True, help="hidden states of a training run")
    parser.add_argument("--kind", default="block", help="the kind of that run")
    parser.add_argument("--begin", type=Path, help="its checkpoint.pt")
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--batch-tokens", type=int, default=1024, help="short runs need many steps")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="a variant; may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True, help="results; runs that are in it are not made again")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    subject = load_subject(None, args.threads, "cpu", args.kind)  # type: ignore[arg-type]
    problems = Problems()
    examples = encode_records(read_records(args.data, problems), subject.text, problems)
    cache = FeatureCache(args.cache, subject.config.hidden_size, len(subject.trunk.tap))
    order = np.random.default_rng(0).permutation(len(examples))
    examples = [examples[i] for i in order if examples[i].key in cache]
    held_out = [example for example in examples if example.held_out]
    training = [example for example in examples if not example.held_out]
    found = json.loads(args.json.read_text()) if args.json.exists() else {}
    begin = torch.load(args.begin) if args.begin else {}
    fitting = [name for name, each in VARIANTS.items() if each.kind in (args.kind, "mtp", "medusa")]
    for name in args.only or fitting:
        if name not in found:
            print(name, file=sys.stderr, flush=True)
            corpus = (training, held_out, cache)
            found[name] = train(VARIANTS[name], subject, *corpus, args.tokens, args.batch_tokens, begin)
            args.json.write_text(json.dumps(found, indent=1))
    print("| run | acceptance length | T = 1 | to base | by position | tokens (distinct) |\n|---|---|---|---|---|---|")
    for name, row in found.items():
        places = " ".join(f"{share:.3f}" for share in row["by_position"])
        base = found.get("block" if name.startswith("block") else "base", {}).get("length")
        difference = f"{row['length'] - base:+.3f}" if base else ""
        tokens = f"{row['tokens'] / 1e3:.0f} k ({row['distinct'] / 1e3:.0f} k)"
        print(f"| {name} | {row['length']:.3f} | {row['sampled']:.3f} | {difference} | {places} | {tokens} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
