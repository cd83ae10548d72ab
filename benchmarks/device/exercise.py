"""Engine runs that launch every kernel of the cuda backend, for compiling.py."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import support
import torch
from families.rows import all_rows
from tiny_models import write_model

from device.compiling import Compiler
from device.speed import SHAPES
from headstart import hub, registry
from headstart.config import EngineConfig
from headstart.engine.load import load_model
from headstart.errors import ModelError
from headstart.models.small import TINY

MIXED: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 1.0, "repetition_penalty": 1.2, "presence_penalty": 0.1, "logit_bias": {5: 2.0}, "logprobs": 1},
)
PROMPTS = (3, 37, 9, 16, 1)
"""Lengths of prompts, for passes of one row, of a few rows, and of more than a tile."""


def names() -> list[str]:
    own = [hub.DEFAULT_MODEL] if hub.cached_trunk() else []
    return [*all_rows(), *SHAPES, *own]


def exercise(name: str, compiler: Compiler) -> str:
    """Runs an engine on this model with the compiler. Returns the backend's reason for a refusal, or an empty text."""
    with tempfile.TemporaryDirectory() as folder, compiler.active():
        path, drafts, vocab = _write_model(name, Path(folder))
        for kept in (None, "float32"):
            base: dict[str, Any] = {"backend": "cuda", "kv_cache_dtype": kept}
            try:
                model = load_model(path, EngineConfig(**base))
            except ModelError as error:
                return str(error)
            compiler.watch(model.backend)
            if kept is None and not drafts and len(model.config.layers) > 1:
                model = replace(model, head=support.make_head(model))
            drafting = {"drafter": model.head.spec.kind if model.head else "ngram", "depth": 3}
            for more in ({"drafter": "none", "max_num_seqs": 1}, drafting):
                engine = support.make(model, **base, dtype="float32", kv_blocks=200, **more)
                for i, length in enumerate(PROMPTS):
                    prompt = [3 + token % (vocab - 3) for token in support.prompt_of(length, i)]
                    params = {"max_tokens": 4, **MIXED[i % len(MIXED)]}
                    engine.submit(support.request(prompt, name=str(i), stops=(), **params))
                while engine.has_work:
                    engine.step(lambda deltas: None)
            drawn = torch.zeros(2, 3, dtype=torch.int64)  # as gates request
            model.backend.sampler.logprobs(torch.zeros(2, vocab), drawn, None, torch.zeros(2, 3), 1)
    return ""


def _write_model(name: str, folder: Path) -> tuple[str, bool, int]:
    """(path, whether it has draft modules, vocabulary size)."""
    if name == hub.DEFAULT_MODEL:
        return name, True, 49152
    if name in SHAPES:
        family, keys = SHAPES[name]
        sizes = {**keys, "num_hidden_layers": 4, "vocab_size": 8192}
        return str(write_empty(folder / name, family, sizes)), True, 8192
    path, vocab, drafts = all_rows()[name].write(folder)
    return str(path), drafts, vocab


def write_empty(folder: Path, family: str, keys: Mapping[str, Any]) -> Path:
    """A checkpoint of these sizes with zeros in sparse files."""
    declared = registry.find("models", family).FAMILY
    sizes = {**TINY, **declared.small, **keys, "torch_dtype": "bfloat16"}
    shapes = declared.shapes(declared.read(sizes))
    empty = {at: np.zeros(shape, np.float32) for at, shape in shapes.items()}
    written = declared.as_published(empty, declared.read(sizes))
    write_model(folder, sizes, {})
    header, end = {}, 0
    for at, array in written.items():
        header[at] = {"dtype": "BF16", "shape": list(array.shape), "data_offsets": [end, end := end + 2 * array.size]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder
