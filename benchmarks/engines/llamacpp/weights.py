"""The same weights as other GGUF files: copies made once, into a work directory, with llama.cpp's own tools."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

QUANTIZE_NAMES = {"Q8_0": "Q8_0", "bf16": "BF16"}
"""Our names of the copies -> llama-quantize's."""


def gguf_copy(llama_bin: Path, source: Path, work: Path, weights: str) -> Path:
    """`source` requantized to Q8_0 or bf16, with llama.cpp's own tool."""
    target = work / f"{source.stem}.{weights}.gguf"
    if not target.exists():
        unfinished = target.with_suffix(".unfinished")
        command = [llama_bin / "llama-quantize", "--allow-requantize", source, unfinished, QUANTIZE_NAMES[weights]]
        subprocess.run(command, check=True, capture_output=True)
        unfinished.rename(target)
    return target


def converted(args: argparse.Namespace, source: Path, more: tuple[str, ...] = ()) -> Path:
    """A bfloat16 GGUF file of a Hugging Face directory, by llama.cpp's own script. args: python, llama_source, work."""
    made: Path = args.work / f"{source.name}.bf16.gguf"
    if not made.exists() or made.stat().st_mtime < (source / "model.safetensors").stat().st_mtime:
        script = args.llama_source / "convert_hf_to_gguf.py"
        command = [args.python or sys.executable, script, source, "--outfile", made, "--outtype", "bf16", *more]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return made


def weights_files(llama_bin: Path | None, source: Path, work: Path, wanted: list[str]) -> dict[str, Path]:
    """Weights by name for llama.cpp: the source itself as "Q4_1" (or what it is), and the copies wanted."""
    if llama_bin is None:
        return {}
    return {each: gguf_copy(llama_bin, source, work, each) if each in QUANTIZE_NAMES else source for each in wanted}
