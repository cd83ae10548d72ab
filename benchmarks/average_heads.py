"""Averages the weights of a head and of its continued training (Wortsman et al. 2022, "Robust fine-tuning of zero-shot
models"), to keep more of the earlier training.

    python benchmarks/average_heads.py EARLIER LATER --out AVERAGE --share 0.6

The result has the draft vocabulary of EARLIER and the provenance of LATER.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from headstart.heads.files import read_head
from headstart.train.head_weights import BY_TOKEN, export_head


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("earlier", type=Path)
    parser.add_argument("later", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--share", type=float, default=0.6, help="weight of LATER, 0 to 1")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists")
    earlier, later = read_head(args.earlier), read_head(args.later)
    if earlier.spec != later.spec:
        parser.error("the heads differ in kind, sizes or layers that they read")
    if by_token := BY_TOKEN & later.tensors.keys():
        parser.error(f"{min(by_token)} has a row for each draft token, and the vocabularies may differ")
    share, rest = np.float32(args.share), np.float32(1 - args.share)
    averages = {
        name: torch.from_numpy(share * tensor.float32() + rest * earlier.tensors[name].float32())
        for name, tensor in later.tensors.items()
    }
    training = {**later.training, "averaged": {"share": args.share, "earlier": earlier.training.get("command")}}
    head = replace(later, draft_token_ids=earlier.draft_token_ids, training=training)
    export_head(args.out, head, averages)


if __name__ == "__main__":
    main()
