"""Error of `headstart plan --gpu here` against measured passes of this machine.

    python benchmarks/plan_error.py                                      # the default model, 1 to 64 sequences and rows
    python benchmarks/plan_error.py --counts 1,2,4,8,16 --contexts 128,1024 --json errors.json

Times passes of many batches, rows and contexts in turns, calibrates on those of 1 and 8 sequences (and 8 rows of one)
at contexts 128 and 1024 (marked *), and prints predicted and measured times of all. Kinds: `batch`, n sequences with
one row each (decoding); `rows`, n rows of one sequence (verification of n - 1 drafts). Run it on an idle machine.
Filling the KV caches of 64 sequences of 4,096 positions takes several minutes and 7 GB.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from headstart.config import EngineConfig
from headstart.engine.load import load_model
from headstart.tools.plan.measure import CALIBRATION_PASSES, PassTimer, calibrate, measure
from headstart.tools.plan.roofline import Pass, pass_seconds
from headstart.tools.plan.sources import find_shape

TARGET = 0.15


def progress(done: int, total: int, text: str) -> None:
    print(f"\r{text} {done}/{total}   ", end="", file=sys.stderr, flush=True)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="default: the built-in model")
    parser.add_argument("--counts", type=numbers, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--contexts", type=numbers, default=[128, 1024, 4096])
    parser.add_argument("--seconds", type=float, default=60.0, help="for all timed passes together")
    parser.add_argument("--quantization", choices=["int8", "int4"])
    parser.add_argument("--json", type=Path, help="also write every number here")
    args = parser.parse_args()

    config = EngineConfig(quantization=args.quantization)
    works = [*CALIBRATION_PASSES]
    works += [Pass(n, 1, context) for context in args.contexts for n in args.counts]
    works += [Pass(1, n, context) for context in args.contexts for n in args.counts if n > 1]
    works = list(dict.fromkeys(works))
    passes = PassTimer(load_model(args.model, config), config, works, progress)
    timed = passes.time(works, args.seconds, progress)
    model, machine = calibrate(
        find_shape(args.model), measure(passes, {each: timed[each] for each in CALIBRATION_PASSES}, progress)
    )
    print(file=sys.stderr)

    print(machine.assumptions[0])
    print(f"{'kind':6}{'n':>5}{'context':>9}{'measured ms':>13}{'predicted ms':>14}{'error':>8}")
    rows = []
    for work, seconds in sorted(timed.items(), key=lambda item: (item[0].rows > 1, item[0].context, item[0].num_rows)):
        predicted = pass_seconds(model, machine, work)
        kind = "batch" if work.rows == 1 else "rows"
        n, error = int(work.num_rows), predicted / seconds - 1
        rows.append({"kind": kind, "n": n, "context": work.context, "s": seconds, "predicted_s": predicted})
        mark = ("  *" if work in CALIBRATION_PASSES else "") + ("" if abs(error) <= TARGET else "  beyond")
        print(f"{kind:6}{n:5}{work.context:9.0f}{seconds * 1e3:13.2f}{predicted * 1e3:14.2f}{error:+8.1%}{mark}")
    errors = sorted(abs(row["predicted_s"] / row["s"] - 1) for row in rows)
    within = sum(error <= TARGET for error in errors)
    print(
        f"{within} of {len(errors)} within {TARGET:.0%}; median {errors[len(errors) // 2]:.1%}, worst {errors[-1]:.1%}"
    )
    if args.json:
        args.json.write_text(json.dumps({"machine": machine.assumptions[0], "passes": rows}, indent=1))
    return 0 if within == len(errors) else 1


if __name__ == "__main__":
    sys.exit(main())
