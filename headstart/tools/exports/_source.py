"""What every layout starts from: a trunk, its head, and plain arrays of their tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headstart.engine.load import canonical_tensors, find_family
from headstart.formats.base import Checkpoint
from headstart.formats.head import HeadConfig
from headstart.kernels.ops import RawTensor
from headstart.layers.build import DecoderConfig

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


@dataclass(frozen=True)
class Source:
    """A checkpoint and a head directory that has been read. `draft_ids` None: the full vocabulary."""

    name: str
    checkpoint: Checkpoint
    sizes: DecoderConfig
    tensors: Mapping[str, RawTensor]  # of the trunk, canonical names
    head: HeadConfig
    head_path: Path
    head_tensors: Mapping[str, RawTensor]
    draft_ids: NDArray[np.int64] | None

    @staticmethod
    def of(
        name: str,
        checkpoint: Checkpoint,
        head: tuple[HeadConfig, Mapping[str, RawTensor], NDArray[np.int64] | None],
        path: Path,
    ) -> Source:
        family = find_family(checkpoint)
        sizes = family.parse(checkpoint.config)
        return Source(name, checkpoint, sizes, canonical_tensors(checkpoint, family, sizes), head[0], path, *head[1:])


def write_text_side(source: Source, target: Path) -> None:
    """Tokenizer and chat template: the files of a directory, or made from a GGUF file's own."""
    folder = source.checkpoint.path
    if folder.is_dir():
        for name in TOKENIZER_FILES:
            if (folder / name).exists():
                shutil.copyfile(folder / name, target / name)
        return
    tokenizer = source.checkpoint.load_tokenizer()
    tokenizer.save(target / "tokenizer.json")
    template = source.checkpoint.chat_template()
    ends = sorted(tokenizer.eos_ids)
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if ends:
        config["eos_token"] = tokenizer.token_text(ends[0])
    if template is not None:
        config["chat_template"] = template.sources["default"]
    (target / "tokenizer_config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}) + "\n")
