"""Checks, measurements and training on a machine with a GPU, in calls of some minutes each.

    python benchmarks/gpu.py pack --prompts gpteacher.jsonl          # here: files to upload, scratch/gpu/1, 2, ...
    python benchmarks/gpu.py all --carried scratch/gpu --minutes 9   # there, repeatedly
    python benchmarks/gpu.py heads --out RETURNED --to HEADS         # here: unpack the returned heads

The machine needs no network: Python with torch, numpy, tokenizers, jinja2 and rich (triton and transformers for some
parts, pytest and hypothesis for the tests), this repository's files, and the default model. `pack` splits the model
into parts, adds packages that such machines often lack, and distributes both over folders of at most `--call-mb`, for
machines with limited uploads. Each call uploads one more folder and stores the files below `--carried` in `--work`.
Until all parts have arrived, calls end with exit code 2. `--model DIR` names another model. Prompt files (JSONL with
`prompt`) are optional and not part of the repository.

Parts run in this order. A failed part does not stop the others. Finished work of earlier calls is not repeated.

bits    logits of a row in batches and chunks, bit for bit (device/bits.py)
checks  tests of kernels, `headstart verify --full` and some families (device/checks.py)
speed   tokens/s, plain and with drafts, against plain torch and the limit of the memory bandwidth (device/speed.py)
train   heads for the default model, on text that it generates (device/heads.py)

Results are rows of OUT/gpu.json, written as they are measured, and tables on stdout. Heads are OUT/heads.00, .01, ...
Large state stays in `--work`, with a copy of the rows, for later calls on the same machine. Another machine takes the
returned rows from `--carried`; `train --start HEADS` continues from the returned heads and their schedule.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(1, str(Path(__file__).resolve().parents[1] / "tests"))
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")

from device import parts
from device.clock import Clock, Results, attempt, say

from headstart import hub, registry

PARTS = ("bits", "checks", "speed", "train")
SHARES = {"bits": 0.15, "checks": 0.6, "speed": 0.9, "train": 1.0}
"""Share of the remaining time for each part, if several run."""
LEAST_CALL = 4e6
HERE = Path(__file__).resolve().parents[1] / "scratch" / "gpu"


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    main.add_argument("command", choices=("all", *PARTS, "pack", "heads"))
    main.add_argument("--out", type=Path, default=Path(os.environ.get("OUT") or HERE / "out"))
    main.add_argument("--work", type=Path, default=hub.cache_dir() / "gpu", help="folder that stays on the machine")
    main.add_argument("--carried", type=Path, default=HERE, help="folder of uploaded files")
    main.add_argument("--minutes", type=float, help="limit of this call; default: none")
    main.add_argument("--device", default="cuda")
    main.add_argument("--backend", help="default: cuda with a GPU, else reference")
    main.add_argument("--model", default=hub.DEFAULT_MODEL)
    main.add_argument("--seed", type=int, default=0)
    main.add_argument(
        "--call-mb", type=float, help="pack: upload limit of a call; default: 66, less this repository's files"
    )
    main.add_argument("--prompts", type=Path, action="append", default=[], help="pack, train: JSONL prompts")
    main.add_argument("--to", type=Path, help="heads: a new folder")
    train = main.add_argument_group("train")
    train.add_argument("--kinds", default="mtp,eagle3,block")
    train.add_argument("--tokens", type=int, default=100_000_000)
    train.add_argument("--train-minutes", type=float, default=24, help="limit over all calls; 0: none")
    train.add_argument("--start", default="shipped", help="shipped, new, or a folder of heads")
    train.add_argument("--chunk", type=int, default=3_000_000, help="answer tokens per round")
    train.add_argument("--batch-tokens", type=int, default=32_768)
    train.add_argument("--slots", type=int, default=2048, help="texts generated concurrently")
    train.add_argument("--answer", type=int, default=256, help="maximum tokens of an answer")
    train.add_argument("--held-out", type=int, default=40_000, help="held-out answer tokens")
    train.add_argument("--every", type=int, default=50, help="one of this many prompts is held out")
    speed = main.add_argument_group("bits, speed")
    speed.add_argument("--length", type=int, default=513, help="bits: rows of the text")
    speed.add_argument("--shapes", default="default,qwen3.5-0.8b,moe,qwen3.5-9b")
    speed.add_argument("--batches", default="1,8,32")
    speed.add_argument("--decode", type=int, default=128, help="tokens of each answer")
    return main


def main() -> int:
    args = parser().parse_args()
    if args.command == "pack":
        return pack(args)
    if args.command == "heads":
        done = parts.unarchive(args.out, "heads", args.to)
        say(f"heads in {args.to}" if done else f"no heads came back in {args.out}")
        return 0 if done else 2
    clock, kept = Clock(args.minutes), args.work / "gpu.json"
    results = Results(args.out / "gpu.json", about(args), kept=kept, known=args.carried / "gpu.json")
    if parts.unpack(args.carried, args.work / "carried") is None and args.model == hub.DEFAULT_MODEL:
        say("the default model is not here: gpu.py pack makes what to take along, and some parts are missing yet")
        return 2
    parts.use_packages(args.work / "carried")
    names = PARTS if args.command == "all" else (args.command,)
    failed = 0
    for name in names:
        mine = clock if len(names) == 1 else clock.share(SHARES[name])
        failed += not attempt(results, name, lambda: WORK[name](args, mine, results))  # noqa: B023  called at once
    return 1 if failed else 0


def pack(args: argparse.Namespace) -> int:
    most = args.call_mb * 1e6 if args.call_mb else parts.CALL_BYTES - parts.repository_bytes()
    if most < LEAST_CALL:
        say(f"this repository's files leave {most / 1e6:.1f} MB of a call: name more with --call-mb")
        return 2
    for paths in parts.pack(args.carried, args.prompts, int(most)):
        megabytes = sum(path.stat().st_size for path in paths) / 1e6
        print(f"{megabytes:8.1f} MB  {paths[0].parent}: {', '.join(path.name for path in paths)}")
    return 0


def about(args: argparse.Namespace) -> dict[str, Any]:
    facts = {"command": " ".join(sys.argv[1:]), "python": platform.python_version(), "device": args.device}
    try:
        import torch
    except ImportError:
        return facts
    if args.device == "cuda" and torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return {**facts, "torch": torch.__version__}


def backend_of(args: argparse.Namespace) -> str:
    if args.backend:
        return str(args.backend)
    return "cuda" if args.device == "cuda" and "cuda" in registry.available("backends") else "reference"


def bits(args: argparse.Namespace, clock: Clock, results: Results) -> None:
    from device import bits, speed

    from headstart.engine.load import load_model

    model = load_model(args.model, speed.config_of(backend_of(args), args.device, drafter="none"))
    bits.run(model, args.length, clock, results, args.seed)


def checks(args: argparse.Namespace, clock: Clock, results: Results) -> None:
    from device import checks

    checks.run(backend_of(args), args.device, args.model, clock, results, args.out)


def speed(args: argparse.Namespace, clock: Clock, results: Results) -> None:
    from device import speed

    batches = [int(each) for each in args.batches.split(",")]
    options = speed.Options(backend_of(args), args.device, args.model, args.shapes.split(","), batches, args.decode)
    speed.run(options, args.work, clock, results)


def train(args: argparse.Namespace, clock: Clock, results: Results) -> None:
    from device.heads import JointTraining, Plan

    files = args.prompts or sorted((args.work / "carried").glob("*.jsonl"))
    plan = Plan(
        model=args.model, device=args.device, dtype="bfloat16" if args.device == "cuda" else "float32",
        kinds=args.kinds.split(","), tokens=args.tokens, minutes=args.train_minutes or None, chunk=args.chunk,
        held_out=args.held_out, every=args.every, batch_tokens=args.batch_tokens, slots=args.slots,
        answer=args.answer, files=files, start=args.start, seed=args.seed,
    )  # fmt: skip
    JointTraining(plan, args.work / "train", args.out, clock, results).run()


WORK = {"bits": bits, "checks": checks, "speed": speed, "train": train}

if __name__ == "__main__":
    sys.exit(main())
