"""Is a version of headstart slower than another one? Python's share of a step, and passes, in alternating turns.

    python benchmarks/before_after.py OLD NEW --rounds 7        # checkouts, each with its own .venv

A turn is a process: the checkout's own `benchmarks/host.py`, then `headstart bench step`. Rounds go A B, B A, ...;
ratios are taken within a round. Medians over rounds, with quartiles of the ratios. Exit code 1 where the ratios of a
kind (Python's microseconds, passes, drafts) have a geometric mean above `--allowed`.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import geometric_mean, median, quantiles

Numbers = dict[str, float]


def resolved(text: str) -> Path:
    return Path(text).resolve()


def output(checkout: Path, *words: str) -> str:
    command = [str(checkout / ".venv/bin/python"), *words]
    return subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True).stdout


def host(checkout: Path, args: argparse.Namespace) -> Numbers:
    """Microseconds of Python a step, all parts."""
    script = args.host_before if args.host_before and checkout == args.before else checkout / "benchmarks/host.py"
    lines = output(checkout, str(script), "--steps", str(args.steps)).splitlines()[1:]
    table = (line.split() for line in lines)
    return {f"Python us a step, {way}, {batch} x depth {depth}": float(row[-1]) for way, batch, depth, *row in table}


def passes(checkout: Path, args: argparse.Namespace) -> Numbers:
    """Milliseconds of passes by rows, of a draft step and of a whole draft."""
    words = ["bench", "step", "--rows", args.rows, "--repeats", str(args.repeats), "--json"]
    words += ["--threads", str(args.threads)] if args.threads else []
    document = json.loads(output(checkout, "-m", "headstart.cli.main", *words))
    draft = {f"draft ms, {part}": document["draft"][part]["median_ms"] for part in ("step", "whole")}
    return {f"pass ms, {each['rows']} rows": each["median_ms"] for each in document["passes"]} | draft


PARTS = {"host": host, "passes": passes}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=resolved)
    parser.add_argument("after", type=resolved)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100, help="of host.py")
    parser.add_argument("--rows", default="1,2,4,8,16,64", help="of bench step")
    parser.add_argument("--repeats", type=int, default=30, help="of bench step")
    parser.add_argument("--threads", type=int, help="of bench step")
    parser.add_argument("--allowed", type=float, default=1.02)
    parser.add_argument("--host-before", type=resolved, help="a host.py for BEFORE, where its own one does not run")
    args = parser.parse_args()
    checkouts = (args.before, args.after)
    taken: dict[str, tuple[list[float], list[float]]] = {}
    for number in range(args.rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            for part in args.parts:
                for name, value in PARTS[part](checkouts[side], args).items():
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
    sys.exit(main())
