"""`headstart verify` on a tiny random model of every family, native backend, all pairs of levels and many random cells.

    python benchmarks/verify_families.py --json verify.json                 # every family, 500 cells each
    python benchmarks/verify_families.py --families qwen3_5 --cells 100

Levels: temperature 0, 0.7, 1; depth 0 to 5 and auto; MTP, n-gram and mixed drafts (n-gram alone where a family has no
MTP module); 1, 4 and 16 sequences at a time; chunks of 1, 37 and 512 rows; prefix cache and preemption on and off;
1 and 2 threads. The trunk is softened and the MTP module made to say what the trunk says from its last token, so that
drafts are accepted, rejected and cut at every place. Exit code 1 on a difference; nothing is excused.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from headstart import registry
from headstart.config import AUTO, EngineConfig
from headstart.errors import ModelError
from headstart.models.base import Family
from headstart.models.small import Arrays
from headstart.tools.tiny import write_model
from headstart.tools.verify import run as verify
from headstart.tools.verify.options import VerifyOptions

LENGTHS = (1, 5, 17, 30, 45, 64)
"""Of the prompts; the longer ones begin with the same tokens."""
SHARED = 20
SOFT = 0.1
QUIET = ("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight", "experts.down_proj", "down_proj_bias")
PROJECTIONS = {
    "mtp.fc.weight": False, "eh_proj.weight": False, "input_proj.weight": True, "mtp_linear_proj.0.weight": False,
}  # fmt: skip
"""Ending of the name of an MTP module's projection -> does the hidden state come first?"""
TAKES = r"pre_fc_norm_embedding\.weight|enorm(\.m)?\.weight|token_layernorm\.weight"
SAYS = r"mtp\.norm\.weight|shared_head\.norm\.weight|final_layernorm\.weight|mtp_emb_norm"


VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4_experts": (
        "gemma4", {"enable_moe_block": True, "num_experts": 5, "top_k_experts": 2, "moe_intermediate_size": 20},
    ),
    "gemma4_shared": (
        "gemma4",
        {
            "num_hidden_layers": 5, "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
            "layer_types": [("sliding", "full")[i % 2 if i < 3 else i - 3] + "_attention" for i in range(5)],
        },
    ),
}  # fmt: skip
"""Rows beside those of each family: the family, and changes of its small config."""


def agreeing(arrays: Arrays) -> Arrays:
    """Quiet blocks; an MTP module that passes its token's embedding on to the trunk's own last norm."""
    arrays = {name: array * np.float32(SOFT if name.endswith(QUIET) else 1) for name, array in arrays.items()}
    folded = any("pre_fc_norm" in name for name in arrays)  # norms that are 1 + w
    for name, array in arrays.items():
        for ending, hidden_first in PROJECTIONS.items():
            if name.endswith(ending):
                halves = [np.eye(len(array)), np.zeros((len(array),) * 2)]
                arrays[name] = np.hstack(halves[::-1] if hidden_first else halves).astype(np.float32)
        if re.search(TAKES, name):
            arrays[name] = np.full_like(array, 0.0 if folded else 1.0)
        elif re.search(SAYS, name) and name != "model.norm.weight":
            arrays[name] = arrays["model.norm.weight"]
    return arrays


def prompts(vocab: int) -> tuple[list[int], ...]:
    rng = np.random.default_rng(0)
    common = rng.integers(3, vocab, SHARED).tolist()
    return tuple((common + rng.integers(3, vocab, length).tolist())[:length] for length in LENGTHS)


def check(family: str, args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One family's document of `headstart verify`, with the seconds it took."""
    name, changes = VARIANTS.get(family, (family, {}))
    found: Family = registry.find("models", name).FAMILY
    config, arrays = found.tiny(**changes)
    has_head = any(name.endswith(ending) for name in arrays for ending in PROJECTIONS)
    texts = prompts(config["vocab_size"])
    options = VerifyOptions(
        model=str(write_model(folder / family, config, agreeing(arrays))),
        config=EngineConfig(backend="native"),
        prompts=tuple(texts),
        max_tokens=args.max_tokens,
        min_texts=args.cells * len(texts),
        depths=(0, 1, 2, 3, 4, 5, AUTO),
        drafters=("mtp", "ngram", "mixed") if has_head else ("ngram",),
        batch_sizes=(1, 4, 16),
        chunk_sizes=(1, 37, 512),
        thread_counts=tuple(args.threads),
    )
    begun, shown = time.perf_counter(), 0.0

    def progress(done: int, total: int, text: str) -> None:
        nonlocal shown
        if sys.stderr.isatty() and time.perf_counter() - shown > 1:
            shown = time.perf_counter()
            print(f"\r{family}: {done}/{total} {text:40}", end="", file=sys.stderr, flush=True)

    report = verify.run(options, progress)
    for line in report.lines:
        if "DIFFERENT" in line:
            print(line)
    return {**report.data, "family": family, "seconds": time.perf_counter() - begun}


def row(found: dict[str, Any]) -> str:
    lengths = [cell["acceptance_length"] for cell in found["cells"] if cell["depth"] == 3]
    cells = (
        found["family"], len(found["cells"]), f"{found['identical']}/{found['texts']}", found["tokens"],
        found["preemptions"], f"{np.mean(lengths):.2f}", found["differences"], f"{found['seconds']:.0f}",
    )  # fmt: skip
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = [*registry.available("models"), *VARIANTS]
    add("--families", type=lambda text: text.split(","), default=names, help=",".join(names))
    add("--cells", type=int, default=500, help="of each family, at least")
    add("--max-tokens", type=int, default=24)
    add("--threads", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    add("--json", type=Path, help="file for all documents")
    args = parser.parse_args()
    if unknown := sorted(set(args.families) - set(names)):
        parser.error(f"--families: unknown {unknown[0]}")
    print("| family | cells | texts identical | tokens | preemptions | acceptance length, depth 3 | differences | s |")
    print("|---" * 8 + "|")
    documents = []
    with tempfile.TemporaryDirectory() as folder:
        for family in args.families:
            try:
                documents.append(check(family, args, Path(folder)))
            except ModelError as error:  # a family that the backend refuses by name
                print(f"| {family} | refused: {error.message} |", flush=True)
                continue
            print(row(documents[-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(documents, indent=1))
    return int(any(document["differences"] for document in documents))


if __name__ == "__main__":
    sys.exit(main())
