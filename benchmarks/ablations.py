"""What matters when a head is trained: short runs that differ from a base run in one thing.

    headstart train --kind eagle3 --data texts --out eagle3 --tokens 3000000     # leaves hidden states behind
    python benchmarks/ablations.py --data texts --cache eagle3.training/cache-* --tokens 400000 --json ablations.json

The cache of an EAGLE-3 run holds three tapped streams and the final states, so every kind of head trains on the same
examples in the same order. Every run: `--tokens` training tokens from the start, one seed, the same held-out examples;
the number is the held-out acceptance length over three draft steps, greedy, teacher-forced, in int4 as drafts run. A
run that is in the JSON file is not made again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headstart.heads.kind import EMBEDDING_SHARE, head_kind
from headstart.train.batches import plan_epoch
from headstart.train.data import Example, Problems, draft_vocabulary, encode_records, read_records
from headstart.train.evaluate import evaluate
from headstart.train.features import FeatureCache
from headstart.train.head import first_weights, modules_of
from headstart.train.loop import Recipe, Trainer
from headstart.train.objective import Target, Weighting
from headstart.train.rounding import rounded
from headstart.train.setup import Subject, load_subject

STEPS = (1.0, 0.8, 0.6)
WRITTEN_BY_OTHERS = ("text", "code")


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One run. `keeps`: which examples are used; `tokens`: share of the base run's."""

    kind: str = "mtp"
    steps: tuple[float, ...] = STEPS
    vocabulary: int = 12_288
    modules: int = 1
    random_start: bool = False
    embedding: float = EMBEDDING_SHARE
    keeps: Callable[[Example], bool] = lambda example: True
    tokens: float = 1.0
    top1: float = 0.5
    rounded: bool = True


def own(example: Example) -> bool:
    """Text that the model wrote itself."""
    return not example.kind.startswith(WRITTEN_BY_OTHERS)


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
    "EAGLE-3": Variant(kind="eagle3"),
    "Medusa": Variant(kind="medusa"),
}


def train(
    variant: Variant,
    subject: Subject,
    training: list[Example],
    held_out: list[Example],
    cache: FeatureCache,
    tokens: int,
    batch_tokens: int,
) -> dict[str, Any]:
    """One run, to the end of its schedule."""
    training_of, config = head_kind(variant.kind).training, subject.config
    assert training_of is not None
    spec = replace(training_of.spec(config.num_layers, len(STEPS)), layer=config.head_layer)
    if variant.modules > 1:
        spec = replace(spec, num_modules=variant.modules, beyond="last")
    chosen = [example for example in training if variant.keeps(example)]
    ids = torch.from_numpy(draft_vocabulary(training, variant.vocabulary, subject.text.end_ids))
    start = first_weights(training_of, spec, subject.trunk.model, 1.0)
    if variant.embedding != EMBEDDING_SHARE:
        columns = slice(None, config.hidden_size)  # the embedding's come first (HeadSpec.hidden_first is False)
        start["mtp.0.projection.weight"][:, columns] *= variant.embedding / EMBEDDING_SHARE
    if variant.random_start:
        start = {name: _random(tensor) for name, tensor in start.items()}
    recipe = Recipe(
        tokens=round(tokens * variant.tokens),
        batch_tokens=batch_tokens,
        weighting=Weighting(variant.steps, variant.top1),
        dtype=subject.trunk.dtype,
        rounded=variant.rounded,
    )
    trainer = Trainer(start, spec, Target.of(subject.trunk, ids, rounded=variant.rounded), recipe)
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
    parser.add_argument("--cache", type=Path, required=True, help="of an EAGLE-3 run")
    parser.add_argument("--tokens", type=int, default=400_000)
    parser.add_argument("--batch-tokens", type=int, default=1024, help="short runs need many steps")
    parser.add_argument("--only", action="append", choices=VARIANTS, help="a variant; may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, required=True, help="results; runs that are in it are not made again")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    subject = load_subject(None, args.threads, "cpu", "eagle3")  # type: ignore[arg-type]
    problems = Problems()
    examples = encode_records(read_records(args.data, problems), subject.text, problems)
    cache = FeatureCache(args.cache, subject.config.hidden_size, len(subject.trunk.tap))
    order = np.random.default_rng(0).permutation(len(examples))
    examples = [examples[i] for i in order if examples[i].key in cache]
    held_out = [example for example in examples if example.held_out]
    training = [example for example in examples if not example.held_out]
    found = json.loads(args.json.read_text()) if args.json.exists() else {}
    for name in args.only or VARIANTS:
        if name not in found:
            print(name, file=sys.stderr, flush=True)
            found[name] = train(VARIANTS[name], subject, training, held_out, cache, args.tokens, args.batch_tokens)
            args.json.write_text(json.dumps(found, indent=1))
    base = found.get("base", {}).get("length")
    print("| run | acceptance length | to base | by position | tokens (distinct) |\n|---|---|---|---|---|")
    for name, row in found.items():
        places = " ".join(f"{share:.3f}" for share in row["by_position"])
        difference = f"{row['length'] - base:+.3f}" if base else ""
        tokens = f"{row['tokens'] / 1e3:.0f} k ({row['distinct'] / 1e3:.0f} k)"
        print(f"| {name} | {row['length']:.3f} | {difference} | {places} | {tokens} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
