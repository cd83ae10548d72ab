"""An EAGLE-3 head as vLLM, SGLang, llama.cpp's converter and OpenVINO load it: the layout it already has."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from headstart.errors import ModelError
from headstart.tools.exports._source import Source

USE = (
    "vllm serve MODEL --speculative-config "
    """'{{"method": "eagle3", "model": "{out}", "num_speculative_tokens": 3}}'"""
)


def write(source: Source, target: Path, progress: Callable[[int, int, str], None]) -> None:
    """Fill the directory `target`, which exists and is empty."""
    if source.head.kind != "eagle3":
        raise ModelError(
            f"the head {source.head_path} is of kind {source.head.kind}, not eagle3",
            "headstart train --kind eagle3 makes one; an MTP head goes with --to vllm-mimo",
        )
    for number, name in enumerate(("model.safetensors", "config.json")):
        progress(number, 2, name)
        shutil.copyfile(source.head_path / name, target / name)
