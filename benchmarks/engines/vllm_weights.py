"""Copies of weights for vLLM and transformers."""

from __future__ import annotations

import json
from pathlib import Path

from headstart.formats import open_checkpoint, safetensors
from headstart.models.tensors import canonical_tensors, find_family


def safetensors_copy(source: Path, work: Path) -> Path:
    """bfloat16 Hugging Face directory of a Llama GGUF, made once, with tokenizer and template by transformers."""
    target = work / f"{source.stem}-bf16"
    if (target / "config.json").exists():  # written last
        return target
    from transformers import AutoTokenizer

    checkpoint = open_checkpoint(source)
    family = find_family(checkpoint)
    tensors = canonical_tensors(checkpoint, family, family.read(checkpoint.config, strict=False))
    arrays = {
        name if name == "lm_head.weight" else f"model.{name}": safetensors.bfloat16(tensor.float32())
        for name, tensor in tensors.items()
    }
    safetensors.save(target / "model.safetensors", arrays, {"format": "pt"})
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    config = {"architectures": ["LlamaForCausalLM"], "hidden_act": "silu", "dtype": "bfloat16"} | checkpoint.config
    (target / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=2))
    (target / "config.json").write_text(json.dumps(config, indent=2))
    return target
