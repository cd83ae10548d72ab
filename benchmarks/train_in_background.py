"""Trains a head with one thread on otherwise unused CPU time.

    python benchmarks/train_in_background.py FOLDER --data TEXTS --data MORE.jsonl        # continues if run again
    python benchmarks/train_in_background.py FOLDER --kind block --turn-minutes 60

`headstart train --finetune` runs in turns at SCHED_IDLE and nice 19 with a memory limit until it is stopped. It is
paused during benchmarks of this machine (measure.machine.LOCK). FOLDER/head is the head; FOLDER/train.log has a line
per turn. Without --data the model generates the texts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

from measure.machine import is_benchmark_running

POLL_S = 1.0
GB = 10**9


def lower_priority(max_bytes: int) -> None:
    os.nice(19)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def wait_for(child: subprocess.Popen[str]) -> None:
    """Waits for the child and stops it during benchmarks."""
    is_paused = False
    while child.poll() is None:
        if is_benchmark_running() != is_paused:
            is_paused = not is_paused
            child.send_signal(signal.SIGSTOP if is_paused else signal.SIGCONT)
        time.sleep(POLL_S)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kind", default="eagle3", choices=["mtp", "eagle3", "medusa", "block"])
    parser.add_argument("--head", type=Path, help="initial head; default: the shipped one of the kind")
    parser.add_argument("--data", type=Path, action="append", default=[])
    parser.add_argument("--turn-minutes", type=float, default=30.0)
    parser.add_argument("--turns", type=int, help="default: unlimited")
    parser.add_argument("--memory-gb", type=float, default=16.0, help="limit on the address space")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    out, turn = args.folder / "head", 0
    while args.turns is None or turn < args.turns:
        turn += 1
        words = ["train", "--kind", args.kind, "--threads", "1", "--out", str(out), "--json"]
        words += ["--minutes", str(args.turn_minutes), "--finetune", *(["--head", str(args.head)] if args.head else [])]
        words += [word for path in args.data for word in ("--data", str(path))]
        child = subprocess.Popen(
            [sys.executable, "-m", "headstart", *words], stdout=subprocess.PIPE, text=True,
            preexec_fn=lambda: lower_priority(int(args.memory_gb * GB)),
        )  # fmt: skip
        try:
            wait_for(child)
        finally:
            child.terminate()
        assert child.stdout
        report = child.stdout.read()
        if child.returncode:
            return child.returncode
        with (args.folder / "train.log").open("a") as log:
            log.write(json.dumps({"time": time.strftime("%Y-%m-%dT%H:%M:%S"), **json.loads(report)}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
