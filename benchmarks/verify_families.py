"""Every family on small random models: beside transformers, beside llama.cpp, and `headstart verify` on `native`.

    python benchmarks/verify_families.py --llama-source LLAMA --json verify.json      # all columns, 500 cells each
    python benchmarks/verify_families.py --families qwen3_5 --cells 100 --columns cells

transformers  Its own class, float32: the largest difference of a logit (90 rows; limit 2e-4), the first 100 greedy
              tokens, and those of `native` (with drafts) against `reference`.
llama         llama.cpp's source with `build/bin`: its converter writes F32 and F16, its quantizer Q8_0 and Q4_K_M
              (families/in_llama.py). The same 24 greedy steps behind 40 tokens, the worse of `reference` and `native`:
              in F32 the largest difference of a log-probability, else the median divergence. Limits: `LIMITS` there.
drafter       Draft logits of native MTP modules beside the formula of tests/contract/native_heads.py.
cells         `headstart verify`, all pairs of levels and many random cells: temperature 0, 0.7, 1; depth 0 to 5 and
              auto; MTP, n-gram and mixed drafts (n-gram alone where a family has no MTP module); 1, 4 and 16 sequences
              at a time; chunks of 1, 37 and 512 rows; prefix cache and preemption on and off; 1 and 2 threads. The
              trunk is softened and the MTP module made to say what the trunk says from its last token, so that drafts
              are accepted, rejected and cut at every place.

Exit code 1 on a red cell; nothing is excused. `-`: there is none (no MTP module; no architecture of llama.cpp's).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from families import in_llama, in_transformers

from headstart import registry
from headstart.config import AUTO, EngineConfig
from headstart.models.base import Family
from headstart.models.small import Arrays
from headstart.tools.tiny import write_model
from headstart.tools.verify import run as verify
from headstart.tools.verify.options import VerifyOptions

LENGTHS = (1, 5, 17, 30, 45, 64)
"""Of the prompts; the longer ones begin with the same tokens."""
SHARED = 20
SOFT = 0.1
QUIET = (
    "o_proj.weight", "wo_b.weight", "out_proj.weight", "down_proj.weight", "w2.weight", "experts.down_proj",
    "down_proj_bias",
)  # fmt: skip
PROJECTIONS = {
    "mtp.fc.weight": False, "eh_proj.weight": False, "input_proj.weight": True, "mtp_linear_proj.0.weight": False,
}  # fmt: skip
"""Ending of the name of an MTP module's projection -> does the hidden state come first?"""
SUMMED = {".e_proj.weight": 1.0, ".h_proj.weight": 0.0}
"""Two projections whose results are added -> how much of its input each lets through."""
TAKES = r"pre_fc_norm_embedding\.weight|enorm(\.m)?\.weight|token_layernorm\.weight"
SAYS = r"mtp\.(\d\.)?norm\.weight|shared_head\.norm\.weight|final_layernorm\.weight|mtp_emb_norm"
LAST_NORMS = ("model.norm.weight", "backbone.norm_f.weight", "model.final_layernorm.weight", "norm.weight")
"""Of the trunk."""


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
    last = next((name for name in LAST_NORMS if name in arrays), "")
    for name, array in arrays.items():
        for ending, hidden_first in PROJECTIONS.items():
            if name.endswith(ending):
                halves = [np.eye(len(array)), np.zeros((len(array),) * 2)]
                arrays[name] = np.hstack(halves[::-1] if hidden_first else halves).astype(np.float32)
        for ending, share in SUMMED.items():
            if name.endswith(ending):
                arrays[name] = np.float32(share) * np.eye(len(array), dtype=np.float32)
        if re.search(TAKES, name):
            arrays[name] = np.full_like(array, 0.0 if folded else 1.0)
        elif re.search(SAYS, name) and name != last:
            arrays[name] = arrays[last]
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
    has_head = any(name.endswith(ending) for name in arrays for ending in {**PROJECTIONS, **SUMMED})
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


def cells(family: str, args: argparse.Namespace, folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    found = check(family, args, folder)
    lengths = [cell["acceptance_length"] for cell in found["cells"] if cell["depth"] == 3]
    texts = f"{found['identical']}/{found['texts']} texts, {np.mean(lengths):.2f} a pass"
    return {"cells": marked(texts, not found["differences"])}, found


def transformers(family: str, args: argparse.Namespace, folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    name, changes = VARIANTS.get(family, (family, {}))
    found = in_transformers.compare(registry.find("models", name).FAMILY, name, folder / "theirs" / family, changes)
    steps = in_transformers.GREEDY
    return {
        "logits": marked(f"{found.logits:.0e}", found.logits <= in_transformers.LIMIT),
        "greedy": marked(f"{found.greedy}/{steps}", found.greedy == steps),
        "native": marked(f"{found.native}/{steps}", found.native == steps),
    }, vars(found)


def llama(family: str, args: argparse.Namespace, folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    name, changes = VARIANTS.get(family, (family, {}))
    if name in in_llama.NOT_THERE:
        return dict.fromkeys(in_llama.TYPES, "-"), {}
    declared: Family = registry.find("models", name).FAMILY
    found = in_llama.compare_all(declared, name, family, folder / "gguf" / family, changes, args.llama_source)
    rows: dict[str, str] = {}
    for kind, each in found.items():
        worst, good = in_llama.judged(name, kind, each)
        rows[kind] = marked(f"{worst:.0e}", good)
    return rows, {kind: {backend: vars(one) for backend, one in each.items()} for kind, each in found.items()}


def drafter(family: str, args: argparse.Namespace, folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    name = VARIANTS.get(family, (family, {}))[0]
    if name != family or not in_transformers.has_drafter(name):
        return {"drafter": "-"}, {}
    try:
        in_transformers.check_drafter(name)
    except AssertionError as error:
        return {"drafter": marked(str(error).strip().splitlines()[0], False)}, {}
    return {"drafter": "equal"}, {}


COLUMNS: dict[str, tuple[tuple[str, ...], Callable[..., tuple[dict[str, str], dict[str, Any]]]]] = {
    "transformers": (("logits", "greedy", "native"), transformers),
    "llama": (in_llama.TYPES, llama),
    "drafter": (("drafter",), drafter),
    "cells": (("cells",), cells),
}


def marked(text: str, good: bool) -> str:
    return text if good else f"**RED** {text}"


def row(family: str, args: argparse.Namespace, folder: Path) -> tuple[list[str], dict[str, Any]]:
    """Cells of a family's row, and all that was found."""
    shown, document = [family], {}
    for name in args.columns:
        heads, measure = COLUMNS[name]
        try:
            texts, document[name] = measure(family, args, folder)
        except Exception as error:  # noqa: BLE001  one family that fails must not hide the others
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            texts = {heads[0]: marked(f"{type(error).__name__}: {first[:160]}", False)}
        shown += [texts.get(head, "") for head in heads]
    return shown, {"family": family, **document}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = [*registry.available("models"), *VARIANTS]
    add("--families", type=lambda text: text.split(","), default=names, help=",".join(names))
    add("--columns", type=lambda text: text.split(","), help=f"of {', '.join(COLUMNS)}; default: all that can be")
    add("--llama-source", type=Path, help="llama.cpp's source, with build/bin")
    add("--cells", type=int, default=500, help="of each family, at least")
    add("--max-tokens", type=int, default=24)
    add("--threads", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    add("--json", type=Path, help="file for all documents")
    args = parser.parse_args()
    args.columns = args.columns or [name for name in COLUMNS if name != "llama" or args.llama_source]
    for option, given, known in (("--families", args.families, names), ("--columns", args.columns, [*COLUMNS])):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{option}: unknown {unknown[0]}")
    if "llama" in args.columns and not args.llama_source:
        parser.error("--columns llama needs --llama-source")
    heads = ["family", *(head for name in args.columns for head in COLUMNS[name][0])]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    documents, red = [], 0
    for family in args.families:
        with tempfile.TemporaryDirectory() as folder:
            shown, document = row(family, args, Path(folder))
        print("| " + " | ".join(shown) + " |", flush=True)
        red += sum("**RED**" in text for text in shown)
        documents.append(document)
        if args.json:
            args.json.write_text(json.dumps(documents, indent=1))
    print(f"\n{len(documents)} families, {red} red")
    return int(red > 0)


if __name__ == "__main__":
    sys.exit(main())
