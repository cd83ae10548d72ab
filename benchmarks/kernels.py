"""Kernels of the cuda backend without a GPU: compiled for a GPU, or timed in Triton's interpreter.

    python benchmarks/kernels.py compile                               # for sm_90: all families and weight formats
    python benchmarks/kernels.py compile --targets sm_80,gfx942 --rows llama,qwen3_5,mimo+awq
    python benchmarks/kernels.py interpret                             # pytest tests/kernels/cuda, kernel by kernel

compile    Runs engines on the small random models of verify_families.py, on sizes of large models, and on the default
           model if present. Each kernel launch is compiled to a binary by Triton and ptxas (or LLVM for AMD) and not
           run. Per kernel: binaries, maximum shared memory, registers of a thread, spilled bytes. Red: compilation
           errors; more shared memory than the GPU has; binaries that depend on the number of rows of a pass, as bits
           could then differ; fused multiply-adds or inexact divisions in the sampler. Finished rows are written to
           --out and reused while the backend's files and Triton are unchanged, so that a stopped run can be continued.
interpret  Launches, programs and seconds of each kernel during the tests.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / each) for each in (".", "tests", "tests/contract", "tests/kernels", "tests/kernels/cuda")]
SPILLED = 16
"""Spilled bytes of a thread from which a kernel is listed."""
ONE_BY_ONE = {"scatter", "keep", "conv_states", "count", "sort_into_tiles", "choose"}
"""Kernels that copy or count. Their results are exact, so that their tiles may depend on the number of rows."""


def parser() -> argparse.ArgumentParser:
    main = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    main.add_argument("command", choices=("compile", "interpret"))
    main.add_argument("--targets", default="sm_90", help="compile: some of sm_80, sm_90, sm_100, gfx942")
    main.add_argument("--rows", help="compile: names, see verify_families.py; default: all, and large sizes")
    kept = ROOT / "scratch" / "kernels.jsonl"
    main.add_argument("--out", type=Path, default=kept, help="compile: results file, one line per row")
    main.add_argument("--keep", type=Path, help="compile: folder for the assembly")
    return main


def compile_all(args: argparse.Namespace) -> int:
    from device.compiling import Compiler
    from device.exercise import names

    known = [json.loads(line) for line in args.out.read_text("utf-8").splitlines()] if args.out.is_file() else []
    wanted = args.rows.split(",") if args.rows else list(names())
    bad = 0
    for target in args.targets.split(","):
        compiler = Compiler(target)
        done = {told["row"]: told for told in known if (told["target"], told["of"]) == (target, digest())}
        for row in wanted:
            if row not in done:
                done[row] = compile_row(row, compiler)
                args.out.parent.mkdir(parents=True, exist_ok=True)
                with args.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(done[row]) + "\n")
                red = "".join(f"\n  {line}" for line in done[row]["red"])
                print(f"{target}, {row}: {len(done[row]['binaries'])} binaries{red}", file=sys.stderr, flush=True)
        bad += summarize(target, [done[row] for row in wanted])
        if args.keep:
            keep(args.keep / target, compiler)
    print(f"\n{bad} red")
    return int(bool(bad))


def compile_row(row: str, compiler: Any) -> dict[str, Any]:
    """The entry of a row in --out: its binaries by hash, and its red findings."""
    from device.compiling import SHARED
    from device.exercise import exercise

    begun = time.perf_counter()
    compiler.begin()
    refused = exercise(row, compiler)
    made = {name: compiler.found[name] for name in sorted(compiler.used)}
    red = [f"{name}: {why}" for name, why in compiler.failed.items()]
    red += [*fused(compiler, made.values()), *varying_binaries(compiler)]
    most = SHARED[compiler.name]
    red += [f"{each.kernel}: {each.shared} bytes of shared memory" for each in made.values() if each.shared > most]
    binaries = {name: {k: v for k, v in vars(each).items() if k != "assembly"} for name, each in made.items()}
    seconds = round(time.perf_counter() - begun, 1)
    told = {"target": compiler.name, "of": digest(), "row": row, "binaries": binaries, "red": red, "seconds": seconds}
    return told | ({"refused": refused} if refused else {})


def digest() -> str:
    """Hash of the backend's files and Triton's version, which determine the binaries."""
    import triton

    files = sorted((ROOT / "headstart" / "kernels" / "cuda").rglob("*.py"))
    content = b"".join(path.read_bytes() for path in files) + triton.__version__.encode()
    return hashlib.sha256(content).hexdigest()[:12]


def summarize(target: str, rows: Sequence[dict[str, Any]]) -> int:
    """Prints the tables of a target and returns the number of red findings."""
    found = {name: each for told in rows for name, each in told["binaries"].items()}
    red = [f"{target}, {told['row']}, {line}" for told in rows for line in told["red"]]
    by_name = defaultdict(list)
    for made in found.values():
        by_name[made["kernel"]].append(made)
    seconds = sum(told["seconds"] for told in rows)
    whole = f"{len(rows)} rows, {len(by_name)} kernels, {len(found)} binaries in {seconds:.0f} s, {len(red)} red"
    print(f"\n{target}: {whole}")
    print("\n| kernel | binaries | shared memory | registers | outside of them |\n|---|---|---|---|---|")
    for name, all_made in sorted(by_name.items()):
        most = [max(each[what] for each in all_made) for what in ("shared", "registers", "local")]
        print(f"| {name} | {len(all_made)} | " + " | ".join(map(str, most)) + " |")
    for made in found.values():
        if made["local"] > SPILLED:
            where = f"{made['local']} bytes of a thread outside of {made['registers']} registers"
            print(f"\n{made['kernel']} keeps {where}: {made['about']}")
    print("".join(f"\n{told['row']}: {told['refused']}" for told in rows if "refused" in told))
    print("\n".join(red))
    return len(red)


def fused(compiler: Any, binaries: Iterable[Any]) -> Iterator[str]:
    """Fused or inexact instructions in the sampler's binaries, unlike the host's arithmetic."""
    from headstart.kernels.cuda.kernels import sampling

    for made in binaries:
        if hasattr(sampling, made.kernel) and compiler.target.backend == "cuda":
            for word in ("fma.rn", "div.full", "div.approx", "sqrt.approx", "ex2.approx", "lg2.approx"):
                if word in made.assembly:
                    yield f"{made.kernel}: {word}"


def varying_binaries(compiler: Any) -> Iterator[str]:
    """Kernels whose binary differs between passes of one program."""
    known: dict[tuple[int, str], tuple[int, list[str]]] = {}
    said = set()
    for each in compiler.passes:
        if each.program is None:
            continue
        launches = defaultdict(list)
        for name, binary in each.launches:
            launches[name].append(binary)
        for name in launches.keys() - ONE_BY_ONE:
            rows, first = known.setdefault((id(each.program), name), (each.rows, launches[name]))
            if first != launches[name] and name not in said:
                said.add(name)
                yield f"{name}: not the same binaries for {rows} and {each.rows} rows"


def keep(folder: Path, compiler: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    count: Counter[str] = Counter()
    for made in compiler.found.values():
        (folder / f"{made.kernel}.{count[made.kernel]}.s").write_text(made.assembly, "utf-8")
        count[made.kernel] += 1


class Times:
    """pytest plug-in that counts launches, programs and seconds of each kernel."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.programs: Counter[str] = Counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)

    def pytest_configure(self, config: Any) -> None:
        from triton.runtime.interpreter import GridExecutor

        call = GridExecutor.__call__

        def timed(executor: Any, *args: Any, **about: Any) -> Any:
            name, begun = executor.fn.__name__, time.perf_counter()
            try:
                return call(executor, *args, **about)
            finally:
                self.seconds[name] += time.perf_counter() - begun
                self.launches[name] += 1
                grid = executor.grid({}) if callable(executor.grid) else executor.grid
                self.programs[name] += prod(grid)

        GridExecutor.__call__ = timed


def interpret(args: argparse.Namespace) -> int:
    import pytest

    times, begun = Times(), time.perf_counter()
    failed = pytest.main([str(ROOT / "tests" / "kernels" / "cuda"), "-q", "-p", "no:cacheprovider"], plugins=[times])
    print("\n| kernel | launches | programs | seconds |\n|---|---|---|---|")
    for name, seconds in sorted(times.seconds.items(), key=lambda item: -item[1]):
        print(f"| {name} | {times.launches[name]} | {times.programs[name]} | {seconds:.1f} |")
    whole = times.launches.total(), times.programs.total(), sum(times.seconds.values())
    print("| all {} | {} | {} | {:.1f} |".format(len(times.seconds), *whole))
    print(f"\n{time.perf_counter() - begun:.0f} s in all")
    return int(failed)


if __name__ == "__main__":
    asked = parser().parse_args()
    sys.exit({"compile": compile_all, "interpret": interpret}[asked.command](asked))
