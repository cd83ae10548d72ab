"""Every form in which weights come, on one Llama shape: bytes of a pass, ms over one, four and 512 rows, and how close
one row comes to what memory allows.

    python benchmarks/forms.py --work WORK                                     # all of them, the best path
    python benchmarks/forms.py --work WORK --forms Q4_0,Q4_K,fp8 --paths avx512bf16,avx512,avx2

Three layers of 2,048 with an MLP of 12,288 (258 million weights) and next to no vocabulary, random values: GGUF types
and bfloat16, float16 and the quantizations that checkpoints are published in. Files are written to WORK and kept there,
so a second run only measures; the packed weights are cached beside them. Passes are those of `bench step` (two threads,
behind `--context` positions). `of the limit`: bytes of a pass over what the machine reads a second, as a share of the
median over one row. A path is forced by being the only one that the backend finds.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import load_memory
import numpy as np
from engines.llamacpp.random_files import Kind, Shape, Tensors, block, write
from engines.llamacpp.random_shapes import plain, sizes
from measure import formats
from measure.formats import Part

from headstart.config import EngineConfig
from headstart.kernels.native import backend
from headstart.tools.bench.step import StepOptions, run

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, DIM, VOCAB = 3, 2048, 12288, 16, 4, 128, 512
ROWS = (1, 4, 512)
GGUF = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4",
)  # fmt: skip
BASE = "Q4_0"
"""What other forms are compared with."""


def tensors(layers: int, kind: Kind) -> Tensors:
    yield "token_embd.weight", (VOCAB, HIDDEN), kind
    yield "output_norm.weight", (HIDDEN,), "one"
    for i in range(layers):
        yield from block(i, plain(HIDDEN, INNER, HEADS, KV_HEADS, DIM, kind))


def fields(layers: int) -> dict[str, Any]:
    return {**sizes(layers, HIDDEN, INNER, HEADS, KV_HEADS, DIM), "rope.freq_base": 1e6}


SHAPE = Shape("llama", LAYERS, VOCAB, fields, tensors)


def float16(name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    yield Part(name, "F16", shape, lambda rng: rng.integers(0, 1 << 16, shape, np.uint16) & 0x83FF | 0x2400)


def bfloat16(name: str, shape: tuple[int, ...]) -> Iterator[Part]:
    yield Part(name, "BF16", shape, lambda rng: formats.small(rng, shape))


STORED: dict[str, tuple[dict[str, Any], formats.Stored]] = {
    "bf16": ({}, bfloat16),
    "fp16": ({}, float16),
    "fp8_blocks": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, formats.fp8_blocks),
    **formats.FORMATS,
}
FORMS = (*GGUF, *STORED)


def written(form: str, work: Path) -> Path:
    """The model in this form, written where it is not there yet."""
    if form in GGUF:
        if not (path := work / f"{form}.gguf").exists():
            write(path, SHAPE, form, LAYERS)
        return path
    folder, (told, stored) = work / form, STORED[form]
    if not (folder / "done").exists():
        config = {**load_memory.DENSE, "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB}
        if told:
            config["quantization_config"] = told
        load_memory.write(folder, load_memory.Case("llama", config, stored=stored), 0)
        (folder / "done").touch()
    return folder


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A document of `bench step` for each form and path."""
    found = []
    for form in args.forms:
        model = written(form, args.work)
        for path in args.paths:
            print(f"{form}, {path}", file=sys.stderr, flush=True)
            backend.paths = lambda path=path: [path]
            config = EngineConfig(drafter="none", threads=args.threads)
            options = StepOptions(
                model=str(model), config=config, rows=ROWS, context=args.context, repeats=args.repeats
            )  # fmt: skip
            found.append({"form": form, "path": path, **run(options).data})
    return found


def table(found: list[dict[str, Any]]) -> list[str]:
    """Markdown."""
    ms = {(each["form"], each["path"]): {row["rows"]: row["median_ms"] for row in each["passes"]} for each in found}
    head = ["weights", "path", "MB a pass", "1 row, ms", "of the limit", f"/ {BASE}", "4 rows", "512 rows", f"/ {BASE}"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for each in found:
        one, took, base = each["passes"][0], ms[each["form"], each["path"]], ms.get((BASE, each["path"]))
        ratios = [f"{took[rows] / base[rows]:.2f}" if base else "" for rows in (1, 512)]
        cells = [each["form"], each["path"], f"{one['bytes'] / 1e6:.0f}", f"{took[1]:.2f}"]
        cells += [f"{one['share_of_bandwidth']:.0%}", ratios[0], f"{took[4]:.2f}", f"{took[512]:.0f}", ratios[1]]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--work", type=Path, required=True, help="directory for the files, 6 GB, and as much for what is packed")
    add("--forms", type=lambda text: text.split(","), default=list(FORMS), help=",".join(FORMS))
    add("--paths", type=lambda text: text.split(","), help="of those that this processor runs: default the best one")
    add("--threads", type=int, default=2)
    add("--context", type=int, default=128)
    add("--repeats", type=int, help="passes of each kind; default: what ten seconds allow")
    add("--only-write", action="store_true", help="write the files, measure nothing")
    add("--json", type=Path, help="also write every number here")
    args = parser.parse_args()
    if unknown := sorted(set(args.forms) - set(FORMS)):
        parser.error(f"--forms: unknown {unknown[0]}")
    args.paths = args.paths or backend.instruction_paths()[:1]
    return args


def main() -> int:
    args = arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.only_write:
        for form in args.forms:
            written(form, args.work)
        return 0
    os.environ.setdefault("HEADSTART_CACHE", str(args.work / "cache"))
    found = measure(args)
    print("\n".join(table(found)))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
