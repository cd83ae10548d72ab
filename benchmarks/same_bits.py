"""Compares tokens and logprobs of two versions of headstart, or of two instruction-set paths, bit for bit.

    OLD/.venv/bin/python benchmarks/same_bits.py --questions question.jsonl --out before.json
    NEW/.venv/bin/python benchmarks/same_bits.py --questions question.jsonl --out after.json
    python benchmarks/same_bits.py --compare before.json after.json
    python benchmarks/same_bits.py --questions question.jsonl --out paths.json --portable-bits --paths avx2 portable

The version is that of the interpreter's environment. Prompts: first turns of Spec-Bench, alternating categories, each
at T = 0 and T = 0.8 (seed: its number) with every drafter, at fixed depths or `auto`. Recorded: token ids, logprobs
with the top alternatives (as hexadecimal floats), finish reason, and drafted and accepted tokens at fixed depths.
`--paths` repeats this on each path. Exit code 1 if two files differ, or drafters or paths within one file. Tokens/s of
each cell include prefill of prompts that no earlier cell has cached.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

from measure.questions import NUM_CATEGORIES, in_turns

from headstart.api import LLM, Completion
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.kernels.native import backend as native

Document = dict[str, Any]
TEMPERATURES = (0.0, 0.8)
DRAFTERS = ("none", "mtp", "eagle3", "auto")
TEXT = ("token_ids", "logprobs", "finish_reason")
"""Fields that must be equal for all drafters."""


def record(completion: Completion, *, fixed_depth: bool) -> Document:
    found: Document = {
        "token_ids": completion.token_ids,
        "logprobs": [
            [each.token, each.logprob.hex(), [[token, value.hex()] for token, value in each.top]]
            for each in completion.logprobs
        ],
        "finish_reason": completion.finish_reason,
    }
    stats = completion.speculation
    return found | ({"drafting": [stats.drafts, stats.drafted, stats.accepted]} if fixed_depth else {})


@contextmanager
def on_path(path: str | None) -> Iterator[None]:
    """Engines built in this context use an instruction-set path; None: the best one of this CPU."""
    usable = native.paths

    def only(portable_bits: bool) -> list[str]:
        return [each for each in usable(portable_bits) if each == path] or sys.exit(f"no path {path}")

    with patch.object(native, "paths", only if path else usable):
        yield


def decode(args: argparse.Namespace) -> Document:
    """One record per prompt, by cell."""
    prompts = in_turns(args.questions, -(-args.prompts // NUM_CATEGORIES))[: args.prompts]
    cells: Document = {}
    for path, drafter in product(args.paths, args.drafters):
        name = f"{path}, {drafter}" if path else drafter
        depth: Any = "auto" if drafter == "auto" else 0 if drafter == "none" else args.depth
        config = EngineConfig(
            drafter=drafter, depth=depth, max_num_seqs=args.batch, threads=args.threads, max_model_len=4096,
            portable_bits=args.portable_bits,
        )  # fmt: skip
        with on_path(path):
            llm = LLM(args.model, config)
        for temperature in TEMPERATURES:
            params = [
                SamplingParams(
                    temperature=temperature, seed=seed, max_tokens=args.max_tokens, logprobs=args.logprobs
                )
                for seed in range(len(prompts))
            ]  # fmt: skip
            started = time.perf_counter()
            completions = llm.generate(prompts, params)
            seconds, tokens = time.perf_counter() - started, sum(len(each.token_ids) for each in completions)
            cell = f"{name}, T {temperature:g}"
            cells[cell] = [record(each, fixed_depth=depth != "auto") for each in completions]
            say(f"{cell}: {seconds:.0f} s, {tokens / seconds:.1f} tokens/s")
    about = {"prompts": len(prompts), "max_tokens": args.max_tokens, "depth": args.depth, "model": args.model}
    return {"about": about, "cells": cells}


def differences(cell: str, ones: list[Document], others: list[Document], keys: tuple[str, ...]) -> Iterator[str]:
    """One line per differing prompt, with its first difference."""
    for index, (one, other) in enumerate(zip(ones, others, strict=True)):
        for key in keys:
            if one.get(key) == other.get(key):
                continue
            place, mine, its = "", one.get(key), other.get(key)
            if isinstance(mine, list) and isinstance(its, list):
                pairs = enumerate(zip(mine, its, strict=False))
                at = next((i for i, (a, b) in pairs if a != b), min(len(mine), len(its)))
                place, mine, its = f" at {at}", mine[at : at + 1], its[at : at + 1]
            yield f"{cell}, prompt {index}, {key}{place}: {mine} and {its}"
            break


def compare(one: Document, other: Document) -> list[str]:
    """Differences of two documents. Prints the number of equal and different texts by cell."""
    if one["about"] != other["about"] or one["cells"].keys() != other["cells"].keys():
        sys.exit(f"not the same work: {one['about']} {list(one['cells'])}, {other['about']} {list(other['cells'])}")
    every: list[str] = []
    for cell, records in one["cells"].items():
        found = list(differences(cell, records, other["cells"][cell], (*TEXT, "drafting")))
        print(f"{cell:16} {len(records) - len(found):5} equal {len(found):5} different", flush=True)
        every += found
    return every


def among_cells(document: Document) -> list[str]:
    """Differences of each cell from the first cell at the same temperature."""
    first: dict[str, list[Document]] = {}
    every: list[str] = []
    for cell, records in document["cells"].items():
        base = first.setdefault(cell.rpartition(", ")[2], records)
        every += differences(cell, base, records, TEXT)
    return every


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--questions", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--compare", type=Path, nargs=2, metavar=("BEFORE", "AFTER"))
    parser.add_argument("--model")
    parser.add_argument("--drafters", nargs="+", default=list(DRAFTERS))
    parser.add_argument(
        "--paths", nargs="+", default=[None], help="instruction-set paths; default: the best one of this CPU"
    )
    parser.add_argument("--portable-bits", action="store_true")
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=100)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--logprobs", type=int, default=5)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--threads", type=int)
    args = parser.parse_args()
    if args.compare:
        before, after = (json.loads(path.read_text("utf-8")) for path in args.compare)
        found = compare(before, after)
    elif args.questions and args.out:
        document = decode(args)
        args.out.write_text(json.dumps(document), "utf-8")
        found = among_cells(document)
        print(f"{len(document['cells'])} cells of {document['about']['prompts']} prompts")
    else:
        parser.error("give --questions and --out, or --compare")
    print(f"first difference: {found[0]}" if found else "no difference")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
