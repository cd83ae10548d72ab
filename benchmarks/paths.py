"""headstart's instruction-set paths beside llama.cpp built for the same instructions, on one model or several files.

    python benchmarks/paths.py --llama avx2=LLAMA/build/bin --llama portable=LLAMA/build-plain/bin
    python benchmarks/paths.py shape-Q4_0.gguf shape-Q4_K.gguf --paths avx2 --llama avx2=LLAMA/build/bin
    python benchmarks/paths.py --verify 500

Prints, per file and path, ms of a pass over one row and over four (verification of three drafts) and the tokens/s of
512 rows of a prompt, all behind `--context` positions; medians of `--rounds` rounds, in each of which every engine has
its turn: headstart's passes are those of `bench step`, llama.cpp's are llama-bench's (-n, -p 4 and -p 512; logits of
the last row alone). Ratios are taken within a round: above 1 headstart is faster. A path is forced by being the only
one that the backend finds; a processor cannot run those that it lacks. llama.cpp for an instruction set: cmake
-DGGML_NATIVE=OFF with GGML_AVX2, GGML_AVX_VNNI, GGML_AVX512, GGML_AVX512_VNNI, GGML_AVX512_BF16, GGML_FMA, GGML_F16C,
GGML_BMI2 and GGML_SSE42 ON or OFF.

With --verify no times, but `headstart verify --full` on each path, over so many texts: exit code 1 where one differs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure.tables import ratio, spread

from headstart import hub
from headstart.config import EngineConfig
from headstart.kernels.native import backend
from headstart.tools.bench.step import StepOptions, run
from headstart.tools.verify import run as verify
from headstart.tools.verify.options import FULL, VerifyOptions

ROWS = (1, 4, 512)
GENERATED = 32
"""Tokens that llama-bench generates for a pass over one row."""
Milliseconds = dict[int, list[float]]


def headstart_ms(model: Path, path: str, args: argparse.Namespace) -> dict[int, float]:
    """Median ms of a pass by its rows."""
    backend.paths = lambda: [path]
    config = EngineConfig(drafter="none", threads=args.threads)
    options = StepOptions(model=str(model), config=config, rows=ROWS, context=args.context, repeats=args.repeats)
    return {row["rows"]: row["median_ms"] for row in run(options).data["passes"]}


def llama_ms(model: Path, program: Path, args: argparse.Namespace) -> dict[int, float]:
    """The same by llama-bench; nothing for a file that it refuses."""
    shape = ["-p", ",".join(str(rows) for rows in ROWS[1:]), "-n", str(GENERATED), "-d", str(args.context)]
    command = [
        program / "llama-bench",
        "-m",
        model,
        "-t",
        str(args.threads),
        "-r",
        str(args.repeats),
        "-o",
        "json",
        *shape,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"llama-bench: {done.stderr.strip()[-200:]}", file=sys.stderr)
        return {}
    tests = json.loads(done.stdout)
    return {each["n_prompt"] or 1: (each["n_prompt"] or 1) / each["avg_ts"] * 1e3 for each in tests}


def measure(args: argparse.Namespace) -> dict[tuple[str, str], dict[str, Milliseconds]]:
    """(file, path) -> engine -> rows -> ms of each round."""
    found: dict[tuple[str, str], dict[str, Milliseconds]] = {}
    for turn in range(args.rounds):
        for model in args.models:
            for path in args.paths:
                print(f"round {turn + 1}: {model.stem}, {path}", file=sys.stderr)
                taken = {"headstart": headstart_ms(model, path, args)}
                if path in args.llama:
                    taken["llama.cpp"] = llama_ms(model, args.llama[path], args)
                for engine, times in taken.items():
                    kept = found.setdefault((model.stem, path), {}).setdefault(engine, {})
                    for rows, ms in times.items():
                        kept.setdefault(rows, []).append(ms)
    return found


def table(found: dict[tuple[str, str], dict[str, Milliseconds]]) -> list[str]:
    """Markdown."""
    header = [
        "file",
        "path",
        "pass(1), ms",
        "/ llama.cpp",
        "pass(4), ms",
        "/ llama.cpp",
        "prompt 512, tokens/s",
        "/ llama.cpp",
    ]
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    for (model, path), engines in found.items():
        cells = [model, path]
        for rows in ROWS:
            ours, theirs = engines["headstart"][rows], engines.get("llama.cpp", {}).get(rows)
            shown = spread([512e3 / ms for ms in ours], 0) if rows == ROWS[-1] else spread(ours, 2)
            cells += [shown, ratio(theirs, ours) if theirs else ""]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def verified(args: argparse.Namespace) -> bool:
    """Is every text that of plain decoding, on each path?"""
    print("| file | path | texts | tokens | differences |\n" + "|---" * 5 + "|")
    good = True
    for model in args.models:
        for path in args.paths:
            backend.paths = lambda path=path: [path]
            grid = {**FULL, "min_texts": args.verify}
            name = None if args.default else str(model)  # the default one has heads
            options = VerifyOptions(model=name, config=EngineConfig(backend="native"), **grid)
            found = verify.run(options).data
            cells = (model.stem, path, f"{found['identical']}/{found['texts']}", found["tokens"], found["differences"])
            print("| " + " | ".join(map(str, cells)) + " |", flush=True)
            good &= not found["differences"]
    return good


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", type=Path, help="GGUF files; none: the default model")
    parser.add_argument("--paths", help="of those that this processor runs: default all")
    parser.add_argument(
        "--llama", action="append", default=[], metavar="PATH=DIR", help="where llama-bench for a path is"
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=5, help="passes of each kind in a round")
    parser.add_argument("--verify", type=int, metavar="TEXTS", help="instead: compare so many texts on each path")
    parser.add_argument("--json", type=Path, help="also write every number here")
    args = parser.parse_args()
    args.default = not args.models
    args.models = args.models or [Path(hub.resolve_alias(None).trunk)]
    args.paths = args.paths.split(",") if args.paths else backend.instruction_paths()
    args.llama = {path: Path(place) for path, _, place in (each.partition("=") for each in args.llama)}
    return args


def main() -> int:
    args = arguments()
    if args.verify:
        return int(not verified(args))
    found = measure(args)
    print("\n".join(table(found)))
    if args.json:
        kept: list[dict[str, Any]] = [
            {"file": model, "path": path, "ms": engines} for (model, path), engines in found.items()
        ]
        args.json.write_text(json.dumps(kept, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
