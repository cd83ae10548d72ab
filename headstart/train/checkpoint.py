"""A trained model as a Hugging Face directory."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from torch import Tensor

import headstart
from headstart.formats import safetensors
from headstart.train.corpus import END


def save_model(
    folder: Path,
    config: Mapping[str, Any],
    masters: Mapping[str, Tensor],
    tokenizer: tokenizers.Tokenizer,
    facts: Mapping[str, Any],
) -> None:
    """Write weights in bfloat16, configs and tokenizer; `facts` of the training beside them."""
    tensors = {name: safetensors.bfloat16(master.detach().cpu().numpy()) for name, master in masters.items()}
    safetensors.save(folder / "model.safetensors", tensors, {"format": "pt"})
    documents = {
        "config.json": config,
        "generation_config.json": {key: config[key] for key in ("bos_token_id", "eos_token_id")},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": END,
            "eos_token": END,
            "model_max_length": config["max_position_embeddings"],
        },
        "training.json": {"headstart_version": headstart.__version__, **facts},
    }
    for name, content in documents.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
