"""Checks of every family and weight format on small random models, as one table: transformers, llama.cpp, drafters, and
`headstart verify` on `native`.

    python benchmarks/verify_families.py --llama-source LLAMA --json verify.json      # all columns, 500 cells each
    python benchmarks/verify_families.py --rows qwen3_5 --cells 100 --columns cells
    python benchmarks/verify_families.py --columns cuda --json cuda.json               # kernels of cuda, without a GPU
    python benchmarks/verify_families.py --columns cells --path avx2 --json avx2.json  # other instructions

Rows are the families, variants of some, and `mimo+FORMAT`: a trunk in a weight format with a float MTP module.

transformers  transformers' class in float32: maximum logit difference (90 rows; limit 2e-4), the first 100 greedy
              tokens, and the tokens of `native` (with drafts) against `reference`.
llama         llama.cpp's converter writes F32 and F16, its quantizer Q8_0 and Q4_K_M (families/in_llama.py). 24 greedy
              steps after 40 tokens, the worse of `reference` and `native`: in F32 the maximum difference of a
              log-probability, else the median divergence. Limits: `LIMITS` of in_llama.py.
drafter       Draft logits of native MTP modules against tests/contract/oracles.py, and of the DSpark drafters of
              DeepSeek-V4 and V4.1 against tests/contract/test_v4_dspark.py.
cells         `headstart verify`, all pairs of levels and many random cells: temperature 0, 0.7, 1; depth 0 to 5 and
              auto; MTP, n-gram and mixed drafts (n-gram alone where a family has no MTP module); 1, 4 and 16 sequences
              at a time; chunks of 1, 37 and 512 rows; prefix cache and preemption on and off; 1 and 2 threads; prompts
              of 530 to 1,100 tokens in a few cells. The trunk's blocks are scaled down, and the MTP module predicts
              similarly from its last token (families/softened.py), so that drafts are accepted, rejected and cut.
cuda          `cuda` against `reference` in float32 (in Triton's interpreter without a GPU): maximum difference of a
              log-probability (limit 2e-4), bit equality with drafts, chunks and batches, and number of accepted tokens
              (families/in_cuda.py). Not a default column.

`native` runs the best path of this CPU, or --path. With --json results are saved as they are measured: the same command
continues a stopped run and repeats cells that are red or had other settings. Exit code 1 on a red cell. `-`: not
applicable (no MTP module; no architecture in llama.cpp; values of weight formats are checked by tests).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from families import in_cuda, in_llama, in_transformers
from families.results_file import ResultsFile, marked, red
from families.rows import Row, all_rows

from headstart.config import EngineConfig
from headstart.errors import ModelError
from headstart.kernels.native import backend
from headstart.tools.verify import run as verify
from headstart.tools.verify.options import FULL, VerifyOptions

LENGTHS = (1, 5, 17, 30, 45, 64)
"""Lengths of prompts; the longer ones share a prefix."""
SHARED = 20
Measured = tuple[dict[str, str], dict[str, Any]]
"""(texts of the table by column head, all findings)."""


def prompts(vocab: int) -> tuple[list[int], ...]:
    rng = np.random.default_rng(0)
    common = rng.integers(3, vocab, SHARED).tolist()
    return tuple((common + rng.integers(3, vocab, length).tolist())[:length] for length in LENGTHS)


def cells(row: Row, args: argparse.Namespace, folder: Path) -> Measured:
    """Document of `headstart verify`. Raises TimeoutError beyond --limit."""
    model, vocab, drafts = row.write(folder)
    texts = prompts(vocab)
    options = VerifyOptions(
        model=str(model),
        config=EngineConfig(backend="native"),
        prompts=tuple(texts),
        max_tokens=args.max_tokens,
        min_texts=args.cells * len(texts),
        depths=FULL["depths"],
        drafters=(drafts, "ngram", "mixed") if drafts else ("ngram",),
        batch_sizes=FULL["batch_sizes"],
        chunk_sizes=FULL["chunk_sizes"],
        thread_counts=tuple(args.threads),
        long_lengths=FULL["long_lengths"],
    )
    begun, shown = time.process_time(), 0.0

    def progress(done: int, total: int, text: str) -> None:
        nonlocal shown
        if time.process_time() - begun > args.limit:
            raise TimeoutError(f"{done} of {total} texts in {args.limit:g} s, see --limit")
        if sys.stderr.isatty() and time.perf_counter() - shown > 1:
            shown = time.perf_counter()
            print(f"\r{row.name}: {done}/{total} {text:40}", end="", file=sys.stderr, flush=True)

    report = verify.run(options, progress)
    for line in report.lines:
        if "DIFFERENT" in line:
            print(line, file=sys.stderr)
    found = report.data
    lengths = [cell["acceptance_length"] for cell in found["cells"] if cell["depth"] == 3]
    said = f"{found['identical']}/{found['texts']} texts, {np.mean(lengths):.2f} a pass"
    return {"cells": marked(said, not found["differences"])}, found


def transformers(row: Row, args: argparse.Namespace, folder: Path) -> Measured:
    if row.weight_format or row.name in in_transformers.NOT_THERE:
        return dict.fromkeys(COLUMNS["transformers"][0], "-"), {}
    found = in_transformers.compare(row.family, row.module, folder / "theirs" / row.name, row.changes)
    steps = in_transformers.GREEDY
    return {
        "logits": marked(f"{found.logits:.0e}", found.logits <= in_transformers.LIMIT),
        "greedy": marked(f"{found.greedy}/{steps}", found.greedy == steps),
        "native": marked(f"{found.native}/{steps}", found.native == steps),
    }, vars(found)


def llama(row: Row, args: argparse.Namespace, folder: Path) -> Measured:
    if row.weight_format or {row.module, row.name} & {*in_llama.NOT_THERE}:
        return dict.fromkeys(in_llama.TYPES, "-"), {}
    place = folder / "gguf" / row.name
    found = in_llama.compare_all(row.family, row.module, row.name, place, row.changes, args.llama_source)
    texts: dict[str, str] = {}
    for kind, each in found.items():
        worst, good = in_llama.table_cell(row.module, kind, each)
        texts[kind] = marked(f"{worst:.0e}", good)
    return texts, {kind: {backend: vars(one) for backend, one in each.items()} for kind, each in found.items()}


def drafter(row: Row, args: argparse.Namespace, folder: Path) -> Measured:
    if row.weight_format or not in_transformers.has_drafter(row.name):
        return {"drafter": "-"}, {}
    in_transformers.check_drafter(row.name)
    return {"drafter": "equal"}, {}


def cuda(row: Row, args: argparse.Namespace, folder: Path) -> Measured:
    model, vocab, drafts = row.write(folder)
    try:
        found = in_cuda.compare(model, vocab, drafts=drafts)
    except ModelError as error:
        return {"cuda": f"refused: {error}", "exact": "-"}, {}
    return {
        "cuda": marked(f"{found.difference:.0e}", found.difference <= in_cuda.LIMIT and found.same),
        "exact": marked(f"{found.accepted} accepted", found.exact),
    }, vars(found)


COLUMNS: dict[str, tuple[tuple[str, ...], Callable[[Row, argparse.Namespace, Path], Measured]]] = {
    "transformers": (("logits", "greedy", "native"), transformers),
    "llama": (in_llama.TYPES, llama),
    "drafter": (("drafter",), drafter),
    "cells": (("cells",), cells),
    "cuda": (("cuda", "exact"), cuda),
}


def measure(row: Row, column: str, args: argparse.Namespace) -> tuple[dict[str, str], Any, float]:
    """(texts of the table, findings, seconds)."""
    heads, measured = COLUMNS[column]
    begun, found = time.perf_counter(), dict[str, Any]()
    try:
        with tempfile.TemporaryDirectory() as folder:
            texts, found = measured(row, args, Path(folder))
    except Exception as error:  # noqa: BLE001  a failing family must not hide the others
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        texts = {heads[0]: marked(f"{type(error).__name__}: {first[:160]}", False)}
    return texts, found, time.perf_counter() - begun


def line(row: str, args: argparse.Namespace, kept: ResultsFile) -> str:
    shown = [row]
    for column in args.columns:
        texts = kept.rows[row][column]["texts"]
        shown += [texts.get(head, "") for head in COLUMNS[column][0]]
    return "| " + " | ".join(shown) + " |"


def parsed(rows: dict[str, Row]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--rows", type=lambda text: text.split(","), default=list(rows), help=",".join(rows))
    add(
        "--columns", type=lambda text: text.split(","), help=f"some of {', '.join(COLUMNS)}; default: all possible ones"
    )
    add("--llama-source", type=Path, help="llama.cpp's source, with build/bin")
    add("--cells", type=int, default=500, help="minimum of each row")
    add("--limit", type=float, default=600, help="maximum CPU seconds of the cells of a row")
    add("--max-tokens", type=int, default=24)
    add("--path", help="instruction-set path: " + ", ".join(backend.instruction_paths()))
    add("--threads", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2])
    add("--json", type=Path, help="file that keeps the results")
    args = parser.parse_args()
    asked = {"cuda": False, "llama": args.llama_source}
    args.columns = args.columns or [name for name in COLUMNS if asked.get(name, True)]
    paths = [args.path] if args.path else []
    for option, given, known in (
        ("--rows", args.rows, rows),
        ("--columns", args.columns, COLUMNS),
        ("--path", paths, backend.instruction_paths()),
    ):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"{option}: unknown {unknown[0]}")
    if "llama" in args.columns and not args.llama_source:
        parser.error("--columns llama needs --llama-source")
    return args


def main() -> int:
    rows = all_rows()
    args = parsed(rows)
    asked = {"cells": args.cells, "max_tokens": args.max_tokens, "threads": args.threads}
    if args.path:
        backend.paths = lambda portable_bits: [args.path]
    forced = {"path": args.path} if args.path else {}
    kept = ResultsFile(args.json, {column: forced | (asked if column == "cells" else {}) for column in COLUMNS})
    heads = ["row", *(head for name in args.columns for head in COLUMNS[name][0])]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|", flush=True)
    before = 0
    for name in args.rows:
        for column in args.columns:
            if kept.good(name, column):
                before += 1
            else:
                kept.add(name, column, *measure(rows[name], column, args))
        print(line(name, args, kept), flush=True)
    bad = [f"{name}, {each}" for name in args.rows for column in args.columns for each in red(kept.rows[name][column])]
    print(f"\n{len(args.rows)} rows, {len(bad)} red; {before} results were there before")
    print("\n".join(bad))
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
