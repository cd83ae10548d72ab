"""The same weights in every format the engines read: copies of one GGUF file, made once into a work directory."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from headstart.engine.load import canonical_tensors, find_family
from headstart.formats import open_checkpoint, safetensors

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


def safetensors_copy(source: Path, work: Path) -> Path:
    """A Hugging Face directory of a Llama GGUF, dequantized to bfloat16; tokenizer and template by transformers."""
    target = work / f"{source.stem}-bf16"
    if (target / "config.json").exists():  # written last
        return target
    from transformers import AutoTokenizer

    checkpoint = open_checkpoint(source)
    family = find_family(checkpoint)
    tensors = canonical_tensors(checkpoint, family, family.parse(checkpoint.config))
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


def weights_files(llama_bin: Path | None, source: Path, work: Path, wanted: list[str]) -> dict[str, Path]:
    """Weights by name for llama.cpp: the source itself as "Q4_1" (or what it is), and the copies wanted."""
    if llama_bin is None:
        return {}
    return {each: gguf_copy(llama_bin, source, work, each) if each in QUANTIZE_NAMES else source for each in wanted}
