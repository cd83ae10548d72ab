"""Does a head learn from what a server writes? Three narrow workloads, acceptance before and after `headstart adapt`.

    python benchmarks/adapt.py --minutes 30 --requests 1500
    python benchmarks/adapt.py --workloads tools --minutes 4 --requests 400 --kind eagle3

Of each workload the model answers prompts of benchmarks/measure/narrow.py, half of them greedily and half at T = 0.7;
prompts and answers are kept as `serve --record` keeps them, and `headstart adapt` does the rest: one request in ten is
held out, acceptance is measured there and on general prompts at fixed depth 3, with paired 95 % intervals. The adapted
heads lie in a cache of their own under --work; yours is not touched.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure.narrow import WORKLOADS, prompts

from headstart import hub
from headstart.api import LLM
from headstart.cli.render import progress
from headstart.config import EngineConfig
from headstart.core import SamplingParams
from headstart.server.records import Record, RecordedModel, RecordFiles, claim_folder

MOST_BYTES = 2**28
COLUMNS = ("texts", "tokens", "held out", "before", "after", "difference, 95 %", "general before", "after", "kept")


def write(llm: LLM, folder: Path, workload: str, count: int, max_tokens: int) -> None:
    """Records of a workload, unless they are there."""
    if folder.exists():
        return
    claim_folder(folder, RecordedModel.of(llm.model))
    asked = list(prompts(workload, count))
    rng = random.Random(workload)
    params = [
        SamplingParams(max_tokens=max_tokens, temperature=0.7 * (number % 2), seed=rng.getrandbits(32))
        for number in range(count)
    ]
    files, done = RecordFiles(folder, MOST_BYTES), 0
    with progress(workload) as advance:

        def finished(index: int, completion: Any) -> None:
            nonlocal done
            done += 1
            advance(done, count, workload)
            record = Record(tuple(completion.prompt_token_ids), tuple(completion.token_ids), params[index].temperature)
            files.append(record.line())

        llm.generate(asked, params, depth=0, on_finish=finished)
    files.close()


def adapt(records: Path, cache: Path, words: list[str]) -> dict[str, Any]:
    """The report of the command, with heads in a cache of their own; the trunk is taken from the user's."""
    trunk = hub.resolve()
    place = cache / "models" / hub.DEFAULT_MODEL / trunk.name
    if not place.exists():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(trunk)
    command = [sys.executable, "-m", "headstart", "adapt", str(records), "--json", *words]
    done = subprocess.run(command, env=os.environ | {"HEADSTART_CACHE": str(cache)}, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"headstart adapt failed with {done.returncode}")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def row(workload: str, document: dict[str, Any], tokens: int) -> list[str]:
    own, general, texts = document["held_out"], document["general"], document["texts"]
    low, high = own["difference"]
    return [workload, str(texts["training"]), f"{tokens:,}", str(own["requests"]), f"{own['before']:.2f}",
            f"{own['after']:.2f}", f"{low:+.2f} to {high:+.2f}", f"{general['before']:.2f}", f"{general['after']:.2f}",
            "new" if document["adapted"] else "old"]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=list(WORKLOADS))
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--kind")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--work", type=Path, default=Path("adapt-work"))
    parser.add_argument("--out", type=Path, help="JSON of the reports")
    options = parser.parse_args()
    work = options.work.resolve()
    llm = LLM(None, EngineConfig(threads=options.threads, max_num_seqs=32, drafter="none"))
    for name in options.workloads:
        write(llm, work / "records" / name, name, options.requests, options.max_tokens)
    del llm
    words = ["--minutes", str(options.minutes)]
    words += [word for flag, value in (("--kind", options.kind), ("--threads", options.threads)) if value
              for word in (flag, str(value))]  # fmt: skip
    reports, rows = {}, []
    for name in options.workloads:
        document = reports[name] = adapt(work / "records" / name, work / f"cache-{name}", words)
        lines = [line for path in (work / "records" / name).glob("records-*") for line in path.read_text().splitlines()]
        rows.append(row(name, document, sum(len(json.loads(line)["response_ids"]) for line in lines)))
        print("|".join(rows[-1]), file=sys.stderr)
    print("| workload | " + " | ".join(COLUMNS) + " |\n|" + "---|" * (len(COLUMNS) + 1))
    for each in rows:
        print("| " + " | ".join(each) + " |")
    if options.out:
        options.out.write_text(json.dumps(reports, indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
