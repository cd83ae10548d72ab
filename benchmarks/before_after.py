"""Compares the speed of two versions of headstart: passes, drafts and the Python share of a step, in alternating turns.

    python benchmarks/before_after.py OLD NEW --rounds 7        # checkouts, each with its own .venv

A turn is a process: the checkout's own `headstart bench step`. Rounds alternate A B, B A, ...; ratios are taken within
a round. Printed are medians over rounds, with quartiles of the ratios. Exit code 1 if the ratios of a kind (passes,
drafts, both in running generations) have a geometric mean above `--allowed`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean, median, quantiles

from measure.machine import machine_alone

Numbers = dict[str, float]


def resolved(text: str) -> Path:
    return Path(text).resolve()


def measure(checkout: Path, args: argparse.Namespace) -> Numbers:
    """Milliseconds by name from one run of `headstart bench step`."""
    words = ["bench", "step", "--rows", args.rows, "--repeats", str(args.repeats), "--json"]
    words += ["--threads", str(args.threads)] if args.threads else []
    command = [str(checkout / ".venv/bin/python"), "-m", "headstart", *words]
    document = json.loads(subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True).stdout)
    numbers = {f"draft ms, {part}": document["draft"][part]["median_ms"] for part in ("step", "whole")}
    numbers |= {f"pass ms, {each['rows']} rows": each["median_ms"] for each in document["passes"]}
    for each in document["in_place"]:
        for part in ("forward", "draft", "host"):
            numbers[f"{part} ms in place, {each['rows']} rows"] = each[f"{part}_ms"]
    return numbers


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=resolved)
    parser.add_argument("after", type=resolved)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", default="1,2,4,8,16,64", help="of bench step")
    parser.add_argument("--repeats", type=int, default=30, help="of bench step")
    parser.add_argument("--threads", type=int, help="of bench step")
    parser.add_argument("--allowed", type=float, default=1.02)
    args = parser.parse_args()
    checkouts = (args.before, args.after)
    taken: dict[str, tuple[list[float], list[float]]] = {}
    for number in range(args.rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            for name, value in measure(checkouts[side], args).items():
                taken.setdefault(name, ([], []))[side].append(value)
        print(f"round {number + 1}/{args.rounds}", file=sys.stderr, flush=True)
    kinds: dict[str, list[float]] = {}
    print("| | before | after | ratio (quartiles) |\n|---|---|---|---|")
    for name, (before, after) in taken.items():
        ratios = [new / old for old, new in zip(before, after, strict=True)]
        low, middle, high = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        kinds.setdefault(name.partition(",")[0], []).append(middle)
        print(f"| {name} | {median(before):.3f} | {median(after):.3f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
    means = {kind: geometric_mean(ratios) for kind, ratios in kinds.items()}
    for kind, mean in means.items():
        print(f"{kind}: {mean:.3f}{' (slower)' if mean > args.allowed else ''}")
    return 1 if max(means.values()) > args.allowed else 0


if __name__ == "__main__":
    with machine_alone():
        sys.exit(main())
